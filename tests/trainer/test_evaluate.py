"""`python -m trainer eval`: prompts, figures, what is printed, and bad input in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import at
from tiny_checkpoints import save_checkpoint, save_drafter
from tiny_targets import drafter_for, tiny_target

from trainer import evaluate
from trainer.__main__ import main
from trainer.checkpoint import Score
from trainer.conversations import LineError
from trainer.evaluate import LeftOut, MeasuredAnswer, Way, measure, summary
from trainer.optim import make_optimizer
from trainer.speculate import Comparison, Decoded, decode_speculative
from trainer.stream import GREEN
from trainer.turns import Dialogue, ask, first_prompt, read_dialogues, said_before_answers


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command line for a random drafter of a random target, with three conversations."""
    target = tiny_target(layers=4)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    torch.manual_seed(0)
    model = drafter_for(target, block=4)
    save_drafter(tmp_path / "drafter", model)
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
        MeasuredAnswer("a", [], decoded([4, 2], 1.0), decoded([1] * 6, 4.0), Comparison(7, 0, [])),
        MeasuredAnswer("b", [], decoded([1], 1.0), decoded([1], 1.5), Comparison(1, 1, [])),
    ]
    figures = summary(rows)
    assert (figures["acceptance_macro"], figures["acceptance_micro"]) == (2.0, 2.333)  # (3 + 1) / 2, 7 / 3
    assert figures["histogram"] == {"1": 1, "2": 1, "4": 1}
    assert (figures["tokens_per_s"], figures["plain_tokens_per_s"]) == (3.5, 1.273)
    assert figures["speedup"] == 2.75
    assert (figures["equal_tokens"], figures["near_ties"], figures["wrong_tokens"]) == (8, 1, 0)
    assert figures["lossless"] is True


def test_nothing_measured_is_none_and_no_error() -> None:
    figures = summary([MeasuredAnswer("a", [], decoded([], 0.0), None, None)])
    assert figures["acceptance_macro"] is figures["speedup"] is figures["tokens_per_s"] is figures["lossless"] is None
    json.dumps(figures, allow_nan=False)


def test_the_prompt_is_all_before_the_last_answer(words: list[str], tmp_path: Path) -> None:
    target = tiny_target(layers=4)
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
        ("--max-new-tokens", "5000", "data.jsonl:1: prompt, answer and a block need"),
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


@pytest.mark.parametrize("command", ["eval", "chat"])
def test_of_a_run_the_best_checkpoint_is_decoded_with(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    model, run = drafter_for(tiny_target(layers=4), block=4), tmp_path / "run"
    for step, score in enumerate([Score(3.0, "decoded"), None], start=1):
        save_checkpoint(
            run / "checkpoints", model, make_optimizer(model, lr=1e-3, weight_decay=0.0), at(step), keep=1, score=score
        )
    more = ["--prompts", "1", "--json"] if command == "eval" else ["--prompt", "hi"]
    given = words if command == "eval" else ["chat", *words[1:5], *words[7:]]
    assert main([*given, "--drafter", str(run), *more]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("taking step-00000001, the run's best: 3.00 tokens a cycle, decoded\n")
    if command == "eval":
        assert json.loads(said.out)["drafter"] == str(run / "checkpoints/step-00000001")


@pytest.mark.parametrize("option", ["--drafter", "--data"])
def test_what_is_missing_is_told_before_the_target_is_loaded(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(evaluate, "load_target", refuse)
    (tmp_path / "begun/checkpoints").mkdir(parents=True)
    for place in ("nowhere", "begun") if option == "--drafter" else ("nowhere",):
        assert main([*words, option, str(tmp_path / place)]) == 1
        assert place in capsys.readouterr().err


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
    model = drafter_for(tiny_target(**{"layers": 4, **changes}), block=4)
    save_drafter(tmp_path / "drafter", model)
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
    model = drafter_for(tiny_target(layers=4), block=4)
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


# --- turns, data sets, temperatures ---


def test_every_turn_is_answered_behind_the_model_s_own_answers() -> None:
    target = tiny_target(layers=4)
    talk = [("user", "one"), ("assistant", "THEIRS"), ("user", "two"), ("assistant", "THEIRS TOO")]
    record = {"messages": [{"role": role, "content": content} for role, content in talk]}
    dialogue = Dialogue("a", "here:1", said_before_answers(record, "all"))
    prompts: list[str] = []
    own = target.tokenizer.encode("ours")

    def answer(prompt: list[int]) -> Decoded:
        prompts.append(target.tokenizer.decode(prompt))
        return Decoded([*own, 2], [], [], [True] * 5, [5], 1.0)  # its end token is not part of what is said

    asked = list(ask(dialogue, target, answer, lambda prompt: True))
    assert [each.turn for each in asked] == [1, 2]
    first = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [first, first + "ours<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"]
    assert [target.tokenizer.decode(each.prompt) for each in asked] == prompts


def test_the_last_turn_alone_is_answered_behind_the_file_s_own_answers() -> None:
    talk = [("user", "one"), ("assistant", "THEIRS"), ("user", "two"), ("assistant", "THEIRS TOO")]
    messages = [{"role": role, "content": content} for role, content in talk]
    assert said_before_answers({"messages": messages}, "last") == (messages[:3],)
    assert said_before_answers({"messages": messages}, "all") == (messages[:1], messages[2:3])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "one"}, [["one"]]),
        ({"prompt": "one", "response": "two"}, [["one"]]),
        ({"turns": ["one", "two"]}, [["one"], ["two"]]),
        ({"messages": [{"role": "user", "content": "one"}]}, [["one"]]),
        ({"system": "S", "conversations": [{"from": "human", "value": "one"}]}, [["S", "one"]]),
    ],
)
def test_a_prompt_may_have_any_form(record: dict[str, Any], said: list[list[str]]) -> None:
    found = said_before_answers(record, "all")
    assert [[message["content"] for message in run] for run in found] == said


