"""Records to tokens, in this process or in several, always in the records' own order."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.conversations import LineError, document_from
from trainer.prepared import DataError, Settings
from trainer.sources import Record

CHUNK = 64  # records that a worker takes at a time
CHUNK_BYTES = 2**20  # fewer, when they have more bytes than this together

Tokens = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]  # a document's ids and mask
Outcome = tuple[int, Tokens | str]  # a record's number, and what came of it: tokens, or why there are none


class Tokeniser:
    """Turns chunks of records into tokens."""

    def __init__(self, tokenizer: Any, settings: Settings) -> None:
        self._tokenizer, self._last_turn_only = tokenizer, settings.last_turn_only
        self._ends = frozenset(settings.end_tokens)

    def __call__(self, records: Iterable[tuple[int, Record]]) -> list[Outcome]:
        return [(number, self._one(record)) for number, record in records]

    def _one(self, record: Record) -> Tokens | str:
        if isinstance(record, LineError):
            return str(record)
        try:
            found = document_from(record, self._tokenizer, self._ends, last_turn_only=self._last_turn_only)
        except LineError as error:
            return str(error)
        return found.ids.astype(np.int32), found.loss_mask.astype(np.uint8)


def chunks(records: Iterator[tuple[int, Record]]) -> Iterator[list[tuple[int, Record]]]:
    """Records in handfuls."""
    held: list[tuple[int, Record]] = []
    size = 0
    for number, record in records:
        held.append((number, record))
        size += len(record) if isinstance(record, bytes) else CHUNK_BYTES // CHUNK
        if len(held) == CHUNK or size >= CHUNK_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def outcomes(
    records: Iterator[tuple[int, Record]], tokenizer: Any, settings: Settings, workers: int
) -> Iterator[list[Outcome]]:
    """What comes of the records, in their order, a chunk at a time; no more than a few chunks are under way."""
    if workers == 1:
        yield from map(Tokeniser(tokenizer, settings), chunks(records))
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (tokenizer, settings))
    try:
        under_way: deque[Future[list[Outcome]]] = deque()
        todo = chunks(records)
        while True:
            for chunk in itertools.islice(todo, 2 * workers + 2 - len(under_way)):
                under_way.append(pool.submit(_work, chunk))
            if not under_way:
                return
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker of prepare died; with less memory to spare, use fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokeniser: Tokeniser | None = None  # a worker process' own


def _begin(tokenizer: Any, settings: Settings) -> None:
    """The start of a worker process. It ends with its parent, however that ends; Ctrl-C is the parent's affair."""
    global _tokeniser
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _tokeniser = Tokeniser(tokenizer, settings)


def _work(chunk: list[tuple[int, Record]]) -> list[Outcome]:
    assert _tokeniser is not None
    return _tokeniser(chunk)
