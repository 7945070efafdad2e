"""How long gpu-status takes: one host with two containers, and sixteen hosts that are slow. In the sandbox.

    python benchmarks/gpu_status.py [--rounds 5] [--look] [--json]

one host      `dflash-ops gpu-status` as a user runs it, a new process with a new connection each time; and the verb
              over an open connection, as `gpu-status --watch` does it. Two containers are asked too: by pct, and by
              lxc-attach; and how many commands that is
16 hosts      `dflash-ops gpu-status --all` of sixteen hosts whose every command takes 2 s to begin, against one of
              them alone, and what CPU time the client and the hosts take for it

A pct call takes 0.6 s as real ones do, with what the look-alike itself needs for one: that is measured first.

The sixteen hosts are one sandbox under sixteen names. What they answer, and how long they take for it, is taken down
once, of the same host when it is not slow; then it is said again to whoever asks, over real connections and after real
waits: sixteen hypervisors on a few CPUs would show what they take, and not whether all are asked at once. With --look
they do look at themselves each time.

To reach: 0.8 s for one host by pct; 1.5 times one host alone for sixteen.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from dflash_ops import gpus, status
from dflash_ops.command import Command, Container, Host
from dflash_ops.inventory import load
from dflash_ops.sandbox import down, layout, up
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell
from dflash_ops.ssh import Link

PCT_SECONDS = 0.6
SLOW_SECONDS = 2.0
HOSTS = 16
# Every shell of a login waits first, as a host under load does.
SLOW_SHELL = f'#!/bin/sh\nsleep {SLOW_SECONDS}\nPATH=/root/said:$PATH\nexport PATH\nexec /bin/sh "$@"\n'
# Takes the whole question, and says what was said to it once.
SAYS_AGAIN = "#!/bin/sh\ncat > /dev/null\nsleep {seconds:.3f}\ncat /root/said/{program}.out\n"
WRITE = 'mkdir -p "${1%/*}"; cat > "$1"; chmod 755 "$1"'


def seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def spread(times: list[float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in zip(
        ("median", "least", "most"), (statistics.median(times), min(times), max(times)), strict=True
    )}  # fmt: skip


@dataclass(frozen=True)
class Client:
    """`dflash-ops` in processes of its own, with the byte code that an installed one has."""

    folder: Path

    def __call__(self, inventory: Path, *words: str) -> dict[str, Any]:
        program = [sys.executable, "-m", "dflash_ops", *words, "--json"]
        own = {"DFLASH_OPS_INVENTORY": str(inventory), "PYTHONPYCACHEPREFIX": str(self.folder / "pycache")}
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run(program, env={**environment, **own}, capture_output=True)
        if done.returncode != 0:
            sys.exit(done.stderr.decode())
        return json.loads(done.stdout)


def commands(act: Callable[[], object]) -> int:
    """How many commands the act asks hosts to run."""
    with mock.patch.object(Link, "start", autospec=True, side_effect=Link.start) as start:
        act()
    return start.call_count


def root_of(state: SandboxState) -> Host:
    return Host("root", state.host, state.port, state.user, state.key, state.known_hosts)


def write(shell: Shell, host: Host, path: str, text: bytes) -> None:
    shell.run(host, Command(("sh", "-c", WRITE, "sh", path), text), check=True)


def set_pct(state: SandboxState, rounds: int) -> float:
    """Lets a whole call of pct take PCT_SECONDS; gives what it does take, the connection's own time left out."""
    root = root_of(state)
    places = (Container(root, 200, via="pct"), root)
    with Shell() as shell:

        def call(place: Container | Host) -> None:
            shell.run(place, Command(("true",)), check=True)

        def taken() -> float:
            times = [[seconds(partial(call, place)) for place in places] for _ in range(rounds + 2)]
            return statistics.median(inside - outside for inside, outside in times)

        call(places[0])
        write(shell, root, str(layout.PCT_DELAY), f"{PCT_SECONDS - (taken() - PCT_SECONDS):.4f}".encode())
        return round(taken(), 3)


def one_host(state: SandboxState, client: Client, rounds: int, via: str) -> dict[str, Any]:
    inventory = client.folder / f"{via}.toml"
    text = f'default = "a"\n{host("box", state)}'
    for name, vmid in (("a", 200), ("b", 201)):
        text += f'[containers.{name}]\nhost = "box"\nvmid = {vmid}\npython = "{state.python}"\nvia = "{via}"\n'
    inventory.write_text(text)
    book = load(inventory)
    own, other = book.container("a"), book.container("b")
    with Shell() as shell:

        def verb() -> None:
            seen = status.gpu_status(shell, own.host, [own, other], own)
            assert not seen.problems, seen.problems

        verb()
        asked = commands(verb)
        verbs = [seconds(verb) for _ in range(rounds)]
    client(inventory, "gpu-status")  # which leaves byte code
    whole = [seconds(lambda: client(inventory, "gpu-status")) for _ in range(rounds)]
    return {"commands": asked, "verb_s": spread(verbs), "command_s": spread(whole)}


def host(name: str, state: SandboxState) -> str:
    lines = {"address": state.host, "user": state.user, "key": str(state.key), "known_hosts": str(state.known_hosts)}
    text = "".join(f'{key} = "{value}"\n' for key, value in lines.items())
    return f"[hosts.{name}]\n{text}port = {state.port}\n"


