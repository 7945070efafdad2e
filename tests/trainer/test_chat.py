"""One way to write a conversation: prompts, answers and training data agree, whatever the template."""

import json
from pathlib import Path

import pytest
from tiny_targets import THINKING_TEMPLATE, tiny_target

from trainer.chat import ChatError, prompt_tokens, render
from trainer.documents import documents_from
from trainer.target import TargetModel
from trainer.turns import first_prompt, read_dialogues

TALK = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture
def thinking() -> TargetModel:
    target = tiny_target()
    target.tokenizer.chat_template = THINKING_TEMPLATE
    return target


def test_a_thinking_template_gives_training_and_decoding_the_same_prompt(thinking: TargetModel, tmp_path: Path) -> None:
    tokenizer, line = thinking.tokenizer, json.dumps({"messages": TALK})
    (document,) = documents_from(line.encode(), tokenizer, [tokenizer.eos_token_id], last_turn_only=False)
    first = int(document.loss_mask.argmax())
    assert tokenizer.decode(document.ids[document.loss_mask]) == "Hello.<|im_end|>"
    (tmp_path / "data.jsonl").write_text(line + "\n")
    (dialogue,) = read_dialogues(tmp_path / "data.jsonl", None)
    prompt = first_prompt(dialogue, thinking)
    assert prompt == document.ids[:first].tolist() == prompt_tokens(tokenizer, TALK[:1])
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_that_raises_is_an_error_of_ours() -> None:
    tokenizer = tiny_target().tokenizer
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatError, match="refuses it: roles must alternate"):
        render(tokenizer, TALK, answer_follows=False)
    tokenizer.chat_template = None
    with pytest.raises(ChatError, match="chat template"):
        render(tokenizer, TALK, answer_follows=False)
