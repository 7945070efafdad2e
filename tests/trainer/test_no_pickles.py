"""Nothing that the trainer reads can run code: no pickles, neither of ours nor of others."""

import ast
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.target import TargetError, load_target

TRAINER = Path(__file__).parents[2] / "trainer"
FILES = sorted(TRAINER.rglob("*.py"))

PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {"torch": {"load", "save", "hub", "jit", "package"}, "np": {"load", "save"}, "numpy": {"load", "save"}}


def offences(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if name in LOADERS.get(owner, set()):
                modules = [f"{owner}.{name}"]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="from_pretrained"), keywords=keywords):
                given = {word.arg: ast.unparse(word.value) for word in keywords}
                safe = given.get("use_safetensors") == "True" or "gguf_file" in given
                if "Model" in owner and not safe:
                    found.append(f"{owner}.from_pretrained without use_safetensors=True, line {node.lineno}")
                continue
            case _:
                continue
        for module in modules:
            top, _, name = module.partition(".")
            if top in PICKLES or name.partition(".")[0] in LOADERS.get(top, set()):
                found.append(f"{module}, line {node.lineno}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TRAINER)))
def test_the_trainer_reads_and_writes_no_pickles(file: Path) -> None:
    assert offences(file.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(file)",
        "from torch import load",
        "import numpy as np\nnp.load(file)",
        "import pickle",
        "from pickle import loads",
        "import torch.jit",
        "AutoModelForCausalLM.from_pretrained(name)",
        "AutoModel.from_pretrained(name, use_safetensors=False)",
    ],
)
def test_each_way_in_is_seen(source: str) -> None:
    assert len(offences(source)) == 1


def test_a_target_whose_weights_are_pickles_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=1, **sizes))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_folder / "target" / name).read_bytes())

    def load(*args: object, **named: object) -> None:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(TargetError, match=r"can't be loaded on cpu: .*safetensors"):
        load_target(tmp_path)
