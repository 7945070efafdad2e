"""Processes by identity: what /proc says of them, and signals that can't hit a stranger.

A process is its pid and its raw start time (field 22 of /proc/PID/stat, clock ticks since boot); a pid alone may have
been given to somebody else. Runs in the container and on the hypervisor: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

PROC = Path("/proc")
RUN_ID = b"DFLASH_RUN_ID"
RUN_DIR = b"DFLASH_RUN_DIR"
MESSENGER = b"DFLASH_OPS_MESSENGER"

# What is told as the command of a process that was gone before it could be looked at.
GONE = "[gone]"

_DEVICE = re.compile(r"/dev/nvidia(\d+)")


class Process(NamedTuple):  # a dataclass would load `inspect`, which takes as long as the rest of us
    """One line of the process table. state: R, S, D, T, Z... as in /proc/PID/stat; of a process whose main thread is
    dead and others live, theirs. threads: how many, the dead main one among them."""

    pid: int
    start: int
    parent: int
    group: int
    state: str
    threads: int = 1

    @property
    def ended(self) -> bool:
        """Dead, though its parent may not have noticed yet: it holds no memory and no device."""
        return self.state in "ZX"

    def identity(self) -> dict[str, int]:
        return {"pid": self.pid, "start": self.start}


def read(pid: int) -> Process | None:
    """The process that has this pid now; None when there is none."""
    fields = _stat(f"{PROC}/{pid}")
    if len(fields) < 20:
        return None
    state, count = fields[0].decode(), int(fields[17])
    _voices.pop(pid, None)
    if state in "ZX" and count > 1:
        state = _state_of_the_rest(pid) or state
    return Process(
        pid=pid, state=state, parent=int(fields[1]), group=int(fields[2]), start=int(fields[19]), threads=count
    )


def _stat(folder: str) -> list[bytes]:
    """The fields of a stat file from the third on, the state; none when it can't be read."""
    try:
        descriptor = os.open(f"{folder}/stat", os.O_RDONLY)  # `open` takes thrice as long, and threads are many
    except OSError:
        return []
    try:
        line = os.read(descriptor, 4096)
    except OSError:
        return []
    finally:
        os.close(descriptor)
    # The name in brackets may hold spaces and brackets of its own: cut at the last one.
    return line[line.rfind(b")") + 2 :].split()


# -- threads

# Of one process so many are looked at, a trainer has a few hundred; and of all, before their memory is read.
_THREADS, _ALL_THREADS = 512, 4096
# By process whose main thread is dead: a living thread of it, in whose folder can be read what the dead one's lacks.
_voices: dict[int, int] = {}
# Between two looks at a thread that may only wait for a disk; and how long all of these may take together.
_LOOK_AGAIN, _LOOKS_AGAIN = 0.03, 1.0
_looked_again = 0.0


def threads(pid: int) -> Iterator[tuple[int, str]]:
    """The thread id and the state of each thread of the process, the first _THREADS of them."""
    try:
        names = os.listdir(f"{PROC}/{pid}/task")
    except OSError:
        return
    for name in names[:_THREADS]:
        fields = _stat(f"{PROC}/{pid}/task/{name}")
        if fields:
            yield int(name), fields[0].decode()


def _state_of_the_rest(pid: int) -> str:
    """The state of a process whose main thread is dead: D when any thread's is, else a living one's; empty when none
    lives. A thread that the driver does not let go keeps the whole process's memory and devices."""
    living = {tid: state for tid, state in threads(pid) if state not in "ZX"}
    if not living:
        return ""
    _voices[pid] = next((tid for tid, state in living.items() if state != "D"), next(iter(living)))
    return "D" if "D" in living.values() else living[_voices[pid]]


def stuck_thread(pid: int) -> int | None:
    """A thread of the process that waits in the kernel where no signal ends it: in the same wait at two looks, for
    one that reads a disk is in state D now and then."""
    global _looked_again
    waits = {tid: _switches(pid, tid) for tid, state in threads(pid) if state == "D"}
    if waits and _looked_again < _LOOKS_AGAIN:
        _looked_again += _LOOK_AGAIN
        time.sleep(_LOOK_AGAIN)
    for tid, before in waits.items():
        if _stat(f"{PROC}/{pid}/task/{tid}")[:1] == [b"D"] and _switches(pid, tid) == before:
            return tid
    return None


def _switches(pid: int, tid: int) -> list[bytes]:
    """How often the thread went to sleep, as it stands in its status."""
    try:
        with open(f"{PROC}/{pid}/task/{tid}/status", "rb") as file:
            return re.findall(rb"^voluntary_ctxt_switches:.*", file.read(), re.MULTILINE)
    except OSError:
        return []


def _folder(pid: int) -> Path:
    """Where the process's files are: a dead main thread has none any more."""
    return PROC / str(pid) / "task" / str(_voices[pid]) if pid in _voices else PROC / str(pid)


# -- the table


def table() -> list[Process]:
    """Every process that this pid namespace can see."""
    global _stuck, _threaded, _threads_left
    numbers = (int(name) for name in os.listdir(PROC) if name.isdigit())
    found = [process for process in map(read, numbers) if process is not None]
    _stuck = {process.pid for process in found if process.state == "D"}
    _threaded, _threads_left = {process.pid for process in found if process.threads > 1}, _ALL_THREADS
    return found


# Of the newest table, those that wait in the kernel: in a sick driver they may hold what reading their memory needs,
# and whoever reads their environment, command line or maps hangs as they do. Those whose threads have yet to be looked
# at for one such. And those of the stuck where we hung.
_stuck: set[int] = set()
_threaded: set[int] = set()
_threads_left = _ALL_THREADS
_hung: set[int] = set()
_PATIENCE, _LEAST_PATIENCE = 0.3, 0.05  # where one hangs the next probably does: a hundred must not take half a minute


