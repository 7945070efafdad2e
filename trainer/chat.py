# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""Conversations as the target's chat template writes them: the one place where a template is asked.

Training, regeneration and evaluation must write the same conversation in the same way, so all three come here.
Templates that know a thinking mode (Qwen3's) are asked without it: they then write the same empty thought into the
prompt as into the answer; in the thinking mode no answer would begin where its prompt ends.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class ChatError(ValueError):
    """The tokenizer has no chat template, or the template refuses the conversation."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, answer_follows: bool) -> str:
    """The conversation's text; with `answer_follows` up to where the assistant's next words begin. Raises ChatError."""
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer_follows, enable_thinking=False
            )
        )
    except Exception as error:  # a template raises what it likes, for roles out of order for instance
        raise ChatError(f"the chat template refuses it: {error}") from error


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Rendered text as tokens: the template has written all special tokens, the tokenizer adds none."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens before the assistant's answer to `messages`. Raises ChatError."""
    return tokens_of(tokenizer, render(tokenizer, messages, answer_follows=True))
