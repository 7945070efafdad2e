"""The log in parts: what is written is read, whole and in order, however it is rotated under its readers."""

import contextlib
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.remote import logfile
from dflash_ops.remote.logfile import Log, Reader


def read_all(reader: Reader, limit: int = 1 << 20) -> bytes:
    got = bytearray()
    while data := reader.read(limit):
        got += data
    return bytes(got)


def text_from(folder: Path, offset: int, limit: int = 1 << 20) -> bytes:
    with contextlib.closing(Reader(folder, offset)) as reader:
        return read_all(reader, limit)


def make(folder: Path, text: bytes, part_bytes: int, parts: int = 1000) -> None:
    log = Log(folder / "log", part_bytes, parts)
    for line in text.splitlines(keepends=True):
        log.write(line)
    log.close()


@given(lines=st.lists(st.binary(max_size=20), max_size=30), part=st.integers(1, 60), offset=st.integers(0, 400))
def test_any_log_is_read_from_any_offset_and_from_any_line(
    lines: list[bytes], part: int, offset: int, tmp_path_factory
) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("log")
    text = b"".join(line.replace(b"\n", b"x") + b"\n" for line in lines)
    make(folder, text, part)
    assert logfile.end(folder) == len(text)
    assert text_from(folder, offset, 7) == text[offset:]
    assert all(last - first <= 2 * part + 21 for first, last, _ in logfile.parts(folder))
    ends = [at + 1 for at, byte in enumerate(text) if byte == 10]
    for count in (0, 1, 3, 100):
        begins = [0, *ends[:-1]] if ends else [0]
        expected = len(text) if count == 0 else begins[-count] if count <= len(begins) else 0
        assert logfile.tail_offset(folder, count) == expected


def test_a_part_ends_within_what_is_written_at_once(tmp_path: Path) -> None:
    text = b"".join(b"%07d\n" % number for number in range(10_000))
    log = Log(tmp_path / "log", 1001, 1000)
    for begin in range(0, len(text), 777):
        log.write(text[begin : begin + 777])
    log.close()
    assert {last - first for first, last, _ in logfile.parts(tmp_path)} == {1000}
    assert text_from(tmp_path, 0) == text
    wide = tmp_path / "wide"
    wide.mkdir()
    log = Log(wide / "log", 100, 1000)
    for data in (b"x" * 90, b"y" * 60 + b"\nz\n", b"a\n"):
        log.write(data)
    log.close()
    assert [(first, last) for first, last, _ in logfile.parts(wide)] == [(0, 151)]


