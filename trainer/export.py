"""`python -m trainer export CHECKPOINT FOLDER [--to hf|speculators]`: a drafter as others load it.

hf: z-lab's format, for SGLang and vLLM, and for transformers by the modelling file that lies with it:
`AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`. speculators: that project's format, for vLLM; it holds the
target's embedding and head as well, so it needs --target.

An export is read back in a fresh process before FOLDER appears: names, shapes and config, and that its logits are the
trained drafter's. When they are not, nothing appears and the faults are told.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from trainer.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    STATE_FILE,
    CheckpointError,
    damage,
    load_drafter,
)
from trainer.chosen import chosen_drafter
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.files import built_beside, names_in, save_tensors, write_synced
from trainer.readback import Format, write_probe
from trainer.speculators import EMBEDDING, HEAD, to_speculators

MODELLING = Path(__file__).parent / "remote_code" / "dflash.py"
FILES = {CONFIG_FILE, MODEL_FILE, MODELLING.name}
MARK = {"exported_by": "dflash-ops trainer"}  # in the config.json: only what has it is ever replaced


def export(
    checkpoint: Path, folder: Path, to: Format, dtype: torch.dtype, *, target: str | None, verifier: str | None = None
) -> None:
    """Writes the drafter of a checkpoint, or of a drafter's folder, into `folder`; an older export is replaced whole.

    target: folder or name of the target, for speculators; hf takes the ids of its special tokens. verifier: the name
    under which servers find it, when that is another. Raises CheckpointError, TargetError, OSError; `folder` is then as
    it was.
    """
    folder = folder.resolve()  # also for "." and "..", which have no name
    if folder == checkpoint.resolve():
        raise CheckpointError(f"{folder} is what shall be exported: name another folder for the export")
    refuse_foreign(folder)
    if (checkpoint / STATE_FILE).exists() and (fault := damage(checkpoint)):
        raise CheckpointError(f"checkpoint {checkpoint} is damaged ({fault}): export another one")
    model, config = load_drafter(checkpoint, "cpu", torch.float32)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    named = str(dtype).removeprefix("torch.")
    if to == "hf":
        head_VH = None
        data = {**config.to_json(), "auto_map": {"AutoModel": f"{MODELLING.stem}.DFlashDraftModel"}}
        data |= {"dtype": named, "torch_dtype": named}  # as transformers 5 calls it, and as everything before
        data |= special_tokens(target, config) if target else {}
    else:
        if target is None:
            raise CheckpointError("the speculators format holds the target's embedding and head: name it with --target")
        ends, architectures = ends_of(target, config, dtype)
        weights, head_VH = {**weights, **ends}, ends[HEAD]
        try:
            data = to_speculators(config, target=verifier or target, target_architectures=architectures)
        except ValueError as error:
            raise CheckpointError(f"drafter {checkpoint}: {error}") from error
        data["dtype"] = named
    with built_beside(folder) as building:
        save_tensors(building / MODEL_FILE, weights)
        write_synced(building / CONFIG_FILE, json.dumps({**data, **MARK}, indent=2).encode() + b"\n")
        if to == "hf":
            write_synced(building / MODELLING.name, MODELLING.read_bytes())
        read_back(building, model, head_VH, dtype, to)


def refuse_foreign(folder: Path) -> None:
    """Raises CheckpointError when something is at `folder` that no export of ours made."""
    if not os.path.lexists(folder):
        return
    with contextlib.suppress(OSError, ValueError):
        names = names_in(folder)
        if not names:
            return
        data: Any = json.loads((folder / CONFIG_FILE).read_bytes())
        if names <= FILES and isinstance(data, Mapping):
            data = cast("Mapping[str, Any]", data)
            if data.items() >= MARK.items():
                return
    raise CheckpointError(f"{folder} is not an export of ours: it will not be replaced")


def refuse_other_target(target: str, config: DraftConfig, its: Any, num_layers: int) -> None:
    """its: the target's config. Raises CheckpointError."""
    for what, own, found in (
        ("hidden size", config.hidden_size, its.hidden_size),
        ("layers", config.num_target_layers, num_layers),
        ("vocabulary", config.vocab_size, its.vocab_size),
    ):
        if own != found:
            raise CheckpointError(f"the drafter was made for another target than {target}: {what} {own}, not {found}")


def special_tokens(target: str, config: DraftConfig) -> dict[str, Any]:
    """The ids that the target's config names; one that it doesn't is left out. Raises CheckpointError, OSError."""
    from transformers import AutoConfig

    its: Any = cast(Any, AutoConfig).from_pretrained(target).get_text_config()
    refuse_other_target(target, config, its, its.num_hidden_layers)
    named = {key: getattr(its, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {key: id for key, id in named.items() if id is not None}


def ends_of(target: str, config: DraftConfig, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[str]]:
    """The target's embedding and head, and its architectures. Raises CheckpointError when it is another's target."""
    from trainer.target import load_target

    loaded = load_target(target, "cpu", dtype)
    refuse_other_target(target, config, loaded.config, loaded.num_layers)
    embedding_VH = loaded.embedding(torch.arange(config.vocab_size))
    head_VH = loaded.head_weight[: config.vocab_size]
    ends = {EMBEDDING: embedding_VH.to(dtype).contiguous(), HEAD: head_VH.to(dtype).contiguous().clone()}
    return ends, list(getattr(loaded.config, "architectures", None) or [type(loaded.model).__name__])


def read_back(folder: Path, model: DraftModel, head_VH: Tensor | None, dtype: torch.dtype, to: Format) -> None:
    """Loads an export in fresh processes: with the trainer, and for hf with transformers alone, as its users will.

    Raises CheckpointError with what is wrong.
    """
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch) / "probe.safetensors"
        write_probe(probe, model, head_VH, dtype)
        package = str(Path(__file__).parents[1])
        more = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{package}{os.pathsep}{more}" if more else package,
            "HF_MODULES_CACHE": f"{scratch}/modules",  # where transformers copies the modelling file and runs it
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        said = _faults_of(["-m", "trainer.readback", str(folder), str(probe), to], environment)
        if not said and to == "hf":
            # -P: not the folder of the file, in which the trainer's files lie.
            alone = ["-P", str(Path(__file__).with_name("loaded_alone.py")), str(folder), str(probe)]
            said = _faults_of(alone, environment)
    if said:
        more = f" (and {len(said) - 3} more)" if len(said) > 3 else ""
        raise CheckpointError(f"the export does not read back as what was trained: {'; '.join(said[:3])}{more}")


def _faults_of(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """The lines of a process that found something wrong, or died; none: it ended well."""
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    if ended.returncode == 0:
        return []
    return ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines()[-1:] or ["no word"]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m trainer export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, of a drafter, or of a run: its best one")
    parser.add_argument("folder", type=Path, help="where the export shall be; an older export there is replaced")
    parser.add_argument("--to", choices=("hf", "speculators"), default="hf", help="the format (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(%(default)s)")
    parser.add_argument(
        "--target",
        help="folder or hub name of the target model: for --to speculators; hf takes its bos, eos and pad ids",
    )
    parser.add_argument("--verifier", help="name of the target in the config, when servers find it elsewhere")
    options = parser.parse_args(words)
    checkpoint = chosen_drafter(options.checkpoint, lambda line: print(line, flush=True))
    before = signal.signal(signal.SIGTERM, _stop)  # so that what is half done goes away
    try:
        to, dtype = cast(Format, options.to), getattr(torch, options.dtype)
        export(checkpoint, options.folder, to, dtype, target=options.target, verifier=options.verifier)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"wrote {options.folder}: read back in a fresh process, logits equal")
    return 0


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
