"""README's pictures of `train watch` and `train plot`, of real trainings of a tiny target in a sandbox.

    python benchmarks/pictures.py

Writes docs/watch.png (while the second training goes on) and docs/plot.png (of both).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from PIL import Image  # noqa: E402
from terminal_picture import draw  # noqa: E402
from tiny import tiny_toml, tiny_training  # noqa: E402

from dflash_ops import train, watch_page, watching  # noqa: E402
from dflash_ops.inventory import load  # noqa: E402
from dflash_ops.sandbox import down, up  # noqa: E402
from dflash_ops.shell import Shell  # noqa: E402

STEPS = 600
COLUMNS, ROWS = 100, 30


def main() -> None:
    name = f"pictures-{os.getpid()}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        inventory = folder / "dflash-ops.toml"
        inventory.write_text(
            f'[hosts.box]\nsandbox = "{name}"\n[containers.trainer]\nhost = "box"\nvmid = 200\npython = "sandbox"\n'
            "gpus = [0, 1]\nenv_check = false\n"
        )
        environment = {**os.environ, "DFLASH_OPS_INVENTORY": str(inventory), "PYTHONPATH": str(ROOT)}

        def ops(*words: str) -> None:
            subprocess.run([sys.executable, "-m", "dflash_ops", *words], env=environment, check=True)

        up(name, owner=os.getpid())
        try:
            shutil.copytree(ROOT / "trainer", folder / "source" / "trainer")
            ops("deploy", str(folder / "source"))
            tiny_training(folder / "tiny")
            files = [str(it) for it in (folder / "tiny").iterdir() if it.name != "config.toml"]
            ops("put", *files, "shared/tiny/")
            container = load(inventory).container()
            there = f"{container.path}/shared/tiny"
            config = folder / "tiny.toml"
            changes = {"train__steps": STEPS, "train__eval_every": 50, "train__checkpoint_every": 100}
            config.write_text(tiny_toml(f"{there}/target", f"{there}/train.jsonl", f"{there}/heldout.jsonl", **changes))
            ops("train", "start", str(config), "--name", "lr-6e-4", "--wait")
            ops("train", "start", str(config), "--name", "lr-2e-3", "--set", "train.lr=2e-3")
            with Shell() as shell:
                shown: list[watching.View] = []

                def see(view: watching.View) -> None:
                    if view.run.status and view.run.status.step < STEPS * 0.8 and view.gpus:
                        shown.append(view)

                watching.watch(shell, container, train.newest(shell, container).id, on_view=see, interval=0.5)
            draw(watch_page.page(shown[-1], COLUMNS, ROWS), COLUMNS, ROOT / "docs" / "watch.png")
            plot = ROOT / "docs" / "plot.png"
            ops("train", "plot", "lr-6e-4", "lr-2e-3", "-o", str(plot), "--smooth", "10")
            Image.open(plot).convert("RGB").quantize(64).save(plot, optimize=True)  # a smaller file
        finally:
            down(name)


if __name__ == "__main__":
    main()
