"""Configs, good and bad: every mistake names the file, the key and what to write instead."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import ConfigFault, TrainConfig, default_gamma, idle_keys, known_keys, load

GOOD = b"""
[target]
path = "model"
[data]
train = "train.jsonl"
[train]
steps = 100
"""


def test_a_small_file_is_enough_and_the_defaults_are_the_published_recipe() -> None:
    config = load(GOOD)
    assert (config.draft.layers, config.draft.block, config.train.lr, config.train.warmup_ratio) == (5, 16, 6e-4, 0.04)
    assert [default_gamma(block) for block in (16, 10, 8)] == [7, 5, 4]


def test_sets_override_the_file_with_the_types_of_toml() -> None:
    config = load(GOOD, ["train.steps=7", "train.lr=1e-3", "data.heldout=held.jsonl", "draft.target_layer_ids=[1, 4]"])
    assert (config.train.steps, config.train.lr) == (7, 1e-3)
    assert (config.data.heldout, config.draft.target_layer_ids) == ("held.jsonl", (1, 4))


@pytest.mark.parametrize(
    ("sets", "key", "nearest"),
    [
        (["train.step=3"], "train.step", "train.steps"),
        (["train.block=3"], "train.block", "draft.block"),
        (["steps=3"], "steps", "train.steps"),
        (["trian.steps=3"], "trian", "train"),
        (["draft.layer=3"], "draft.layer", "draft.layers"),
        (["train.zzzz=3"], "train.zzzz", None),
        (["layout.target=cpu"], "layout.target", "layout.targets"),
        (["layout.draft=cpu"], "layout.draft", "layout.drafters"),
        (["draft.train=x"], "draft.train", "data.train"),
        (["train.row_tokens=8"], "train.row_tokens", "data.row_tokens"),
        (["train.target=x"], "train.target", "target"),
        (["layout.device=cpu"], "layout.device", "layout.targets or layout.drafters"),
        (["device=cpu"], "device", "layout.targets or layout.drafters"),
        (["train.gpus=8"], "train.gpus", "layout.targets or layout.drafters"),
        (["layout.shared_device=true"], "layout.shared_device", "layout.allow_shared_device"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(sets: list[str], key: str, nearest: str | None) -> None:
    with pytest.raises(ConfigFault) as caught:
        load(GOOD, sets, file="my.toml")
    assert (caught.value.file, caught.value.key, caught.value.nearest) == ("my.toml", key, nearest)
    assert str(caught.value).startswith(f"my.toml: {key}: unknown key")


def test_a_key_of_an_older_version_is_refused_with_its_place_of_today() -> None:
    for key, now in (("train.device", "layout.drafters"), ("train.target_device", "layout.targets")):
        with pytest.raises(ConfigFault) as caught:
            load(GOOD, [f"{key}=cuda:1"], file="my.toml")
        assert str(caught.value) == f'my.toml: {key}: moved to {now} (a list, e.g. ["cuda:0"])'


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.steps=many"], "train.steps: should be a valid integer, got 'many'"),
        (["train.steps=0"], "train.steps: should be greater than or equal to 1, got 0"),
        (["train.steps=1.5"], "train.steps: "),
        (["train.lr=true"], "train.lr: "),
        (["train.loss=kl"], "train.loss: should be 'exp-decay' or 'd-pace', got 'kl'"),
        (["layout.depth=0"], "layout.depth: should be greater than or equal to 1, got 0"),
        (["draft.target_layer_ids=[1, true]"], "draft.target_layer_ids.1: "),
        (["draft.sliding_layers=[0]"], "draft: sliding_layers need a sliding_window"),
        (["draft.sliding_window=15"], "draft: sliding_window 15 is smaller than the block of 16 tokens"),
        (["draft.sliding_window=64", "draft.sliding_layers=[4, 5]"], "draft: sliding_layers [4, 5]: name some of the"),
        (["draft.sliding_window=64", "draft.sliding_layers=[4, 4]"], "layers 0..4, each once"),
        (["draft.sliding_window=64", "draft.sliding_layers=[]"], "layers 0..4, each once"),
        (["schema_version=2"], "schema_version: 2 is newer than this trainer, which knows 1"),
        (["schema_version=true"], "schema_version: should be 1, got True"),
        (["train.lr=inf"], "train.lr: should be a finite number, got inf"),
        (["train.gamma=nan"], "train.gamma: should be a finite number, got nan"),
        (["train.clip=inf", "train.weight_decay=inf"], "train.weight_decay: should be a finite number, got inf"),
        (["train.seed=9223372036854775808"], "train.seed: should be less than or equal to 9223372036854775807"),
        (["data.train="], "data.train: "),
        (["data.heldout="], "data.heldout: "),
        (["target.path="], "target.path: "),
        (["draft.target_layer_ids=[]"], "draft: target_layer_ids []: name some layers, each once"),
        (["draft.target_layer_ids=[5, 5]"], "draft: target_layer_ids [5, 5]: name some layers, each once"),
        (["target=3"], "target: "),
        (["target.path.x=3"], "target.path.x: path is a value, not a section"),
        (["train.steps"], 'train.steps: expected key=value, as in "train.steps=200"'),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        load(GOOD, sets)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "lines"),
    [
        ([], []),
        (["train.gamma=3"], ["train.gamma 3 does nothing: train.loss is d-pace"]),
        (["train.gamma=3", "train.loss=exp-decay"], []),
        (["train.alpha=0.5", "train.loss=exp-decay"], ["train.alpha 0.5 does nothing: train.loss is exp-decay"]),
        (["train.alpha=0.1"], []),
        (
            ["draft.captured=3", "draft.target_layer_ids=[1, 4]"],
            ["draft.captured 3 does nothing: draft.target_layer_ids names 2 layers"],
        ),
        (["draft.captured=2", "draft.target_layer_ids=[1, 4]"], []),
        (["draft.target_layer_ids=[1, 4]"], []),
        (["train.micro_rows=4"], []),
        (["train.anchors=1024"], []),
        (
            ["train.anchors=1025"],
            [
                "train.anchors 1025: more than a row of 1024 tokens (data.row_tokens) has places for, at most 1023: "
                "the others are padding, which costs time and teaches nothing"
            ],
        ),
        (
            ["train.micro_rows=3"],
            [
                "train.rows_per_step 8 in forwards of 3 rows: padding makes up 1 of a step's 9 rows, which costs "
                "time and teaches nothing; a multiple of 3 has none"
            ],
        ),
        (['layout.drafters=["cuda:0-3"]'], []),
        (['layout.drafters=["cuda:0-2"]', "train.micro_rows=1"], []),  # 3, 3 and 2 forwards
        (
            ['layout.drafters=["cuda:0-2"]', "train.rows_per_step=10"],
            [
                "train.rows_per_step 10 shared by 3 drafters in forwards of 4 rows: padding makes up 2 of a "
                "step's 12 rows, which costs time and teaches nothing; a multiple of 12 has none"
            ],
        ),
        (["train.eval_every=5"], ["train.eval_every 5 does nothing: there is no data.heldout"]),
        (["train.eval_every=5", "data.heldout=x"], []),
        (["train.eval_every=200", "data.heldout=x"], []),
        (
            ["train.eval_every=6", "train.checkpoint_every=4", "data.heldout=x"],
            [
                "train.eval_every 6 and train.checkpoint_every 4 meet every 12 steps only: what is measured at other "
                "steps is not saved, and can't be the best"
            ],
        ),
        (["train.eval_every=6", "train.checkpoint_every=4", "train.decode_every=3", "data.heldout=x"], []),
        (["preset=qwen3-4b", "train.loss=d-pace", "data.heldout=x"], []),
    ],
)
def test_what_is_set_and_does_nothing_is_said(sets: list[str], lines: list[str]) -> None:
    assert idle_keys(load(GOOD, sets)) == lines


@pytest.mark.parametrize("content", [b"", b"steps", b"[train\n", b"\xff = 1", GOOD.replace(b"path", b"pfad")])
def test_a_file_that_is_no_config_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigFault):
        load(content)


def test_a_mark_that_an_editor_puts_first_is_passed_over() -> None:
    assert load(b"\xef\xbb\xbf" + GOOD) == load(GOOD)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigFault, match=r"none\.toml: can't be read: No such file"):
        load(tmp_path / "none.toml")


def test_every_field_says_what_it_is() -> None:
    sections = [TrainConfig] + [info.annotation for info in TrainConfig.model_fields.values()]
    documented = [m.model_fields.items() for m in sections if isinstance(m, type) and hasattr(m, "model_fields")]
    undocumented = [name for fields in documented for name, info in fields if not info.description]
    assert [name for name in undocumented if name not in ("target", "draft", "data", "train", "layout")] == []
    assert len(list(known_keys())) > 30


def test_config_and_records_import_no_torch() -> None:
    code = (
        "import sys, trainer.config, trainer.records; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
