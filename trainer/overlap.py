"""Held-out conversations that are learned from all the same: what is measured on them says too much."""

# numpy's functions are partly untyped.
# pyright: reportUnknownMemberType=false

import hashlib

import numpy as np

from trainer.documents import Integers
from trainer.prepared import SLICE, Prepared

MOST = 100_000  # held-out documents that are looked for
SHOWN = 3  # that are named


def overlap(train: Prepared, heldout: Prepared) -> tuple[str, ...]:
    """A line for the log when documents of `heldout` are in `train`, token for token; none when there are none.

    Of each training document only its length and three of its tokens are read, and all of it where those agree: a
    second or two for a million.
    """
    wanted: dict[bytes, int] = {}
    count = min(len(heldout), MOST)
    keys = np.unique(
        np.concatenate([_keys(heldout, np.arange(i, min(i + SLICE, count))) for i in range(0, count, SLICE)])
    )
    for index in range(count):
        wanted.setdefault(_content(heldout, index), index)
    found: dict[int, int] = {}
    for start in range(0, len(train), SLICE):
        documents = np.arange(start, min(start + SLICE, len(train)))
        for index in documents[np.isin(_keys(train, documents), keys)].tolist():
            held = wanted.get(_content(train, index))
            if held is not None:
                found.setdefault(held, index)
    if not found:
        return ()
    pairs = [
        f"{heldout.place(heldout.line(held))} is {train.place(train.line(index))}"
        for held, index in sorted(found.items())[:SHOWN]
    ]
    more = ", ..." if len(found) > SHOWN else ""
    return (
        f"{len(found):,} of {count:,} held-out conversations are learned from, too ({', '.join(pairs)}{more}): what is "
        f"measured on them is better than on unseen ones",
    )


def _keys(prepared: Prepared, documents: Integers) -> Integers:
    """A number for each document, equal for equal ones: of its length and of tokens at three places."""
    lengths = prepared.lengths(documents)
    keys = lengths.astype(np.uint64)
    for place in (lengths // 2, lengths * 3 // 4, lengths - 2):
        tokens = prepared.tokens_at(documents, np.maximum(place, 0)).astype(np.uint64)
        keys = keys * np.uint64(0x9E3779B97F4A7C15) + tokens  # wraps
    return keys.astype(np.int64)


def _content(prepared: Prepared, index: int) -> bytes:
    return hashlib.sha256(prepared.document(index, 10**9).ids.tobytes()).digest()
