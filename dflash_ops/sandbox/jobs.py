"""What tasks do with a container, and the program that does one: it reads its order from stdin, and its stdout is the
task's log. pct and pvesh do the same in the foreground. Runs in the hypervisor.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

from dflash_ops.sandbox import container, containers, faults, kernel, layout, snapshots
from dflash_ops.sandbox.guest_config import Config
from dflash_ops.sandbox.perl import ConfigLock, Failure
from dflash_ops.sandbox.processes import ProcessId
from dflash_ops.sandbox.tasks import Task, say


def main() -> NoReturn:
    """The program task-worker: {"upid", "job", "vmid", "options"} on stdin."""
    text = sys.stdin.read()
    order = json.loads(text)
    task = Task.parse(order["upid"])
    assert task is not None
    if task.node != layout.NODE:
        _move_to(task.node, text)
    log = os.open(task.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
    os.dup2(log, 1)
    os.dup2(log, 2)
    wrong, event = faults.read(), f"{task.kind} {task.id}"
    try:
        if wrong.hangs and re.search(wrong.hangs, event):
            say("hanging, as it was told to")
            while True:
                time.sleep(60)
        globals()[order["job"]](order["vmid"], **order["options"])
    except (Failure, container.StartError, OSError) as error:
        say(f"TASK ERROR: {error}".rstrip("\n").replace("\n", " "))
        sys.exit(1)
    warns = bool(wrong.warns and re.search(wrong.warns, event))
    if warns:
        say("WARN: Systemd 257 detected. You may need to enable nesting.")
    say("TASK WARNINGS: 1" if warns else "TASK OK")
    sys.exit(0)


def _move_to(node: str, order: str) -> NoReturn:
    """Become the same program on another node of the cluster: the host's name makes the node."""
    kernel.unshare(kernel.CLONE_NEWUTS)
    kernel.set_hostname(node)
    reader, writer = os.pipe()
    os.write(writer, order.encode())
    os.close(writer)
    os.dup2(reader, 0)
    os.execv(sys.orig_argv[0], sys.orig_argv)


def start(vmid: int) -> None:
    """Start it, as `pct start` does."""
    with ConfigLock(vmid):
        config = Config.read(vmid)
        if lock := config.value("lock"):
            raise Failure(f"CT is locked ({lock})")
        for key, value in config.pairs():
            device = value.partition(",")[0].removeprefix("path=")
            if key.startswith("dev") and key[3:].isdigit() and not Path(device).exists():
                raise Failure(f"Device {device} does not exist")
        try:
            container.start(vmid)
        except (container.StartError, OSError) as error:
            raise Failure(f"startup for container '{vmid}' failed: {error}") from error


def stop(vmid: int) -> None:
    """Kill it."""
    with ConfigLock(vmid):
        _unlocked(vmid)
        container.stop(vmid)


def shutdown(vmid: int, timeout: float = 60, force: bool = False) -> None:
    """Ask it to end, and kill it after `timeout` seconds when `force`."""
    with ConfigLock(vmid):
        _unlocked(vmid)
        if not container.shutdown(vmid, timeout):
            if not force:
                raise Failure("container did not stop")
            container.stop(vmid)


def reboot(vmid: int, timeout: float = 60) -> None:
    """Ask it to end, then start it."""
    shutdown(vmid, timeout)
    start(vmid)


def snapshot(vmid: int, snapname: str, description: str = "") -> None:
    with ConfigLock(vmid):
        snapshots.create(vmid, snapname, description)


def rollback(vmid: int, snapname: str, restart: bool = False) -> None:
    """Go back to a snapshot. A running container is killed for it, and started again only when asked to."""
    with ConfigLock(vmid):
        _unlocked(vmid)
        if snapname not in Config.read(vmid).sections:
            raise Failure(f"snapshot '{snapname}' does not exist")
        container.stop(vmid)
        snapshots.rollback(vmid, snapname)
    if restart:
        start(vmid)


def delsnapshot(vmid: int, snapname: str) -> None:
    with ConfigLock(vmid):
        snapshots.delete(vmid, snapname)


def migrate(vmid: int, target: str, restart: bool = False) -> None:
    """Move it to another node; a running one is ended and started again there, when `restart`."""
    was_running = containers.init_of(vmid) is not None
    if was_running and not restart:
        raise Failure("lxc live migration is currently not implemented")
    say(f"starting migration of CT {vmid} to node '{target}' (127.0.0.1)")
    if was_running:
        shutdown(vmid, 60, force=True)
    with ConfigLock(vmid):
        _unlocked(vmid)
        Path(layout.configs(target)).mkdir(parents=True, exist_ok=True)
        Path(layout.config_file(vmid, layout.NODE)).rename(layout.config_file(vmid, target))
    if was_running:
        say(f"start container on target node '{target}'")
        child = os.fork()
        if child == 0:
            _start_there(vmid, target)
        os.waitpid(child, 0)
        if containers.init_of(vmid, target) is None:
            raise Failure(f"the container did not start on node '{target}'")
    say("migration finished successfully")


def _start_there(vmid: int, node: str) -> NoReturn:
    """In a child: become a task of the other node that starts the container."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    task = Task(node, me.pid, me.start, int(time.time()), "vzstart", str(vmid), "root@pam")
    task.make_log_folder()
    _move_to(node, json.dumps({"upid": task.upid, "job": "start", "vmid": vmid, "options": {}}))


def _unlocked(vmid: int) -> None:
    if lock := Config.read(vmid).value("lock"):
        raise Failure(f"CT is locked ({lock})")
