"""Presets, and the config that is written to start with."""

import tomllib
from pathlib import Path

import pytest

from trainer import presets
from trainer.__main__ import main
from trainer.config import ConfigFault, TrainConfig, as_mapping, default_gamma, idle_keys, load

OWN = '[data]\ntrain = "own.jsonl"\n[train]\nsteps = 7\n'


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b", "smollm2-135m"])
def test_a_preset_needs_only_data_and_steps(name: str) -> None:
    config = load(f'preset = "{name}"\n{OWN}'.encode())
    values = presets.values_of(name)
    assert config.target.path == values["target"]["path"]
    assert (config.data.train, config.data.row_tokens) == ("own.jsonl", values["data"]["row_tokens"])
    assert (config.train.steps, config.train.anchors) == (7, values["train"]["anchors"])


def test_the_file_and_sets_go_before_the_preset() -> None:
    text = f'preset = "qwen3-4b"\n[target]\npath = "here"\n{OWN}lr = 1e-5\n'
    config = load(text.encode(), ["train.anchors=64"])
    assert (config.target.path, config.train.lr, config.train.anchors) == ("here", 1e-5, 64)
    assert config.train.gamma is None  # by the block: 7 for the preset's, 4 for one of 8
    assert default_gamma(config.draft.block) == 7.0
    assert load(OWN.encode(), ["preset=qwen3-8b"]).target.path == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ('"qwen3-4"', r"preset: 'qwen3-4' is none of qwen3-4b, qwen3-8b, smollm2-135m; did you mean qwen3-4b\?"),
        ("4", r"preset: 4 is none of"),
        ('"../presets/qwen3-4b"', "is none of"),
    ],
)
def test_a_preset_that_is_none_is_refused(preset: str, message: str) -> None:
    with pytest.raises(ConfigFault, match=message):
        load(f"preset = {preset}\n{OWN}".encode())


def test_a_section_that_is_no_section_is_still_refused() -> None:
    with pytest.raises(ConfigFault, match="target"):
        load(f'preset = "qwen3-4b"\ntarget = 3\n{OWN}'.encode())


@pytest.mark.parametrize("name", [None, *presets.names()])
def test_a_written_config_is_one_and_holds_every_key(name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *([name] if name else [])]) == 0
    text = capsys.readouterr().out
    filled = ["data.train=own.jsonl", "train.steps=7", *(() if name else ("target.path=own",))]
    config = load(text.encode(), filled)
    expected = presets.values_of(name) if name else {}
    for section, values in expected.items():
        assert values.items() <= as_mapping(config)[section].items()
    # The keys that stand there as comments have the defaults that the trainer takes.
    all_set = "\n".join(line[1:] if line.startswith("#") and line[1:2].islower() else line for line in text.split("\n"))
    with_defaults = tomllib.loads("\n".join(line for line in all_set.split("\n") if not line.endswith("=")))
    as_it_is = as_mapping(config)
    for section in ("target", "draft", "data", "train", "layout"):
        told = {key: value for key, value in with_defaults[section].items() if value != presets.UNFILLED}
        assert told.items() <= as_it_is[section].items()
        wanted = TrainConfig.model_fields[section].annotation
        assert wanted is not None
        assert all(f"{key} =" in text for key in wanted.model_fields)


@pytest.mark.parametrize(
    ("name", "unfilled"), [(None, "target.path, data.train, train.steps"), ("qwen3-4b", "data.train, train.steps")]
)
def test_what_a_written_config_lacks_has_to_be_filled_in(
    name: str | None, unfilled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "config.toml"
    assert main(["config", *([name] if name else []), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}; fill in {unfilled}\n"
    for words in (["check", str(out)], ["check", str(out), "--json"], ["train", str(out), "--dry-run"]):
        assert main(words) == 3
        told = capsys.readouterr()
        assert (told.out, told.err) == ("", f'{out}: {unfilled}: still to be filled in, where "FILL IN" stands\n')
    rest = ["--set=target.path=x", "--set=train.steps=7"]
    assert main(["check", str(out), *rest]) == 3
    assert f"{out}: data.train: still to be filled in" in capsys.readouterr().err
    assert main(["check", str(out), *rest, "--set=data.train=x.jsonl"]) == 0
    assert capsys.readouterr().out == f"{out}: good, 7 steps\n"


@pytest.mark.parametrize(
    ("word", "targets", "drafters", "rows"),
    [
        ("5+3", "cuda:0-4", "cuda:5-7", 9),
        ("7+1", "cuda:0-6", "cuda:7", 8),
        ("1+1", "cuda:0", "cuda:1", 8),
        ("8", "cuda:0-7", "cuda:0-7", 8),
        ("10", "cuda:0-9", "cuda:0-9", 10),
        ("1", "cuda:0", "cuda:0", 8),
    ],
)
@pytest.mark.parametrize("name", [None, "qwen3-4b"])
def test_a_config_is_written_for_a_layout(
    name: str | None, word: str, targets: str, drafters: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its drafters share a step's rows evenly: no line says that padding costs time."""
    assert main(["config", *([name] if name else []), "--layout", word]) == 0
    filled = ["data.train=own.jsonl", "train.steps=7", *(() if name else ("target.path=own",))]
    config = load(capsys.readouterr().out.encode(), filled)
    assert (config.layout.targets, config.layout.drafters) == ((targets,), (drafters,))
    assert config.train.rows_per_step == rows and not any("padding" in line for line in idle_keys(config))
    if name:
        assert config.train.lr == presets.values_of(name)["train"]["lr"] and config.train.micro_rows == 1


@pytest.mark.parametrize("word", ["", "0+3", "5+0", "5+", "+3", "5-3", "5+3+1", "auto", "cuda:0", "1000", "٥+٣", "-1"])
def test_a_layout_s_word_that_is_none_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", f"--layout={word}"])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == "" and 'neither TARGETS+DRAFTERS, as "5+3", nor a number of GPUs' in told.err


def test_a_config_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "config.toml"
    filled = ["data.train=own.jsonl", "train.steps=7"]
    assert main(["config", "qwen3-8b", "--out", str(out)]) == 0
    assert load(out, filled).target.path == "Qwen/Qwen3-8B"
    assert main(["config", "--out", str(out)]) == 1
    assert "exists" in capsys.readouterr().err
    assert load(out, filled).target.path == "Qwen/Qwen3-8B"
