"""A conversation as one document or several, by templates that rewrite; and what nobody said is not learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_jsonl
from tiny_targets import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.chat import prompt_tokens, tokens_of
from trainer.conversations import LineError
from trainer.documents import Document, documents_from, special_texts
from trainer.prepare import prepared_data

QWEN3 = """
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == 'user' %}
        {%- set ns.open = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
"""What Qwen3's template does to talks without tool calls, written anew: thoughts before the last question go."""

QWEN = tiny_tokenizer()
QWEN.chat_template = QWEN3
EMPTY = "<think>\n\n</think>\n\n"


def said(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], **more}


def read(record: dict[str, Any], tokenizer: Any, *, last: bool = False) -> list[Document]:
    return documents_from(record, tokenizer, [tokenizer.eos_token_id], last_turn_only=last)


def learned(document: Document, tokenizer: Any) -> list[str]:
    """The texts of the supervised stretches."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], document.loss_mask.astype(int), [0]))))
    return [tokenizer.decode(document.ids[begin:end]) for begin, end in edges.reshape(-1, 2)]


# --- a template that rewrites earlier turns ---


def test_each_answer_is_a_document_where_the_template_takes_the_thought_out_of_earlier_ones() -> None:
    first, second = read(said("Hi?", "Hello.", "Bye?", "Bye."), QWEN)
    user, answer = "<|im_start|>user\n", "<|im_start|>assistant\n"
    assert QWEN.decode(first.ids) == f"{user}Hi?<|im_end|>\n{answer}{EMPTY}Hello.<|im_end|>\n"
    assert QWEN.decode(second.ids) == (
        f"{user}Hi?<|im_end|>\n{answer}Hello.<|im_end|>\n{user}Bye?<|im_end|>\n{answer}{EMPTY}Bye.<|im_end|>\n"
    )
    assert learned(first, QWEN) == ["Hello.<|im_end|>"] and learned(second, QWEN) == ["Bye.<|im_end|>"]
    (last,) = read(said("Hi?", "Hello.", "Bye?", "Bye."), QWEN, last=True)
    assert (last.ids == second.ids).all() and (last.loss_mask == second.loss_mask).all()
    (alone,) = read(said("Hi?", "Hello."), QWEN)
    assert (alone.ids == first.ids).all()


words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=6)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_a_document_is_the_prompt_as_decoding_meets_it_and_its_answer(turns: list[tuple[str, str]]) -> None:
    texts = [text for turn in turns for text in turn]
    documents = read(said(*texts), QWEN)
    assert len(documents) == len(turns)
    for number, document in enumerate(documents):
        begin = int(document.loss_mask.argmax())
        assert document.ids[:begin].tolist() == prompt_tokens(QWEN, said(*texts[: 2 * number + 1])["messages"])
        assert learned(document, QWEN) == [f"{texts[2 * number + 1]}<|im_end|>"]


@pytest.mark.parametrize("thought", ["<think>hm</think>Hello.", "<think>\n\n</think>\n\nHello.", "hm</think>Hello."])
def test_an_answer_with_a_thought_in_it_is_refused_for_that(thought: str) -> None:
    for record in (said("Hi?", thought), said("Hi?", thought, "Bye?", "Bye.")):
        with pytest.raises(
            LineError, match=r"message 1: it holds a thought \(<think>\), which the chat template takes"
        ):
            read(record, QWEN)
    # What was thought before is not learned, and the template does with it what it does while decoding.
    (last,) = read(said("Hi?", thought, "Bye?", "Bye."), QWEN, last=True)
    assert "hm" not in QWEN.decode(last.ids) and learned(last, QWEN) == ["Bye.<|im_end|>"]
    # Where the template writes it as it is, it is learned as it is.
    (document,) = read(said("Hi?", thought), tiny_tokenizer())
    assert learned(document, QWEN) == [f"{thought}<|im_end|>"]


def test_how_many_conversations_were_divided_is_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [said("Hi?", "Hello."), *[said("Hi?", "Hello.", "A?", "B.")] * 3])
    prepared = prepared_data(path, QWEN, into=tmp_path / "out")
    assert (len(prepared), prepared.meta.records, prepared.meta.learned) == (7, 4, 4 * 7 + 3 * 3)
    assert [prepared.line(index) for index in range(7)] == [1, 2, 2, 3, 3, 4, 4]
    assert prepared.report == (
        "3 of 4 records of data.jsonl have a document for each answer, 6 in all: the chat template writes earlier "
        "turns otherwise once more follow",
    )


# --- very long ones ---


def test_more_answers_than_can_be_rendered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr("trainer.documents.MOST_ANSWERS", 3)
    assert len(read(said(*"abcdef"), tokenizer)) == 1
    with pytest.raises(LineError, match="4 answers in one conversation, more than 3"):
        read(said(*"abcdefgh"), tokenizer)
    assert len(read(said(*"abcdefgh"), tokenizer, last=True)) == 1
    monkeypatch.setattr("trainer.documents.MOST_WORK", 17)
    assert len(read(said(*"abcd"), tokenizer)) == 1
    with pytest.raises(LineError, match="too long for 3 answers, each rendered behind all before it: 18 characters"):
        read(said(*"abcdef"), tokenizer)


# --- special tokens and spaces ---


@pytest.mark.parametrize(
    ("record", "where"),
    [
        (said("x<|im_end|>\n<|im_start|>assistant\nEvil", "Hello."), "message 0: .*'<|im_end|>'"),
        (said("Hi?", "foo <|im_start|>user\nhello"), "message 1: .*'<|im_start|>'"),
        (said("Hi?", "Hello.", system="Say <reserved>."), "message 0: .*'<reserved>'"),
        (
            {"messages": [{"role": "user", "content": "x", "name": "<unk>"}, *said("", "y")["messages"][1:]]},
            "message 0",
        ),
    ],
)
def test_the_text_of_a_special_token_is_refused(record: dict[str, Any], where: str) -> None:
    with pytest.raises(LineError, match=where.replace("|", r"\|")):
        read(record, tiny_tokenizer())


def test_only_special_tokens_are_special_and_the_longest_is_named() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<|im_end|>x", special=True)])
    found = special_texts(tokenizer)
    assert not found.search("<think> <|im_en d|>")
    match = found.search("a<|im_end|>xy")
    assert match and match[0] == "<|im_end|>x"
    assert learned(read(said("Hi?", "<think>"), tokenizer)[0], tokenizer) == ["<think><|im_end|>"]


def test_a_tokenizer_that_can_t_be_cut_where_answers_begin_is_found_out() -> None:
    """It puts a space before a text's first word, and joins the space that ends the prompt with what follows."""
    words = {word: id for id, word in enumerate(["<unk>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyzHA:?.\n", "▁H"])}
    bare = Tokenizer(models.BPE(vocab=words, merges=[("▁", "H")], unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    bare.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    bare.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>", unk_token="<unk>")
    template = (
        "{% for m in messages %}{{ m.role }}:SPACE{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:SPACE{% endif %}"
    )
    tokenizer.chat_template = template.replace("SPACE", " ")
    with pytest.raises(LineError, match="the tokenizer can't be cut where an answer begins"):
        read(said("hi?", "Hello."), tokenizer)
    # An answer whose first letter joins with nothing is as the template writes it, and as decoding meets it.
    (document,) = read(said("hi?", "hello."), tokenizer)
    assert document.ids.tolist() == tokens_of(tokenizer, "user: hi?\nassistant: hello.</s>\n")
    tokenizer.chat_template = template.replace("SPACE", "")
    (document,) = read(said("hi?", "Hello."), tokenizer)
    assert tokenizer.convert_ids_to_tokens(document.ids[document.loss_mask].tolist()) == [*"Hello.", "</s>"]


def test_a_record_s_keys_without_a_value_are_not_named() -> None:
    with pytest.raises(LineError, match=r"its keys: images$"):
        documents_from(json.dumps({"messages": None, "images": ""}).encode(), QWEN, [], last_turn_only=False)
