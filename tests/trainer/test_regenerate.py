"""Conversations made by the target: many at a time as one by one, by seed, and only those fit to learn from."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_targets import TEMPLATE, THINKING_TEMPLATE, tiny_target

from trainer.__main__ import main as command
from trainer.chat import prompt_tokens
from trainer.generate import Generated, generate, top_p
from trainer.prepare import prepared_data
from trainer.regenerate import Counts, answer, in_order, in_place_of, main, sample_prompts, text_reader, user_header
from trainer.speculate import decode_plain
from trainer.target import TargetError, TargetModel

pytestmark = pytest.mark.usefixtures("one_thread")


def talkative(seed: int = 0) -> TargetModel:
    """A tiny target whose turns end, at random's whim: often by the template's own end token, and by some others."""
    target = tiny_target(seed=seed)
    target.head_weight[2] *= 2  # its logits are spread wider, so that it is the best more often
    target.model.generation_config.eos_token_id = [2, *range(4, target.config.vocab_size, 12)]
    return target


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target, folder = talkative(), tmp_path / "target"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("slots", [1, 5, 40])
def test_many_at_a_time_as_one_by_one(slots: int) -> None:
    target = talkative()
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(4, target.config.vocab_size, (size,), generator=generator).tolist()
        for size in torch.randint(1, 90, (12,), generator=generator).tolist()
    ]
    ends, limit = target.end_tokens(), 14
    found = list(in_order(generate(target, prompts, limit, ends, slots=slots)))
    assert [one.index for one in found] == list(range(12))
    for prompt, one in zip(prompts, found, strict=True):
        alone = decode_plain(target, prompt, limit, ends)
        last = alone.tokens[-1]
        expected = (alone.tokens[:-1], last) if last in ends else (alone.tokens, None)
        assert one == Generated(one.index, *expected)
    assert {one.end is None for one in found} == {True, False}


def test_stopping_ends_what_is_under_way_and_begins_nothing() -> None:
    target = talkative()
    asked: list[None] = []

    def stop() -> bool:
        asked.append(None)
        return len(asked) > 1

    found = list(generate(target, [[5]] * 20, 9, frozenset(), slots=4, stop=stop))
    assert sorted(one.index for one in found) == [0, 1, 2, 3]
    assert all(len(one.tokens) == 9 for one in found)


def test_top_p_leaves_the_tail_out() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)
    shares = top_p(0.8, torch.Generator().manual_seed(0))(logits).bincount(minlength=4) / 4000
    assert shares[2] == shares[3] == 0  # 0.5 and 0.3 reach 0.8
    torch.testing.assert_close(shares[:2], torch.tensor([0.625, 0.375]), rtol=0, atol=0.03)


@given(st.permutations(range(6)))
def test_in_order_sorts_and_keeps_all(indices: list[int]) -> None:
    found = list(in_order(Generated(index, [], 2) for index in indices))
    assert [one.index for one in found] == list(range(6))


def test_the_header_is_what_the_template_writes_before_the_user_s_words() -> None:
    tokenizer = tiny_target().tokenizer
    assert tokenizer.decode(user_header(tokenizer)) == "<|im_start|>user\n"
    tokenizer.chat_template = "{{ messages[0]['content'] | upper | replace('\u241a', '') }}"
    with pytest.raises(TargetError, match="does not write the user's words"):
        user_header(tokenizer)


def test_text_with_special_tokens_or_other_tokens_is_refused() -> None:
    tokenizer = tiny_target().tokenizer
    tokens = tokenizer.encode("a word\n")
    read = text_reader(tokenizer)
    assert read(tokens) == "a word\n"
    assert read([*tokens, 3]) is None  # <reserved>
    unused = len(tokenizer) + 1
    assert read([*tokens, unused]) is None  # a row of the embedding without a token


class Counting:
    """A tokenizer that counts how often its table of added tokens is made."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.made = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        self.made += name == "added_tokens_decoder"
        return getattr(self._tokenizer, name)


def test_the_table_of_added_tokens_is_made_once() -> None:
    counting = Counting(tiny_target().tokenizer)
    read = text_reader(counting)
    assert [read(counting.encode(text)) for text in ("one", "two")] == ["one", "two"]
    assert counting.made == 1


