"""Makes trainer/requirements.lock: every package that the trainer needs in its container, with version and hashes.

    python tools/lock.py            (uv must be there: pip install uv)

What is wanted stands in pyproject.toml (the extras `trainer` and `data`, and the package's own dependencies that the
trainer imports), which versions in constraints.txt; uv finds the rest. The same files give the same lock: uv takes its
versions from the constraints, then from the lock that is there, and the hashes from the index. It holds for Linux and
any Python from `requires-python` on; packages that only some of these need carry a marker.
"""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = "trainer/requirements.lock"
# Of the package's own dependencies, those that the trainer imports.
SHARED = {"pydantic"}


def wanted(project: dict[str, Any]) -> list[str]:
    """The requirements to lock, as pyproject.toml writes them."""
    own = [text for text in project["dependencies"] if re.split(r"[\s<>=!~;\[]", text, maxsplit=1)[0] in SHARED]
    extras = project["optional-dependencies"]
    return [*own, *extras["trainer"], *extras["data"]]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    # Linux alone: the lock is for containers.
    text = "\n".join(f"{requirement} ; sys_platform == 'linux'" for requirement in wanted(project))
    os.chdir(ROOT)
    stdin = os.memfd_create("requirements")
    os.write(stdin, text.encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else "uv"
    words = [uv, "pip", "compile", "-", "--universal", "--python-version", oldest, "--constraint", "constraints.txt"]
    words += ["--generate-hashes", "--no-build", "--quiet", "--output-file", LOCK]
    words += ["--custom-compile-command", f"python tools/lock.py, for python >= {oldest}"]
    os.execvp(uv, words)


if __name__ == "__main__":
    main()
