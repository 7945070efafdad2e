"""How `train logs -f` and `train list` keep up, in a sandbox whose pct calls take 0.6 s as real ones do.

    python benchmarks/logs.py [--seconds 60] [--rounds 5] [--json]

follow   a trainer writes 10 MB/s, each line with the time at which it was written; how old lines are when `logs -f` has
         them on its stdout, how much of its memory grew after the first 5 s, and what the writing itself reached
list     the whole `train list` of 1,000 runs, a new process with a new connection each time
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash_ops.command import Command
from dflash_ops.inventory import load
from dflash_ops.sandbox import down, up
from dflash_ops.shell import Shell

PCT_SECONDS = 0.6
BYTES_PER_SECOND = 10_000_000
LINE_BYTES, LINES_AT_ONCE = 1000, 100

TRAINER = f"""
import os, signal, sys, time
if sys.argv[1] == "check":
    sys.exit(0)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
began, sent = time.monotonic(), 0
while not asked:
    line = b"%.6f " % time.time()
    data = (line + b"x" * ({LINE_BYTES} - len(line) - 1) + b"\\n") * {LINES_AT_ONCE}
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]
    sent += len(data)
    time.sleep(max(0.0, began + sent / {BYTES_PER_SECOND} - time.monotonic()))
"""

RUNS = """
import json, sys
from pathlib import Path
words = "step 100/100 loss 3.4412 accept 1.22 lr 1.0e-04 12345 tok/s"
for number in range(1000):
    folder = Path(sys.argv[1], "runs", f"run-20261129-12{number // 60 % 60:02d}{number % 60:02d}-{number:04x}")
    (folder / "checkpoints" / "step-00000100").mkdir(parents=True)
    def write(name, **record):
        (folder / name).write_text(json.dumps({"schema_version": 1, **record}))
    moment = "2026-11-29T12:00:00Z"
    write("run.json", release="20261129-120000-abc-0123abcd", created_at=moment, gpus=[0], command=["x"] * 20)
    write("state.json", boot_id="an earlier one")
    write("status.json", state="finished", step=100, total_steps=100, loss=3.4412, updated_at=moment)
    write("exit.json", code=0, ended_at=moment, seconds=3.0, stopped=False, last_lines=[words] * 50)
    (folder / "log").write_text(words)
"""


class Bench:
    def __init__(self, sandbox: str, folder: Path) -> None:
        self.folder, self.inventory = folder, folder / "dflash-ops.toml"
        self.inventory.write_text(
            f'[hosts.box]\nsandbox = "{sandbox}"\n[containers.trainer]\nhost = "box"\nvmid = 200\npython = "sandbox"\n'
            "env_check = false\n"
        )
        self.environment = {**os.environ, "DFLASH_OPS_INVENTORY": str(self.inventory)}
        self.container = load(self.inventory).container()

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dflash_ops", *words]

    def ops(self, *words: str) -> bytes:
        done = subprocess.run(self.words(*words), env=self.environment, capture_output=True)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: {done.stderr.decode()}")
        return done.stdout

    def start(self) -> None:
        package = self.folder / "source" / "trainer"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(TRAINER)
        (self.folder / "c.toml").touch()
        self.ops("deploy", str(self.folder / "source"))
        self.ops("train", "start", str(self.folder / "c.toml"), "--name", "fast", "--gpus", "none")

    def follow(self, seconds: float) -> dict[str, Any]:
        """Reads what `logs -f` prints, as quickly as it comes."""
        words = self.words("train", "logs", "-f", "-n", "0", "fast")
        ages: list[float] = []
        count, settled_kib, held = 0, 0, b""
        with subprocess.Popen(words, env=self.environment, stdout=subprocess.PIPE) as follower:
            assert follower.stdout is not None
            began = time.monotonic()
            while time.monotonic() - began < seconds + 5:
                data = os.read(follower.stdout.fileno(), 1 << 20)
                if not data:
                    sys.exit("logs -f ended")
                line = (held + data)[-3 * LINE_BYTES :].split(b"\n")[-2]
                held = data[-3 * LINE_BYTES :]
                if time.monotonic() - began > 5:
                    settled_kib = settled_kib or _rss_kib(follower.pid)
                    count += len(data)
                    ages.append(time.time() - float(line.split(b" ")[0]))
            grown = _rss_kib(follower.pid) - settled_kib
            follower.terminate()
        self.ops("train", "stop", "fast")
        ages.sort()
        return {
            "megabytes_per_s": count / seconds / 1e6,
            "age_s": {"median": statistics.median(ages), "p99": ages[int(len(ages) * 0.99)], "most": ages[-1]},
            "rss_mib": settled_kib / 1024,
            "grown_mib": grown / 1024,
        }

    def list(self, rounds: int) -> dict[str, float]:
        with Shell() as shell:
            made = Command((self.container.python, "-c", RUNS, self.container.path))
            shell.run(self.container, made, check=True)
        times: list[float] = []
        for _ in range(rounds):
            began = time.monotonic()
            shown = self.ops("train", "list")
            times.append(time.monotonic() - began)
            assert shown.count(b"run-2026") == 1000
        return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def _rss_kib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    name = f"bench-{os.getpid()}"
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        up(name, owner=os.getpid(), pct_delay=PCT_SECONDS)
        try:
            bench = Bench(name, Path(folder))
            listed = bench.list(options.rounds)
            bench.start()
            followed = bench.follow(options.seconds)
        finally:
            down(name)
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    if options.json:
        print(json.dumps({"list_1000_s": listed, "follow": followed, "machine": machine}))
        return
    age = followed["age_s"]
    print(f"list of 1,000 runs: {listed['median']:.2f} s ({listed['least']:.2f} to {listed['most']:.2f})")
    print(
        f"logs -f of {BYTES_PER_SECOND / 1e6:.0f} MB/s for {options.seconds:.0f} s: "
        f"{followed['megabytes_per_s']:.1f} MB/s, "
        f"lines {age['median']:.2f} s old (p99 {age['p99']:.2f}, most {age['most']:.2f}), "
        f"memory {followed['rss_mib']:.0f} MiB, grown by {followed['grown_mib']:.1f}"
    )
    print(
        f"machine: {machine['cpus']} CPUs, load {machine['load_before']:.1f} before, {machine['load_after']:.1f} after"
    )


if __name__ == "__main__":
    main()
