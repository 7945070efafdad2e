"""Preparing: every kind of source, the same bytes from any number of workers, bad input told, nothing half-made."""

import gzip
import itertools
import json
import re
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nursery import Nursery, retry_until
from tiny import conversations, write_jsonl

from trainer.__main__ import main as command
from trainer.documents import Document
from trainer.prepare import fingerprint, load_tokenizer, prepared_data
from trainer.prepared import DataError, Prepared
from trainer.sources import MOST_BYTES, line_records, open_source
from trainer.tokenise import CHUNK, chunks


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts(prepared: Prepared, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(prepared.document(n, 10**9).ids) for n in range(len(prepared))]


def written(rows: list[dict[str, Any]], tokenizer: Any) -> list[str]:
    return [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]


# --- sources ---


def put_jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_jsonl(folder / "data.jsonl", rows)


def put_gzip(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.jsonl.gz"
    path.write_bytes(gzip.compress(put_jsonl(folder, rows).read_bytes()))
    return path


def put_windows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """With a byte order mark, carriage returns, blank lines and no end of the last line."""
    path = folder / "data.json"
    lines = ["", *(json.dumps(row, ensure_ascii=False) for row in rows)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n \r\n".join(lines).encode())
    return path


def put_folder(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "data" / "deep").mkdir(parents=True)
    write_jsonl(folder / "data" / "a.jsonl", rows[:3])
    (folder / "data" / "README.md").write_text("Some conversations.")
    (folder / "data" / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(put_jsonl(folder, rows[3:]).read_bytes()))
    return folder / "data"


def put_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pytest.importorskip("pyarrow", reason="Parquet needs the package datasets")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([{**row, "picture": b"\0" * 9, "conversations": None} for row in rows])
    pyarrow.parquet.write_table(table, folder / "data.parquet", row_group_size=4)
    return folder / "data.parquet"


def put_parquet_folder(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "data").mkdir()
    for number, part in enumerate((rows[:5], rows[5:])):
        put_parquet(folder, part).rename(folder / "data" / f"train-{number:05}-of-00002.parquet")
    return folder / "data"


def put_saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets", reason="a saved data set needs the package datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).select(range(len(rows))).save_to_disk(str(folder / "saved"), num_shards=2)
    return folder / "saved"


@pytest.mark.parametrize(
    "put", [put_jsonl, put_gzip, put_windows, put_folder, put_parquet, put_parquet_folder, put_saved]
)
def test_every_kind_of_source_gives_the_same_documents(put: Any, tokenizer: Any, tmp_path: Path) -> None:
    rows = conversations(12)
    prepared = prepared_data(put(tmp_path, rows), tokenizer, into=tmp_path / "prepared")
    assert texts(prepared, tokenizer) == written(rows, tokenizer)
    assert prepared.meta.records == 12 and prepared.report == ()
    assert prepared.digest == prepared_data(put_jsonl(tmp_path, rows), tokenizer, into=tmp_path / "plain").digest


def test_a_line_of_a_folder_is_named_by_its_file(tokenizer: Any, tmp_path: Path) -> None:
    prepared = prepared_data(put_folder(tmp_path, conversations(8)), tokenizer, into=tmp_path / "prepared")
    assert [prepared.place(prepared.line(n)) for n in range(8)] == [
        *(f"a.jsonl:{n}" for n in (1, 2, 3)), *(f"deep/b.jsonl.gz:{n}" for n in (1, 2, 3, 4, 5)),
    ]  # fmt: skip


def test_splits_are_not_mixed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="a saved data set needs the package datasets")
    datasets.disable_progress_bars()
    both = datasets.Dataset.from_list(conversations(4)).train_test_split(0.5, seed=0)
    both.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"has splits: name one of .*/saved/test, .*/saved/train"):
        open_source(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    for split in ("train", "test"):
        both[split].to_parquet(str(tmp_path / "files" / f"{split}-00000-of-00001.parquet"))
    with pytest.raises(DataError, match="has the splits test, train side by side: name a file of one"):
        open_source(tmp_path / "files")


def test_without_the_package_a_table_names_the_command(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [tmp_path / "data.parquet", tmp_path / "saved"]
    sources[0].write_bytes(b"PAR1")
    sources[1].mkdir()
    for name in ("state.json", "dataset_info.json"):
        (sources[1] / name).write_text("{}")
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for source in sources:
        with pytest.raises(DataError, match=r"needs the package datasets\. Next: .*python.* -m pip install datasets"):
            prepared_data(source, tokenizer, into=tmp_path / "prepared")


def put_broken_gzip(folder: Path) -> Path:
    path = put_gzip(folder, conversations(200))
    path.write_bytes(path.read_bytes()[:-200])
    return path


def put_broken_parquet(folder: Path) -> Path:
    path = put_parquet(folder, conversations(4))
    path.write_bytes(path.read_bytes()[:-20])
    return path


def put(name: str, content: bytes | None) -> Any:
    def make(folder: Path) -> Path:
        path = folder / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        return path

    return make


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder / "none.jsonl", r"none\.jsonl can't be read: No such file"),
        (lambda folder: Path("/dev/null"), "/dev/null is neither a file nor a folder"),
        (put("data.json", b'[{"messages": []}]'), r"is a JSON array.* Next: jq -c '\.\[\]' FILE > data\.lines\.jsonl"),
        (put("data.json", b'\n[\n  {"messages": []}\n]'), "is a JSON array"),
        (put("data.jsonl.zst", b"x"), "unpack it first"),
        (put("data.jsonl", b""), "no conversation to learn from in 0 records"),
        (put("data.jsonl", b"\n \n"), "no conversation to learn from in 0 records"),
        (put("data.jsonl.gz", b"no gzip"), r"can't be read behind record 0: Not a gzipped file"),
        (put("data", None), r"no \.jsonl, \.jsonl\.gz or \.parquet in it"),
        (put_broken_gzip, r"can't be read behind record \d+: Compressed file ended before"),
        (put_broken_parquet, r"data\.parquet can't be read behind record 0: "),
    ],
)
def test_a_source_that_can_t_be_read_is_refused(make: Any, why: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=why):
        prepared_data(make(tmp_path), tokenizer, into=tmp_path / "prepared")
    assert not [path for path in tmp_path.iterdir() if "prepared" in path.name]


