# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""The target's tokens: that tokenizer and weights agree on how many there are, and which one stands for "unknown"."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.refused import TargetError

Counts = npt.NDArray[np.int64]
"""How often each token id occurs in the prepared data, [V]."""


def check_vocabulary(embedding_rows: int, head_rows: int, config_size: int, tokenizer: Any) -> None:
    """Refuse a target whose parts know different numbers of tokens. Raises TargetError."""
    if not embedding_rows == head_rows == config_size:
        raise TargetError(
            f"its vocabulary has no one size: the config says {config_size}, the embedding has {embedding_rows} rows, "
            f"the head {head_rows}"
        )
    if tokenizer is None:
        return
    if len(tokenizer) > embedding_rows:
        raise TargetError(
            f"its tokenizer has {len(tokenizer)} tokens, its embedding only {embedding_rows} rows: of one model?"
        )
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= embedding_rows:
        raise TargetError(f"its tokenizer gives the id {highest}, its embedding has only {embedding_rows} rows")


def mask_token(tokenizer: Any, size: int, ends: Iterable[int], wanted: int | None, counts: Counts | None) -> int:
    """The token id that stands for "not yet known" in a block.

    In this order: the one wanted; the tokenizer's mask token; the first row of the embedding that no token uses; the
    last reserved token (a special token that is neither bos, eos, pad nor unk, and that the chat template does not
    write). None of them may occur in the data: the drafter would take what it sees there for unknown. So never pad or
    an end token. One that is wanted all the same, or none being left, raises TargetError.
    """

    def times(id: int) -> int:
        return int(counts[id]) if counts is not None and id < len(counts) else 0

    busy = set(ends)
    if tokenizer is not None:
        busy |= {id for id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id is not None}
    if wanted is not None:
        if not 0 <= wanted < size:
            raise TargetError(f"mask_token_id {wanted} is outside the vocabulary of {size} tokens")
        if wanted in busy:
            raise TargetError(
                f"mask_token_id {wanted}{_named(tokenizer, wanted)} ends or fills the texts themselves: choose "
                "another, or none"
            )
        if times(wanted):
            raise TargetError(
                f"mask_token_id {wanted}{_named(tokenizer, wanted)} occurs {times(wanted):,} times in the data: choose "
                "another, or none"
            )
        return wanted
    if tokenizer is None:
        raise TargetError("the target has no tokenizer to choose a mask token from: give mask_token_id")
    own = tokenizer.mask_token_id
    if own is not None and own not in busy and not times(int(own)):
        return int(own)
    used = set(tokenizer.get_vocab().values())
    free = next((id for id in range(size) if id not in used and id not in busy and not times(id)), None)
    if free is not None:
        return free
    template = str(tokenizer.chat_template or "")
    reserved = [
        int(id)
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and id not in tokenizer.all_special_ids and id not in busy and token.content not in template
    ]
    if unused := [id for id in reserved if not times(id)]:
        return max(unused)
    why = f"all {len(reserved)} reserved tokens occur in the data" if reserved else "it has no reserved one"
    raise TargetError(f"the target's tokenizer has no unused token for the mask ({why}): give mask_token_id")


def _named(tokenizer: Any, id: int) -> str:
    return "" if tokenizer is None else f" ({tokenizer.convert_ids_to_tokens(id)!r})"