def memory_file(pid: int, name: str) -> bytes:
    """What is in environ, cmdline or maps of the process; empty when it can't be read, or not without hanging."""
    global _threads_left
    if pid in _threaded and _threads_left > 0:
        states = [state for _, state in threads(pid)]
        _threaded.discard(pid)
        _threads_left -= len(states)
        if "D" in states:
            _stuck.add(pid)
    if pid not in _stuck:
        _hung.discard(pid)
        return _content(pid, name)
    if pid in _hung:
        return b""
    told: list[bytes] = []
    reader = threading.Thread(target=lambda: told.append(_content(pid, name)), daemon=True)
    reader.start()
    reader.join(max(_LEAST_PATIENCE, _PATIENCE / (1 + len(_hung))))
    if not told:
        _hung.add(pid)
    return told[0] if told else b""


def _content(pid: int, name: str) -> bytes:
    try:
        return (_folder(pid) / name).read_bytes()
    except OSError:
        return b""


def is_identity(value: Any) -> bool:
    """Whether a value out of a record is a process's {"pid", "start"}."""
    if not isinstance(value, dict):
        return False
    record = cast("dict[str, Any]", value)
    return type(record.get("pid")) is int and type(record.get("start")) is int


def find(identity: dict[str, Any] | None) -> Process | None:
    """The process of a recorded identity, if it still is the same one; dead but unreaped ones count."""
    if identity is None or not is_identity(identity):
        return None
    process = read(identity["pid"])
    return process if process is not None and process.start == identity["start"] else None


def alive(identity: dict[str, Any] | None) -> bool:
    process = find(identity)
    return process is not None and not process.ended


def boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def age_seconds(process: Process) -> float:
    """Seconds since the process began. /proc/uptime would be wrong in a container: lxcfs makes it start at the
    container's boot, while start times count from the host's."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start / os.sysconf("SC_CLK_TCK")


def environment(pid: int) -> dict[bytes, bytes]:
    """The environment that the process was started with; empty when it can't be read."""
    pairs = (entry.partition(b"=") for entry in memory_file(pid, "environ").split(b"\0") if entry)
    return {key: value for key, _, value in pairs}


def command(pid: int) -> str:
    """The command line for people; [name] where there is none (kernel threads, the dead)."""
    words = memory_file(pid, "cmdline").rstrip(b"\0").split(b"\0")
    if words != [b""]:
        return b" ".join(words).decode("utf-8", "replace")
    try:
        return "[" + (PROC / str(pid) / "comm").read_text(errors="replace").strip() + "]"
    except OSError:
        return ""


def describe(process: Process) -> dict[str, Any]:
    """A process for the user: with the kernel function it waits in when it can't be killed (state D), which it can't
    be either when one of its threads is in it."""
    state, folder = process.state, _folder(process.pid)
    thread = stuck_thread(process.pid) if process.threads > 1 and not process.ended else None
    if thread is not None:
        state, folder = "D", PROC / str(process.pid) / "task" / str(thread)
    try:
        waits_in = (folder / "wchan").read_text().strip("0\n") or None
    except OSError:
        waits_in = None
    words = command(process.pid)[:300] or GONE
    return {**process.identity(), "state": state, "wchan": waits_in, "command": words}


def open_files(pid: int) -> list[str]:
    """Where the process's descriptors point; empty when it can't be looked into."""
    links: list[str] = []
    try:
        folder = _folder(pid) / "fd"
        names = os.listdir(folder)
    except OSError:
        return links
    for name in names:
        try:
            links.append(os.readlink(folder / name))
        except OSError:
            continue  # closed meanwhile
    return links


def device_minors(links: Iterable[str]) -> list[int]:
    """The N of every /dev/nvidiaN among the links; /dev/nvidiactl and /dev/nvidia-uvm have none."""
    found = (_DEVICE.fullmatch(link) for link in links)
    return sorted({int(match.group(1)) for match in found if match})


def comm(pid: int) -> str:
    """The name that the process gives itself, or its program's; empty when it is gone."""
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def program(pid: int) -> str:
    """The file name of its program; empty when it can't be read."""
    try:
        return os.path.basename(os.readlink(_folder(pid) / "exe"))
    except OSError:
        return ""


def send(process: Process, number: int) -> bool:
    """Signals this very process; False when it is gone, also when its pid has a new owner."""
    try:
        handle = os.pidfd_open(process.pid)  # pinned: from here on the pid can't change hands unnoticed
    except ProcessLookupError:
        return False
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            raise
        handle = -1  # an old kernel or Python: the start time alone has to do
    try:
        if find(process.identity()) is None:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(process.pid, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def wait_until(
    condition: Callable[[], bool],
    seconds: float,
    every: float = 0.05,
    on_wait: Callable[[float], None] = lambda left: None,
) -> bool:
    """Whether the condition came true in time; asked at least once. on_wait: told now and then what is left of it."""
    deadline = time.monotonic() + seconds
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        on_wait(left)
        time.sleep(every)
    return True


def kill_all(
    members: Callable[[], list[Process]], seconds: float, on_wait: Callable[[float], None] = lambda left: None
) -> list[Process]:
    """SIGKILL to all members, asked for anew until a scan finds none; what is left after `seconds`."""

    def none_left() -> bool:
        found = members()
        for process in found:
            send(process, signal.SIGKILL)
        return not found

    wait_until(none_left, seconds, on_wait=on_wait)
    return members()
