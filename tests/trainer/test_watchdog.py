"""A process that hangs says what its threads do, and ends with a code of its own."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from trainer import watchdog as module
from trainer.pipeline import Pipeline, Stage
from trainer.watchdog import STALLED_CODE, Watchdog

BOUND = 30.0  # seconds, for what comes at once


class Left(threading.Event):
    """Stands for os._exit."""

    code: int | None = None

    def __call__(self, code: int) -> None:
        self.code = code
        self.set()


class Time:
    """Stands for the module time: it stands still until `step` seconds pass before each look of the watchdog, which are
    counted. So no machine is too slow for what is to happen before a watchdog has seen enough."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.step, self.looks = 1000.0, 0.0, 0
        self.at_look: Callable[[], None] = lambda: None
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.monotonic))

    def monotonic(self) -> float:
        self.at_look()
        self.looks += 1
        self.now += self.step
        return self.now


def wait_until(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        meanwhile()
        time.sleep(0.002)


def test_a_hang_is_told_with_each_threads_stack_and_what_it_waits_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # faulthandler writes to stderr too where the watchdog's thread can't run, or tell, for twice its seconds.
    monkeypatch.setattr(module, "_dump_unless_again_within", lambda seconds: None)
    left, release, told, clock = Left(), threading.Event(), list[str](), Time(monkeypatch)

    def hanging(number: int) -> int:
        release.wait()
        return number

    with Pipeline[int](range(9), [Stage("target", [hanging, hanging])], depth=1) as pipeline:
        caller = threading.Thread(target=list, args=(pipeline,), name="its caller")
        caller.start()
        wait_until(lambda: "to put item 3" in pipeline.doing()["source"] and "the caller" in pipeline.doing())
        wait_until(lambda: sum(words.startswith("works on") for words in pipeline.doing().values()) == 2)
        with Watchdog(0.1, told.append, what="the training", leave=left) as watchdog:
            watchdog.ask(pipeline.doing)
            watchdog.ask(lambda: {"drafter-0": str(1 / 0)})
            clock.step = 0.02
            assert left.wait(BOUND)
        release.set()
        caller.join(BOUND)
    assert left.code == STALLED_CODE == 14
    [report] = told
    assert capfd.readouterr().err == report
    assert report.startswith("the training stands still: nothing got on for 0.1 s; the process ends with code 14\n")
    for beginning in (
        "'target-",
        "'source' waits to put item 3 among what 'source' has made (1 of at most 1 items wait there; item 2 is next",
        "'the caller' waits for what 'target' has made (0 of at most 1 items wait there; item 0 is next), for ",
        "what some threads do can't be told: ZeroDivisionError",
        *(f"thread {name!r}:" for name in ("MainThread", "source", "target-0", "target-1", "its caller", "watchdog")),
    ):
        assert f"\n{beginning}" in report
    assert "works on item 0, for " in report and "works on item 1, for " in report
    assert report.count("in hanging\n    release.wait()\n") == 2


def test_beats_keep_it_quiet_and_so_does_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    left, clock = Left(), Time(monkeypatch)
    watchdog = Watchdog(0.2, leave=left)
    clock.at_look, clock.step = watchdog.beat, 0.05
    with watchdog:
        wait_until(lambda: clock.looks > 20 or left.is_set())  # a second has passed
    assert not left.is_set()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_a_process_that_was_stopped_and_goes_on_did_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    left, clock = Left(), Time(monkeypatch)
    with Watchdog(0.4, leave=left):
        wait_until(lambda: clock.looks > 0)
        clock.now += 1e6
        before = clock.looks
        wait_until(lambda: clock.looks > before + 1 or left.is_set())
        assert not left.is_set()
        clock.step = 0.05
        assert left.wait(BOUND)  # but nothing gets on now


def test_what_is_allowed_more_time_gets_it_and_nothing_after_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    left, clock, told = Left(), Time(monkeypatch), list[str]()
    with Watchdog(0.1, told.append, leave=left) as watchdog:
        with watchdog.allow(BOUND), watchdog.allow(0.01):  # which is less than it has
            before, clock.step = clock.looks, 0.0125
            wait_until(lambda: clock.looks > before + 20 or left.is_set())  # 0.25 s in all
            assert not left.is_set()
        assert left.wait(BOUND)
    assert told[0].startswith("the process stands still: nothing got on for 0.1 s;")
    hangs, clock.step = Left(), 0.0
    with Watchdog(0.01, told.append, leave=hangs) as watchdog, watchdog.allow(0.2):
        clock.step = 0.01
        assert hangs.wait(BOUND)
    assert told[1].startswith("the process stands still: nothing got on for 0.2 s;")


def test_zero_is_no_watch() -> None:
    with Watchdog(0) as watchdog:
        watchdog.beat()
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("fails", ["hangs", "raises"])
def test_a_report_that_can_not_be_written_keeps_no_process_alive(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left, release = Left(), threading.Event()
    monkeypatch.setattr(module, "TELLING_SECONDS", 0.05)

    def tell(report: str) -> None:
        if fails == "raises":
            raise OSError("the disk is gone")
        release.wait()

    with Watchdog(0.05, tell, leave=left):
        assert left.wait(BOUND)
    release.set()


def test_what_gets_on_after_all_is_not_ended() -> None:
    left, told = Left(), threading.Event()

    def tell(report: str) -> None:
        told.set()
        assert watchdog._over.wait(BOUND)

    with Watchdog(0.05, tell, leave=left) as watchdog:
        assert told.wait(BOUND)
    assert not left.is_set() and not watchdog._thread.is_alive()


HANGS = """
import ctypes, threading
from trainer.watchdog import Watchdog

read, buffer = ctypes.PyDLL(None).read, ctypes.create_string_buffer(1)
with Watchdog(0.2, lambda report: print(report.split("\\n")[0], flush=True)) as watchdog:
    read(0, buffer, 1)  # with Python's lock, so that no thread of Python runs
    watchdog.beat()
    print("went on", flush=True)
    threading.Event().wait()
"""


def test_a_process_that_hangs_ends_with_code_14() -> None:
    words, pipe = [sys.executable, "-c", HANGS], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        try:
            of_faulthandler = ""
            while 'File "<string>", line 7 in <module>' not in of_faulthandler:  # written while Python's lock is held
                of_faulthandler += process.stderr.readline() or pytest.fail(of_faulthandler)
            said, report = process.communicate("x", timeout=60)
        finally:
            process.kill()
    assert process.returncode == 14, report
    line = "the process stands still: nothing got on for 0.2 s; the process ends with code 14"
    assert said == f"went on\n{line}\n"
    assert of_faulthandler.startswith("Timeout (0:00:00.4") and line in report
    assert "thread 'MainThread':\n" in report


WAITS = """
import signal, threading
from trainer.watchdog import stacks_on

stacks_on(signal.SIGUSR1)
lock = threading.Lock()
lock.acquire()
print("waits", flush=True)
lock.acquire()  # for ever, and no signal ends it
"""


def test_a_signal_has_the_stacks_told_and_ends_nothing() -> None:
    words = [sys.executable, "-c", WAITS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == "waits\n"
            for _ in range(3):
                process.send_signal(signal.SIGUSR1)
                while process.stderr.readline() != "thread 'MainThread':\n":
                    assert process.poll() is None
                assert process.stderr.readline().startswith('  File "<string>", line ')
        finally:
            process.kill()