@pytest.mark.parametrize(
    ("record", "turns", "reason"),
    [
        ({"turns": ["one", "two"]}, "last", "only --turns all"),
        ({"turns": []}, "all", "not a list"),
        ({"turns": [1]}, "all", "turns.0: a number, not a text"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "all", "assistant comes first"),
        ({"messages": []}, "all", "no prompt"),
        ({"id": 1}, "all", "no messages"),
    ],
)
def test_what_is_no_prompt_is_refused(record: dict[str, Any], turns: Any, reason: str) -> None:
    with pytest.raises(LineError, match=reason):
        said_before_answers(record, turns)


def test_turns_without_room_are_left_out_and_counted() -> None:
    target = tiny_target(layers=4, max_position_embeddings=160)
    dialogues = [Dialogue("a", "here:1", tuple([{"role": "user", "content": f"question {n}"}] for n in range(5)))]
    drafter = drafter_for(target, block=4)
    rows = list(measure(target, drafter, dialogues, Way(limit=8)))
    kinds = [type(row) for row in rows]
    assert [row.id for row in rows] == [f"a turn {n}" for n in range(1, 6)]
    assert MeasuredAnswer in kinds and kinds == sorted(kinds, key=lambda kind: kind is LeftOut) and LeftOut in kinds
    figures = summary(rows)
    assert (figures["prompts"], figures["left_out"]) == (kinds.count(MeasuredAnswer), kinds.count(LeftOut))
    assert figures["wrong_tokens"] == 0 and figures["compared"] == figures["prompts"]


def test_behind_a_turn_that_was_left_out_none_is_answered() -> None:
    """Though a template that drops old turns made room again: it would follow words without an answer."""
    target, room = tiny_target(layers=4), iter([True, False, True])
    dialogue = Dialogue("a", "here:1", tuple([{"role": "user", "content": f"{n}"}] for n in range(3)))
    answer = Decoded([40, 2], [], [], [False] * 2, [1], 1.0)
    asked = list(ask(dialogue, target, lambda prompt: answer, lambda prompt: next(room)))
    assert [each.answer is None for each in asked] == [False, True, True]


