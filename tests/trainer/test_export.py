"""Exports: what loaders look for, read back for real, and nothing left of one that is not right or was cut."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import Nursery, retry_until
from safetensors.torch import load_file, save_file
from test_checkpoint import at, learn, trained
from tiny_checkpoints import save_checkpoint, save_drafter
from tiny_drafters import CONFIG, KINDS, LLAMA3, YARN, drafter

from trainer import export as module
from trainer.__main__ import main
from trainer.checkpoint import CheckpointError, Score, load_drafter
from trainer.chosen import chosen_drafter
from trainer.draft import DraftModel
from trainer.draft_config import FULL, SLIDING, DraftConfig
from trainer.export import MODELLING, export
from trainer.loaded_alone import transformers_faults
from trainer.readback import Format, faults, write_probe
from trainer.speculators import from_speculators, to_speculators
from trainer.start import start_weights
from trainer.target import TargetModel, load_target

EVERY = {**KINDS, "yarn": replace(CONFIG, rope_scaling=YARN), "llama3": replace(CONFIG, rope_scaling=LLAMA3)}
EVERY["scaled"] = replace(CONFIG, logit_scale=0.25, embedding_scale=8.0)


@pytest.fixture(autouse=True)
def _modules_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies modelling files into a cache of the user's."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def all_faults(folder: Path, probe: Path, to: Format) -> list[str]:
    alone = transformers_faults(str(folder), str(probe)) if to == "hf" else []
    return faults(folder, probe, to) + alone


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads back in this process, which takes no seconds; that the real one is fresh has tests of its own."""

    def read_back(
        folder: Path, model: DraftModel, head_VH: torch.Tensor | None, dtype: torch.dtype, to: Format
    ) -> None:
        probe = folder.parent / "probe"
        write_probe(probe, model, head_VH, dtype)
        if found := all_faults(folder, probe, to):
            raise CheckpointError("; ".join(found))

    monkeypatch.setattr(module, "read_back", read_back)


def saved(folder: Path, config: DraftConfig = CONFIG) -> Path:
    return save_drafter(folder, drafter(config, torch.float32))


@pytest.fixture(scope="session")
def target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target")


def drafter_of(target: TargetModel, folder: Path, **changes: Any) -> DraftConfig:
    config = replace(target.draft_config(2, 4, (1, 2, 3)), **changes)
    return saved(folder, config) and config


# --- hf ---


def test_a_checkpoint_is_exported_and_read_back_in_a_fresh_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained(1)
    checkpoint = save_checkpoint(tmp_path / "run", model, optimizer, at(1), keep=1)
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}: read back in a fresh process, logits equal\n"
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "dflash.py", "model.safetensors"]
    loaded, config = load_drafter(out, "cpu", torch.bfloat16)
    assert config == CONFIG
    for name, tensor in model.state_dict().items():
        assert (loaded.state_dict()[name] == tensor.bfloat16()).all()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", EVERY)
