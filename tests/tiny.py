"""A tiny random target, data for it and a config: a real training that takes a second. For tests of trainer and runs.

`config = tiny_training(tmp_path)` writes target/, train.jsonl, heldout.jsonl and config.toml below tmp_path, for
`python -m trainer train CONFIG RUN_DIR`.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ("amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "iris", "jade", "kelp", "lagoon")


def tiny_target(folder: Path, *, layers: int = 6, hidden: int = 64, seed: int = 0) -> Path:
    """Saves a random Llama (vocabulary 512, a byte-level tokenizer with a chat template) into `folder`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.2,  # logits of a random model far enough apart to be learned
            bos_token_id=256,
            eos_token_id=257,
            pad_token_id=None,  # its embedding, which is also its row of the head, would stay zero
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def conversations(count: int, *, seed: int = 0, words: int = 6) -> list[dict[str, Any]]:
    """Short conversations whose answers are drawn from a few words."""
    draw = random.Random(seed)
    made: list[dict[str, Any]] = []
    for number in range(count):
        answer = " ".join(draw.choice(WORDS) for _ in range(words))
        messages = [
            {"role": "user", "content": f"{draw.choice(WORDS)} {number}?"},
            {"role": "assistant", "content": answer},
        ]
        made.append({"id": f"tiny-{seed}-{number}", "messages": messages})
    return made


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_toml(target: Path | str, train: Path | str, heldout: Path | str | None = None, **changes: Any) -> str:
    """The text of a tiny training's config. `changes` replace or add keys: `train__steps=20` is [train] steps."""
    sections: dict[str, dict[str, Any]] = {
        "target": {"path": str(target)},
        "draft": {"layers": 1, "block": 4, "captured": 3},
        "data": {"train": str(train), "row_tokens": 96},
        "train": {"steps": 20, "rows_per_step": 2, "anchors": 8, "checkpoint_every": 10},
        "layout": {"targets": ["cpu"], "drafters": ["cpu"]},
    }
    if heldout is not None:
        sections["data"]["heldout"] = str(heldout)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections[section][name] = value
    return "schema_version = 1\n" + "".join(_section(name, values) for name, values in sections.items())


def tiny_training(folder: Path, **changes: Any) -> Path:
    """Writes target, data and config below `folder`; returns the config's path."""
    target = tiny_target(folder / "target")
    train = write_jsonl(folder / "train.jsonl", conversations(12))
    heldout = write_jsonl(folder / "heldout.jsonl", conversations(4, seed=1))
    config = folder / "config.toml"
    config.write_text(tiny_toml(target, train, heldout, **changes))
    return config


def _section(name: str, values: Mapping[str, Any]) -> str:
    # JSON's strings, numbers, booleans and lists are TOML's.
    return f"\n[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