def test_a_table_without_conversations_names_its_columns(tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs the package datasets")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "x", "n": 1}]), tmp_path / "data.parquet")
    with pytest.raises(DataError, match="no column messages, conversations, or prompt and response; it has text, n"):
        prepared_data(tmp_path / "data.parquet", tokenizer, into=tmp_path / "prepared")


@given(st.lists(st.binary(max_size=8).filter(lambda line: b"\n" not in line), max_size=9), st.booleans())
def test_lines_have_the_numbers_that_an_editor_shows(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], packed: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / ("x.jsonl.gz" if packed else "x.jsonl")
    content = b'{"first": 1}\n' + b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if packed else content)
    expected = [(number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    assert [(n, line.rstrip(b"\n")) for n, line in line_records(path) if isinstance(line, bytes)] == expected


# --- bad records ---


def test_bad_records_are_reported_and_the_rest_goes_on(tokenizer: Any, tmp_path: Path) -> None:
    rows = conversations(60)
    lines = [json.dumps(row).encode() for row in rows]
    for place, bad in (
        (4, b"{"),
        (9, b'{"messages": [{"role": "robot", "content": ""}]}'),
        (20, b"\xff"),
        (30, b"\xfe"),
    ):
        lines.insert(place, bad)
    short = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}
    lines.append(json.dumps(short).encode())
    (tmp_path / "data.jsonl").write_bytes(b"\n".join(lines))
    said: list[str] = []
    prepared = prepared_data(tmp_path / "data.jsonl", tokenizer, into=tmp_path / "prepared", say=said.append)
    assert texts(prepared, tokenizer) == written(rows, tokenizer)
    assert prepared.meta.records == 65 and tuple(said) == prepared.report
    assert said == [
        "left out 2 of 65 records of data.jsonl: not UTF-8: byte 0xff at 0, or the like (data.jsonl:21, data.jsonl:31)",
        "left out 1 of 65 records of data.jsonl: not JSON: Expecting property name enclosed in double quotes at "
        "character 2 (data.jsonl:5)",
        "left out 1 of 65 records of data.jsonl: messages.0: unknown role 'robot' (data.jsonl:10)",
        "left out 1 of 65 records of data.jsonl: no answer of two tokens (data.jsonl:65)",
    ]


@pytest.mark.parametrize(("bad", "refused"), [(2, False), (3, True)])
def test_more_than_a_tenth_bad_is_refused(bad: int, refused: bool, tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [*conversations(20 - bad), *[{}, {"messages": 3}, {}][:bad]])
    if not refused:
        assert len(prepared_data(path, tokenizer, into=tmp_path / "prepared")) == 18
        return
    why = (
        r"data\.jsonl: 3 of 20 records can't be used; 2 times: no messages.* \(data\.jsonl:18, data\.jsonl:20\); "
        r"1 times: messages: a num"
    )
    with pytest.raises(DataError, match=why):
        prepared_data(path, tokenizer, into=tmp_path / "prepared")
    assert not [path for path in tmp_path.iterdir() if "prepared" in path.name]


def test_a_hopeless_source_is_not_read_to_its_end(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.prepare.HOPELESS", 100)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"{\n" * 5000)
    with pytest.raises(
        DataError, match=r"128 of 128 records can't be used; 128 times: .*jsonl:4, data\.jsonl:5, \.\.\."
    ):
        prepared_data(path, tokenizer, into=tmp_path / "prepared")


def test_many_kinds_of_reasons_are_counted_together(tokenizer: Any, tmp_path: Path) -> None:
    letters = [chr(97 + n % 26) + chr(97 + n // 26) for n in range(60)]
    bad = [{"messages": [{"role": "user", "content": [{"type": "text", name: 1}]}]} for name in letters]
    path = write_jsonl(tmp_path / "data.jsonl", [*conversations(600), *bad])
    prepared = prepared_data(path, tokenizer, into=tmp_path / "prepared")
    assert len(prepared.meta.dropped) == 51 and sum(one.count for one in prepared.meta.dropped) == 60
    assert prepared.report[0].startswith("left out 10 of 660 records of data.jsonl: other reasons")


def test_a_line_without_end_is_passed_over(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_BYTES == 64 * 2**20
    monkeypatch.setattr("trainer.sources.MOST_BYTES", 2**16)
    rows = conversations(20)
    lines = [json.dumps(row) for row in rows]
    lines.insert(3, '{"messages": "' + "x" * 5 * 2**20)
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    prepared = prepared_data(tmp_path / "data.jsonl", tokenizer, into=tmp_path / "prepared")
    assert texts(prepared, tokenizer) == written(rows, tokenizer)
    assert "longer than 0 MiB (data.jsonl:4)" in prepared.report[0] and prepared.line(3) == 5


def test_a_tokenizer_without_chat_template_is_refused(own: Any, tiny_folder: Path, tmp_path: Path) -> None:
    own.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        prepared_data(tiny_folder / "train.jsonl", own, into=tmp_path / "prepared")


def test_the_target_s_end_tokens_and_the_tokenizer_s_end_an_answer(own: Any, tokenizer: Any, tmp_path: Path) -> None:
    own.chat_template = own.chat_template.replace("<|im_end|>", "<|im_start|>")
    path = write_jsonl(tmp_path / "data.jsonl", conversations(1))
    start = own.convert_tokens_to_ids("<|im_start|>")
    for end_tokens, ended in (([], False), ([start], True)):
        document = prepared_data(path, own, into=tmp_path / f"p{ended}", end_tokens=end_tokens).document(0, 999)
        assert (document.ids[document.loss_mask][-1] == start) == ended
    document = prepared_data(path, tokenizer, into=tmp_path / "usual", end_tokens=[start]).document(0, 999)
    assert document.ids[document.loss_mask][-1] == tokenizer.eos_token_id


# --- the folder ---


def test_what_is_there_already_is_used_again_unless_anything_changed(own: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", conversations(6))
    into = tmp_path / "prepared"

    def stamp(**changes: Any) -> int:
        prepared_data(path, own, into=into, **changes)
        return (into / "meta.json").stat().st_ino

    first = stamp()
    assert stamp() == first
    assert (last := stamp(last_turn_only=True)) != first
    assert (ends := stamp(last_turn_only=True, end_tokens=[7])) != last
    write_jsonl(path, conversations(6, seed=1))
    assert (other := stamp(last_turn_only=True, end_tokens=[7])) != ends
    own.chat_template = "{# another #}" + own.chat_template
    assert (template := stamp(last_turn_only=True, end_tokens=[7])) != other
    (into / "ids.bin").write_bytes(b"")
    assert stamp(last_turn_only=True, end_tokens=[7]) != template
    assert len(prepared_data(into, own, into=tmp_path / "no", last_turn_only=True, end_tokens=[7])) == 6
    assert not (tmp_path / "no").exists()


def test_a_prepared_folder_of_another_tokenizer_or_setting_is_refused(own: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", conversations(6))
    folder = prepared_data(path, own, into=tmp_path / "prepared").folder
    with pytest.raises(DataError, match="made with last_turn_only False, this training wants True"):
        prepared_data(folder, own, into=tmp_path / "no", last_turn_only=True)
    with pytest.raises(DataError, match=r"made with end_tokens \(257,\), this training wants \(7, 257\)"):
        prepared_data(folder, own, into=tmp_path / "no", end_tokens=[7])
    own.add_tokens(["more"])
    why = r"another tokenizer than the target's: 258 tokens, fingerprint \w{12}; the target's has 259"
    with pytest.raises(DataError, match=why):
        prepared_data(folder, own, into=tmp_path / "no")


def test_a_token_that_the_target_hasn_t_is_refused(tokenizer: Any, tiny_folder: Path, tmp_path: Path) -> None:
    into = tmp_path / "prepared"
    assert prepared_data(tiny_folder / "train.jsonl", tokenizer, into=into, vocab_size=258)
    with pytest.raises(DataError, match=r"has the token 257 \(train\.jsonl:1\), but the target knows 257 tokens only"):
        prepared_data(tiny_folder / "train.jsonl", tokenizer, into=into, vocab_size=257)


def test_a_fingerprint_tells_what_a_tokenizer_does(own: Any, tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    assert fingerprint(own) == fingerprint(tokenizer)
    own.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    assert fingerprint(own) != fingerprint(tokenizer)


def test_a_folder_of_something_else_is_not_replaced(tokenizer: Any, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    with pytest.raises(DataError, match="mine is not prepared data: it will not be replaced"):
        prepared_data(tiny_folder / "train.jsonl", tokenizer, into=tmp_path / "mine")
    assert contents(tmp_path / "mine") == {"letter.txt": b"Dear"}


def test_a_source_that_changes_meanwhile_is_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", conversations(6))

    def grow(source: Any) -> Iterator[Any]:
        with path.open("a") as file:
            file.write("\n")
        return (found for found in list(line_records(path)) if found[1])

    monkeypatch.setattr("trainer.sources.Source.records", grow)
    with pytest.raises(DataError, match="changed while it was read"):
        prepared_data(path, tokenizer, into=tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


def test_any_number_of_workers_makes_the_same_bytes(tokenizer: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = conversations(3 * CHUNK + 5)
    rows[7] = rows[100] = {}
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    for workers in (1, 2):
        prepared_data(path, tokenizer, into=tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_progress_is_told_now_and_then(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", conversations(2 * CHUNK))
    lines: list[str] = []
    prepared_data(path, tokenizer, into=tmp_path / "quick", progress=lines.append)
    assert lines == []
    monkeypatch.setattr("trainer.prepare.TICK_S", 0)
    tokens = prepared_data(path, tokenizer, into=tmp_path / "slow", progress=lines.append).tokens
    assert len(lines) == 2 and lines[1] == f"data.jsonl: 128 records, 128 documents, {tokens:,} tokens"


@given(st.lists(st.integers(0, 2**19), max_size=200))
def test_chunks_hold_all_records_in_order_and_few_bytes(sizes: list[int]) -> None:
    records = [(n, b"\0" * size) for n, size in enumerate(sizes)]
    made = list(chunks(iter(records)))
    assert list(itertools.chain(*made)) == records
    assert all(0 < len(chunk) <= CHUNK and sum(len(r) for _, r in chunk[:-1]) < 2**20 for chunk in made)  # type: ignore


def test_memory_does_not_grow_with_the_source(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    def made_up(record: bytes, *_: Any, **__: Any) -> list[Document]:
        """Tracing the memory of a real tokenisation takes a minute; this one has as many tokens."""
        return [Document(np.zeros(len(record), dtype=np.int64), np.ones(len(record), dtype=np.bool_))]

    monkeypatch.setattr("trainer.tokenise.documents_from", made_up)

    def peak(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        path = write_jsonl(folder / "data.jsonl", conversations(100, words=1500))
        path.write_bytes(path.read_bytes() * (count // 100))
        tracemalloc.start()
        try:
            prepared = prepared_data(path, tokenizer, into=folder / "prepared", workers=1)
            assert prepared.tokens > 8000 * count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    count = 4000 if soak else 1500
    small, large = peak(200), peak(count)
    # A conversation of the large one has 40 kB of tokens on the disk, and its text 10 kB.
    assert large < small + 500 * count, f"{small:,} bytes for 200 conversations, {large:,} for {count}"


# --- the command ---


def test_the_command_prepares_and_says_what_came_of_it(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = conversations(20)
    path = write_jsonl(tmp_path / "data.jsonl", [*rows, {}])
    words = ["prepare", str(path), "--target", str(tiny_folder / "target"), "--out", str(tmp_path / "out")]
    assert command(words) == 0
    printed = capsys.readouterr()
    assert re.fullmatch(
        r".*/out: 20 documents of 21 records, [\d,]+ tokens, [\d,]+ of them the assistant's\n", printed.out
    )
    assert printed.err.startswith("left out 1 of 21 records of data.jsonl: no messages")
    assert command([*words, "--json", "--last-turn-only"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["documents"] == 20 and told["settings"] == {"last_turn_only": True, "end_tokens": [257]}
    assert command([*words[:1], str(tmp_path / "none.jsonl"), *words[2:]]) == 1
    assert capsys.readouterr().err.startswith("DataError: data ")


def test_the_target_s_weights_are_not_read(tiny_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for path in (tiny_folder / "target").iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    assert load_tokenizer(str(target))[1] == [257]
    (target / "generation_config.json").unlink()  # transformers then takes the model's config
    assert load_tokenizer(str(target))[1] == [257]
    with pytest.raises(DataError, match=r"the tokenizer of .* can't be loaded: "):
        load_tokenizer(str(tmp_path))


def test_a_killed_prepare_leaves_nothing_that_passes_as_data(
    tiny_folder: Path, tmp_path: Path, nursery: Nursery, soak: bool
) -> None:
    rows = conversations(2000 if soak else 1000, words=150)
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    words = ["prepare", path, "--target", tiny_folder / "target", "--out", tmp_path / "out", "--workers", "2"]
    running = nursery.start(*words)  # the first process of a session
    building = tmp_path / ".out.tmp" / "ids.bin"
    retry_until(lambda: running.ended() or (building.exists() and building.stat().st_size > 0))
    assert running.kill() == -signal.SIGKILL, running.said()
    assert not (tmp_path / "out").exists()
    tokenizer, ends = load_tokenizer(str(tiny_folder / "target"))
    with pytest.raises(DataError):
        prepared_data(tmp_path / ".out.tmp", tokenizer, into=tmp_path / "no")
    # Its workers end with it.
    retry_until(lambda: not alive_in_session(running.pid))
    # The next one takes the remains away.
    write_jsonl(path, rows[:3])
    assert len(prepared_data(path, tokenizer, into=tmp_path / "out", end_tokens=ends)) == 3
    assert {p.name for p in tmp_path.iterdir() if "out" in p.name} == {"out"}


def alive_in_session(session: int) -> list[int]:
    """Processes of a session that are no zombies."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" ")
        except OSError:
            continue
        state, _, _, its_session = rest.rpartition(")")[2].split()[:4]
        if int(its_session) == session and state not in "ZX":
            found.append(int(pid))
    return found


def test_the_demo_s_data_is_read_whole(tokenizer: Any, tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "dflash_ops" / "demo"
    for name in ("train", "heldout"):
        prepared = prepared_data(demo / f"{name}.jsonl", tokenizer, into=tmp_path / name)
        assert prepared.meta.records == len(prepared) > 30 and prepared.report == ()
        assert (
            int(prepared.counts.sum()) == prepared.tokens == int(np.fromfile(tmp_path / name / "mask.bin", "u1").size)
        )
