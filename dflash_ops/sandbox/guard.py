"""The process outside: starts the hypervisor's init, waits for its end or the owner's, and clears up after it.

The init dies with the guard (by the parent-death signal), and the guard ends with the init; so whichever is killed,
no process stays. What the guard's own death leaves is its folder and an empty cgroup: remains.py removes them later.
"""

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from dflash_ops.sandbox import cgroups, hypervisor, kernel, remains, server, state
from dflash_ops.sandbox.processes import ProcessId, boot_id
from dflash_ops.sandbox.settings import Settings
from dflash_ops.sandbox.templates import CONTAINERS

OWNER_POLL_SECONDS = 0.5  # only where the kernel has no pidfd
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(lock: int) -> NoReturn:
    """Run a sandbox in a process of its own: settings as JSON on stdin, one line of JSON on stdout when it is ready
    ({"port": …}) or has failed ({"error": …}), then silence until the end.

    lock: the descriptor of the caller's lock; until it is closed here too, no other `up` or `down` begins.
    """
    settings = Settings.from_json(sys.stdin.read())
    if os.fork():
        os._exit(0)  # so that the guard is nobody's child: whoever called `up` need not wait for it
    os.setsid()
    _forget_ignored_signals()
    folder = Path(settings.folder)
    me = _identity(os.getpid())
    remains.note_processes(folder, me)
    os.close(lock)  # from here on, whoever comes next knows whom to end
    group = cgroups.place_for(settings.name)
    (folder / remains.CGROUP).write_text(group or "")  # before there is one: we may be killed between
    group = cgroups.create(group)
    keys = server.make_keys(folder)
    host_key = server.load(keys.host_key)  # now: the folder does not show in the hypervisor
    reader, writer = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    kernel.unshare(kernel.CLONE_NEWPID)
    init = os.fork()
    if init == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.close(reader)
        hypervisor.run(settings, group, lambda port: server.serve(keys, host_key, port), writer)
    os.close(writer)
    try:
        remains.note_processes(folder, me, _identity(init))
        answer = json.loads(os.read(reader, 1 << 16) or b'{"error": "the hypervisor ended while it started"}')
        told = {name: answer[name] for name in ("port", "error") if name in answer}
        print(json.dumps(told), flush=True)  # fails when `up` has been killed: then the sandbox ends before it shows
        if "port" in answer:
            _write_state(settings, keys, init, answer)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # `up` reads to the end of our stdout
        if "port" in answer:
            _wait(init, settings)
    finally:
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)
        remains.clear(folder)
    os._exit(0)


def _forget_ignored_signals() -> None:
    """A caller in a shell's background or under nohup ignores SIGINT or SIGHUP; sessions must not inherit that."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _identity(pid: int) -> ProcessId:
    identity = ProcessId.of(pid)
    if identity is None:
        raise RuntimeError("the hypervisor ended while it started")
    return identity


def _wake(_signal: int, _frame: object) -> None:
    """A handler only so that the signal writes to the wake-up pipe."""


def _write_state(settings: Settings, keys: "server.Keys", init: int, facts: dict[str, Any]) -> None:
    me, child = _identity(os.getpid()), _identity(init)
    keys.write_known_hosts(*facts["nodes"].values())
    folder = Path(settings.folder)
    authority, tokens = folder / "pve-root-ca.pem", folder / "tokens"
    authority.write_text(facts["api"]["ca"])
    tokens.mkdir(mode=0o700)
    for name, secret in facts["api"]["tokens"].items():
        (tokens / name).touch(0o600)
        (tokens / name).write_text(secret)
    containers: dict[int, state.ContainerState] = {
        template.vmid: {
            "hostname": template.hostname,
            "unprivileged": template.unprivileged,
            "status": "running" if template.running else "stopped",
        }
        for template in CONTAINERS
    }
    state.write(
        state.SandboxState(
            name=settings.name,
            pid=me.pid,
            start=me.start,
            init_pid=child.pid,
            init_start=child.start,
            boot_id=boot_id(),
            host="127.0.0.1",
            port=facts["port"],
            user="root",
            key=keys.client_key,
            known_hosts=keys.known_hosts,
            folder=folder,
            python=settings.python,
            containers=containers,
            nodes=facts["nodes"],
            api_port=facts["api"]["port"],
            api_ca=authority,
            api_tokens=tokens,
        )
    )


class Watch:
    """Says whether a process has ended, for use in a `select.poll` loop where the kernel has pidfds.

    `descriptor` is None where it has none (some user-space kernels): then ask `ended` now and then.
    """

    def __init__(self, identity: ProcessId) -> None:
        self.identity = identity
        self.descriptor: int | None
        try:
            self.descriptor = os.pidfd_open(identity.pid)
        except OSError:
            self.descriptor = None

    @property
    def ended(self) -> bool:
        if self.descriptor is not None and select.select([self.descriptor], [], [], 0)[0]:
            return True
        return not self.identity.alive


def _wait(init: int, settings: Settings) -> None:
    """Return when the init or the owner has ended, or a signal asks us to end."""
    watches = [Watch(identity) for identity in [ProcessId.of(init)] if identity]
    if settings.owner is not None:
        watches.append(Watch(ProcessId(*settings.owner)))
    poll = select.poll()
    for watch in watches:
        if watch.descriptor is not None:
            poll.register(watch.descriptor, select.POLLIN)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    for number in _ENDING:
        signal.signal(number, _wake)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    poll.register(wake_reader, select.POLLIN)
    sightless = any(watch.descriptor is None for watch in watches)
    while True:
        events = poll.poll(OWNER_POLL_SECONDS * 1000 if sightless else None)
        if any(descriptor == wake_reader for descriptor, _ in events) or any(watch.ended for watch in watches):
            return
