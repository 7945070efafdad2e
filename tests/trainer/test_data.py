"""Conversations to rows: which tokens are learned from, what is refused, and the same rows always."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import conversations, tiny_target, write_jsonl
from transformers import AutoTokenizer

from trainer.config import load
from trainer.data import DataError, Document, Documents, Rows, document_from_line, make_row, pack, read_documents
from trainer.feed import Feed

ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder / "target")


def line(*messages: tuple[str, str]) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]}).encode()


def supervised(document: Document, tokenizer: Any) -> list[str]:
    """The texts of the supervised stretches."""
    texts: list[str] = []
    edges = np.flatnonzero(np.diff(np.concatenate(([0], document.loss_mask.astype(int), [0]))))
    for begin, end in edges.reshape(-1, 2):
        texts.append(tokenizer.decode(document.ids[begin:end]))
    return texts


# --- what is learned from ---


def test_the_loss_is_on_the_answers_and_their_ends(tokenizer: Any) -> None:
    talk = line(
        ("system", "Be brief."), ("user", "Hi?"), ("assistant", "Hello."), ("user", "Bye?"), ("assistant", " é\n")
    )
    document = document_from_line(talk, tokenizer, [tokenizer.eos_token_id], last_turn_only=False)
    assert supervised(document, tokenizer) == ["Hello.<|im_end|>", " é\n<|im_end|>"]
    # The tokens are the template's text, whole and in order.
    written = tokenizer.apply_chat_template(json.loads(talk)["messages"], tokenize=False)
    assert tokenizer.decode(document.ids) == written
    last = document_from_line(talk, tokenizer, [tokenizer.eos_token_id], last_turn_only=True)
    assert supervised(last, tokenizer) == [" é\n<|im_end|>"]
    assert (last.ids == document.ids).all()


def test_an_answer_is_tokenised_as_it_is_while_decoding(tokenizer: Any) -> None:
    """The prompt's tokens are those of the prompt alone, whatever the answer begins with."""
    document = document_from_line(
        line(("user", "Hi?"), ("assistant", "\n\nHello")), tokenizer, [tokenizer.eos_token_id], last_turn_only=False
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi?"}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    first = int(document.loss_mask.argmax())
    assert document.ids[:first].tolist() == prompt


def test_a_template_that_rewrites_earlier_turns_is_found_out(tokenizer: Any, tiny_folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(tiny_folder / "target")
    own.chat_template = (
        "{% for m in messages %}{% if not loop.last and m.role == 'assistant' %}[old]{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    talk = line(("user", "Hi?"), ("assistant", "Hello."), ("user", "Bye?"), ("assistant", "Bye."))
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        document_from_line(talk, own, [own.eos_token_id], last_turn_only=False)
    assert supervised(document_from_line(talk, own, [own.eos_token_id], last_turn_only=True), own) == ["Bye."]


def test_a_template_whose_prompt_is_not_how_its_answers_begin_is_found_out(tiny_folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(tiny_folder / "target")
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think></think>{% endif %}"
    )
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        document_from_line(line(("user", "Hi?"), ("assistant", "Hello.")), own, [own.eos_token_id], last_turn_only=True)


def test_a_template_that_changes_the_answer_is_found_out(tiny_folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(tiny_folder / "target")
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match="don't decode to the answer"):
        document_from_line(
            line(("user", "Hi?"), ("assistant", "Hello.")), own, [own.eos_token_id], last_turn_only=False
        )


def test_what_the_template_writes_behind_an_answer_is_not_learned(tiny_folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(tiny_folder / "target")
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n[END]\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    talk = line(("user", "Hi?"), ("assistant", "Hello é"), ("user", "Bye?"), ("assistant", "Bye."))
    document = document_from_line(talk, own, [own.eos_token_id], last_turn_only=False)
    assert supervised(document, own) == ["Hello é", "Bye."]


def test_the_first_of_the_target_s_end_tokens_ends_an_answer(tiny_folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(tiny_folder / "target")
    start, end = own.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_start|>-<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    talk = line(("user", "Hi?"), ("assistant", "Hello."))
    for ends, said in (([start, end], "Hello.<|im_start|>"), ([end], "Hello.<|im_start|>-<|im_end|>")):
        assert supervised(document_from_line(talk, own, ends, last_turn_only=False), own) == [said]


def test_a_file_is_read_with_the_target_s_end_tokens_and_the_tokenizer_s(tiny_folder: Path, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(tiny_folder / "target")
    own.chat_template = own.chat_template.replace("<|im_end|>", "<|im_start|>")
    path = write_jsonl(tmp_path / "data.jsonl", conversations(1))
    start = own.convert_tokens_to_ids("<|im_start|>")
    for end_tokens, ended in (([], False), ([start], True)):
        (document,) = read_documents(path, own, row_tokens=96, end_tokens=end_tokens).documents
        assert (document.ids[document.loss_mask][-1] == start) == ended
    usual = AutoTokenizer.from_pretrained(tiny_folder / "target")
    (document,) = read_documents(path, usual, row_tokens=96, end_tokens=[start]).documents
    assert document.ids[document.loss_mask][-1] == usual.eos_token_id


# --- bad input ---


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "Invalid JSON"),
        (b"[]", "Input should be"),
        (b'{"text": "x"}', "messages: Field required"),
        (line(("user", "Hi?")), "no message of the assistant"),
        (line(("robot", "Hi?"), ("assistant", "x")), "messages.0.role: Input should be 'system', 'user', 'assistant'"),
        (b'{"messages": [{"role": "assistant", "content": 3}]}', "messages.0.content: Input should be a valid string"),
        (b'\xff{"messages": []}', ""),
    ],
)
def test_a_malformed_line_is_reported_and_the_rest_goes_on(
    bad: bytes, reason: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", conversations(12))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], bad, b"", *lines[4:]]))
    documents = read_documents(path, tokenizer, row_tokens=96)
    assert len(documents.documents) == 12
    (report,) = documents.report
    assert report.startswith(f"left out {path}:5: ") and reason in report


def test_a_file_with_more_than_a_tenth_bad_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [*conversations(16), {}, {}])
    with pytest.raises(DataError, match=r"2 of 18 lines can't be used; the first: .*data\.jsonl:17: messages"):
        read_documents(path, tokenizer, row_tokens=96)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_with_nothing_to_learn_from_is_refused(content: str, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(DataError, match="no conversation to learn from in 0 lines"):
        read_documents(tmp_path / "data.jsonl", tokenizer, row_tokens=96)


def test_a_missing_file_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl can't be read: No such file"):
        read_documents(tmp_path / "none.jsonl", tokenizer, row_tokens=96)


def test_a_tokenizer_without_chat_template_is_refused(tiny_folder: Path) -> None:
    bare = AutoTokenizer.from_pretrained(tiny_folder / "target")
    bare.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        read_documents(tiny_folder / "train.jsonl", bare, row_tokens=96)


def test_a_mask_token_of_the_data_is_refused(tokenizer: Any, tiny_folder: Path) -> None:
    used = tokenizer("a")["input_ids"][0]
    with pytest.raises(DataError, match=rf"train\.jsonl:1: holds the mask token {used} \('a'\)"):
        read_documents(tiny_folder / "train.jsonl", tokenizer, row_tokens=96, mask_token_id=used)


def test_what_is_cut_and_what_is_unusable_is_said(tokenizer: Any, tmp_path: Path) -> None:
    long_prompt = {"messages": [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "yes"}]}
    path = write_jsonl(tmp_path / "data.jsonl", [*conversations(3, words=30), long_prompt])
    documents = read_documents(path, tokenizer, row_tokens=64)
    assert [len(d) for d in documents.documents] == [64] * 3
    assert documents.report == [
        f"left out 1 conversations of {path}: no answer of two tokens within 64",
        f"cut 4 conversations of {path} to 64 tokens",
    ]


# --- rows ---


@given(st.lists(st.integers(1, 50), max_size=300), st.randoms())
def test_packing_puts_every_document_in_one_row_that_holds_it(lengths: list[int], random: Any) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    rows = pack(lengths, order, 50)
    assert Counter(d for row in rows for d in row) == Counter(range(len(lengths)))
    assert all(0 < sum(lengths[d] for d in row) <= 50 for row in rows)


def test_a_row_holds_its_documents_side_by_side() -> None:
    first = Document(np.array([5, 6, 7]), np.array([False, True, True]))
    second = Document(np.array([8]), np.array([True]))
    row = make_row(3, [first, second], 6)
    assert row.ids.tolist() == [5, 6, 7, 8, 0, 0]
    assert row.loss_mask.tolist() == [False, True, True, True, False, False]
    assert row.document_ids.tolist() == [0, 0, 0, 1, -1, -1]
    assert row.positions.tolist() == [0, 1, 2, 0, 0, 0]
    assert row.tokens == 4


def some_documents() -> Documents:
    return Documents([Document(np.full(1 + n % 9, n), np.ones(1 + n % 9, dtype=bool)) for n in range(40)], "")


def test_row_i_is_always_the_same_whatever_was_asked_before() -> None:
    in_order = Rows(some_documents(), row_tokens=16, seed=3, shuffle=True)
    expected = [in_order.row(n).ids.tolist() for n in range(60)]
    jumping = Rows(some_documents(), row_tokens=16, seed=3, shuffle=True)
    for n in (59, 0, 31, 30, 5):
        assert jumping.row(n).ids.tolist() == expected[n]


def test_each_epoch_has_every_document_once_in_a_new_order() -> None:
    rows = Rows(some_documents(), row_tokens=16, seed=3, shuffle=True)
    first, second = rows.epoch_rows(0), rows.epoch_rows(1)

    def told(numbers: range) -> list[list[int]]:
        return [sorted(set(rows.row(n).ids[rows.row(n).document_ids >= 0].tolist())) for n in numbers]

    epochs = told(range(first)), told(range(first, first + second))
    assert all(Counter(d for row in epoch for d in row) == Counter(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    other_seed = Rows(some_documents(), row_tokens=16, seed=4, shuffle=True)
    assert other_seed.row(0).ids.tolist() != rows.row(0).ids.tolist()
    unshuffled = Rows(some_documents(), row_tokens=16, seed=3, shuffle=False)
    assert unshuffled.row(0).ids[0] == 0


def test_the_feed_is_the_same_from_any_step_on_and_measures_when_due() -> None:
    toml = b'[target]\npath = "t"\n[data]\ntrain = "d"\nrow_tokens = 16\n'
    toml += b"[train]\nsteps = 7\nrows_per_step = 4\nmicro_rows = 2\nanchors = 3\neval_every = 3\n"
    feed = Feed(load(toml), some_documents(), some_documents())
    assert [feed.measures_after(step) for step in range(1, 8)] == [False, False, True, False, False, True, True]
    whole = list(feed.batches(0, 0))
    assert len(whole) == 7 * 2 + 3 * feed.heldout_batches
    rest = list(feed.batches(4, 16))
    for got, expected in zip(rest, whole[-len(rest) :], strict=True):
        assert all((one == other).all() for one, other in zip(vars(got).values(), vars(expected).values(), strict=True))
    assert {batch.ids_BS.shape for batch in whole} == {(2, 16)}


def test_a_tiny_target_is_saved_as_the_tests_need_it(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "other", layers=4, hidden=32)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
