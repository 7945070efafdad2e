"""Fills the compile cache with what a training will run: `python -m trainer warm` of a release, twice when it compiled
anything, so that what it saves is measured. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, environment
from dflash_ops.remote.answers import Fault
from dflash_ops.remote.attending import Attending

_CONFIG_CODE = 3


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    os.umask(0o022)
    return answers.answer(path, lambda: warm(path, parameters))


def warm(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Says {"event": "line"} for each line of the trainer; answers with its documents: `first`, and `again`, which is
    null when the first compiled nothing."""
    release = environment.release_folder(path, parameters["release"])
    with environment.python_kept(path, parameters["python"]) as python:
        return _warm(path, release, python, parameters)


def _warm(path: Path, release: Path, python: str, parameters: dict[str, Any]) -> dict[str, Any]:
    environment.refuse_mismatch(path, release, python, parameters)
    shared = path / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "DFLASH_SHARED": str(shared), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # a release stays as it was sent
    if parameters["gpus_chosen"] is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, parameters["gpus_chosen"]))
    other = Attending()
    with tempfile.NamedTemporaryFile(suffix=".toml") as config:
        config.write(parameters["config"].encode("utf-8", "surrogateescape"))
        config.flush()
        words = [python, "-m", "trainer", "warm", config.name, "--json"]
        for setting in parameters["set"]:
            words += ["--set", setting]

        def once() -> dict[str, Any]:
            with tempfile.TemporaryFile() as out:
                code, lines = other.run(words, env, cwd=str(release), out=out)
                out.seek(0)
                return _document(out.read(), code, lines, config.name, release, parameters["config_name"])

        first = once()
        again = once() if any(device["compiled"] for device in first["devices"]) else None
    return {"event": "done", "release": release.name, "first": first, "again": again}


def _document(out: bytes, code: int, lines: list[str], config: str, release: Path, config_name: str) -> dict[str, Any]:
    # The user knows the file by the name on their own machine.
    why = (lines[-1] if lines else f"exit code {code}").replace(config, config_name)
    if code == _CONFIG_CODE:
        raise Fault("config", "the trainer refuses the config", why, "correct it")
    if code == 2:
        raise Fault("preflight", f"release {release.name} can't warm up", why, "deploy a newer one")
    if code:
        raise Fault("failed", "warming up failed", why, "see the lines before", f"release {release.name}")
    try:
        return json.loads(out)
    except ValueError:
        raise Fault("failed", "the trainer's answer can't be read", out[-100:].decode("utf-8", "replace")) from None
