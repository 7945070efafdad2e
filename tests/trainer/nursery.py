"""Trainers as processes of their own that start in a moment: forked from one that has imported everything.

with Nursery(folder) as nursery:
    trainer = nursery.start("train", config, run)
    trainer.kill()
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PROGRAM = """
import json, os, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
import tensorboard.compat.proto.event_pb2, tensorboard.summary.writer.record_writer
import trainer.train
from trainer.__main__ import leave, main

for line in sys.stdin:
    words, log = json.loads(line)
    if words is None:  # only now does the child's number become free for another process
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    child = os.fork()
    if child == 0:  # no thread runs yet and torch has computed nothing, so there is nothing that a fork could break
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(to, 1), os.dup2(to, 2)
        leave(main(words))
    print(child, flush=True)
"""


@dataclass
class Child:
    """One trainer; its exit code is negative when a signal ended it."""

    pid: int
    log: Path
    _nursery: subprocess.Popen[str]

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def kill(self) -> int:
        """SIGKILL; returns the exit code, which is the trainer's own when it was quicker."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        return _ask(self._nursery, None, None)


def _ask(nursery: subprocess.Popen[str], words: list[str] | None, log: str | None) -> int:
    assert nursery.stdin is not None and nursery.stdout is not None
    print(json.dumps([words, log]), file=nursery.stdin, flush=True)
    return int(nursery.stdout.readline())


class Nursery:
    """One child at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __enter__(self) -> "Nursery":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, *words: str | Path) -> Child:
        self._count += 1
        log = self._folder / f"log-{self._count}"
        return Child(_ask(self._process, [str(word) for word in words], str(log)), log, self._process)


def retry_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
