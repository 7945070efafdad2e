"""Records to tokens: which forms are read, what is learned of them, and what is refused with which reason."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_targets import THINKING_TEMPLATE, real_model_folder, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.conversations import LineError, talk_from
from trainer.documents import Document, documents_from

CHAT = [("system", "Be brief."), ("user", "Hi?"), ("assistant", "Hello."), ("user", "Bye?"), ("assistant", " é\n")]


def messages(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def line(*pairs: tuple[str, Any]) -> bytes:
    return json.dumps({"messages": messages(*pairs)}).encode()


def read(record: bytes | dict[str, Any], tokenizer: Any, *, last: bool = False) -> Document:
    (document,) = documents_from(record, tokenizer, [tokenizer.eos_token_id], last_turn_only=last)
    return document


def learned(document: Document, tokenizer: Any) -> list[str]:
    """The texts of the supervised stretches."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], document.loss_mask.astype(int), [0]))))
    return [tokenizer.decode(document.ids[begin:end]) for begin, end in edges.reshape(-1, 2)]


def reason(record: bytes | dict[str, Any]) -> str:
    with pytest.raises(LineError) as caught:
        talk_from(record)
    return str(caught.value)


# --- forms ---

SHAREGPT = [{"from": who, "value": text} for who, text in [("human", "Hi?"), ("gpt", "Hello.")]]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": messages(("user", "Hi?"), ("assistant", "Hello.")), "score": float("nan"), "id": None},
        {"conversations": SHAREGPT, "messages": None},
        {"conversations": messages(("user", "Hi?"), ("assistant", "Hello."))},
        {"conversations": [{"from": "Human", "value": "Hi?"}, {"from": " model", "value": "Hello.", "role": None}]},
        {"prompt": "Hi?", "response": "Hello."},
        {"prompt": messages(("user", "Hi?")), "response": [{"type": "text", "text": "Hello."}]},
        {"messages": messages(("user", [{"type": "text", "text": "H"}, "i?"]), ("assistant", [{"text": "Hello."}]))},
        {"messages": messages(("user", [{"type": "text", "text": "Hi?", "image": None}]), ("assistant", "Hello."))},
        {"messages": [{**m, "tool_calls": None, "images": []} for m in messages(("user", "Hi?"), ("bot", "Hello."))]},
        {"prompt": "ignored: the messages hold it", "messages": messages(("user", "Hi?"), ("assistant", "Hello."))},
    ],
)
def test_every_form_gives_the_same_tokens(record: dict[str, Any], tokenizer: Any) -> None:
    expected = read(line(("user", "Hi?"), ("assistant", "Hello.")), tokenizer)
    assert learned(expected, tokenizer) == ["Hello.<|im_end|>"]
    for form in (record, json.dumps(record).encode()):
        document = read(form, tokenizer)
        assert (document.ids == expected.ids).all() and (document.loss_mask == expected.loss_mask).all()


def test_of_a_prompt_with_answers_only_the_response_is_learned(tokenizer: Any) -> None:
    prompt = messages(("user", "Hi?"), ("assistant", "Hello."), ("user", "Bye?"))
    record = {"prompt": prompt, "response": "Bye."}
    assert learned(read(record, tokenizer), tokenizer) == ["Bye.<|im_end|>"]
    whole = {"messages": [*prompt, *messages(("assistant", "Bye."))]}
    assert learned(read(whole, tokenizer), tokenizer) == ["Hello.<|im_end|>", "Bye.<|im_end|>"]
    assert (read(whole, tokenizer).ids == read(record, tokenizer).ids).all()


def test_a_system_text_beside_the_turns_comes_first(tokenizer: Any) -> None:
    document = read({"conversations": SHAREGPT, "system": "Be brief."}, tokenizer)
    assert tokenizer.decode(document.ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?")
    assert learned(document, tokenizer) == ["Hello.<|im_end|>"]


def test_a_name_reaches_the_template(own: Any) -> None:
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.name }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    talk = [{"role": "user", "content": "Hi?", "name": " Ann"}, {"role": "assistant", "content": "Hello."}]
    assert own.decode(read({"messages": talk}, own).ids) == "user Ann: Hi?<|im_end|>assistant: Hello.<|im_end|>"


