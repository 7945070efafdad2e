"""Targets made on the spot: random weights, a tokenizer of single ASCII characters, a ChatML template."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.draft import DraftModel
from trainer.models import MODEL, is_whole, models_folder
from trainer.target import TargetModel, load_target

UNKNOWN, START, END, RESERVED = "<unk>", "<|im_start|>", "<|im_end|>", "<reserved>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

THINKING_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
"""As Qwen3's: the last answer has an empty thought, a prompt has it only when the thinking is switched off."""


def tiny_tokenizer() -> Any:
    """One token a character: any tokens give back their text, any ASCII text its tokens."""
    printable = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # the last two: space and line break
    vocabulary = {token: id for id, token in enumerate([UNKNOWN, START, END, RESERVED, *printable])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (UNKNOWN, START, END, RESERVED)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=START, eos_token=END, pad_token=END,
        chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def tiny_target(family: str = "llama", seed: int = 0, layers: int = 6, **changes: Any) -> TargetModel:
    """A random target: hidden 32, four heads of 8 on two key heads, the vocabulary of `tiny_tokenizer`."""
    tokenizer = tiny_tokenizer()
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer), "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "initializer_range": 0.2,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    return TargetModel(model, tokenizer)


def talkative(seed: int = 0, layers: int = 6) -> TargetModel:
    """A tiny target whose turns end, at random's whim: often by the template's own end token, and by some others."""
    target = tiny_target(seed=seed, layers=layers)
    target.head_weight[2] *= 2  # its logits are spread wider, so that it is the best more often
    target.model.generation_config.eos_token_id = [2, *range(4, target.config.vocab_size, 12)]
    return target


def drafter_for(
    target: TargetModel, *, layers: int = 1, block: int = 16, mask_token_id: int | None = None
) -> DraftModel:
    """A random drafter that fits the target."""
    return DraftModel(target.draft_config(layers, block, (1, 2, 3), mask_token_id))


def document_features(target: TargetModel, ids_BS: torch.Tensor, layer_ids: Sequence[int]) -> torch.Tensor:
    """The target's features of rows that hold one document each."""
    positions_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
    return target.features(ids_BS, torch.zeros_like(ids_BS), positions_BS, layer_ids)


def real_model_folder() -> Path:
    """SmolLM2 as `make setup` leaves it."""
    folder = models_folder() / MODEL
    if not is_whole(folder):
        pytest.fail(f"the real model is not at {folder}: run `make setup` (or `python -m trainer import-gguf`)")
    return folder


@cache
def real_target() -> TargetModel:
    """SmolLM2, loaded once for all tests: they change nothing of it."""
    return load_target(real_model_folder())