def test_data_sets_are_measured_one_by_one_and_together(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "turns.jsonl").write_text('{"question_id": 81, "turns": ["one", "two"]}\n{"prompt": "three"}\n')
    data = ["--data", str(tmp_path / "turns.jsonl"), "--no-color"]
    assert main([*words, *data, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(row["data"], row["prompts"]) for row in figures["data_sets"]] == [
        (str(tmp_path / "data.jsonl"), 3), (str(tmp_path / "turns.jsonl"), 3)
    ]  # fmt: skip
    for key in ("prompts", "tokens", "cycles", "compared", "equal_tokens", "near_ties", "wrong_tokens"):
        assert figures[key] == sum(row[key] for row in figures["data_sets"]), key
    cycles = {tau: count for row in figures["data_sets"] for tau, count in row["histogram"].items()}
    assert figures["histogram"].keys() == cycles.keys() and figures["wrong_tokens"] == 0
    assert main([*words, *data]) == 0
    said = capsys.readouterr().out
    assert "--- 81 turn 2: " in said and "--- line 2: " in said
    table = said[said.index("DATA ") :].splitlines()
    assert [line.split()[:2] for line in table[1:4]] == [
        [str(tmp_path / "data.jsonl"), "3"], [str(tmp_path / "turns.jsonl"), "3"], ["together", "6"]
    ]  # fmt: skip
    assert len({len(line) for line in table[:4]}) == 1  # columns stand below each other


def test_a_prompt_that_is_too_long_is_left_out_and_told(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, long = tmp_path / "data.jsonl", json.dumps({"prompt": "x" * 2000}) + "\n"
    data.write_text(long + data.read_text())
    (tmp_path / "long.jsonl").write_text(long)
    assert main([*words, "--json", "--data", str(tmp_path / "long.jsonl")]) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)
    assert (figures["prompts"], figures["left_out"], figures["wrong_tokens"]) == (3, 2, 0)
    assert [(row["prompts"], row["left_out"]) for row in figures["data_sets"]] == [(3, 1), (0, 1)]
    assert said.err.splitlines() == [
        f"left out: {tmp_path / name}:1: prompt, answer and a block need 2032 positions, the target has 1024"
        for name in ("data.jsonl", "long.jsonl")
    ]
    assert main(words) == 0
    assert "left out           1 turn: no positions left for an answer" in capsys.readouterr().out


def test_a_template_s_refusal_in_any_data_set_is_told_before_anything_is_measured(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('refused') }}{% endif %}"
    file = tmp_path / "target" / "chat_template.jinja"
    file.write_text(template + file.read_text())
    (tmp_path / "odd.jsonl").write_text('{"prompt": "no"}\n')
    assert main([*words, "--data", str(tmp_path / "odd.jsonl")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "odd.jsonl:1: the chat template refuses it: refused" in said.err


def test_answers_at_a_temperature_are_drawn_by_the_seed_and_not_compared(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(*more: str) -> dict[str, Any]:
        assert main([*words, "--temperature", "1", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        return {
            key: value for key, value in found.items() if "_per_s" not in key and key not in ("speedup", "data_sets")
        }

    first = figures("--samples", "2")
    assert (first["prompts"], first["samples"], first["temperature"]) == (6, 2, 1.0)
    assert first["compared"] == first["equal_tokens"] == first["wrong_tokens"] == 0
    assert first["acceptance_micro"] >= 1 and first["cycles"] > 0
    assert figures("--samples", "2") == first
    assert figures("--samples", "2", "--seed", "1")["histogram"] != first["histogram"]


def test_a_conversation_s_draws_do_not_depend_on_the_others(tmp_path: Path) -> None:
    target = tiny_target(layers=4)
    torch.manual_seed(0)
    drafter = drafter_for(target, block=4)
    dialogues = [Dialogue(f"{n}", "here", ([{"role": "user", "content": f"say {n}"}],)) for n in range(2)]
    both = list(measure(target, drafter, dialogues, Way(limit=12, temperature=1.0, plainly=False)))
    one = list(measure(target, drafter, dialogues[:1], Way(limit=12, temperature=1.0, plainly=False, samples=2)))
    tokens = [row.speculative.tokens for row in (both[0], one[0], one[1]) if isinstance(row, MeasuredAnswer)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    "more",
    [["--samples", "2"], ["--temperature", "-1"], ["--temperature", "nan"], ["--temperature", "x"], ["--top-p", "0"],
     ["--top-p", "1.5"], ["--turns", "some"], ["--seed", "-1"]],
)  # fmt: skip
def test_a_wrong_choice_is_usage(words: list[str], more: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, *more])
    assert caught.value.code == 2


def test_a_token_that_is_not_the_target_s_is_code_9_in_full_precision_only(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def another(*given: Any, **more: Any) -> Decoded:
        found = decode_speculative(*given, **more)
        return replace(found, tokens=[(found.tokens[0] + 1) % 90, *found.tokens[1:]])

    monkeypatch.setattr(evaluate, "decode_speculative", another)
    assert main([*words, "--prompts", "1", "--json"]) == 9
    figures = json.loads(capsys.readouterr().out)
    assert figures["wrong_tokens"] >= 1 and figures["lossless"] is False
    assert main([*words, "--prompts", "1", "--json", "--dtype", "bfloat16"]) == 0
    assert json.loads(capsys.readouterr().out)["lossless"] is False