# --- refused, with the reason ---


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[]", "a list, not an object"),
        (b"NaN", "a number, not an object"),
        (b'{"text": "x"}', "no messages, no conversations, no prompt with response; its keys: text"),
        (b'{"prompt": "x"}', "its keys: prompt"),
        (b'{"messages": 3}', "messages: a number, not a list"),
        (b'{"messages": ["x"]}', "messages.0: a text, not an object"),
        (b'{"messages": [], "conversations": []}', "both messages and conversations"),
        (b'{"messages": [{"content": "x"}]}', "messages.0: neither role nor from"),
        (b'{"messages": [{"role": "user", "from": "human", "content": "x"}]}', "messages.0: both role and from"),
        (b'{"messages": [{"role": "user"}]}', "messages.0: neither content nor value"),
        (b'{"messages": [{"role": "user", "content": null}]}', "messages.0: neither content nor value"),
        (b'{"messages": [{"role": "user", "content": NaN}]}', "messages.0.content: a number, not a text"),
        (b'{"messages": [{"role": 3, "content": "x"}]}', "messages.0: unknown role 3"),
        (line(("robot", "Hi?"), ("assistant", "x")), "messages.0: unknown role 'robot'"),
        (line(("user", "Hi?"), ("function_call", "f()")), "messages.1: unknown role 'function_call'"),
        (line(("assistant", "Hi!")), "message 0: assistant comes first"),
        (line(("user", "x"), ("user", "y")), "message 1: user after user"),
        (line(("user", "x"), ("assistant", "y"), ("assistant", "z")), "message 2: assistant after assistant"),
        (line(("user", "x"), ("assistant", "y"), ("system", "z")), "message 2: system after assistant"),
        (b'{"messages": [{"role": "user", "role": "system", "content": "x"}]}', "the key 'role' is there twice"),
        (b'\xff{"messages": []}', "not UTF-8: byte 0xff at 0"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', r"half a character (\ud83d)"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"n": ' + b"1" * 5000 + b"}", "not readable: Exceeds the limit"),
        ({"messages": messages(("user", [{"type": "image_url", "image_url": "x"}]))}, "a part of the type 'image_url'"),
        ({"messages": messages(("user", [{"type": "text", "text": "x", "image": 1}]))}, "a part with image, text, not"),
        ({"messages": messages(("user", [3]))}, "messages.0.content.0: a number, not a text"),
        ({"messages": messages(("user", {"text": "x"}))}, "messages.0.content: an object, not a text"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "it has tool_calls, which can't"),
        ({"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]}, "it has function_call"),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]}, "it has reasoning_content"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0}]}, "weight 0: single turns can't"),
        ({"messages": [], "tools": [{"name": "f"}]}, "it has tools, which can't be learned"),
        ({"messages": [], "images": ["a.png"]}, "it has images, which can't be learned"),
        ({"messages": messages(("system", "x")), "system": "y"}, "a system text beside the system message"),
        ({"prompt": 3, "response": "x"}, "prompt: a number, not a text"),
        ({"prompt": "x", "response": messages(("assistant", "y"))}, "response.0: a part with content, role, not text"),
    ],
)  # fmt: skip
def test_what_can_t_be_learned_truthfully_is_refused(bad: bytes | dict[str, Any], why: str) -> None:
    assert why in reason(bad)