def test_parts_that_a_slow_reader_keeps_are_told(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", 100, 2, told_bytes=300)
    log.write(b"0123456\n")
    with contextlib.closing(Reader(tmp_path, 0)) as reader:
        for _ in range(100):
            log.write(b"0123456\n")
        text = read_all(reader)
        told = [line for line in text.split(b"\n") if line.startswith(b"[dflash-ops:")]
        assert 2 <= len(told) <= 8 and b"3 parts of this log" in told[0] and b"a reader that is slow" in told[0]
        assert text.count(b"0123456\n") == 101
    log.close()


def test_old_parts_are_given_up_and_their_bytes_stay_counted(tmp_path: Path) -> None:
    text = b"".join(b"%05d\n" % number for number in range(1000))
    make(tmp_path, text, 600, parts=3)
    kept = logfile.parts(tmp_path)
    assert len(kept) == 2 and logfile.end(tmp_path) == len(text)
    oldest = kept[0][0]
    with contextlib.closing(Reader(tmp_path, 0)) as reader:
        assert reader.offset == oldest == logfile.tail_offset(tmp_path, None)
        assert read_all(reader) == text[oldest:]
    assert logfile.tail_offset(tmp_path, 10**6) == oldest


def test_what_is_being_read_is_not_given_up(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", 100, parts=2)
    wrote = bytearray()

    def write(count: int) -> None:
        for _ in range(count):
            line = b"%09d\n" % len(wrote)
            wrote.extend(line)
            log.write(line)

    write(5)
    reader = Reader(tmp_path, 0)
    got = bytearray(reader.read(20))
    write(200)  # twenty parts more, of which one is kept where nobody reads
    assert len(logfile.parts(tmp_path)) > 15
    got += read_all(reader, 30)
    assert got == wrote
    write(20)
    assert len(logfile.parts(tmp_path)) == 2  # the one that is read still, and the one behind it
    got += read_all(reader)
    assert got == wrote
    reader.close()
    log.close()


def test_a_reader_that_races_the_writer_misses_nothing(tmp_path: Path, soak: bool) -> None:
    dice = random.Random(3)
    log = Log(tmp_path / "log", 500, parts=2)
    text = b"".join(b"%07d%s\n" % (number, b"x" * dice.randrange(50)) for number in range(40_000 if soak else 4_000))
    done = threading.Event()
    got: list[bytes] = []

    def follow() -> None:
        reader = Reader(tmp_path, 0)
        mine = bytearray()
        while True:
            over = done.is_set()  # asked before the last look, as the follower asks
            mine += read_all(reader, dice.choice([1, 100, 5000]))
            if over:
                break
        reader.close()
        got.append(bytes(mine))

    log.write(text[:100])
    followers = [threading.Thread(target=follow) for _ in range(3)]
    for follower in followers:
        follower.start()
    at = 100
    while at < len(text):
        step = dice.randrange(1, 200)
        log.write(text[at : at + step])
        at += step
    log.close()
    done.set()
    for follower in followers:
        follower.join()
    assert got == [text] * 3
    assert logfile.parts(tmp_path)[-1][0] > 1000  # it was rotated, and what nobody reads was given up


def test_what_was_written_just_before_a_rotation_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log", 4, 9)
    log.write(b"first\n")
    reader = Reader(tmp_path, 0)
    assert reader.read() == b"first\n"
    look = logfile._stat

    def meanwhile(path: Path) -> os.stat_result | None:
        """Between the reader's look for more and its look at what `log` is, the part grows and is put aside."""
        monkeypatch.setattr(logfile, "_stat", look)
        with (tmp_path / "log").open("ab") as more:
            more.write(b"late\n")
        log._size += 5
        log.write(b"next\n")
        return look(path)

    monkeypatch.setattr(logfile, "_stat", meanwhile)
    assert (reader.read(), reader.read(), reader.read()) == (b"late\n", b"next\n", b"")
    reader.close()
    log.close()


def test_a_rotation_while_a_reader_opens_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log", 4, 9)
    log.write(b"first\n")
    list_parts = logfile.parts

    def meanwhile(folder: Path) -> list[tuple[int, int, Path]]:
        """The log is put aside behind the look at its parts."""
        listed = list_parts(folder)
        monkeypatch.setattr(logfile, "parts", list_parts)
        log.write(b"second\n")
        return listed

    for look in (lambda: text_from(tmp_path, 0), lambda: text_from(tmp_path, 6), lambda: str(logfile.end(tmp_path))):
        monkeypatch.setattr(logfile, "parts", meanwhile)
        got = look()
        assert got in (b"first\nsecond\n", b"second\nsecond\n", str(log.end)), got
    log.close()


def test_a_log_of_an_earlier_version_is_one_part(tmp_path: Path) -> None:
    assert (logfile.end(tmp_path), text_from(tmp_path, 0), logfile.tail_offset(tmp_path, 3)) == (0, b"", 0)
    (tmp_path / "log").write_bytes(b"a\nb\n")
    (tmp_path / "log.1").write_bytes(b"not ours")
    reader = Reader(tmp_path, 2)
    assert (reader.read(), reader.read(), logfile.end(tmp_path)) == (b"b\n", b"", 4)
    with (tmp_path / "log").open("ab") as more:
        more.write(b"c\n")
    assert reader.read() == b"c\n"
    reader.close()
    assert text_from(tmp_path, 99) == b""


def test_a_rename_that_fails_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log", 4, 2)

    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "rename", refuse)
    log.write(b"12345\n")
    log.write(b"6\n")
    assert (tmp_path / "log").read_bytes() == b"12345\n6\n" and log.end == 8
    log.note("a word of ours")
    assert (tmp_path / "log").read_bytes().endswith(b"6\n[dflash-ops: a word of ours]\n")
    log.close()
