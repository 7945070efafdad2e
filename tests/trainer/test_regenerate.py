"""Conversations made by the target: its own answers, by seed, only those fit to learn from, and none lost to a kill."""

import fcntl
import json
import os
import random
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import TEMPLATE, THINKING_TEMPLATE, talkative, tiny_target

from trainer import answering
from trainer.__main__ import main as command
from trainer.answering import Local, Manner, text_reader
from trainer.asked import Asked, asked_from
from trainer.chat import prompt_tokens
from trainer.conversations import LineError
from trainer.finished import Finished
from trainer.prepare import prepared_data
from trainer.prepared import DataError
from trainer.prompts import sample_prompts, user_header
from trainer.regenerate import Work, main
from trainer.room import Room
from trainer.sampling import greedy
from trainer.speculate import decode_plain
from trainer.target import TargetError, TargetModel


def saved_as(folder: Path, target: TargetModel) -> Path:
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_as(tmp_path_factory.mktemp("regenerate") / "target", talkative(seed=2, layers=3))


@pytest.fixture(scope="module")
def other_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slower, but with the answers that these few prompts are for."""
    return saved_as(tmp_path_factory.mktemp("regenerate") / "target", talkative())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records with a prompt each; the tiny target answers some of them well."""
    draw = random.Random(seed)
    return [{"prompt": "".join(draw.choices("abcdefgh ?", k=draw.randint(5, 40)))} for _ in range(count)]


SHORT = ["--max-new-tokens", "20", "--min-new-tokens", "1"]


def run(
    saved: Path, out: Path, *more: str, prompts: tuple[str, str] = ("--self-prompts", "60")
) -> list[dict[str, Any]]:
    assert main(["--target", str(saved), *prompts, "--out", str(out), *SHORT, "--batch", "8", *more]) == 0
    return rows_of(out)


def local(target: TargetModel, **manner: Any) -> Local:
    return Local(target, Manner(**manner), greedy, Room(target, 8, sampled=False, say=print))


