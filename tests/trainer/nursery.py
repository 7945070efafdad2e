"""Trainers as processes of their own that start in a moment: forked from one that has imported everything.

    trainer = nursery.start("train", config, run)
    trainer.kill()

What differs from `python -m trainer` is that the imports are done when it begins, and the repair of torch. That a
process which does both itself is no other is proved by tests/ops/test_train.py and test_main.py.
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

MAIN = "from trainer.__main__ import leave, main\nleave(main())"

_PROGRAM = """
import ctypes, gc, json, os, signal, sys, time

gc.disable()
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
import tensorboard.compat.proto.event_pb2, tensorboard.summary.writer.record_writer
import trainer.export, trainer.prepare, trainer.train
from trainer.threads import make_torch_thread_safe

# What each would do first, of itself: a thousand regular expressions, and torch's own code compiled anew.
get_checkpoint_conversion_mapping("llama")
make_torch_thread_safe()
end = time.monotonic() + 10
while len(os.listdir("/proc/self/task")) > 1:  # the kernel has a thread that was joined a moment longer
    time.sleep(0.001)
    if time.monotonic() > end:
        sys.exit("a thread stays, beside which nothing can be forked")
gc.freeze()  # a look for garbage would copy all that is shared

def become(words, code, log, environment):
    gc.enable()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: what a failed test leaves ends with the tests
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(to, 1), os.dup2(to, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})

for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):  # only now does the child's number become free for another process
        print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        continue
    child = os.fork()
    if child == 0:  # no thread runs, and what torch computed, it did in threads that have ended
        os.setsid()
        become(*asked)
        sys.exit()
    print(child, flush=True)
"""


@dataclass
class Child:
    """One trainer, the first process of a session; its exit code is negative when a signal ended it."""

    pid: int
    log: Path
    _nursery: "Nursery"

    def said(self) -> str:
        """On stdout and stderr."""
        return self.log.read_text() if self.log.exists() else ""

    def ended(self) -> bool:
        """Until wait() has told its code it is still there, as a zombie."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> int:
        """SIGKILL; returns the exit code, which is the trainer's own when it was quicker."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        return self._nursery.code_of(self)


class Nursery:
    """Begins with its first child; its end is the end of all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count, self._children = folder, 0, list[Child]()
        self._process: subprocess.Popen[str] | None = None

    def start(self, *words: str | Path, code: str = MAIN, log: Path | None = None) -> Child:
        """code: what the process runs, as `python -c` does, with the words in sys.argv. log: where its output goes,
        which may be a named pipe."""
        self._count += 1
        log = log or self._folder / f"log-{self._count}"
        pid = self._ask([[str(word) for word in words], code, str(log), dict(os.environ)])
        self._children.append(Child(pid, log, self))
        return self._children[-1]

    def code_of(self, child: Child) -> int:
        code = self._ask(child.pid)
        self._children.remove(child)
        return code

    def clear(self) -> None:
        """Kills what nobody has waited for."""
        for child in [*self._children]:
            child.kill()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._children = None, []

    def _ask(self, what: object) -> int:
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
            words, pipe = [sys.executable, "-c", _PROGRAM], subprocess.PIPE
            self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())
        except BaseException:  # a test that took too long: the answer is still to come, and would be the next one's
            self.close()
            raise


def retry_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