def slow_down(state: SandboxState, look: bool) -> None:
    """Makes the hosts slow and, unless they are to look each time, has them say again what they say now."""
    root = root_of(state)
    container = Container(root, 200, python=state.python, via="pct")
    with Shell() as shell:
        said = (
            () if look else (("python3", root, gpus.host_query()), ("pct", container, gpus.container_query(container)))
        )
        for program, place, query in said:
            shell.ask(place, query)
            begun = time.perf_counter()
            answer = shell.run(place, query.command, check=True)
            took = time.perf_counter() - begun
            write(shell, root, f"/root/said/{program}.out", answer.out)
            write(shell, root, f"/root/said/{program}", SAYS_AGAIN.format(seconds=took, program=program).encode())
        write(shell, root, "/root/slow", SLOW_SHELL.encode())
        shell.run(root, Command(("sed", "-i", r"s,^\(root:.*:\)[^:]*$,\1/root/slow,", "/etc/passwd")), check=True)


@dataclass
class Taken:
    """Of some rounds: seconds from begin to end, and CPU seconds of the client and of the hosts."""

    whole: list[float] = field(default_factory=list[float])
    client: list[float] = field(default_factory=list[float])
    hosts: list[float] = field(default_factory=list[float])

    def to_json(self) -> dict[str, Any]:
        return {"s": spread(self.whole), "client_cpu_s": spread(self.client)} | (
            {"hosts_cpu_s": spread(self.hosts)} if self.hosts else {}
        )


def many_hosts(state: SandboxState, client: Client, rounds: int, look: bool) -> dict[str, Any]:
    slow_down(state, look)
    found = {1: Taken(), HOSTS: Taken()}
    for count in found:
        text = "".join(
            f'{host(f"h{number}", state)}[containers.c{number}]\nhost = "h{number}"\nvmid = 200\nvia = "pct"\n'
            f'python = "{state.python}"\n'
            for number in range(count)
        )
        (client.folder / f"{count}.toml").write_text(text)
    for _ in range(rounds):  # in turns, so that both meet the same machine
        for count, taken in found.items():
            inventory = client.folder / f"{count}.toml"
            ours, theirs = cpu_of_children(), cpu_of_sandbox(state)
            taken.whole.append(seconds(partial(ask_all, client, inventory, count)))
            taken.client.append(cpu_of_children() - ours)
            if theirs is not None and (now := cpu_of_sandbox(state)) is not None:
                taken.hosts.append(now - theirs)
    alone, all_of_them = (statistics.median(taken.whole) for taken in found.values())
    return {
        "look": look,
        "alone": found[1].to_json(),
        "all": found[HOSTS].to_json(),
        "times_alone": round(all_of_them / alone, 2),
    }


def ask_all(client: Client, inventory: Path, count: int) -> None:
    found = client(inventory, "gpu-status", "--all")
    assert [len(it["gpus"]) for it in found["hosts"]] == [2] * count, found
    assert not any(it["problems"] for it in found["hosts"]), found


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of_sandbox(state: SandboxState) -> float | None:
    """What its control group has used; None where it could not be given one."""
    mounts = [row.split(" ")[4] for row in Path("/proc/self/mountinfo").read_text().split("\n") if " - cgroup2 " in row]
    rows = Path(f"/proc/{state.init_pid}/cgroup").read_text().split("\n")
    own = [row[3:] for row in rows if row.startswith("0::") and "/dflash-sandbox-" in row]
    if not mounts or not own:
        return None
    words = Path(mounts[0] + own[0], "cpu.stat").read_text().split()
    return int(words[words.index("usage_usec") + 1]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--look", action="store_true", help="let the sixteen hosts look at themselves each time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    name = f"gpu-status-{os.getpid()}"
    before = os.getloadavg()[0]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            state = up(name, owner=os.getpid(), pct_delay=PCT_SECONDS)
            client = Client(Path(folder))
            found["pct_s"] = set_pct(state, options.rounds)
            for via in ("pct", "lxc-attach"):
                found[via] = one_host(state, client, options.rounds, via)
            found[f"{HOSTS}_hosts"] = many_hosts(state, client, options.rounds, options.look)
        finally:
            down(name)
    found["machine"] = {"cpus": len(os.sched_getaffinity(0)), "load_before": before, "load_after": os.getloadavg()[0]}
    if options.json:
        print(json.dumps(found))
        return
    print(f"a pct call: {found['pct_s']:.2f} s")
    for via in ("pct", "lxc-attach"):
        verb, whole = (_words(found[via][key]) for key in ("verb_s", "command_s"))
        print(f"one host by {via}: {verb} over an open connection, {found[via]['commands']} commands; {whole} in all")
    slow = found[f"{HOSTS}_hosts"]
    print(f"{HOSTS} hosts of {SLOW_SECONDS} s: {_words(slow['all']['s'])}; one alone {_words(slow['alone']['s'])}; "
          f"{slow['times_alone']} times")  # fmt: skip
    for which, count in (("alone", 1), ("all", HOSTS)):
        used = {
            key: f"{slow[which][key]['median']:.2f} s" for key in ("client_cpu_s", "hosts_cpu_s") if key in slow[which]
        }
        print(f"  CPU time for {count}: client {used['client_cpu_s']}, hosts {used.get('hosts_cpu_s', 'unknown')}")
    print("machine: {cpus} CPUs, load {load_before:.1f} before, {load_after:.1f} after".format(**found["machine"]))


def _words(times: dict[str, float]) -> str:
    return f"{times['median']:.2f} s ({times['least']:.2f} to {times['most']:.2f})"


if __name__ == "__main__":
    main()