def test_a_conversation_without_an_answer_is_refused(tokenizer: Any) -> None:
    for talk in ([], [("user", "Hi?")], [("system", "x"), ("user", "Hi?")]):
        with pytest.raises(LineError, match="no message of the assistant"):
            read(line(*talk), tokenizer)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    for record in (content, b'{"messages": ' + content + b"}", b'{"messages": [{"role": "user", "content": ' + content):
        with pytest.raises(LineError):
            talk_from(record)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters(), max_size=5) | st.sampled_from(["user", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "from", "content", "value", "type", "text", "prompt", "messages", "tools"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["messages", "conversations", "prompt", "response", "system"]), json_values)
    | st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": json_values, "content": json_values}))}
    )
)
def test_any_json_is_read_or_refused(record: dict[str, Any]) -> None:
    try:
        talk = talk_from(json.dumps(record).encode())
    except LineError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert all(message["role"] in ("system", "user", "assistant", "tool") for message in talk.messages)
        "".join(message["content"] for message in talk.messages).encode()


# --- what is learned from ---


def test_the_loss_is_on_the_answers_and_their_ends(tokenizer: Any) -> None:
    document = read(line(*CHAT), tokenizer)
    assert learned(document, tokenizer) == ["Hello.<|im_end|>", " é\n<|im_end|>"]
    # The tokens are the template's text, whole and in order.
    assert tokenizer.decode(document.ids) == tokenizer.apply_chat_template(messages(*CHAT), tokenize=False)
    last = read(line(*CHAT), tokenizer, last=True)
    assert learned(last, tokenizer) == [" é\n<|im_end|>"]
    assert (last.ids == document.ids).all()


