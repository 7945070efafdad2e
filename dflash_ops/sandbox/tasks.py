"""Tasks: what a node does for somebody, with an id that says who and what, and a log that ends in a verdict.

    UPID:NODE:PID:PSTART:TIME:TYPE:ID:USER:      numbers in hexadecimal
    /var/log/pve/tasks/X/UPID…                   the log, X the last digit of TIME; its last line is the verdict

Runs in the hypervisor. Light: every `pct push` imports it.
"""

import os
import sys
import time

from dflash_ops.sandbox import layout
from dflash_ops.sandbox.processes import ProcessId

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WORKER = f"{layout.SUPPORT}/task-worker"
_UPID = r"UPID:([\w-]+):([0-9A-F]{8}):([0-9A-F]{8,}):([0-9A-F]{8}):([^:\s]+):([^:\s]*):([^:\s]+):"


class Task:
    """One task. pid, pstart: the process that does it; began: seconds since 1970"""

    def __init__(self, node: str, pid: int, pstart: int, began: int, kind: str, id: str, user: str) -> None:
        self.node = node
        self.pid = pid
        self.pstart = pstart
        self.began = began
        self.kind = kind
        self.id = id
        self.user = user

    @classmethod
    def parse(cls, upid: str) -> "Task | None":
        import re

        found = re.fullmatch(_UPID, upid)
        if found is None:
            return None
        node, pid, pstart, began, kind, name, user = found.groups()
        return cls(node, int(pid, 16), int(pstart, 16), int(began, 16), kind, name, user)

    @property
    def upid(self) -> str:
        numbers = f"{self.pid:08X}:{self.pstart:08X}:{self.began:08X}"
        return f"UPID:{self.node}:{numbers}:{self.kind}:{self.id}:{self.user}:"

    @property
    def log(self) -> str:
        return f"{layout.TASKS}/{self.began & 0xF:X}/{self.upid}"

    def make_log_folder(self) -> None:
        os.makedirs(os.path.dirname(self.log), exist_ok=True)

    @property
    def running(self) -> bool:
        return ProcessId(self.pid, self.pstart).alive

    @property
    def verdict(self) -> str:
        """`OK`, `WARNINGS: n` or the error's text, once it does not run any more."""
        import re

        lines = self.lines()
        found = re.fullmatch(r"TASK (OK|WARNINGS: \d+|ERROR: (.*))", lines[-1]) if lines else None
        return "unexpected status" if found is None else found[2] if found[2] is not None else found[1]

    def lines(self) -> list[str]:
        try:
            with open(self.log, errors="replace") as file:
                lines = file.read().split("\n")
        except FileNotFoundError:
            return []
        return lines if lines[-1] else lines[:-1]

    def facts(self) -> "dict[str, Any]":
        """The fields that the API tells of every task."""
        named = {"upid": self.upid, "node": self.node, "pid": self.pid, "pstart": self.pstart}
        return {**named, "starttime": self.began, "type": self.kind, "id": self.id, "user": self.user}


def listed(node: str) -> list[Task]:
    """The node's tasks, newest first."""
    names = [name for _, _, files in os.walk(layout.TASKS) for name in files]
    mine = [task for task in map(Task.parse, names) if task is not None and task.node == node]
    return sorted(mine, key=lambda task: (task.began, os.stat(task.log).st_mtime_ns), reverse=True)


def start(node: str, kind: str, vmid: int, user: str, job: str, options: "dict[str, Any]") -> Task:
    """Begin a task in a process of its own and return at once.

    kind: its type in the id; job: the function of jobs.py that does it
    """
    import json
    import subprocess
    import threading

    process = subprocess.Popen(
        [WORKER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    identity = ProcessId.of(process.pid)
    assert identity is not None and process.stdin is not None
    task = Task(node, process.pid, identity.start, int(time.time()), kind, str(vmid), user)
    task.make_log_folder()
    with open(task.log, "a"):
        pass  # there before anybody can ask for it
    with process.stdin as order:
        order.write(json.dumps({"upid": task.upid, "job": job, "vmid": vmid, "options": options}).encode())
    threading.Thread(target=process.wait, daemon=True).start()  # nobody else reaps it
    return task


def foreground(kind: str, vmid: int, work: "Callable[[], None]") -> None:
    """Do the work as a task of this process: its verdict goes to the task's log, an error also to the caller."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    task = Task(layout.NODE, me.pid, me.start, int(time.time()), kind, str(vmid), "root@pam")
    task.make_log_folder()
    # Opened now: a push goes on inside the container.
    with open(task.log, "a") as log:
        try:
            work()
        except BaseException as error:
            log.write(f"TASK ERROR: {str(error).strip() or type(error).__name__}\n".replace("\n", " ").rstrip() + "\n")
            raise
        log.write("TASK OK\n")


def say(line: str) -> None:
    """A line of the task's log: a worker's stdout."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
