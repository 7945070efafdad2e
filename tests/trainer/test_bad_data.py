"""Data as it is found: whatever a record or a folder holds, the rest is learned and what is left out is told."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import conversations, write_jsonl

from trainer.__main__ import main as command
from trainer.conversations import MOST_SHOWN, LineError
from trainer.files import built_beside
from trainer.locks import Locked
from trainer.prepare import Reasons, prepared_data
from trainer.prepared import DataError, open_prepared
from trainer.sources import Source, open_source


def among(bad: list[Any], folder: Path, good: int = 60) -> Path:
    """A file of good conversations, and bad ones behind them."""
    return write_jsonl(folder / "data.jsonl", [*conversations(good), *bad])


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": r, "content": t} for r, t in zip(("user", "assistant") * 9, texts)], **more}  # noqa: B905


# --- reasons ---

HALF = "\ud83d"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({HALF: 1}, r"its keys: \ud83d"),
        ({"k" * 100_000: 1}, "kkk..."),
        ({"\x1b[31m red\nline": 1}, r"its keys: \x1b[31m red\nline"),
        (chat("x", weight=1) | {"messages": [{"role": HALF, "content": "x"}]}, r"unknown role '\ud83d'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", HALF: 1}]}]},
            r"with text, \ud83d, not",
        ),
        ({"messages": [{"role": "user", "content": "x", "weight": [[["long"]]] * 500}]}, "weight [[['long']], "),
        ({"messages": [{"role": "user", "content": "x", "name": HALF}]}, r"messages.0.name: half a character (\ud83d)"),
    ],
)
def test_a_reason_can_be_printed_and_written_whatever_a_record_holds(
    bad: dict[str, Any], said: str, tokenizer: Any, tmp_path: Path
) -> None:
    (line,) = prepared_data(among([bad], tmp_path), tokenizer, into=tmp_path / "out").report
    assert said in line and line.isprintable() and len(line) < MOST_SHOWN + 100
    assert open_prepared(tmp_path / "out").report == (line,)


@given(st.text(st.characters(), max_size=300))
def test_a_reason_is_one_printable_line_that_stays_as_it_is(text: str) -> None:
    reason = str(LineError(text))
    assert reason.isprintable() and len(reason) <= MOST_SHOWN and str(LineError(reason)) == reason
    assert reason == text or not text.isprintable() or len(text) > MOST_SHOWN


def test_whatever_a_record_does_to_template_or_tokenizer_is_its_own_reason(own: Any, tmp_path: Path) -> None:
    own.chat_template = "{% if messages[0].content == 'boom' %}{{ raise_exception('no\nboom') }}{% endif %}" + (
        own.chat_template
    )
    decode = own.decode

    def failing(ids: Any, **named: Any) -> str:
        text = str(decode(ids, **named))
        if "panic" in text:
            raise type("PanicException", (BaseException,), {})("index\nout of range")
        if "key" in text:
            raise KeyError("x")
        return text

    own.decode = failing
    path = among([chat("boom", "x"), chat("panic", "x"), chat("key", "x"), chat("fine", "answer")], tmp_path)
    prepared = prepared_data(path, own, into=tmp_path / "out")
    assert len(prepared) == 61
    assert [line.partition("data.jsonl: ")[2] for line in prepared.report] == [
        r"the chat template refuses it: no\nboom (data.jsonl:61)",
        r"it can't be written as tokens: PanicException: index\nout of range (data.jsonl:62)",
        "it can't be written as tokens: KeyError: 'x' (data.jsonl:63)",
    ]


def test_a_name_of_a_file_that_is_no_text_can_be_written(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "fold").mkdir()
    among([], tmp_path).rename(os.fsdecode(bytes(tmp_path / "fold") + b"/\xff.jsonl"))
    assert prepared_data(tmp_path / "fold", tokenizer, into=tmp_path / "out").place(2) == r"\udcff.jsonl:2"


def test_faults_of_other_words_are_counted_apart_as_long_as_there_is_room() -> None:
    reasons = Reasons()
    for line, word in enumerate(["critic", "developer", "narrator", "critic"], start=1):
        reasons.add(line, f"messages.{line}: unknown role '{word}'")
    assert [(one.reason, one.count, one.lines) for one in reasons.all()] == [
        ("messages.1: unknown role 'critic', or the like", 2, (1, 4)),
        ("messages.2: unknown role 'developer'", 1, (2,)),
        ("messages.3: unknown role 'narrator'", 1, (3,)),
    ]
    for line in range(5, 105):
        reasons.add(line, f"unknown role 'r{'x' * line}' before 'y'")
    assert len(reasons.all()) == 26
    top = reasons.all()[0]
    assert top.reason.endswith("before 'y', or the like") and top.count == 78


def test_a_refusal_names_files_and_their_own_lines(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "fold").mkdir()
    write_jsonl(tmp_path / "fold" / "a.jsonl", conversations(10))
    write_jsonl(tmp_path / "fold" / "b.jsonl", [{}] * 5 + conversations(5))
    why = r"5 of 20 records can't be used; 5 times: no messages.* \(b\.jsonl:1, b\.jsonl:2, b\.jsonl:3, "
    with pytest.raises(DataError, match=why):
        prepared_data(tmp_path / "fold", tokenizer, into=tmp_path / "out")


# --- folders ---


def test_what_a_folder_holds_is_read_or_told(tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "fold"
    (folder / ".checkpoints").mkdir(parents=True)
    for number, name in enumerate(["a.jsonl", "b.JSONL", "._a.jsonl", ".checkpoints/a.jsonl", "c.json", "README.md"]):
        write_jsonl(folder / name, conversations(3, seed=number))
    (folder / "d.csv").write_text("x")
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    (folder / "link").symlink_to(tmp_path)
    said: list[str] = []
    prepared = prepared_data(folder, tokenizer, into=tmp_path / "out", say=said.append)
    assert len(prepared) == 6
    assert said == ["fold: 2 files: a.jsonl, b.JSONL", "not read in fold: c.json, d.csv, gone.jsonl, link"]
    (folder / "e.jsonl.zst").write_bytes(b"x")
    with pytest.raises(DataError, match=r"unpack e\.jsonl\.zst first"):
        open_source(folder)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.jsonl", "test.jsonl"], "test, train"),
        (["train/a.jsonl", "validation/a.jsonl"], "train, validation"),
        (["my_train.jsonl", "my_dev.jsonl.gz", "x.jsonl"], "dev, train"),
        (["train_sft-00000-of-00001.parquet", "train_gen-00000-of-00001.parquet"], "train_gen, train_sft"),
        (["train-a.jsonl", "train-b.jsonl", "deep/train.jsonl"], None),
        (["contest.jsonl", "latest.jsonl"], None),
    ],
)
def test_splits_side_by_side_are_refused_by_name(names: list[str], splits: str | None, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    if splits is None:
        assert len(open_source(tmp_path).files) == len(names)
        return
    with pytest.raises(DataError, match=rf"has the splits {splits} side by side: name a file of one \({tmp_path}"):
        open_source(tmp_path)


def test_what_a_file_is_counts_more_than_its_name(tokenizer: Any, tmp_path: Path) -> None:
    import gzip

    for name in ("a.jsonl", "b.JSONL.GZ"):
        (tmp_path / name).write_bytes(gzip.compress(among([], tmp_path).read_bytes()))
        assert len(prepared_data(tmp_path / name, tokenizer, into=tmp_path / f"{name}.out")) == 60
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        open_source(tmp_path / "pipe.jsonl")
    (tmp_path / "a.jsonl.out" / "meta.json").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl\.out is half a folder of prepared data, without its meta\.json"):
        open_source(tmp_path / "a.jsonl.out")


# --- two at once, and a stop ---


def test_two_who_prepare_one_folder_do_not_meet(tokenizer: Any, tmp_path: Path) -> None:
    path = among([], tmp_path)
    with (
        built_beside(tmp_path / "out") as building,
        pytest.raises(Locked, match=r"/out is in use by process \d+ on .*: wait for it, or end it first"),
    ):
        prepared_data(path, tokenizer, into=tmp_path / "out")
    assert not building.exists() and (tmp_path / "out").is_dir()
    assert len(prepared_data(path, tokenizer, into=tmp_path / "out")) == 60
    assert {found.name for found in tmp_path.iterdir()} == {"out", "data.jsonl"}


def _hold(folder: Path, held: Any) -> None:
    with built_beside(folder):
        held.set()
        time.sleep(60)


def test_a_lock_ends_with_its_holder(tokenizer: Any, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "out", held))
    holder.start()
    assert held.wait(30)
    with pytest.raises(Locked, match=rf"in use by process {holder.pid} on "):
        prepared_data(among([], tmp_path), tokenizer, into=tmp_path / "out")
    holder.kill()
    holder.join()
    assert len(prepared_data(tmp_path / "data.jsonl", tokenizer, into=tmp_path / "out")) == 60
    assert {found.name for found in tmp_path.iterdir()} == {"out", "data.jsonl"}


def test_a_link_stays_and_what_it_leads_to_is_replaced(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big" / "real")
    for seed in (0, 1, 2):
        path = write_jsonl(tmp_path / "data.jsonl", conversations(20, seed=seed))
        assert len(prepared_data(path, tokenizer, into=tmp_path / "out")) == 20
        assert (tmp_path / "out").is_symlink() and {f.name for f in (tmp_path / "big").iterdir()} == {"real"}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_check_ends_a_preparation_between_two_records(workers: int, tokenizer: Any, tmp_path: Path) -> None:
    looks = list[int]()

    def check() -> None:
        looks.append(1)
        if len(looks) > 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared_data(among([], tmp_path, 2000), tokenizer, into=tmp_path / "out", workers=workers, check=check)
    assert {found.name for found in tmp_path.iterdir()} == {"data.jsonl"}


def test_the_command_stops_when_it_is_told(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records: Callable[[Source], Iterator[Any]] = Source.records

    def stopping(source: Source) -> Iterator[Any]:
        for number, record in records(source):
            if number == 70:
                os.kill(os.getpid(), signal.SIGTERM)
            assert number < 200, "it goes on"
            yield number, record

    monkeypatch.setattr(Source, "records", stopping)
    path = among([], tmp_path, 500)
    words = ["prepare", path, "--target", tiny_folder / "target", "--out", tmp_path / "out"]
    assert command([str(word) for word in words]) == 143
    assert capsys.readouterr().err.endswith("prepare: stopped by SIGTERM; nothing was made\n")
    assert {found.name for found in tmp_path.iterdir()} == {"data.jsonl"}


# --- the command ---


def test_the_command_refuses_what_would_do_nothing(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", str(tiny_folder / "target"), "--out", str(tmp_path / "out")]
    assert command(["prepare", str(among([], tmp_path)), *words]) == 0
    capsys.readouterr()
    assert command(["prepare", str(tmp_path / "out"), *words[:2], "--out", str(tmp_path / "other")]) == 1
    assert "out is prepared data already: name it in a config as it is" in capsys.readouterr().err
    target = tmp_path / "target"
    target.mkdir()
    for path in (tiny_folder / "target").iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    assert command(["prepare", str(tmp_path / "data.jsonl"), "--target", str(target), *words[2:]]) == 1
    assert "but the target knows 200 tokens only" in capsys.readouterr().err


def test_a_full_disk_names_the_folder(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.prepare.Writer.add", full)
    with pytest.raises(DataError, match=r"prepared data can't be written to .*/out: No space left on device"):
        prepared_data(among([], tmp_path), tokenizer, into=tmp_path / "out")