@given(
    st.lists(st.tuples(st.text(max_size=12), st.text(min_size=1, max_size=12)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
@example([("", "\r")], True, False)  # white space that is an unknown token there
def test_what_is_learned_decodes_to_the_answers_or_the_record_is_refused(
    tokenizer: Any, turns: list[tuple[str, str]], thinking: bool, last: bool
) -> None:
    """Any text at all, surrogates and control characters included, by two templates."""
    own = THINKING if thinking else tokenizer
    pairs = [pair for question, answer in turns for pair in (("user", question), ("assistant", answer))]
    try:
        documents = documents_from(line(*pairs), own, [own.eos_token_id], last_turn_only=last)
    except LineError:
        # Half a character; a letter that the tiny tokenizer hasn't.
        text = "".join(text for _, text in pairs)
        assert not text.isprintable() or (thinking and not text.isascii())
        return
    answers = [answer for _, answer in turns][-1:] if last else [answer for _, answer in turns]
    assert len(documents) == (len(answers) if thinking else 1)
    said = [text for document in documents for text in learned(document, own)]
    assert [text.removesuffix("<|im_end|>") for text in said] == answers
    assert all(text.endswith("<|im_end|>") for text in said)
    for document in documents:
        assert len(document.ids) == len(document.loss_mask) and not document.loss_mask[0]


THINKING = tiny_tokenizer()
THINKING.chat_template = THINKING_TEMPLATE


def test_an_answer_is_tokenised_as_it_is_while_decoding(tokenizer: Any) -> None:
    """The prompt's tokens are those of the prompt alone, whatever the answer begins with."""
    real = AutoTokenizer.from_pretrained(real_model_folder())
    for each in (tokenizer, real):
        document = read(line(("user", "Hi?"), ("assistant", "\n\nHello")), each)
        prompt = each.apply_chat_template(
            messages(("user", "Hi?")), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        first = int(document.loss_mask.argmax())
        assert document.ids[:first].tolist() == prompt
        assert each.decode(document.ids[document.loss_mask]) == "\n\nHello<|im_end|>"


def test_a_tokenizer_that_puts_a_space_before_any_text_is_asked_for_the_whole() -> None:
    """As Llama 2's: a piece tokenised alone would begin with a space that nobody said."""
    words = {word: id for id, word in enumerate(["<unk>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyzHA:?."])}
    bare = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    bare.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    bare.add_special_tokens(["</s>"])
    own = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>", unk_token="<unk>")
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    document = read(line(("user", "Hi?"), ("assistant", "Hello.")), own)
    assert own.convert_ids_to_tokens(document.ids[document.loss_mask].tolist()) == [*"Hello.", "</s>"]


def test_a_template_that_rewrites_earlier_turns_makes_a_document_of_each_answer(own: Any) -> None:
    own.chat_template = (
        "{% for m in messages %}{% if not loop.last and m.role == 'assistant' %}[old]{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    documents = documents_from(line(*CHAT), own, [own.eos_token_id], last_turn_only=False)
    assert [own.decode(document.ids) for document in documents] == [
        "system: Be brief.\nuser: Hi?\nassistant: Hello.\n",
        "system: Be brief.\nuser: Hi?\n[old]assistant: Hello.\nuser: Bye?\nassistant:  é\n\n",
    ]
    assert [learned(document, own) for document in documents] == [["Hello."], [" é"]]
    assert learned(read(line(*CHAT), own, last=True), own) == [" é"]


def test_a_template_whose_prompt_is_not_how_its_answers_begin_is_found_out(own: Any) -> None:
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think></think>{% endif %}"
    )
    with pytest.raises(LineError, match="message 1: the chat template writes the answer otherwise than it begins one"):
        read(line(("user", "Hi?"), ("assistant", "Hello.")), own, last=True)


@pytest.mark.parametrize("written", ["m.content | upper", "m.content[:3]", "'Well: ' + m.content"])
def test_a_template_that_changes_the_answer_is_found_out(written: str, own: Any) -> None:
    own.chat_template = (
        f"{{% for m in messages %}}{{{{ m.role }}}}: {{{{ {written} }}}}\n{{% endfor %}}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(LineError, match="don't decode to the answer"):
        read(line(("user", "Hi?"), ("assistant", "Hello.")), own)


def test_an_answer_with_an_end_token_in_its_middle_is_refused(tokenizer: Any) -> None:
    (end,) = tokenizer("!")["input_ids"]
    with pytest.raises(LineError, match="goes on behind its end token '!'"):
        documents_from(line(("user", "Hi?"), ("assistant", "Hel!lo")), tokenizer, [end], last_turn_only=False)


def test_a_token_that_holds_the_answer_s_last_letter_and_what_follows_is_refused() -> None:
    bare = Tokenizer(
        models.BPE(vocab={token: id for id, token in enumerate(["a", "b", "!", "b!"])}, merges=[("b", "!")])
    )
    bare.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=bare)
    fast.chat_template = "{% for m in messages %}{{ m.content }}!{% endfor %}{% if add_generation_prompt %}{% endif %}"
    with pytest.raises(LineError, match="last token holds what the chat template writes"):
        documents_from(line(("user", "a"), ("assistant", "ab")), fast, [], last_turn_only=False)


def test_letters_and_accents_apart_are_one_to_a_tokenizer_that_joins_them(own: Any) -> None:
    from tokenizers import normalizers

    own.backend_tokenizer.normalizer = normalizers.NFC()  # Qwen's
    document = read(line(("user", "Hi?"), ("assistant", "e\u0301!")), own)
    assert learned(document, own) == ["\u00e9!<|im_end|>"]


def test_what_the_template_writes_behind_an_answer_is_not_learned(own: Any) -> None:
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n[END]\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    talk = line(("user", "Hi?"), ("assistant", "Hello é"), ("user", "Bye?"), ("assistant", "Bye."))
    assert learned(read(talk, own), own) == ["Hello é", "Bye."]


def test_the_first_of_the_target_s_end_tokens_ends_an_answer(own: Any) -> None:
    start, end = own.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    own.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_start|>-<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    talk = line(("user", "Hi?"), ("assistant", "Hello."))
    for ends, said in (([start, end], "Hello.<|im_start|>"), ([end], "Hello.<|im_start|>-<|im_end|>")):
        assert learned(documents_from(talk, own, ends, last_turn_only=False)[0], own) == [said]


def test_tools_take_their_turn(tokenizer: Any) -> None:
    talk = line(("user", "Two plus two?"), ("assistant", "add(2, 2)"), ("tool", "4"), ("assistant", "Four."))
    assert learned(read(talk, tokenizer), tokenizer) == ["add(2, 2)<|im_end|>", "Four.<|im_end|>"]
