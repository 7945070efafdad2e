"""The receiving end alone, in a folder of this machine, and a client for it that can kill it and lie to it."""

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import stand_in

from dflash_ops.command import Command, Local
from dflash_ops.deploy import _entries
from dflash_ops.release import Release
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell
from dflash_ops.source import Source, read, sha256_of, write_archive

WHEN = datetime(2026, 11, 29, tzinfo=UTC)

# Names each thing that its process does below a folder on stderr, and ends it, as SIGKILL does, before the n-th.
KILLER = """
import os, sys
left, below = int(sys.argv[2]), sys.argv[3]
def hook(event, args):
    global left
    touched = args and any(isinstance(arg, (str, os.PathLike)) and os.fspath(arg).startswith(below) for arg in args[:2])
    kinds = "open os.mkdir os.rename os.remove os.symlink os.link os.chmod os.chown os.rmdir".split()
    if touched and event in kinds:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        os.write(2, event.encode() + b"\\n")
sys.addaudithook(hook)
"""


DEPLOY = {"user": None, "activate": True, "part": "deploy-0123abcd.part"}


class Receiver:
    """Talks with receive.py as deploy.py does, and "pushes" by copying."""

    def __init__(self, shell: Shell, path: Path) -> None:
        self.shell, self.path = shell, path

    def parameters(self, do: str, **parameters: Any) -> dict[str, Any]:
        return {"path": str(self.path), "client": "tester", "patience": 0.3, "do": do, **parameters}

    def command(self, do: str, kill_at: int | None = None, **parameters: Any) -> Command:
        command = bundle.command(sys.executable, "receive", self.parameters(do, **parameters))
        if kill_at is None:
            return command
        python, isolated, option, boot, *rest = command.argv
        words = (python, isolated, option, KILLER + boot, *rest, str(kill_at), str(self.path))
        return Command(words, command.stdin)

    def deploy(
        self,
        release: Release,
        folder: Path,
        kill_at: int | None = None,
        *,
        push: Callable[[Path], None] | None = None,
        honest: bool = True,
        via: str = "push",
        meanwhile: Callable[[], None] = lambda: None,
        files: list[dict[str, Any]] | None = None,
        **more: Any,
    ) -> tuple[int, dict[str, Any] | None]:
        """The exit code and the last answer; stderr is kept in `self.said`, the archives' contents in `self.sent`.

        push: harms the archive; honest: after its sha256 was taken.
        """
        manifest = release.manifest
        described = {"files": files or manifest.records(), "folders": list(manifest.folders)}
        self.sent: list[list[str]] = []
        with self.shell.converse(Local(), self.command("deploy", kill_at, **{**DEPLOY, **more})) as talk:
            last = ready = talk.hear()
            if last is not None and json.loads(last)["ok"]:
                talk.say(json.dumps(described).encode() + b"\n")
                last = ready = talk.hear()
            if last is not None and json.loads(last).get("event") == "waiting":
                last = ready = talk.hear()
            answer = json.loads(last) if last else {"ok": False}
            while answer["ok"] and answer["event"] in ("ready", "again"):
                meanwhile()
                lacking = _entries(manifest, answer["lacking"])
                self.sent.append([file.path for file in lacking])
                request = {"id": release.id, "record": release.record(), "by": via if lacking else None}
                archive = BytesIO()
                write_archive(lacking, folder, archive)
                if lacking and via == "push":
                    part = Path(json.loads(ready or b"")["part"])
                    part.write_bytes(archive.getvalue())
                    if push is not None and not honest:
                        push(part)
                        archive = BytesIO(part.read_bytes())
                    request["size"], request["sha256"] = sha256_of(archive)
                    if push is not None and honest:
                        push(part)
                talk.say(b"\n\n" + json.dumps(request).encode() + b"\n")
                if request["by"] == "stream":
                    data = archive.getvalue()
                    for piece in (data[:7], data[7:]):
                        talk.say(b"\n" + json.dumps({"bytes": len(piece)}).encode() + b"\n" + piece)
                    talk.say(b'{"end": true}\n')
                last = talk.hear()
                answer = json.loads(last) if last else {"ok": False}
            result = talk.finish()
            self.said = result.err.decode()
            return result.code, json.loads(last) if last else None

    def ask(self, do: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
        return stand_in.call("receive", self.parameters(do, **parameters))

    def leftovers(self) -> list[str]:
        found = [*self.path.glob("incoming/*"), *self.path.glob(".current-*")]
        found += (self.path / "releases").glob("*.tmp-*")
        return [str(each) for each in found]


def versions(shell: Shell, at: Path) -> Callable[[int], tuple[Release, Path]]:
    """Makes the n-th version of a small tree; one file differs, and one is in this version alone."""

    def make(version: int) -> tuple[Release, Path]:
        folder = at / f"source{version}"
        (folder / "trainer").mkdir(parents=True)
        (folder / "empty" / "deep").mkdir(parents=True)
        (folder / "trainer" / "a.py").write_text(f"version = {version}\n" * 1000)
        (folder / "trainer" / "same.py").write_text("the same always\n" * 3000)
        (folder / f"only{version}.py").write_text(f"{version}")
        (folder / "trainer" / os.fsdecode(b"odd\xff")).write_text("")
        (folder / "run.sh").write_text("#!/bin/sh\n")
        (folder / "run.sh").chmod(0o755)
        (folder / "link").symlink_to("trainer/a.py")
        reading = read(shell, Source(folder))
        return Release(WHEN + timedelta(minutes=version), reading.commit, reading.manifest), folder

    return make
