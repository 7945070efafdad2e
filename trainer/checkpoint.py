"""Drafters and checkpoints on disk: safetensors only, whole or not there at all.

A folder is written under a temporary name, every file synced, then renamed: a reader sees all of it or nothing.

checkpoints/best.json                which of them is the best: told from their states, and nothing depends on it
checkpoints/step-00000100/
    config.json, model.safetensors   the drafter, its weights in float32, loadable as it is
    optimizer.safetensors            AdamW's moments, named after their weights
    random.json                      the states of all random generators
    state.json                       Progress, Score, Origin, and the sha256 of the other files and of its own content
"""

# safetensors' and the optimiser's functions are typed loosely.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.files import (
    built_beside,
    file_digest,
    nothing,
    remove,
    replace_synced,
    save_tensors,
    write_synced,
)
from trainer.origin import Origin
from trainer.randomness import restore_random_states
from trainer.records import checkpoint_name
from trainer.scores import Best, Score, ranking, read_hint
from trainer.snapshot import Snapshot, Trained
from trainer.speculators import EMBEDDING, HEAD, REDUCED, from_speculators, is_speculators
from trainer.state import (
    CHECKPOINT,
    SCHEMA_VERSION,
    STATE_FILE,
    CheckpointError,
    Progress,
    StateFile,
    checkpoint_folders,
    damage,
    fault,
    newer,
    read_state,
    schema_version,
)

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random.json"
BEST_FILE = "best.json"
LEFTOVER = re.compile(rf"\.{CHECKPOINT.pattern}\.(tmp|old|lock)|\.{re.escape(BEST_FILE)}\.tmp")  # of a kill
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Written(NamedTuple):
    """A checkpoint that is on the disk."""

    path: Path
    best: bool  # of all that were measured so far
    notes: tuple[str, ...] = ()  # what was odd about the others, for the log