def plain(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- what is kept ---


def test_the_header_is_what_the_template_writes_before_the_user_s_words() -> None:
    tokenizer = tiny_target().tokenizer
    assert tokenizer.decode(user_header(tokenizer)) == "<|im_start|>user\n"
    tokenizer.chat_template = "{{ messages[0]['content'] | upper | replace('\u241a', '') }}"
    with pytest.raises(TargetError, match="does not write the user's words"):
        user_header(tokenizer)


def test_text_with_special_tokens_or_other_tokens_is_refused() -> None:
    tokenizer = tiny_target().tokenizer
    tokens = tokenizer.encode("a word\n")
    text_of, reads_back = text_reader(tokenizer)
    assert text_of(tokens) == "a word\n" and reads_back("a word\n", tokens)
    assert text_of([*tokens, 3]) is None  # <reserved>
    unused = [*tokens, len(tokenizer) + 1]  # a row of the embedding without a token
    assert not reads_back(str(text_of(unused)), unused)


class Counting:
    """A tokenizer that counts how often its table of added tokens is made."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.made = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        self.made += name == "added_tokens_decoder"
        return getattr(self._tokenizer, name)


def test_the_table_of_added_tokens_is_made_once() -> None:
    counting = Counting(tiny_target().tokenizer)
    text_of, _ = text_reader(counting)
    assert [text_of(counting.encode(text)) for text in ("one", "two")] == ["one", "two"]
    assert counting.made == 1


@pytest.mark.parametrize("template", [TEMPLATE, THINKING_TEMPLATE])
def test_rows_are_the_target_s_own_greedy_answers(tmp_path: Path, template: str) -> None:
    target = talkative()
    target.tokenizer.chat_template = template
    asked = [Asked(n, f"q{n}", [plain(row["prompt"])]) for n, row in enumerate(questions(80))]
    found = list(local(target, limit=8, least=2).answers(asked, lambda: False))
    assert sorted(one.number for one in found) == list(range(80))
    assert {one.dropped for one in found} >= {None, "unfinished", "other_end"}
    rows = [one.row for one in found if one.row]
    assert len(rows) > 3
    for row in rows:
        question, said = row["messages"]
        alone = decode_plain(target, prompt_tokens(target.tokenizer, [question]), 8)
        assert alone.tokens[-1] == 2  # as the template ends a turn, though others end one for the target too
        assert target.tokenizer.decode(alone.tokens[:-1]) == said["content"]
        assert len(said["content"]) >= 2
    read = prepared_data(write_rows(tmp_path / "rows.jsonl", rows), target.tokenizer, into=tmp_path / "prepared")
    assert len(read) == len(rows)  # what training makes of them


def test_turns_are_answered_in_order_each_behind_the_new_ones_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "WINDOW", 7)
    target, draw = talkative(), random.Random(1)
    words = [[plain("".join(draw.choices("abcdefgh", k=9))) for _ in range(3)] for _ in range(60)]
    asked = [Asked(n, f"q{n}", [list(turn) for turn in turns]) for n, turns in enumerate(words)]
    found = list(local(target, limit=12, least=1).answers(asked, lambda: False))
    rows = {one.number: one.row for one in found if one.row}
    lengths = [len(row["messages"]) for row in rows.values()]
    assert len(found) == 60 and min(lengths) < max(lengths) == 6  # some end before a dropped answer
    for number, row in rows.items():
        chat: list[dict[str, str]] = []
        for turn, said in zip(words[number], row["messages"][1::2], strict=False):
            chat += turn
            tokens = decode_plain(target, prompt_tokens(target.tokenizer, chat), 12).tokens
            assert target.tokenizer.decode(tokens[:-1]) == said["content"]
            chat.append(said)
        assert row["messages"] == chat
    tried = sum(one.answers for one in found)
    assert tried == sum(lengths) // 2 + sum(one.dropped is not None for one in found)
    assert sum(one.tokens for one in found) > tried


def test_a_conversation_that_no_longer_fits_ends_before() -> None:
    target = talkative()
    longest = target.longest - 20 - len(prompt_tokens(target.tokenizer, plain("")))
    told: list[tuple[int, str]] = []
    maker = Local(
        target, Manner(limit=20, least=1), greedy, Room(target, 8, sampled=False, say=print),
        refused=lambda number, why: told.append((number, why)),
    )  # fmt: skip
    edge = [Asked(n, "", [plain("x" * (longest + n))]) for n in range(2)]
    assert [one.number for one in maker.answers(edge, lambda: False)] == [0]
    assert told == [(1, "1005 tokens, with 20 new ones more than the 1024 that the target has")]
    asked = [Asked(n, "", [plain("ab" * n), plain("x" * longest)]) for n in range(1, 20)]
    ended = [one for one in maker.answers(asked, lambda: False) if one.dropped == "too_long"]
    assert ended and all(one.row and len(one.row["messages"]) == 2 and one.answers == 1 for one in ended)


# --- what is asked ---

USER, SAID, MORE = (
    {"role": role, "content": text} for role, text in (("user", "u"), ("assistant", "a"), ("user", "v"))
)
SYSTEM, TOOL = {"role": "system", "content": "s"}, {"role": "tool", "content": "t"}


@pytest.mark.parametrize(
    ("record", "turns", "last"),
    [
        ({"messages": [USER, SAID]}, [[USER]], [[USER]]),
        ({"messages": [USER]}, [[USER]], [[USER]]),
        ({"messages": [SYSTEM, USER, SAID, MORE, SAID]}, [[SYSTEM, USER], [MORE]], [[SYSTEM, USER, SAID, MORE]]),
        ({"messages": [USER, SAID, MORE]}, [[USER], [MORE]], [[USER, SAID, MORE]]),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "x"}]}, [[USER]], [[USER]]),
        ({"conversations": [{"from": "human", "value": "u"}], "system": "s"}, [[SYSTEM, USER]], [[SYSTEM, USER]]),
        ({"prompt": "u", "response": "a"}, [[USER]], [[USER]]),
        ({"prompt": "u"}, [[USER]], [[USER]]),
        ({"prompt": [USER, SAID, MORE], "response": "a"}, [[USER, SAID, MORE]], [[USER, SAID, MORE]]),
        ({"messages": [USER, SAID, TOOL, SAID]}, None, [[USER, SAID, TOOL]]),
        ({"messages": []}, None, None),
        ({"messages": [SYSTEM]}, None, None),
        ({"messages": [SYSTEM, SAID]}, None, None),
        ({"messages": [SAID]}, None, None),
        ({"text": "u"}, None, None),
    ],
)
def test_every_form_of_a_conversation_is_asked(record: Any, turns: Any, last: Any) -> None:
    for expected, only in ((turns, False), (last, True)):
        line = json.dumps(record).encode()
        if expected is None:
            with pytest.raises(LineError):
                asked_from(line, 7, "data.jsonl", last_turn_only=only)
        else:
            asked = asked_from(line, 7, "data.jsonl", last_turn_only=only)
            assert asked.turns == expected and asked.id == "data.jsonl-000007"


@pytest.mark.parametrize(("given", "id"), [("x7", "x7"), (12, "12"), (None, "f-000001"), ("a\n", "f-000001")])
def test_a_record_keeps_its_id(given: Any, id: str) -> None:
    assert asked_from({"id": given, "prompt": "u"}, 1, "f", last_turn_only=False).id == id


def test_what_can_not_be_answered_is_counted_with_its_reason(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [{"text": "no"}, {"prompt": "x" * 2000}, {"messages": [USER, SAID, TOOL, SAID]}]
    data = write_rows(tmp_path / "data.jsonl", [*bad, *questions(40)])
    rows = run(saved, tmp_path / "out.jsonl", prompts=("--data", str(data)))
    counts = json.loads((tmp_path / "out.jsonl.origin.json").read_text())["counts"]
    assert counts["unanswerable"] == 3 and counts["prompts"] == 40 == counts["answered"] and counts["rows"] == len(rows)
    said = capsys.readouterr().err
    assert "tokens, with 20 new ones more than the 1024 that the target has (record 2)" in said
    assert "1 not answered: no messages" in said and "(record 1)" in said and "a tool answers" in said
    assert all(int(row["id"].removeprefix("data.jsonl-")) > 3 for row in rows)

    write_rows(data, [*bad, *questions(20)])
    with pytest.raises(DataError, match=r"3 of 23 records can't be answered; 1 times: .* \(record 1\)"):
        run(saved, tmp_path / "other.jsonl", prompts=("--data", str(data)))


def test_near_duplicates_are_dropped_where_it_is_wanted(saved: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [row for row in questions(20) for _ in range(2)])
    source = ("--data", str(data))
    twice = run(saved, tmp_path / "twice.jsonl", prompts=source)
    once = run(saved, tmp_path / "once.jsonl", "--drop-near-duplicates", "1", prompts=source)
    assert once == twice[::2] and [row["messages"] for row in twice[1::2]] == [row["messages"] for row in once]
    assert json.loads((tmp_path / "once.jsonl.origin.json").read_text())["counts"]["near_duplicates"] == 20


# --- the command ---


def test_the_seed_decides_and_the_batch_does_not(saved: Path, tmp_path: Path) -> None:
    prompts = ("--self-prompts", "30")
    first = run(saved, tmp_path / "a.jsonl", "--seed", "3", prompts=prompts)
    assert len(first) > 2 and first[0]["id"].startswith("self-3-0000")
    assert [row["id"] for row in first] == sorted(row["id"] for row in first)
    assert run(saved, tmp_path / "b.jsonl", "--seed", "3", "--batch", "auto", prompts=prompts) == first
    other = run(saved, tmp_path / "c.jsonl", "--seed", "4", prompts=prompts)
    assert [row["messages"] for row in other] != [row["messages"] for row in first]
    assert not list(tmp_path.glob("*part*"))


def test_sampled_answers_follow_from_the_seed(saved: Path, tmp_path: Path) -> None:
    source = ("--data", str(write_rows(tmp_path / "data.jsonl", questions(30))))
    warm = ["--temperature", "1.2", "--top-p", "0.95", "--top-k", "50"]
    cold = run(saved, tmp_path / "cold.jsonl", prompts=source)
    first = run(saved, tmp_path / "first.jsonl", *warm, prompts=source)
    assert run(saved, tmp_path / "again.jsonl", *warm, "--batch", "3", prompts=source) == first != cold
    assert run(saved, tmp_path / "other.jsonl", *warm, "--seed", "1", prompts=source) != first


def test_held_out_rows_are_not_learned_from_and_excerpts_are(saved: Path, tmp_path: Path) -> None:
    prompts = ("--data", str(write_rows(tmp_path / "data.jsonl", questions(40))))
    everything = run(saved, tmp_path / "all.jsonl", prompts=prompts)
    held, excerpt = tmp_path / "held.jsonl", tmp_path / "excerpt.jsonl"
    more = ["--heldout", "3", str(held), "--excerpt", "2", str(excerpt), "--excerpt-bytes", "150"]
    rest = run(saved, tmp_path / "out.jsonl", *more, prompts=prompts)
    assert rows_of(held) + rest == everything
    assert rows_of(held) == everything[:3]
    assert rows_of(excerpt) == [row for row in rest if len(json.dumps(row)) < 150][:2]
    origin = json.loads((tmp_path / "out.jsonl.origin.json").read_text())
    assert origin["seed"] == 0 and "--heldout" in origin["command"]
    assert origin["counts"]["rows"] == len(everything)


def test_nothing_made_is_an_error_and_leaves_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    words = ["regenerate", "--target", str(saved), "--self-prompts", "9", "--out", str(out)]
    assert command([*words, "--time-limit", "0"]) == 1  # when the time is up nothing is begun
    assert capsys.readouterr().err == f"NoRows: no row for {out}: the time was over with 9 not asked\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "more",
    [
        ["--batch", "0"],
        ["--self-prompts", "-1"],
        ["--heldout", "x", "held.jsonl"],
        ["--excerpt", "0", "some.jsonl"],
        ["--heldout", "3", "out.jsonl"],
        ["--data", "x.jsonl"],
        ["--endpoint", "http://127.0.0.1:1"],
        ["--top-p", "0.9"],
        ["--temperature", "1", "--top-p", "1.5"],
        ["--temperature", "nan"],
        ["--time-limit", "nan"],
        ["--time-limit", "-1"],
        ["--time-limit", "inf"],
        ["--request-timeout", "0"],
        ["--model", "x"],
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
    words = ["--target", "/nowhere", "--self-prompts", "9", "--out"]
    with pytest.raises(OSError, match="file"):
        main([*words, str(tmp_path / "file" / "out.jsonl")])
    with pytest.raises(ValueError, match="is no file"):
        main([*words, str(tmp_path)])


# --- going on ---


def test_a_finished_file_is_not_made_again_nor_another_s_replaced(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    data = write_rows(tmp_path / "data.jsonl", questions(10))
    source = ("--data", str(data))
    before = (run(saved, out, prompts=source), out.stat().st_mtime_ns)
    assert (run(saved, out, prompts=source), out.stat().st_mtime_ns) == before
    assert "is whole already: nothing to do" in capsys.readouterr().out
    for more in (["--seed", "5"], ["--heldout", "1", str(tmp_path / "held.jsonl")], ["--dtype", "bfloat16"]):
        with pytest.raises(ValueError, match=rf"was made with other settings: .*{more[0][2:]} was .*, now "):
            run(saved, out, *more, prompts=source)
    write_rows(data, questions(11))
    with pytest.raises(ValueError, match="data_digest was "):
        run(saved, out, prompts=source)
    (tmp_path / "out.jsonl.origin.json").unlink()
    with pytest.raises(ValueError, match="is there already, and not this command's"):
        run(saved, out, prompts=source)
    assert rows_of(out) == before[0]


class Broken(Exception):
    pass


@pytest.fixture
def broken(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, Path]]:
    """A command that ended in its middle: after so many conversations. Returns the data and FILE."""

    def make(count: int, *more: str) -> tuple[Path, Path]:
        data, out = write_rows(tmp_path / "data.jsonl", questions(30)), tmp_path / "out.jsonl"
        judged = Local._judged
        left = [count]

        def ending(self: Local, asked: Asked, one: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Broken
            return judged(self, asked, one)

        with monkeypatch.context() as patch:
            patch.setattr(Local, "_judged", ending)
            with pytest.raises(Broken):
                run(saved, out, *more, prompts=("--data", str(data)))
        return data, out

    return make


def part(out: Path) -> Path:
    return out.with_name("out.jsonl.part")


@pytest.mark.parametrize("more", [[], ["--drop-near-duplicates", "1"]])
def test_the_same_command_goes_on_with_what_is_missing(
    saved: Path, tmp_path: Path, broken: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], more: list[str],
) -> None:  # fmt: skip
    data, out = broken(13, *more)
    assert f"13 conversations are in {part(out)}; the same command goes on" in capsys.readouterr().err
    lines = part(out).read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 13
    numbers = [json.loads(line)["number"] for line in lines[1:]]
    assert numbers != sorted(numbers)  # as they finished
    part(out).write_bytes(b"".join(lines)[:-5])  # the last one was being written
    asked: list[int] = []
    prompts = Local._prompts

    def seen(self: Local, some: Sequence[Asked]) -> Any:
        asked.extend(one.number for one in some)
        return prompts(self, some)

    monkeypatch.setattr(Local, "_prompts", seen)
    resumed = run(saved, out, *more, prompts=("--data", str(data)))
    assert set(asked) == set(range(1, 31)) - set(numbers[:12])
    said = capsys.readouterr().err
    assert f"the last line was torn, {len(lines[-1]) - 5:,} bytes of it are dropped" in said
    assert f"going on behind 12 conversations in {part(out)}" in said
    assert not part(out).exists()
    assert resumed == run(saved, tmp_path / "whole.jsonl", *more, prompts=("--data", str(data)))


def test_samples_of_prompts_are_gone_on_with(tmp_path: Path) -> None:
    target, told = talkative(), list[str]()
    room = Room(target, 4, sampled=True, say=told.append)
    samples = Finished(tmp_path / "prompts.part", {}, told.append)
    sample_prompts(target, 30, samples, room, seed=1, stop=lambda: len(samples.numbers) > 9)
    before = samples.path.read_bytes()
    assert 9 < len(samples.numbers) < 30
    sample_prompts(target, 30, samples, room, seed=1, stop=lambda: False)
    after = samples.path.read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 31 and samples.numbers == set(range(30))
    samples.close()
    with pytest.raises(ValueError, match="begun with other settings: seed was None, now 1"):
        Finished(samples.path, {"seed": 1}, told.append)
    assert not told


def test_other_settings_are_not_mixed_in(saved: Path, broken: Callable[..., tuple[Path, Path]]) -> None:
    data, out = broken(4)
    before = part(out).read_bytes()
    for more, name in (
        (["--seed", "5"], "seed was 0, now 5"), (["--temperature", "1"], "temperature was 0.0, now 1.0"),
        (["--max-new-tokens", "21"], "max_new_tokens was 20, now 21"), (["--last-turn-only"], "last_turn_only was"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"begun with other settings: {name}"):
            run(saved, out, *more, prompts=("--data", str(data)))
    with pytest.raises(ValueError, match="self_prompts was None, now 60"):
        run(saved, out)
    other = talkative(seed=1)
    other.model.save_pretrained(data.parent / "other")
    other.tokenizer.save_pretrained(data.parent / "other")
    with pytest.raises(ValueError, match="begun with other settings: target was "):
        run(data.parent / "other", out, prompts=("--data", str(data)))
    write_rows(data, questions(31))
    with pytest.raises(ValueError, match="data_digest was "):
        run(saved, out, prompts=("--data", str(data)))
    assert part(out).read_bytes() == before


def test_a_damaged_or_foreign_file_is_left_alone(saved: Path, broken: Callable[..., tuple[Path, Path]]) -> None:
    data, out = broken(4)
    lines = part(out).read_bytes().splitlines(keepends=True)
    for damaged, said in (
        ([*lines[:2], lines[2][5:], *lines[3:]], "line 3 is damaged"),
        ([b'{"id": 1}\n'], "is no file of this command's"),
    ):
        part(out).write_bytes(b"".join(damaged))
        with pytest.raises(ValueError, match=said):
            run(saved, out, prompts=("--data", str(data)))
        assert part(out).read_bytes() == b"".join(damaged)


def test_a_full_disk_costs_one_line(
    saved: Path, broken: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = broken(4)
    write, left = os.write, [20]

    def full(file: int, line: bytes) -> int:
        if not left:
            raise OSError(28, "No space left on device")
        return write(file, line[: left.pop()])

    with monkeypatch.context() as patch:
        patch.setattr("trainer.finished.os.write", full)
        with pytest.raises(OSError, match="No space left"):
            run(saved, out, prompts=("--data", str(data)))
    assert not part(out).read_bytes().endswith(b"\n")
    assert len(run(saved, out, prompts=("--data", str(data)))) > 3


FORKING = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from trainer.regenerate import main
from trainer.target import load_target

torch.set_num_threads(1)
commands = json.loads(sys.argv[1])
load_target(commands[0][0][1])  # the imports that it takes, once for all forks
draw, all_codes = random.Random(0), []
for words, folder, kinds in commands:
    codes = []
    while True:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = main(words)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        status = None
        if kinds:
            # At a random moment: some bytes after the file was begun, or gone on with.
            size = lambda: sum(p.stat().st_size for p in Path(folder).glob("*.part"))
            begin, more = size(), draw.randint(1, 1500)
            while status is None and size() < begin + more:
                found = os.waitpid(child, os.WNOHANG)
                status = found[1] if found[0] else None
                time.sleep(0.001)
            if status is None:
                os.kill(child, kinds.pop(0))
        if status is None:
            status = os.waitpid(child, 0)[1]
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] == 0:
            break
    all_codes.append(codes)
print(json.dumps(all_codes))
"""

KILL, CTRL_C, TERM = int(signal.SIGKILL), int(signal.SIGINT), int(signal.SIGTERM)


@pytest.mark.parametrize(("end", "name"), [(CTRL_C, "Ctrl-C"), (TERM, "SIGTERM")])
def test_a_signal_ends_it_with_its_code_and_the_next_goes_on(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: int,
    name: str,
) -> None:  # fmt: skip
    prompts, out = ("--data", str(write_rows(tmp_path / "data.jsonl", questions(30)))), tmp_path / "out.jsonl"
    words = ["--target", str(saved), *prompts, "--out", str(out), *SHORT, "--batch", "3"]
    judged, left = Local._judged, [9]

    def signalled(self: Local, asked: Asked, one: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(end)
        return judged(self, asked, one)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(Local, "_judged", signalled)
        patch.setattr("signal.SIG_IGN", None)  # tests may run in a shell's background, where Ctrl-C is ignored
        assert main(words) == 128 + end
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert f"the same command goes on\nregenerate: stopped by {name}\n" in capsys.readouterr().err
    assert 9 <= len(rows_of(part(out))) - 1 < 30
    assert run(saved, out, prompts=prompts) == run(saved, tmp_path / "whole.jsonl", prompts=prompts)


def test_however_it_ends_nothing_is_lost_and_nothing_changes(saved: Path, tmp_path: Path, soak: bool) -> None:
    """Of data and of self-prompts: run again and again, each time in a fork that a signal ends, until it is through."""
    if not soak:
        pytest.skip("processes of their own with --soak; daily the same by a signal and an exception in this one")
    draw, size = random.Random(3), 120
    words = ["".join(draw.choices("abcdefgh ", k=12)) for _ in range(size)]
    turns = [{"messages": [m for text in words[n : n + 2] for m in (*plain(text), SAID)]} for n in range(0, size, 2)]
    data = write_rows(tmp_path / "data.jsonl", turns)
    more = ["--temperature", "0.8", "--batch", "3", "--device", "cpu"]
    sources = {
        "data": (("--data", str(data)), [KILL, CTRL_C, TERM]),
        "self": (("--self-prompts", str(size // 2)), [KILL, KILL]),
    }
    commands: list[Any] = []
    for name, (prompts, ends) in sources.items():
        (tmp_path / name).mkdir()
        out = ["--out", str(tmp_path / name / "out.jsonl")]
        ends += [KILL] * 28
        commands.append([["--target", str(saved), *prompts, *out, *SHORT, *more], str(tmp_path / name), ends])
    done = subprocess.run(
        [sys.executable, "-c", FORKING, json.dumps(commands)],
        capture_output=True, text=True, timeout=400,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = {KILL: -KILL, CTRL_C: 130, TERM: 143}
    found = json.loads(done.stdout.splitlines()[-1])
    for (name, (prompts, ends)), codes in zip(sources.items(), found, strict=True):
        assert codes[-1] == 0 and codes[:-1] == [told[end] for end in ends][: len(codes) - 1] and len(codes) > 2
        whole = run(saved, tmp_path / f"{name}-whole.jsonl", *more, prompts=prompts)
        assert rows_of(tmp_path / name / "out.jsonl") == whole and len(whole) > 1, done.stderr
        assert not list((tmp_path / name).glob("*part*"))
    for name in ("Ctrl-C", "SIGTERM"):
        assert f"the same command goes on\nregenerate: stopped by {name}\n" in done.stderr


# --- the time is over ---


@pytest.fixture
def late_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The time is over, where there is a limit, when so many answers were read, or so many samples of prompts."""
    ends = [0]

    def set_to(count: int) -> None:
        ends[0] = count

    judged, add, elapsed = Local._judged, Finished.add, Work.elapsed

    def counting(self: Local, asked: Asked, one: Any) -> Any:
        ends[0] -= 1
        return judged(self, asked, one)

    def adding(self: Finished, piece: Any) -> None:
        ends[0] -= "prompt" in piece
        add(self, piece)

    monkeypatch.setattr(Local, "_judged", counting)
    monkeypatch.setattr(Finished, "add", adding)
    monkeypatch.setattr(Work, "elapsed", lambda self: elapsed(self) + 10**6 * (ends[0] <= 0))
    return set_to


def origin_of(out: Path) -> dict[str, Any]:
    return json.loads(out.with_name(f"{out.name}.origin.json").read_text())


def dialogues(count: int) -> list[dict[str, Any]]:
    draw = random.Random(3)
    return [
        {"messages": [m for _ in range(3) for m in (*plain("".join(draw.choices("abcdefgh ", k=n % 9 + 9))), SAID)]}
        for n in range(count)
    ]


LIMIT = ["--time-limit", "10000", "--batch", "2"]


def test_when_the_time_is_over_what_is_there_is_kept_and_gone_on_with(
    saved: Path, tmp_path: Path, late_after: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ("--data", str(write_rows(tmp_path / "data.jsonl", dialogues(50))))
    late_after(10**6)
    whole = run(saved, tmp_path / "whole.jsonl", "--temperature", "1", prompts=prompts)
    whole_counts = origin_of(tmp_path / "whole.jsonl")["counts"]
    by_id = {row["id"]: row["messages"] for row in whole}
    out, unasked, cut = tmp_path / "out.jsonl", 50, 0
    for answers in (16, 8, 9):
        late_after(answers)
        rows = run(saved, out, "--temperature", "1", *LIMIT, prompts=prompts)
        origin = origin_of(out)
        assert origin["complete"] is False and 0 < origin["unasked"] < unasked and part(out).exists()
        unasked, counts = origin["unasked"], origin["counts"]
        cut += counts["unasked_turns"]
        assert all(row["messages"] == by_id[row["id"]][: len(row["messages"])] for row in rows)
        assert counts["rows"] == len(rows)
        pieces = {line["number"] for line in rows_of(part(out))[1:]}
        assert len(pieces) == 50 - unasked and max(pieces) <= len(pieces) + 16  # not those with the longest prompts
        said = capsys.readouterr().out
        assert f"the time was over: {unasked} of 50 conversations were not begun" in said and "goes on" in said
    assert cut > 0
    late_after(0)
    assert run(saved, out, "--temperature", "1", prompts=prompts) == whole and not part(out).exists()
    assert origin_of(out)["complete"] is True and origin_of(out)["counts"] == whole_counts
    run(saved, out, "--temperature", "1", *LIMIT, prompts=prompts)
    assert "is whole already" in capsys.readouterr().out


def test_self_prompts_are_gone_on_with_when_the_time_was_over(
    saved: Path, tmp_path: Path, late_after: Callable[[int], None]
) -> None:
    late_after(10**6)
    more = ("--drop-near-duplicates", "0.2")
    prompts = ("--self-prompts", "24")
    whole = run(saved, tmp_path / "whole.jsonl", *more, prompts=prompts)
    out = tmp_path / "out.jsonl"
    for pieces in (26, 4):  # the first time in the middle of answering, for a third of the time is not over before
        late_after(pieces)
        rows = run(saved, out, *more, *LIMIT, prompts=prompts)
        assert len(rows) <= len(whole) and origin_of(out)["complete"] is False and origin_of(out)["unasked"] > 0
    assert run(saved, out, *more, prompts=prompts) == whole and origin_of(out)["complete"] is True
    assert origin_of(out)["counts"] == origin_of(tmp_path / "whole.jsonl")["counts"]
    assert not list(tmp_path.glob("*part*"))


def test_samples_of_prompts_cut_by_the_time_are_gone_on_with(
    saved: Path, tmp_path: Path, late_after: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    late_after(8)
    out = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=r"no row for .*the time was over with"):
        run(saved, out, *LIMIT, prompts=("--self-prompts", "24"))
    assert 8 <= len(rows_of(out.with_name("out.jsonl.prompts.part"))) - 1 < 24
    late_after(10**6)
    prompts = ("--self-prompts", "24")
    assert run(saved, out, prompts=prompts) == run(saved, tmp_path / "whole.jsonl", prompts=prompts)


def test_no_row_of_all_tells_what_became_of_them_and_promises_nothing(
    other_saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ("--data", str(write_rows(tmp_path / "data.jsonl", questions(4))))
    with pytest.raises(ValueError, match=r"no row for \S+: prompts 4, answered 4, answer_tokens \d+, unfinished 4$"):
        run(other_saved, tmp_path / "out.jsonl", "--max-new-tokens", "1", "--min-new-tokens", "1", prompts=prompts)
    said = capsys.readouterr().err
    assert "the same command would end as this one" in said and "goes on" not in said


# --- files of others ---


@pytest.mark.parametrize("which", ["heldout", "excerpt"])
def test_no_file_of_another_s_is_replaced(saved: Path, tmp_path: Path, which: str) -> None:
    prompts = ("--data", str(write_rows(tmp_path / "data.jsonl", questions(30))))
    other, out = tmp_path / "precious.jsonl", tmp_path / "out.jsonl"
    other.write_text("PRECIOUS")
    with pytest.raises(ValueError, match=r"precious.jsonl is there already, and not this command's"):
        run(saved, out, f"--{which}", "1", str(other), prompts=prompts)
    assert other.read_text() == "PRECIOUS" and not out.exists()
    other.unlink()
    run(saved, out, f"--{which}", "1", str(other), prompts=prompts)
    made = {path: path.read_bytes() for path in (out, other)}
    run(saved, out, f"--{which}", "1", str(other), prompts=prompts)
    for path, content in made.items():
        path.write_bytes(content + b"x")
        with pytest.raises(ValueError, match=f"{path.name} was changed since it was made"):
            run(saved, out, f"--{which}", "1", str(other), prompts=prompts)
        assert path.read_bytes() == content + b"x"
        path.write_bytes(content)
    other.unlink()
    with pytest.raises(ValueError, match=r"precious.jsonl is gone"):
        run(saved, out, f"--{which}", "1", str(other), prompts=prompts)
    out.unlink()  # with its origin left: all is made anew
    run(saved, out, f"--{which}", "1", str(other), prompts=prompts)
    assert {path: path.read_bytes() for path in (out, other)} == made


def test_a_kill_between_two_files_is_gone_on_from(
    other_saved: Path, tmp_path: Path, late_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    prompts = ("--data", str(write_rows(tmp_path / "data.jsonl", dialogues(30))))
    more = ("--heldout", "1", str(tmp_path / "held.jsonl"))
    late_after(10**6)
    whole = run(other_saved, tmp_path / "whole.jsonl", prompts=prompts)
    for place in range(3) if soak else (1,):  # of the origin and two files
        out = tmp_path / "out.jsonl"
        for limit in (LIMIT, []):
            late_after(15)
            left, replace = [place], Path.replace

            def dying(self: Path, target: Path, left: list[int] = left, replace: Any = replace) -> Path:
                left[0] -= 1
                if left[0] < 0:
                    raise Broken
                return replace(self, target)

            with monkeypatch.context() as patch, pytest.raises(Broken):
                patch.setattr(Path, "replace", dying)
                run(other_saved, out, *more, *limit, prompts=prompts)
            late_after(5)
            if limit:
                run(other_saved, out, *more, *limit, prompts=prompts)
        rest = run(other_saved, out, *more, prompts=prompts)
        assert rows_of(tmp_path / "held.jsonl") + rest == whole and origin_of(out)["complete"] is True
        for path in tmp_path.glob("out*"):
            path.unlink()
        (tmp_path / "held.jsonl").unlink()


def test_two_files_of_one_stem_have_an_origin_each_and_an_older_version_s_is_known(saved: Path, tmp_path: Path) -> None:
    prompts = ("--data", str(write_rows(tmp_path / "data.jsonl", questions(20))))
    one, other = tmp_path / "x.jsonl", tmp_path / "x.txt"
    rows = run(saved, one, prompts=prompts)
    assert run(saved, other, "--seed", "1", prompts=prompts) and run(saved, one, prompts=prompts) == rows
    origin = origin_of(one)
    del origin["files"], origin["complete"], origin["unasked"]
    (tmp_path / "x.jsonl.origin.json").unlink()
    (tmp_path / "x.origin.json").write_text(json.dumps(origin))
    before = one.stat().st_mtime_ns
    assert run(saved, one, prompts=prompts) == rows and one.stat().st_mtime_ns == before
    (tmp_path / "x.txt.origin.json").unlink()
    with pytest.raises(ValueError, match=r"x.txt is there already, and not this command's"):
        run(saved, other, "--seed", "1", prompts=prompts)


def test_one_process_at_a_time(saved: Path, tmp_path: Path, broken: Callable[..., tuple[Path, Path]]) -> None:
    data, out = broken(4)
    with part(out).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ValueError, match="is being written by another process"):
            run(saved, out, prompts=("--data", str(data)))


def test_the_benchmark_compares_equal_answers(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "regenerate.py"))
    sizes = ["--prompts", "12", "--theirs", "6", "--max-new-tokens", "9", "--rounds", "2"]
    assert script["main"](["--target", str(saved), "--device", "cpu", "--dtype", "float32", *sizes]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["equal_answers"] == found["compared_answers"] == 12
    assert len(found["rounds"]) == 2 and all(one["ours"] > 0 and one["ratio"] > 0 for one in found["rounds"])
