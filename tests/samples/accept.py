"""Makes samples of what record.py recorded: `python tests/samples/accept.py FOLDER PREFIX WHERE`.

Writes gpus.join/PREFIX-<scene>.json with the view, what gpu-status makes of it now, and WHERE it is from: the machine
and its driver, in words. Where the recorder and its Python lay is taken out. Whoever commits one has read whether the
status is right: from then on it is what is expected.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from dflash_ops import gpu_join

HOME = re.compile(r"/[^\s\"]*/(?=tests/samples/record\.py)")  # the checkout
PYTHON = re.compile(r"/[^\s\"]*/bin/python3")


def main(folder: Path, prefix: str, where: str) -> None:
    for file in sorted(folder.glob("*.json")):
        view = json.loads(PYTHON.sub("/opt/venv/bin/python3", HOME.sub("", file.read_text())))
        status = gpu_join.join("lab", view, {}).to_json()
        sample = {"source": f"{where}: tests/samples/record.py", "view": view, "containers": {}, "status": status}
        target = Path(__file__).parent / "gpus.join" / f"{prefix}-{file.name}"
        target.write_text(json.dumps(sample, indent=1) + "\n")
        told = [(it["pid"], it["kind"], it["used_mib"], it["held_by"]) for it in status["processes"]]
        print(target.name, [gpu["health"] for gpu in status["gpus"]], told, status["problems"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