def drafter_files(
    folder: Path, weights: Mapping[str, Tensor], config: DraftConfig, beat: Callable[[], None] = nothing
) -> None:
    """The two files of a drafter, synced, into an existing folder."""
    data = config.to_json()
    data["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    save_tensors(folder / MODEL_FILE, weights, beat)
    write_synced(folder / CONFIG_FILE, json.dumps(data, indent=2).encode())


class Ends(Protocol):
    """What a drafter has in common with its target."""

    num_layers: int

    @property
    def head_weight(self) -> Tensor: ...

    def embedding(self, ids: Tensor) -> Tensor: ...


def load_drafter(
    folder: Path | str, device: torch.device | str, dtype: torch.dtype, *, target: Ends | None = None
) -> tuple[DraftModel, DraftConfig]:
    """Reads a drafter in z-lab's or speculators' format, ours or another trainer's; also a checkpoint's folder.

    target: the drafter's, where it is at hand; speculators' own files don't say how many layers it has. Raises
    CheckpointError naming the folder and what is wrong: a missing file, a tensor missing, unknown or misshapen.
    """
    folder = Path(folder)
    try:
        data: Any = json.loads((folder / CONFIG_FILE).read_bytes())
        foreign = hasattr(data, "keys") and is_speculators(data)
        layers = target.num_layers if target else None
        config = from_speculators(data, layers) if foreign else DraftConfig.from_json(data)
        weights = load_file(folder / MODEL_FILE)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        if (folder / "checkpoints").is_dir() and (found := checkpoint_folders(folder / "checkpoints")):
            why = f"it is a run; name one of its checkpoints: {found[0]}"
            raise CheckpointError(f"no drafter in {folder}: {why}") from error
        raise CheckpointError(f"no drafter in {folder}: {error}") from error
    if foreign:
        _take_ends(folder, weights, target)
    with torch.device("meta"):
        model = DraftModel(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            raise CheckpointError(f"drafter {folder}: tensor {name} is {'missing' if name in expected else 'unknown'}")
        got, wanted = list(weights[name].shape), list(expected[name])
        if got != wanted:
            raise CheckpointError(f"drafter {folder}: tensor {name} has shape {got}, expected {wanted}")
    model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    return model.to(device), config


def _take_ends(folder: Path, weights: dict[str, Tensor], target: Ends | None) -> None:
    """Takes a frozen embedding and head out of `weights`; they have to be the target's own, where that is at hand."""
    if reduced := [name for name in REDUCED if name in weights]:
        raise CheckpointError(f"drafter {folder}: it has {reduced[0]}: a reduced vocabulary is not supported")
    for name in (EMBEDDING, HEAD):
        held = weights.pop(name, None)
        if held is None or target is None:
            continue
        every = torch.arange(len(target.head_weight), device=target.head_weight.device)
        own = target.embedding(every) if name == EMBEDDING else target.head_weight
        # Either may have been rounded to bfloat16 on its way.
        if held.shape != own.shape or not torch.equal(held.bfloat16(), own.cpu().bfloat16()):
            raise CheckpointError(f"drafter {folder}: its {name} is not the target's: it was made for another one")


# --- checkpoints ---


def write_checkpoint(
    folder: Path,
    snapshot: Snapshot,
    progress: Progress,
    keep: int,
    *,
    score: Score | None = None,
    origin: Origin | None = None,
    beat: Callable[[], None] = nothing,
) -> Written:
    """Writes step-N below `folder`, then deletes all but the newest `keep` and the best one.

    score: how good this one is; None: it was not measured, and can't be the best. Raises OSError, which leaves the
    older ones intact. Later ones go too: they were damaged and passed over, else the training would have gone on from
    there. A step that is there already, whole, stays as it is: replacing it would leave a moment with none.
    beat: called as files are written out and read again; not while safetensors writes one.
    """
    new = folder / checkpoint_name(progress.step)
    if not (new.exists() and damage(new) is None):
        _clear(folder)
        with built_beside(new) as building:
            snapshot.arrived()
            drafter_files(building, snapshot.weights, snapshot.config, beat)
            save_tensors(building / OPTIMIZER_FILE, snapshot.moments, beat)
            write_synced(building / RANDOM_FILE, snapshot.random)
            files = {path.name: file_digest(path, beat) for path in sorted(building.iterdir())}
            state = StateFile(progress=progress, score=score, origin=origin, files=files)
            write_synced(building / STATE_FILE, state.written())
        _verified[new.resolve()] = _stamp(new)
    return tidy(new, keep)


def write_score(checkpoint: Path, progress: Progress, score: Score | None, keep: int) -> Written:
    """Says in a whole checkpoint what was measured of it after it was written, then tidies as a save does.

    Only state.json is replaced, by rename. Raises OSError, which leaves it as it was.
    """
    state = read_state(checkpoint).model_copy(update={"progress": progress, "score": score})
    replace_synced(checkpoint / STATE_FILE, state.written())
    _verified[checkpoint.resolve()] = _stamp(checkpoint)
    return tidy(checkpoint, keep, later=False)


def tidy(new: Path, keep: int, *, later: bool = True) -> Written:
    """Beside a checkpoint that is whole: writes best.json, deletes what is not to be kept and what a kill left behind.

    What can't be read just now is not deleted: it may be the best one. later: whether those behind it go, too.
    """
    folder = new.parent
    _clear(folder)
    judged = judge(folder)
    best = judged.best
    if best != judged.hint and not judged.spared:
        if best is None:
            remove(folder / BEST_FILE)
        else:
            replace_synced(folder / BEST_FILE, best.model_dump_json(indent=2).encode())
    found = checkpoint_folders(folder)
    here = found.index(new)
    for unwanted in (found[:here] if later else []) + found[here + keep :]:
        if unwanted.name not in judged.spared and not (best and unwanted.name == best.name):
            # It first loses its name, so that one which is half gone is never taken for a damaged one.
            remove(unwanted.rename(unwanted.with_name(f".{unwanted.name}.old")))
    return Written(new, best is not None and best.name == new.name, judged.notes)


def _clear(folder: Path) -> None:
    """Removes what a save that was killed left in `folder`, and nothing that is anybody else's."""
    for path in folder.iterdir() if folder.exists() else ():
        if LEFTOVER.fullmatch(path.name):
            remove(path)


class Judged(NamedTuple):
    """The checkpoints of a folder, by their scores."""

    best: Best | None  # None: none that is whole was measured
    score: Score | None  # its
    hint: Best | str | None  # what best.json says, or what is wrong with it
    spared: frozenset[str]  # names of those that may be better, which can't be told
    notes: tuple[str, ...]  # why, for the log


def judge(folder: Path) -> Judged:
    """Finds the best checkpoint below `folder`, which is whole, by the scores that their states hold.

    Those from before there were such scores have the one that best.json tells, if it names them.
    """
    scored, unknown = list[tuple[Path, Score]](), list[Path]()
    notes, spared = list[str](), set[str]()

    def spare(checkpoint: Path, error: OSError) -> None:
        spared.add(checkpoint.name)
        notes.append(f"checkpoint {checkpoint.name} can't be read, and may be the best: it is kept ({error})")

    try:
        hint = read_hint(folder / BEST_FILE)
    except OSError as error:
        hint = f"{BEST_FILE} can't be read ({error})"
    for checkpoint in checkpoint_folders(folder):
        try:
            content = (checkpoint / STATE_FILE).read_bytes()
            state = StateFile.model_validate_json(content)
        except (*NOT_THERE, ValueError, RecursionError):
            continue
        except OSError as error:
            spare(checkpoint, error)
            continue
        if not state.intact(content):
            continue
        if "score" not in state.model_fields_set:
            if isinstance(hint, str):
                unknown.append(checkpoint)
            elif hint and hint.name == checkpoint.name:
                scored.append((checkpoint, Score(hint.score, hint.measured)))
        elif state.score:
            scored.append((checkpoint, state.score))
    if isinstance(hint, str):
        notes.append(f"{hint}: " + ("it is made anew" if not unknown else _kept_for_it(unknown)))
        spared.update(checkpoint.name for checkpoint in unknown)
    for checkpoint, score in ranking(scored):
        try:
            if _verified.get(checkpoint.resolve()) != (stamp := _stamp(checkpoint)):
                if fault(checkpoint) is not None:
                    continue
                _verified[checkpoint.resolve()] = stamp
        except NOT_THERE:
            continue
        except OSError as error:
            spare(checkpoint, error)
            continue
        best = Best(name=checkpoint.name, score=score.value, measured=score.measured)
        return Judged(best, score, hint, frozenset(spared), tuple(notes))
    return Judged(None, None, hint, frozenset(spared), tuple(notes))


def _kept_for_it(unknown: list[Path]) -> str:
    names = ", ".join(checkpoint.name for checkpoint in reversed(unknown))
    return f"one of {names} may be the best, so all are kept; delete {BEST_FILE} to let them go"


# Checkpoints that this process wrote or has read through, and how their files were then: they need not be read again.
_verified: dict[Path, list[tuple[str, int, int, int]]] = {}


def _stamp(checkpoint: Path) -> list[tuple[str, int, int, int]]:
    """What changes when somebody writes into a checkpoint's files. Raises OSError."""
    found = [(path.name, path.stat()) for path in sorted(checkpoint.iterdir())]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


def newest_good_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint below `folder` whose files are what was written; damaged ones are named and passed over.

    None when there are none at all. Raises CheckpointError when there are only damaged ones: starting anew would
    overwrite what may still be repaired. Also when any is a newer trainer's: going on from an older one would replace
    it. OSError when the folder can't be read.
    """
    found = checkpoint_folders(folder)
    for checkpoint in found:
        if (version := schema_version(checkpoint)) > SCHEMA_VERSION:
            advice = "go on with the trainer that wrote it, or train into another folder"
            raise CheckpointError(f"checkpoint {checkpoint}: {newer(version)}: {advice}")
    for checkpoint in found:
        fault = damage(checkpoint)
        if fault is None:
            return checkpoint
        say(f"checkpoint {checkpoint.name} is damaged ({fault}): trying an older one")
    if found:
        raise CheckpointError(f"all checkpoints in {folder} ({len(found)}) are damaged: delete them to begin anew")
    return None


def restore(checkpoint: Path, state: Trained) -> Progress:
    """Puts weights, moments and random generators back, exactly, into every replica of `state`.

    However many replicas there were, and whoever of them had the moments. Raises CheckpointError when it holds another
    shape of drafter.
    """
    loaded, config = load_drafter(checkpoint, "cpu", torch.float32)
    if config != state.config:
        raise CheckpointError(f"checkpoint {checkpoint}: {difference(config, state.config)}")
    state.restore(loaded.state_dict(), load_file(checkpoint / OPTIMIZER_FILE))
    if (checkpoint / RANDOM_FILE).exists():  # not in those of the first version
        restore_random_states(json.loads((checkpoint / RANDOM_FILE).read_bytes()))
    return read_state(checkpoint).progress


def difference(found: DraftConfig, wanted: DraftConfig) -> str:
    """Which sizes of two drafters differ, for an error."""
    pairs = [(f.name, getattr(found, f.name), getattr(wanted, f.name)) for f in fields(found)]
    return ", ".join(f"its {name} is {one}, wanted {other}" for name, one, other in pairs if one != other)