@pytest.mark.parametrize("template", [TEMPLATE, THINKING_TEMPLATE])
def test_rows_are_the_target_s_own_greedy_answers(saved: Path, tmp_path: Path, template: str) -> None:
    target = talkative()
    target.tokenizer.chat_template = template
    prompts = sample_prompts(target, 40, Counts(), seed=1, slots=8)
    assert len(set(prompts)) == len(prompts) > 5
    counts = Counts()
    rows = list(answer(target, prompts, counts, seed=1, limit=6, least=2, slots=8))
    assert 0 < len(rows) == counts.rows < counts.answered == len(prompts)
    assert counts.unfinished > 0 and counts.other_end > 0
    for row in rows:
        question, said = row["messages"]
        prompt = prompt_tokens(target.tokenizer, [question])
        alone = decode_plain(target, prompt, 6)
        assert alone.tokens[-1] == 2  # as the template ends a turn, though others end one for the target too
        assert target.tokenizer.decode(alone.tokens[:-1]) == said["content"]
        assert question["content"] in prompts and len(said["content"]) >= 2
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = prepared_data(file, target.tokenizer, into=tmp_path / "prepared")  # what training makes of them
    assert len(read) == len(rows)


def run(saved: Path, out: Path, seed: int = 3, *more: str) -> list[dict[str, Any]]:
    words = ["--target", str(saved), "--self-prompts", "60", "--seed", str(seed), "--out", str(out)]
    assert main([*words, "--max-new-tokens", "20", "--min-new-tokens", "1", "--batch", "8", *more]) == 0
    return rows_of(out)


def test_the_seed_decides(saved: Path, tmp_path: Path) -> None:
    first = run(saved, tmp_path / "a.jsonl")
    assert len(first) > 5
    assert run(saved, tmp_path / "b.jsonl") == first
    other = run(saved, tmp_path / "c.jsonl", 4)
    assert [row["messages"] for row in other] != [row["messages"] for row in first]


def test_held_out_rows_are_not_learned_from_and_excerpts_are(saved: Path, tmp_path: Path) -> None:
    everything = run(saved, tmp_path / "all.jsonl")
    held, excerpt = tmp_path / "held.jsonl", tmp_path / "excerpt.jsonl"
    more = ["--heldout", "3", str(held), "--excerpt", "2", str(excerpt), "--excerpt-bytes", "150"]
    rest = run(saved, tmp_path / "out.jsonl", 3, *more)
    assert rows_of(held) + rest == everything
    assert rows_of(held) == everything[:3]
    assert rows_of(excerpt) == [row for row in rest if len(json.dumps(row)) < 150][:2]
    origin = json.loads((tmp_path / "out.origin.json").read_text())
    assert origin["seed"] == 3 and "--heldout" in origin["command"]
    assert origin["counts"]["rows"] == len(everything)


def test_nothing_made_is_an_error_and_leaves_the_old_file(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    words = ["regenerate", "--target", str(saved), "--self-prompts", "9", "--out", str(out)]
    assert command([*words, "--time-limit", "0"]) == 1  # when the time is up nothing is begun
    assert f"no row for {out}: sampled 0, " in capsys.readouterr().err
    assert out.read_text() == "old" and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "more",
    [
        ["--batch", "0"],
        ["--self-prompts", "-1"],
        ["--heldout", "x", "held.jsonl"],
        ["--excerpt", "0", "some.jsonl"],
        ["--heldout", "3", "out.jsonl"],
    ],
)
def test_wrong_words_are_usage_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out.jsonl").write_text("old")
    with pytest.raises(SystemExit) as caught:
        main(["--target", "/nowhere", "--self-prompts", "9", "--out", "out.jsonl", *more])
    assert caught.value.code == 2
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"out.jsonl": "old"}


def test_a_target_that_is_not_there_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old")
    with pytest.raises(TargetError):
        main(["--target", "/nowhere", "--self-prompts", "9", "--out", str(tmp_path / "out.jsonl")])
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"out.jsonl": "old"}


def test_a_file_that_can_not_be_written_is_told_before_the_target_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        main(["--target", "/nowhere", "--self-prompts", "9", "--out", str(tmp_path / "file" / "out.jsonl")])


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with in_place_of(pipe) as file:
        file.write("x")
    assert os.read(reader, 9) == b"x" and pipe.is_fifo()
    os.close(reader)


def test_what_was_finished_outlives_ctrl_c(saved: Path, tmp_path: Path) -> None:
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    out.write_text("old")
    words = [
        "--target",
        str(saved),
        "--self-prompts",
        "60",
        "--out",
        str(out),
        "--batch",
        "8",
        "--max-new-tokens",
        "900",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "trainer", "regenerate", *words, "--min-new-tokens", "1", "--device", "cpu"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        while process.poll() is None and not (part.exists() and part.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert said == f"what was finished is in {part}\nregenerate: stopped by Ctrl-C\n"
    assert rows_of(part) and out.read_text() == "old"