def test_transformers_and_the_trainer_load_every_kind(kind: str, tmp_path: Path, here: None) -> None:
    dtype = torch.float32 if kind == "full" else torch.bfloat16
    export(saved(tmp_path / "drafter", EVERY[kind]), tmp_path / "out", "hf", dtype, target=None)
    weights = load_file(tmp_path / "out/model.safetensors")
    assert len(weights) == 11 * 2 + 3 and {tensor.dtype for tensor in weights.values()} == {dtype}
    assert weights["fc.weight"].shape == (32, 2 * 32)
    assert weights["layers.1.self_attn.q_norm.weight"].shape == (8,)
    data = json.loads((tmp_path / "out/config.json").read_text())
    assert data["block_size"] == data["dflash_config"]["block_size"] == 4
    assert data["dflash_config"]["target_layer_ids"] == [1, 3] and data["dflash_config"]["mask_token_id"] == 127
    assert (data["architectures"], data["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert data["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert data["dtype"] == data["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


def changed(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "dflash.py"
        text = file.read_text()
        assert text.count(old) >= 1
        file.write_text(text.replace(old, new))

    return change


def without(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        data = json.loads(file.read_text())
        del data[key]
        file.write_text(json.dumps(data))

    return change


def tensor_changed(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["layers.1.mlp.up_proj.weight"] *= 1.05
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def tensor_added(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "lm_head.weight": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})


SABOTAGE = {
    "window": (changed("slot - window", "slot - window + 1"), "transformers: logits of cycle 1 are not"),
    "causal": (changed("seen &= key <= context + slot", "pass"), "transformers: logits of cycle 1 are not"),
    "cache": (changed("key, value = cache.update(key, value, self.layer)", "pass"), "transformers"),
    "context": (changed("self.hidden_norm(self.fc(target_hidden))", "self.fc(target_hidden)"), "transformers"),
    "syntax": (changed("import torch\n", "import torch,\n"), "transformers can't load or run it: SyntaxError"),
    "auto_map": (without("auto_map"), "auto_map.AutoModel is 'missing'"),
    "is_causal": (without("is_causal"), "config.json: is_causal is 'missing', wanted True"),
    "block": (without("block_size"), "config.json: block_size is 'missing', wanted 4"),
    "weight": (tensor_changed, "the trainer: logits of cycle 1 are not the trained drafter's, off by"),
    "tensor": (tensor_added, "tensor lm_head.weight is unknown"),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_what_is_not_right_is_a_fault(what: str, tmp_path: Path) -> None:
    change, told = SABOTAGE[what]
    config = KINDS["sliding causal"]
    model = drafter(config, torch.float32)
    folder, probe = tmp_path / what, tmp_path / "probe"
    save_drafter(folder, model, config)
    shutil.copy(MODELLING, folder)
    data = json.loads((folder / "config.json").read_text())
    data |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(data))
    write_probe(probe, model, None, torch.float32)
    assert all_faults(folder, probe, "hf") == []
    change(folder)
    assert told in "; ".join(all_faults(folder, probe, "hf"))


@pytest.mark.parametrize(
    ("program", "faults"),
    [
        ("print('a'); print('b'); raise SystemExit(1)", ["a", "b"]),
        ("raise ValueError('c')", ["ValueError: c"]),
        ("import os; os._exit(3)", ["no word"]),
        ("print('a')", []),
    ],
)
def test_a_process_tells_its_faults_or_how_it_died(program: str, faults: list[str]) -> None:
    assert module._faults_of(["-c", program], os.environ) == faults


# A process that forgets the trainer is as fresh as one that never knew it, and need not import transformers.
ALONE = """
import os, runpy, sys
import transformers.dynamic_module_utils

transformers.dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # only what is said on stdout counts
for name in [name for name in sys.modules if name.partition(".")[0] == "trainer"]:
    del sys.modules[name]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_modelling_file_that_needs_the_trainer_is_found_by_the_fresh_process_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nursery: Nursery
) -> None:
    wrong = tmp_path / "dflash.py"
    wrong.write_text(MODELLING.read_text().replace("import torch\n", "import torch\nimport trainer.draft\n", 1))
    monkeypatch.setattr(module, "MODELLING", wrong)
    run: list[str] = []

    def without_the_other(words: list[str], environment: Mapping[str, str]) -> list[str]:
        run.append(words[1])
        # The trainer's own process has nothing to find here.
        if words[1] == "trainer.readback":
            return []
        assert words[0] == "-P"
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            alone = nursery.start(*words[1:], code=ALONE)
        return alone.said().splitlines() if alone.wait() else []

    monkeypatch.setattr(module, "_faults_of", without_the_other)
    folder = saved(tmp_path / "drafter")
    assert main(["export", str(folder), str(tmp_path / "out")]) == 1
    told = "CheckpointError: the export does not read back as what was trained: transformers can't load or run it: "
    said = capsys.readouterr().err
    assert len(run) == 2 and said.startswith(told) and "trainer" in said.removeprefix(told), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dflash.py", "drafter"]


# --- what is there already, and what is cut ---


def test_only_an_export_is_replaced_and_as_a_whole(tmp_path: Path, here: None) -> None:
    folder, out = saved(tmp_path / "drafter"), tmp_path / "out"
    export(folder, out, "hf", torch.float32, target=None)
    before = (out / "model.safetensors").stat().st_ino
    export(folder, out, "hf", torch.bfloat16, target=None)
    assert (out / "model.safetensors").stat().st_ino != before and not list(tmp_path.glob(".*"))
    (out / "notes.txt").write_text("years of work")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "file").write_text("more of it")
    foreign = saved(tmp_path / "downloaded")  # a drafter, and of the same format
    for place in (out, tmp_path / "model", tmp_path / "file", foreign):
        with pytest.raises(CheckpointError, match="is not an export of ours: it will not be replaced"):
            export(folder, place, "hf", torch.float32, target=None)
    assert (out / "notes.txt").exists() and (tmp_path / "model/config.json").exists()


def test_of_a_run_the_best_checkpoint_is_exported_or_the_newest(
    tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained(1)
    for run, scores in (("run", [Score(3.0, "decoded"), None]), ("unmeasured", [None, None])):
        for step, score in enumerate(scores, start=1):
            save_checkpoint(tmp_path / run / "checkpoints", model, optimizer, at(step), keep=1, score=score)
            learn(model, optimizer)
    for run, name, why in (
        ("run", "step-00000001", "the run's best: 3.00 tokens a cycle, decoded"),
        ("unmeasured", "step-00000002", "the run's newest: none was measured on held-out data"),
    ):
        assert main(["export", str(tmp_path / run), str(tmp_path / "out"), "--dtype", "float32"]) == 0
        assert capsys.readouterr().out.startswith(f"taking {name}, {why}\n")
        its = load_file(tmp_path / run / "checkpoints" / name / "model.safetensors")
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")["fc.weight"], its["fc.weight"])
    shutil.rmtree(tmp_path / "run/checkpoints")
    (tmp_path / "run/checkpoints").mkdir()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert "the run has no checkpoint yet" in capsys.readouterr().err


def test_of_a_run_whose_best_checkpoint_is_damaged_the_next_best_is_taken_and_that_is_told(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    for step, score in enumerate([2.0, 3.0, 1.0], start=1):
        score = Score(score, "decoded")
        save_checkpoint(tmp_path / "checkpoints", model, optimizer, at(step), keep=3, score=score)
    (tmp_path / "checkpoints/step-00000002/model.safetensors").write_bytes(b"gone")
    said = list[str]()
    assert chosen_drafter(tmp_path, said.append).name == "step-00000001"
    assert said[-1] == "taking step-00000001, the run's best: 2.00 tokens a cycle, decoded"
    assert len(said) == 2 and "step-00000002" in said[0] and "damaged" in said[0], said


def test_an_export_does_not_replace_what_it_is_made_of(tmp_path: Path, here: None) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    export(saved(tmp_path / "drafter"), out, "hf", torch.float32, target=None)
    other.symlink_to(out)
    before = (out / "model.safetensors").read_bytes()
    for place in (out, other):
        with pytest.raises(CheckpointError, match="is what shall be exported: name another folder"):
            export(out, place, "hf", torch.bfloat16, target=None)
    assert (out / "model.safetensors").read_bytes() == before


def test_the_target_s_special_tokens_stand_in_the_config(
    tiny_folder: Path, target: TargetModel, tmp_path: Path, here: None
) -> None:
    drafter_of(target, tmp_path / "drafter")
    for named, ids in ((str(tiny_folder / "target"), {"bos_token_id": 256, "eos_token_id": 257}), (None, {})):
        export(tmp_path / "drafter", tmp_path / "out", "hf", torch.float32, target=named)
        data = json.loads((tmp_path / "out/config.json").read_text())
        assert {key: value for key, value in data.items() if key.endswith("_token_id")} == ids
    with pytest.raises(CheckpointError, match=r"made for another target than .*: hidden size 32, not 64"):
        export(saved(tmp_path / "x"), tmp_path / "y", "hf", torch.float32, target=str(tiny_folder / "target"))


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    checkpoint = save_checkpoint(tmp_path / "run", model, optimizer, at(1), keep=1)
    (checkpoint / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged \(optimizer\.safetensors is missing\): export another one"):
        export(checkpoint, tmp_path / "out", "hf", torch.float32, target=None)
    with pytest.raises(CheckpointError, match="no drafter in"):
        export(tmp_path / "none", tmp_path / "out", "hf", torch.float32, target=None)


def test_sigterm_while_it_is_read_back_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []

    def stopped(folder: Path, *rest: object) -> None:
        built.append((folder / "model.safetensors").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "read_back", stopped)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(["export", str(saved(tmp_path / "drafter")), str(tmp_path / "out")])
    assert signal.getsignal(signal.SIGTERM) == before
    assert caught.value.code == 128 + signal.SIGTERM and built == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_kill_leaves_no_export_and_the_next_one_clears_up(tmp_path: Path, here: None, nursery: Nursery) -> None:
    folder, out, building = saved(tmp_path / "drafter"), tmp_path / "out", tmp_path / ".out.tmp"
    exporting = nursery.start("export", folder, out)
    retry_until(lambda: (building / "dflash.py").exists() or exporting.ended())
    assert exporting.kill() == -signal.SIGKILL, exporting.said()
    assert not out.exists() and building.exists()
    export(folder, out, "hf", torch.bfloat16, target=None)
    assert out.exists() and not building.exists()


# --- speculators ---


def test_speculators_get_their_format(
    tiny_folder: Path, target: TargetModel, tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = drafter_of(target, tmp_path / "drafter")
    model = str(tiny_folder / "target")
    words = ["export", str(tmp_path / "drafter"), str(tmp_path / "out"), "--to", "speculators", "--target", model]
    assert main([*words, "--verifier", "hub/name"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    weights = load_file(tmp_path / "out/model.safetensors")
    assert len(weights) == 11 * 2 + 3 + 2
    assert torch.equal(weights["embed_tokens.weight"], target.embedding(torch.arange(512)).bfloat16())
    assert torch.equal(weights["lm_head.weight"], target.head_weight.bfloat16())
    data = json.loads((tmp_path / "out/config.json").read_text())
    assert data["architectures"] == ["DFlashSpeculator"] and data["speculators_model_type"] == "dflash"
    assert data["aux_hidden_state_layer_ids"] == [2, 3, 4] and data["draft_vocab_size"] == 512
    assert data["speculators_config"] == {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "hub/name", "architectures": ["LlamaForCausalLM"]},
    }
    assert data["transformer_layer_config"]["num_hidden_layers"] == 2
    # And back: with and without the target at hand.
    assert load_drafter(tmp_path / "out", "cpu", torch.float32)[1] == config
    assert load_drafter(tmp_path / "out", "cpu", torch.float32, target=target)[1] == config


def test_a_training_starts_with_a_drafter_in_speculators_format(
    tiny_folder: Path, target: TargetModel, tmp_path: Path, here: None
) -> None:
    config = drafter_of(target, tmp_path / "drafter")
    export(tmp_path / "drafter", tmp_path / "out", "speculators", torch.float32, target=str(tiny_folder / "target"))
    file = tmp_path / "out/config.json"
    data = json.loads(file.read_text())
    del data["num_target_layers"]  # which speculators' own files don't have
    file.write_text(json.dumps(data))
    model, said = DraftModel(config), list[str]()
    start_weights(model, tmp_path / "out", said.append, target)
    assert said == [f"starting with the weights of {tmp_path / 'out'}"]
    for name, tensor in load_drafter(tmp_path / "drafter", "cpu", torch.float32)[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    with pytest.raises(CheckpointError, match="doesn't say how many layers the target has: name the target"):
        start_weights(model, tmp_path / "out", said.append)
    weights = load_file(tmp_path / "out/model.safetensors")
    head = weights["lm_head.weight"]
    changes = {
        r"its lm_head\.weight is not the target's: it was made for another one": {"lm_head.weight": head * 2},
        "it has t2d: a reduced vocabulary is not supported": {"t2d": torch.ones(512)},
        "tensor verifier_norm.weight is unknown": {"verifier_norm.weight": torch.ones(64)},
    }
    for told, change in changes.items():
        save_file({**weights, **change}, tmp_path / "out/model.safetensors")
        with pytest.raises(CheckpointError, match=told):
            start_weights(model, tmp_path / "out", said.append, target)


def test_eval_decodes_with_a_drafter_in_speculators_format(
    tiny_folder: Path, target: TargetModel, tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter_of(target, tmp_path / "drafter")
    model, tokens = str(tiny_folder / "target"), list[int]()
    export(tmp_path / "drafter", tmp_path / "out", "speculators", torch.float32, target=model)
    for folder in ("drafter", "out"):
        words = ["--data", str(tiny_folder / "heldout.jsonl"), "--max-new-tokens", "6", "--prompts", "2", "--json"]
        assert main(["eval", "--target", model, "--drafter", str(tmp_path / folder), *words]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["wrong_tokens"] == 0
        tokens.append(figures["cycles"])
    assert tokens[0] == tokens[1]


def test_speculators_need_the_right_target(tiny_folder: Path, tmp_path: Path) -> None:
    for words, told in (
        (None, "name it with --target"),
        (str(tiny_folder / "target"), "made for another target than .*: hidden size 32, not 64"),
    ):
        with pytest.raises(CheckpointError, match=told):
            export(saved(tmp_path / "drafter"), tmp_path / "out", "speculators", torch.float32, target=words)
    assert not (tmp_path / "out").exists()


MIXED = replace(CONFIG, layer_types=(SLIDING, FULL), sliding_window=5, causal=False)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (KINDS["causal"], None),
        (KINDS["mixed"], None),
        (EVERY["scaled"], "no embedding_scale"),
        (KINDS["sliding"], ""),
        (KINDS["sliding causal"], ""),
        (MIXED, ""),
        (EVERY["yarn"], ""),
    ],
)
def test_the_speculators_config_gives_back_the_drafter_or_says_what_it_has_no_word_for(
    config: DraftConfig, told: str | None
) -> None:
    if told != "":
        with pytest.raises(ValueError, match=told or "causal in some layers and not in others"):
            to_speculators(config, target="target", target_architectures=[])
        return
    data = to_speculators(config, target="target", target_architectures=[])
    assert from_speculators(data) == config
    assert data["sliding_window_non_causal"] is not config.causal


def test_what_speculators_may_ask_for_and_this_drafter_has_not_is_refused_by_name() -> None:
    data = to_speculators(KINDS["sliding causal"], target="target", target_architectures=[])
    changes: dict[str, dict[str, Any]] = {
        "speculators_model_type 'eagle3', expected 'dflash'": {"speculators_model_type": "eagle3"},
        "draft_vocab_size 100, fewer than the target's 128 tokens": {"draft_vocab_size": 100},
        "projector_type 'domino' is not supported": {"projector_type": "domino"},
        "sample_from_anchor True is not supported": {"sample_from_anchor": True},
        "target_hidden_size 64": {"target_hidden_size": 64},
        "layer id 0 of speculators is the embedding": {"aux_hidden_state_layer_ids": [0, 2]},
        "aux_hidden_state_layer_ids None is no list of layers": {"aux_hidden_state_layer_ids": None},
        "transformer_layer_config is missing": {"transformer_layer_config": None},
        "mask_token_id is missing": {"mask_token_id": None},
    }
    for told, change in changes.items():
        with pytest.raises(ValueError, match=told):
            from_speculators({**data, **change})
    with pytest.raises(ValueError, match="num_target_layers is 6, the target has 8"):
        from_speculators(data, 8)
    mixed = {**data, "transformer_layer_config": {**data["transformer_layer_config"], "layer_types": [SLIDING, FULL]}}
    assert from_speculators(mixed).causal is None  # as speculators itself reads it
