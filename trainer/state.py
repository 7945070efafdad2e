"""What a checkpoint's state.json says, and whether its files are still what was written."""

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.data import Cursor
from trainer.files import file_digest
from trainer.origin import Origin
from trainer.records import checkpoint_name
from trainer.scores import Score

SCHEMA_VERSION = 2  # 1: without random.json and Origin
STATE_FILE = "state.json"
CHECKPOINT = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


class Progress(BaseModel):
    """Where a training stands: what a resumed one needs beside weights and moments."""

    model_config = ConfigDict(frozen=True)
    step: int  # steps done
    row: int  # number of the next row to learn from
    cursor: Cursor | None = None  # and its place in the data; checkpoints from before there were cursors have none
    data_digest: str  # sha256 of the documents that are learned from
    packing: str | None = None  # how they are ordered and packed: the cursor is a place in that; None: not said
    first_loss: float | None = None
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: tuple[str, ...] = ()  # the last ones of them, each named with its data: none was learned since
    unmeasured: bool = False  # what was to be measured after the last step was not: a stop came first


class StateFile(BaseModel):
    """state.json."""

    schema_version: int = SCHEMA_VERSION
    progress: Progress
    score: Score | None = None  # None: not measured; when it is not there at all, best.json may know
    origin: Origin | None = None  # of config, code and machine; None: it was not said
    files: dict[str, str]  # name -> sha256
    own: str = ""  # sha256 of this file with `own` empty

    def written(self) -> bytes:
        """The whole file, sealed."""
        content = self.model_copy(update={"own": ""}).model_dump_json(indent=2).encode()
        before, _, after = content.rpartition(EMPTY_SEAL)
        return before + _seal(hashlib.sha256(content).hexdigest()) + after

    def intact(self, content: bytes) -> bool:
        """Whether the file that this was read from is what was written, every byte of it."""
        if self.schema_version == 1:  # which sealed its fields in another form
            fields = self.model_copy(update={"own": ""}).model_dump_json(exclude_unset=True).encode()
            return self.own == hashlib.sha256(fields).hexdigest()
        before, found, after = content.rpartition(_seal(self.own))
        return bool(found) and self.own == hashlib.sha256(before + EMPTY_SEAL + after).hexdigest()


def _seal(digest: str) -> bytes:
    return f'"own": "{digest}"'.encode()


EMPTY_SEAL = _seal("")


class CheckpointError(ValueError):
    """A drafter or checkpoint that can't be used: names the folder and why."""


def checkpoint_folders(folder: Path) -> list[Path]:
    """Newest first. Raises OSError when the folder is there and can't be read: that is not the same as none."""
    try:
        found = [path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)


def read_state(checkpoint: Path) -> StateFile:
    return StateFile.model_validate_json((checkpoint / STATE_FILE).read_bytes())


def schema_version(checkpoint: Path) -> int:
    """The version of a checkpoint's format; 0 when its state.json does not say, or says another than was written.

    A version that we don't know has a seal that we can't check. But a file that with one of ours is as it was sealed
    has only a damaged number.
    """
    try:
        content = (checkpoint / STATE_FILE).read_bytes()
        version: Any = json.loads(content)["schema_version"]
        if not isinstance(version, int):
            return 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    for ours in range(1, SCHEMA_VERSION + 1) if version > SCHEMA_VERSION else ():
        written = content.replace(f'"schema_version": {version}'.encode(), f'"schema_version": {ours}'.encode(), 1)
        with contextlib.suppress(ValidationError):
            if StateFile.model_validate_json(written).intact(written):
                return 0
    return version


def newer(version: int) -> str:
    return f"schema_version {version} is newer than this trainer, which knows {SCHEMA_VERSION}"


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        return fault(checkpoint)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return str(error).split("\n")[0]


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. Raises OSError when they can't be read."""
    try:
        content = (checkpoint / STATE_FILE).read_bytes()
        if (version := schema_version(checkpoint)) > SCHEMA_VERSION:
            return newer(version)
        state = StateFile.model_validate_json(content)
        wrong = [name for name, digest in state.files.items() if file_digest(checkpoint / name) != digest]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return f"{STATE_FILE} can't be read: {'.'.join(map(str, first['loc']))} {first['msg']}".replace("  ", " ")
    except (KeyError, TypeError, RecursionError) as error:
        return str(error).split("\n")[0]
    if not state.intact(content):
        wrong.append(STATE_FILE)
    if wrong:
        return f"{wrong[0]} is not what was written"
    named = checkpoint_name(state.progress.step)
    return None if named == checkpoint.name else f"it is {named} under another name"
