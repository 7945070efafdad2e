"""How long gpu-status takes: one host with two containers, and sixteen hosts that are slow. In the sandbox.

    python benchmarks/gpu_status.py [--rounds 5] [--json]

one host      `dflash-ops gpu-status` as a user runs it, a new process with a new connection each time; and the verb
              over an open connection, as `gpu-status --watch` does it. Two containers are asked too: by pct, whose
              calls take 0.6 s as real ones do, and by lxc-attach; and how many commands that is
16 hosts      `dflash-ops gpu-status --all` of sixteen hosts whose every command takes 2 s to begin, against one of
              them alone. They are one sandbox under sixteen names: their work shares this machine's CPUs

To reach: 0.8 s for one host by pct; 1.5 times one host alone for sixteen.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from dflash_ops import status
from dflash_ops.command import Command, Host
from dflash_ops.inventory import load
from dflash_ops.sandbox import down, up
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell
from dflash_ops.ssh import Link

PCT_SECONDS = 0.6
SLOW_SECONDS = 2.0
HOSTS = 16
# Every shell of a login waits first, as a host under load does.
SLOW_SHELL = f'#!/bin/sh\nsleep {SLOW_SECONDS}\nexec /bin/sh "$@"\n'


def seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def spread(times: list[float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in zip(
        ("median", "least", "most"), (statistics.median(times), min(times), max(times)), strict=True
    )}  # fmt: skip


def ops(inventory: Path, *words: str) -> dict[str, Any]:
    program = [sys.executable, "-m", "dflash_ops", *words, "--json"]
    done = subprocess.run(program, env={**os.environ, "DFLASH_OPS_INVENTORY": str(inventory)}, capture_output=True)
    if done.returncode != 0:
        sys.exit(done.stderr.decode())
    return json.loads(done.stdout)


def commands(act: Callable[[], object]) -> int:
    """How many commands the act asks hosts to run."""
    with mock.patch.object(Link, "start", autospec=True, side_effect=Link.start) as start:
        act()
    return start.call_count


def one_host(state: SandboxState, folder: Path, rounds: int, via: str) -> dict[str, Any]:
    inventory = folder / f"{via}.toml"
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
    whole = [seconds(lambda: ops(inventory, "gpu-status")) for _ in range(rounds)]
    return {"commands": asked, "verb_s": spread(verbs), "command_s": spread(whole)}


def host(name: str, state: SandboxState) -> str:
    lines = {"address": state.host, "user": state.user, "key": str(state.key), "known_hosts": str(state.known_hosts)}
    text = "".join(f'{key} = "{value}"\n' for key, value in lines.items())
    return f"[hosts.{name}]\n{text}port = {state.port}\n"


def many_hosts(state: SandboxState, folder: Path, rounds: int) -> dict[str, Any]:
    root = Host("root", state.host, state.port, state.user, state.key, state.known_hosts)
    install = "cat > /root/slow; chmod 755 /root/slow; sed -i 's,^\\(root:.*:\\)[^:]*$,\\1/root/slow,' /etc/passwd"
    with Shell() as shell:
        shell.run(root, Command(("sh", "-c", install), SLOW_SHELL.encode()), check=True)
    times: dict[int, list[float]] = {1: [], HOSTS: []}
    for count in times:
        text = "".join(
            f'{host(f"h{number}", state)}[containers.c{number}]\nhost = "h{number}"\nvmid = 200\nvia = "pct"\n'
            f'python = "{state.python}"\n'
            for number in range(count)
        )
        (folder / f"{count}.toml").write_text(text)
    for _ in range(rounds):  # in turns, so that both meet the same machine
        for count, taken in times.items():
            taken.append(seconds(lambda count=count: told(ops(folder / f"{count}.toml", "gpu-status", "--all"), count)))
    alone, all_of_them = (statistics.median(taken) for taken in times.values())
    return {"alone_s": spread(times[1]), "all_s": spread(times[HOSTS]), "times_alone": round(all_of_them / alone, 2)}


def told(found: dict[str, Any], count: int) -> None:
    assert [len(it["gpus"]) for it in found["hosts"]] == [2] * count, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    name = f"gpu-status-{os.getpid()}"
    before = os.getloadavg()[0]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            state = up(name, owner=os.getpid(), pct_delay=PCT_SECONDS)
            for via in ("pct", "lxc-attach"):
                found[via] = one_host(state, Path(folder), options.rounds, via)
            found[f"{HOSTS}_hosts"] = many_hosts(state, Path(folder), options.rounds)
        finally:
            down(name)
    found["machine"] = {"cpus": len(os.sched_getaffinity(0)), "load_before": before, "load_after": os.getloadavg()[0]}
    if options.json:
        print(json.dumps(found))
        return
    for via in ("pct", "lxc-attach"):
        verb, whole = (_words(found[via][key]) for key in ("verb_s", "command_s"))
        print(f"one host by {via}: {verb} over an open connection, {found[via]['commands']} commands; {whole} in all")
    slow = found[f"{HOSTS}_hosts"]
    print(f"{HOSTS} hosts of {SLOW_SECONDS} s: {_words(slow['all_s'])}; one alone {_words(slow['alone_s'])}; "
          f"{slow['times_alone']} times")  # fmt: skip
    print("machine: {cpus} CPUs, load {load_before:.1f} before, {load_after:.1f} after".format(**found["machine"]))


def _words(times: dict[str, float]) -> str:
    return f"{times['median']:.2f} s ({times['least']:.2f} to {times['most']:.2f})"


if __name__ == "__main__":
    main()
