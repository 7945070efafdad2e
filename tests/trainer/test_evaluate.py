"""`python -m trainer eval`: prompts, figures, what is printed, and bad input in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_targets import drafter_for, tiny_target

from trainer import evaluate
from trainer.__main__ import main
from trainer.checkpoint import save_drafter
from trainer.evaluate import Measured, summary
from trainer.speculate import Comparison, Decoded
from trainer.stream import GREEN
from trainer.turns import first_prompt, read_dialogues

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command line for a random drafter of a random target, with three conversations."""
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    torch.manual_seed(0)
    model = drafter_for(target, block=4)
    save_drafter(tmp_path / "drafter", model, model.config)
    rows = [
        {"id": f"row-{n}", "messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(3)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"eval --target {tmp_path}/target --drafter {tmp_path}/drafter --data {tmp_path}/data.jsonl --max-new-tokens 9"
    ).split()


def decoded(accepted: list[int], seconds: float, drafted: list[bool] | None = None) -> Decoded:
    count = 1 + sum(accepted)
    return Decoded(list(range(count)), [1.0] * count, [0] * count, drafted or [False] * count, accepted, seconds)


def test_the_figures_of_all_prompts() -> None:
    rows = [
        Measured("a", [], decoded([4, 2], 1.0), decoded([1] * 6, 4.0), Comparison(7, 0, [])),
        Measured("b", [], decoded([1], 1.0), decoded([1], 1.5), Comparison(1, 1, [])),
    ]
    figures = summary(rows)
    assert (figures["acceptance_macro"], figures["acceptance_micro"]) == (2.0, 2.333)  # (3 + 1) / 2, 7 / 3
    assert figures["histogram"] == {"1": 1, "2": 1, "4": 1}
    assert (figures["tokens_per_s"], figures["plain_tokens_per_s"]) == (3.5, 1.273)
    assert figures["speedup"] == 2.75
    assert (figures["equal_tokens"], figures["near_ties"], figures["wrong_tokens"]) == (8, 1, 0)


def test_nothing_measured_is_none_and_no_error() -> None:
    figures = summary([Measured("a", [], decoded([], 0.0), None, None)])
    assert figures["acceptance_macro"] is figures["speedup"] is figures["tokens_per_s"] is None
    json.dumps(figures, allow_nan=False)


def test_the_prompt_is_all_before_the_last_answer(words: list[str], tmp_path: Path) -> None:
    target = tiny_target()
    dialogues = read_dialogues(tmp_path / "data.jsonl", 2)
    assert [dialogue.id for dialogue in dialogues] == ["row-0", "row-1"]
    said = target.tokenizer.decode(first_prompt(dialogues[1], target))
    assert said == "<|im_start|>user\nsay 1<|im_end|>\n<|im_start|>assistant\n"


def test_json_is_all_that_is_printed(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--prompts", "2", "--json", "--out", str(tmp_path / "out.json")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["prompts"], figures["compared"], figures["wrong_tokens"]) == (2, 2, 0)
    assert figures["equal_tokens"] + figures["near_ties"] == figures["tokens"]
    assert json.loads((tmp_path / "out.json").read_text()) == figures


def test_people_get_answers_and_a_summary(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--no-compare", "--drafts", "2"]) == 0
    said = capsys.readouterr().out
    assert all(f"--- row-{n}: " in said for n in range(3))
    assert "acceptance length" in said and "same tokens" not in said
    assert GREEN not in said  # not a terminal


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--target", "/nowhere/at/all", "no config.json"),
        ("--drafter", "/nowhere/at/all", "no drafter in /nowhere/at/all"),
        ("--data", "/nowhere/at/all", "No such file"),
        ("--data", "bad.jsonl", "bad.jsonl:1: "),
        ("--max-new-tokens", "5000", "the target has 1024"),
        ("--device", "cuda:77", "cuda:77"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, reason: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n')
    assert main([*words, option, str(tmp_path / value) if value == "bad.jsonl" else value]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert reason in said.err


def test_a_template_that_refuses_the_prompt_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "data.jsonl:1: the chat template refuses it: no system role" in said


@pytest.mark.parametrize("changes", [{"layers": 7}, {"vocab_size": 120}])
def test_a_drafter_of_another_target_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, int]
) -> None:
    model = drafter_for(tiny_target(**changes), block=4)
    save_drafter(tmp_path / "drafter", model, model.config)
    assert main(words) == 1
    assert "made for another target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("embedding_scale", 12.0, "scale of embeddings 12.0, not 1.0"),
        ("logit_scale", 0.9, "scale of logits 0.9, not 1.0"),
        ("logit_scale", 1.01, None),  # the target was in bfloat16 when it was measured
    ],
)
def test_a_drafter_of_another_scale_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: float, reason: str | None
) -> None:
    model = drafter_for(tiny_target(), block=4)
    save_drafter(tmp_path / "drafter", model, replace(model.config, **{name: value}))
    assert main([*words, "--prompts", "1"]) == (1 if reason else 0)
    assert reason is None or reason in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_nothing_to_measure_with_is_an_error(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    assert main(words) == 1
    assert "no conversation to measure with" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prompts", "--max-new-tokens", "--drafts"])
@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_a_number_below_one_is_usage(words: list[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, f"{option}={value}"])
    assert caught.value.code == 2


def test_blank_lines_are_skipped_and_not_counted(words: list[str], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n" + data.read_text().replace("\n", "\n\n"))
    assert [dialogue.id for dialogue in read_dialogues(data, 2)] == ["row-0", "row-1"]


def test_figures_that_can_not_be_written_are_printed_all_the_same(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--prompts", "1", "--json", "--out", str(tmp_path / "none" / "out.json")]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["prompts"] == 1
    assert "No such file" in said.err


def test_without_comparison_nothing_is_decoded_plainly(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Decoded:
        raise AssertionError("plain decoding, with --no-compare")

    monkeypatch.setattr(evaluate, "decode_plain", refuse)
    assert main([*words, "--no-compare", "--prompts", "1"]) == 0
