"""How long deploys take, in a sandbox whose pct calls take 0.6 s as real ones do; the figures of README's table.

    python benchmarks/ops.py [--rounds 5] [--json]

Each figure is the whole command as a user runs it, a new process with a new connection each time; the median of the
rounds, with the least and the most. It is measured beside what OpenSSH's own programs take for the same files:

one file     `dflash-ops deploy` of a tree of 300 files in which one has changed, against `scp` of that file to the host
             and `ssh` host `pct push` (which check nothing)
elsewhere    the same from a machine that has never deployed to the container, and so can't begin its push ahead
300 files    `dflash-ops deploy` of 300 new files, against one `pct push` for each, one of which is timed
unchanged    `dflash-ops deploy` of 300 files that the container has: how many commands the host is asked for
rollback     `dflash-ops rollback` between two releases of 300 files, each checked, through lxc-attach
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_ops.sandbox import down, up
from dflash_ops.sandbox.state import SandboxState

FILES, BYTES = 300, 6_000
PCT_SECONDS = 0.6


class Bench:
    def __init__(self, state: SandboxState, folder: Path) -> None:
        self.state, self.folder, self.source = state, folder, folder / "source"
        self.host = f"{state.user}@{state.host}"
        self.random = random.Random(0)
        self.inventory = folder / "dflash-ops.toml"
        self.inventory.write_text(
            f'[hosts.box]\naddress = "{state.host}"\nport = {state.port}\nuser = "{state.user}"\nkey = "{state.key}"\n'
            f'known_hosts = "{state.known_hosts}"\n[containers.trainer]\nhost = "box"\nvmid = 200\n'
            f'python = "{state.python}"\n'
        )
        self.write(range(FILES))

    def write(self, numbers: range) -> None:
        """New content for these files."""
        for number in numbers:
            place = self.source / f"part{number % 10}" / f"file{number}.py"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(self.random.randbytes(BYTES))

    def ops(self, *words: str) -> dict[str, Any]:
        program = Path(sys.executable).with_name("dflash-ops")
        environment = {**os.environ, "DFLASH_OPS_INVENTORY": str(self.inventory)}
        done = subprocess.run([program, *words, "--json"], env=environment, capture_output=True)
        if done.returncode != 0:
            sys.exit(done.stderr.decode())
        return json.loads(done.stdout)

    def deploy(self) -> dict[str, Any]:
        return self.ops("deploy", str(self.source))

    def deploy_from_elsewhere(self) -> None:
        """As from a machine that remembers nothing of the container."""
        own = os.environ["XDG_CACHE_HOME"]
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=self.folder)
        try:
            self.deploy()
        finally:
            os.environ["XDG_CACHE_HOME"] = own

    def openssh(self, program: str, *words: str) -> None:
        port = "-P" if program == "scp" else "-p"
        options = ["-q", "-o", f"UserKnownHostsFile={self.state.known_hosts}", "-o", "BatchMode=yes", "-F", "none"]
        subprocess.run([program, *options, "-i", str(self.state.key), port, str(self.state.port), *words], check=True)

    def scp_and_push(self) -> None:
        """One file, as one would without us."""
        self.openssh("scp", str(self.source / "part0" / "file0.py"), f"{self.host}:/tmp/one")
        self.push()

    def push(self) -> None:
        self.openssh("ssh", self.host, "pct push 200 /tmp/one /tmp/one")


def seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def commands(act: Callable[[], object]) -> list[str]:
    """What the act asks a host to run, and whether it was a pct. In this process, through the library."""
    from dflash_ops import ssh

    asked: list[bytes] = []
    start = ssh.Link.start

    def noted(link: ssh.Link, line: bytes, **rest: Any) -> ssh.RemoteProcess:
        asked.append(line)
        return start(link, line, **rest)

    ssh.Link.start = noted
    try:
        act()
    finally:
        ssh.Link.start = start
    return ["pct" if b"pct " in line else "lxc-attach" if b"lxc-attach" in line else "host" for line in asked]


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    from dflash_ops.deploy import deploy
    from dflash_ops.inventory import load
    from dflash_ops.shell import Shell
    from dflash_ops.source import Source

    first = bench.deploy()["release"]
    one: list[float] = []
    elsewhere: list[float] = []
    by_hand: list[float] = []
    for _ in range(rounds):  # in turns, so that both meet the same machine
        bench.write(range(1))
        one.append(seconds(bench.deploy))
        bench.write(range(1))
        elsewhere.append(seconds(bench.deploy_from_elsewhere))
        by_hand.append(seconds(bench.scp_and_push))
    many: list[float] = []
    pushes: list[float] = []
    for _ in range(rounds):
        bench.write(range(FILES))
        many.append(seconds(bench.deploy))
        pushes.append(seconds(bench.push))
    with Shell() as shell:
        asked = commands(lambda: deploy(shell, load(bench.inventory).container(), Source(bench.source)))
    unchanged = [seconds(bench.deploy) for _ in range(rounds)]
    second = bench.deploy()["release"]
    back: list[float] = []
    for number in range(2 * rounds):
        wanted = (first, second)[number % 2]
        back.append(seconds(lambda wanted=wanted: bench.ops("rollback", wanted)))
    return {
        "one_file_s": spread(one),
        "one_file_elsewhere_s": spread(elsewhere),
        "scp_and_pct_push_s": spread(by_hand),
        "one_file_more_s": statistics.median(one) - statistics.median(by_hand),
        "files_300_s": spread(many),
        "pct_push_s": spread(pushes),
        "files_300_times_faster": FILES * statistics.median(pushes) / statistics.median(many),
        "unchanged_300_s": spread(unchanged),
        "unchanged_300_commands": asked,
        "rollback_300_s": spread(back),
    }


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    name = f"bench-{os.getpid()}"
    folder = Path(tempfile.mkdtemp())
    load_before = os.getloadavg()[0]
    try:
        bench = Bench(up(name, owner=os.getpid(), pct_delay=PCT_SECONDS), folder)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        found = measure(bench, options.rounds)
    finally:
        down(name)
        shutil.rmtree(folder)
    found["machine"] = {
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    if options.json:
        print(json.dumps(found))
        return

    def told(key: str) -> str:
        times = found[key]
        return f"{times['median']:.2f} s ({times['least']:.2f} to {times['most']:.2f})"

    asked = ", ".join(found["unchanged_300_commands"])
    print(f"one file of {FILES}:     {told('one_file_s')}; scp and ssh pct push: {told('scp_and_pct_push_s')}")
    print(f"                     {found['one_file_more_s']:+.2f} s (to reach: at most +0.25)")
    print(f"    from elsewhere:  {told('one_file_elsewhere_s')}")
    print(f"{FILES} new files:       {told('files_300_s')}; one pct push: {told('pct_push_s')}")
    print(f"                     {found['files_300_times_faster']:.0f} times faster (to reach: at least 20)")
    print(f"{FILES} unchanged:       {told('unchanged_300_s')}; commands: {asked} (to reach: one, and no pct)")
    print(f"rollback of {FILES}:     {told('rollback_300_s')} (to reach: under 0.50)")
    machine = found["machine"]
    print(
        f"machine: {machine['cpus']} CPUs, load {machine['load_before']:.1f} before, {machine['load_after']:.1f} after"
    )


if __name__ == "__main__":
    main()
