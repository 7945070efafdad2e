"""Records to tokens, in this process or in several, always in the records' own order."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.conversations import LineError
from trainer.documents import documents_from, special_texts
from trainer.prepared import DataError, Settings
from trainer.sources import Record

CHUNK = 64  # records that a worker takes at a time
CHUNK_BYTES = 2**20  # fewer, when they have more bytes than this together
LOOK_S = 0.5  # seconds after which one who waits for a worker looks whether to stop

Tokens = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]  # a document's ids and mask
Outcome = tuple[int, list[Tokens] | str]  # a record's number, and what came of it: documents, or why there are none
Check = Callable[[], None]  # looked at now and then; it raises what ends the preparation


class Tokeniser:
    """Turns chunks of records into tokens."""

    def __init__(self, tokenizer: Any, settings: Settings) -> None:
        self._tokenizer, self._last_turn_only = tokenizer, settings.last_turn_only
        self._ends = frozenset(settings.end_tokens)
        self._special = special_texts(tokenizer)

    def __call__(self, records: Iterable[tuple[int, Record]], check: Check = lambda: None) -> list[Outcome]:
        found: list[Outcome] = []
        for number, record in records:
            check()
            found.append((number, self._one(record)))
        return found

    def _one(self, record: Record) -> list[Tokens] | str:
        """Whatever a record does to template and tokenizer is its own fault, and no reason to lose all others."""
        if isinstance(record, LineError):
            return str(record)
        try:
            found = documents_from(
                record, self._tokenizer, self._ends, last_turn_only=self._last_turn_only, special=self._special
            )
        except LineError as error:
            return str(error)
        except MemoryError:
            raise
        except BaseException as error:
            # A panic in tokenizers' Rust code is no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                return str(LineError(f"it can't be written as tokens: {type(error).__name__}: {error}"))
            raise
        return [(one.ids.astype(np.int32), one.loss_mask.astype(np.uint8)) for one in found]


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
    records: Iterator[tuple[int, Record]],
    tokenizer: Any,
    settings: Settings,
    workers: int,
    check: Check = lambda: None,
) -> Iterator[list[Outcome]]:
    """What comes of the records, in their order, a chunk at a time; no more than a few chunks are under way.

    Now and then an empty list comes while a worker is waited for. Raises DataError, and what `check` raises.
    """
    if workers == 1:
        tokeniser = Tokeniser(tokenizer, settings)
        yield from (tokeniser(chunk, check) for chunk in chunks(records))
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (tokenizer, settings))
    try:
        under_way: deque[Future[list[Outcome]]] = deque()
        todo = chunks(records)
        while True:
            check()
            for chunk in itertools.islice(todo, 2 * workers + 2 - len(under_way)):
                under_way.append(pool.submit(_work, chunk))
            if not under_way:
                return
            try:
                found = under_way[0].result(LOOK_S)
            except TimeoutError:
                yield []
                continue
            under_way.popleft()
            yield found
    except BrokenProcessPool as error:
        check()  # a signal to the whole group ends workers, too
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
