"""Prepared data made of plain lists, without a tokenizer."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from trainer.prepare import Reasons, Writer
from trainer.prepared import Fingerprint, Prepared, Settings, Source, open_prepared


def write_prepared(
    folder: Path, documents: Iterable[tuple[Sequence[int], Sequence[int]]], vocabulary: int = 300
) -> Prepared:
    """A folder of documents given as (ids, mask); their lines are 1, 2, ..."""
    folder.mkdir(parents=True)
    writer = Writer(folder, vocabulary)
    count = 0
    for count, (ids, mask) in enumerate(documents, start=1):
        writer.add([(count, [(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8))])])
    source = Source(name="made.jsonl", digest="0" * 64, files=(("made.jsonl", 1),))
    mark = Fingerprint(digest="0" * 64, vocabulary=vocabulary)
    writer.finish(source, mark, Settings(last_turn_only=False, end_tokens=(2,)), count, Reasons())
    return open_prepared(folder)


def counted(folder: Path, lengths: Sequence[int], prompt: int = 0) -> Prepared:
    """Documents of given lengths, each of its own number's tokens, the first `prompt` of them not learned."""
    documents = [([n] * length, [0] * prompt + [1] * (length - prompt)) for n, length in enumerate(lengths)]
    return write_prepared(folder, documents, vocabulary=max(2, len(lengths)))
