"""Whether gpu-status and `gpu free` tell and do the truth on a machine with a GPU: real CUDA processes in the sandbox.

    python benchmarks/gpu_truth.py [--rounds 3] [--out FOLDER]

Each round starts, in container 200, its neighbour 201 and on the host, processes that take memory by CUDA's driver
API (libcuda alone, no torch): a living run, a stranger, a neighbour's, a host service; then what earlier runs leave:
a child alone after its parent's SIGKILL (1536 MiB), a double fork, a trainer with three forked workers, one with a
zombie. It compares gpu-status with what nvidia-smi says, row by row, and every process with whose it is; has `gpu free`
end the earlier runs; and compares the memory with what it was before them. Beforehand: whether a start's locks name
the GPUs that nvidia-smi names. Without a GPU the sandbox's fake ones serve, which proves this script only.

--out keeps what nvidia-smi, the driver's table, gpu-status and doctor said, and on a machine with a GPU the samples of
tests/samples/record.py (FOLDER/samples): one run is all that such a machine is needed for. So a part that fails is told
in "wrong" and the others go on; result.json is written after each. --seconds: no further round begins after so many.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_ops import gpu_free, gpu_locks, gpus, status
from dflash_ops.command import Command, Container, Host
from dflash_ops.errors import OpsError
from dflash_ops.inventory import load
from dflash_ops.sandbox import down, up
from dflash_ops.shell import Shell

MIB_APART = 10.0

# Takes memory on GPU 0, by CUDA or by what the sandbox has instead, and becomes the scene.
HOLD = r"""
import ctypes, fcntl, json, os, signal, socket, struct, sys, time
kind, mib, writer = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def take():
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        device = os.open("/dev/nvidia0", os.O_RDWR)
        with socket.socket(socket.AF_UNIX) as connection:
            here = "/dev/nvidia-sandbox"
            connection.connect(here if os.path.exists(here) else "/run/sandbox-gpu.sock")
            connection.sendall(json.dumps({"open": "nvidia0", "mib": mib}).encode() + b"\n")
            slot = json.loads(connection.makefile("rb").readline())["slot"]
            fcntl.fcntl(device, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0))
        return device
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    for code in (
        cuda.cuInit(0),
        cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0),
        cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib << 20)),
    ):
        if code:
            tell({"error": f"CUDA says {code}"})
    return context

def tell(*pids):
    os.write(writer, json.dumps(pids).encode() + b"\n")

def stay():
    while True:
        time.sleep(1000)

def fork():
    pid = os.fork()
    if pid == 0:
        stay()
    return pid

if kind == "double fork":
    if os.fork():
        os._exit(0)
    os.setsid()
if kind == "zombie" and os.fork() == 0:
    os._exit(0)
try:
    taken = take()
except Exception as error:
    tell({"error": repr(error)})
    os._exit(1)
if kind == "dead parent":
    tell(fork())
    os.kill(os.getpid(), signal.SIGKILL)
tell(os.getpid(), *[fork() for _ in range(3 if kind == "workers" else 0)])
stay()
"""

LAUNCH = r"""
import json, os, sys
told = []
for scene in json.load(sys.stdin):
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        words = [sys.executable, "-IS", "-c", HOLD, scene["kind"], str(scene["mib"]), str(writer)]
        os.execve(sys.executable, words, scene["environment"])
    os.close(writer)
    line = os.fdopen(reader).readline()
    told.append(json.loads(line) if line else [])
    if scene["kind"] in ("dead parent", "double fork"):
        os.waitpid(pid, 0)
print(json.dumps(told))
"""

RECORD = r"""
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1], "runs", sys.argv[2])
folder.mkdir(parents=True)
(folder / "run.json").write_text("{}")
pid = int(sys.argv[3])
start = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]) if pid else 1
boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
identity = {"pid": pid or 2**22 - 1, "start": start}
(folder / "state.json").write_text(json.dumps({"boot_id": boot, "supervisor": identity, "child": identity}))
"""


class Truth:
    def __init__(self, shell: Shell, own: Container, neighbour: Container, out: Path | None) -> None:
        self.shell, self.own, self.neighbour, self.host, self.out = shell, own, neighbour, own.host, out
        self.wrong: list[str] = []
        self.notes: list[str] = []

    def launch(self, place: Container | Host, scenes: Sequence[tuple[str, int, str | None]]) -> list[list[int]]:
        """The pids, as the place numbers them, of (kind, MiB, run id)."""
        made = [
            {
                "kind": kind,
                "mib": mib,
                "environment": {
                    "PATH": "/usr/bin:/bin",
                    **({"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}),
                    **({"DFLASH_RUN_ID": run, "DFLASH_RUN_DIR": f"{self.own.path}/runs/{run}"} if run else {}),
                },
            }
            for kind, mib, run in scenes
        ]
        program = f"HOLD = {HOLD!r}\n{LAUNCH}"
        words = (self.own.python, "-IS", "-c", program)
        done = self.shell.run(place, Command(words, json.dumps(made).encode()), timeout=120, check=True)
        told: list[list[Any]] = json.loads(done.out)
        for (kind, _, _), pids in zip(scenes, told, strict=True):
            if not pids or any(not isinstance(pid, int) for pid in pids):
                raise SystemExit(f"the scene {kind} could not be made in {place}: {pids}")
        return told

    def record(self, run: str, pid: int = 0) -> None:
        """The run's folder: over without a living supervisor, which `pid` is otherwise."""
        words = (self.own.python, "-IS", "-c", RECORD, self.own.path, run, str(pid))
        self.shell.run(self.own, Command(words), check=True)

    def end(self, place: Container | Host, pids: list[list[int]]) -> None:
        words = ("kill", "-9", *(str(pid) for group in pids for pid in group))
        self.shell.run(place, Command(words))

    def alive(self, place: Container | Host, pids: list[list[int]]) -> set[int]:
        words = "for pid; do grep -q '^State:.[^ZX]' /proc/$pid/status 2>/dev/null && echo $pid; done; true"
        numbers = [str(pid) for group in pids for pid in group]
        done = self.shell.run(place, Command(("sh", "-c", words, "sh", *numbers)), check=True)
        return {int(word) for word in done.out.split()}

    def used(self) -> list[float]:
        words = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
        return [float(word) for word in self.shell.run(self.host, Command(words), check=True).out.split()]

    def settled(self, wanted: list[float], seconds: float = 20.0) -> list[float]:
        deadline = time.monotonic() + seconds
        while True:
            used = self.used()
            if time.monotonic() > deadline or all(abs(a - b) <= MIB_APART for a, b in zip(used, wanted, strict=True)):
                return used
            time.sleep(0.2)

    def look(self, name: str) -> gpus.GpuStatus:
        """gpu-status, compared with nvidia-smi's own rows of the same moment."""
        found = status.gpu_status(self.shell, self.host, [self.own, self.neighbour], self.own)
        asked = ("nvidia-smi", f"--query-compute-apps={','.join(gpus.APP_FIELDS)}", "--format=csv,noheader,nounits")
        out = self.shell.run(self.host, Command(asked), check=True).out.decode()
        charged = {(app.gpu_uuid, app.pid): app.used_mib for app in gpus.parse_apps(out)}
        rows = {key: mib for key, mib in charged.items() if mib is not None}
        told = {(it.gpu_uuid, it.pid): it.used_mib for it in found.processes if it.used_mib is not None}
        if rows != told:
            self.wrong.append(f"{name}: nvidia-smi has {rows}, gpu-status {told}")
        every = self.used()
        if len(found.gpus) != len(every):
            self.wrong.append(f"{name}: nvidia-smi has {len(every)} GPUs, gpu-status {[it.uuid for it in found.gpus]}")
        for gpu, used in zip(found.gpus, every, strict=False):  # those that nvidia-smi does not tell of come last
            if gpu.used_mib is None or abs(gpu.used_mib - used) > MIB_APART:
                self.wrong.append(f"{name}: GPU {gpu.index} uses {used} MiB, gpu-status says {gpu.used_mib}")
        if self.out:
            (self.out / f"{name}.gpu-status.json").write_text(json.dumps(found.to_json(), indent=1) + "\n")
            (self.out / f"{name}.nvidia-smi.csv").write_text(out)
        return found

    def owners(self, name: str, found: gpus.GpuStatus, expected: dict[tuple[int | None, int], str]) -> None:
        told = {(it.vmid, it.container_pid or it.pid): it.owner for it in found.processes if it.kind != "dead"}
        for key, owner in expected.items():
            if told.get(key) != owner:
                self.wrong.append(f"{name}: process {key} is {told.get(key)}, and should be {owner}")
        for key in told.keys() - expected.keys():
            self.wrong.append(f"{name}: process {key} is told and was not made")

    def locks(self) -> list[list[str]]:
        """The lock files of each GPU, by the driver's table and by nvidia-smi, as a process in the container has them;
        compared with nvidia-smi's own index and UUID."""
        asked = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
        rows = gpus.parse_indices(self.shell.run(self.host, Command(asked), check=True).out.decode())
        show = Command(("sh", "-c", "for fd in /proc/$$/fd/*; do readlink $fd; done | grep -o 'gpu-.*lock'; true"))
        # On a rented machine /proc may show the cards of others, which nvidia-smi does not: then it counts otherwise.
        listed = self.shell.run(self.host, Command(("ls", "/proc/driver/nvidia/gpus"))).out.split()
        told: list[list[str]] = []
        for uuid, index in rows.items():
            for by in ("table", "nvidia-smi", "UUID"):
                words = gpu_locks.words(self.own, (self.own.gpus.index(index),), (uuid,) if by == "UUID" else ())
                if by == "nvidia-smi":
                    words = tuple(word.replace("/proc/driver/nvidia/gpus", "/proc/none") for word in words)
                done = self.shell.run(self.own, replace(show, host_prefix=words), check=True)
                files = sorted(done.out.decode().split())
                told.append([by, *files])
                if files != sorted([f"gpu-{index}.lock", f"gpu-{uuid}.lock"]):
                    others = by != "nvidia-smi" and len(listed) != len(rows)
                    said = f"locks of GPU {index}, {uuid}, by {by}: {files}; /proc has {len(listed)} cards"
                    (self.notes if others else self.wrong).append(said)
        return told

    def keep(self, name: str, *words: str) -> None:
        """What a command on the host says, for the folder of --out."""
        if self.out:
            done = self.shell.run(self.host, Command(words), timeout=60)
            (self.out / name).write_bytes(done.out + done.err)

    def round(self, number: int) -> dict[str, Any]:
        runs = {kind: f"r{number}-20261129-12000{at}-abcd" for at, kind in enumerate(_KINDS)}
        idle = self.used()
        others: dict[Container | Host, list[list[int]]] = {}
        left: list[list[int]] = []
        try:
            live = runs["live"]
            others[self.own] = self.launch(self.own, [("trainer", 700, live), ("stranger", 300, None)])
            self.record(live, others[self.own][0][0])
            others[self.neighbour] = self.launch(self.neighbour, [("trainer", 400, runs["dead parent"])])
            others[self.host] = self.launch(self.host, [("trainer", 200, None)])
            before = self.used()
            stale = [(kind, 1536 if kind == "dead parent" else 500, runs[kind]) for kind in _KINDS if kind != "live"]
            for _, _, run in stale:
                self.record(run)
            left = self.launch(self.own, stale)
            full = self.used()
            found = self.look(f"round{number}-full")
            (live_pids, strangers), near, far = others[self.own], others[self.neighbour], others[self.host]
            vmid = self.own.vmid
            self.owners(
                f"round {number}",
                found,
                {
                    **{(vmid, pid): "earlier" for group in left for pid in group},
                    **{(vmid, pid): "run" for pid in live_pids},
                    **{(vmid, pid): "unknown" for pid in strangers},
                    **{(self.neighbour.vmid, pid): "other container" for group in near for pid in group},
                    **{(None, pid): "host" for group in far for pid in group},
                },
            )
            looked = gpu_free.look(self.shell, self.own)
            chosen = gpu_free.choose(looked, [], unknown=False)
            if {it.pid for it in chosen} != {pid for group in left for pid in group}:
                self.wrong.append(f"round {number}: chosen {sorted(it.pid for it in chosen)}, left {left}")
            began = time.monotonic()
            freed = gpu_free.free(self.shell, self.own, looked, chosen, grace=10.0)
            seconds = time.monotonic() - began
            after = self.settled(before, 5.0)
            if self.alive(self.own, left):
                self.wrong.append(f"round {number}: still alive: {self.alive(self.own, left)}")
            for place, pids in others.items():
                if self.alive(place, pids) != {pid for group in pids for pid in group}:
                    self.wrong.append(f"round {number}: {place}: only {self.alive(place, pids)} of {pids} live on")
            self.look(f"round{number}-freed")
        finally:
            for place, pids in [*others.items(), (self.own, left)]:
                with contextlib.suppress(OpsError):  # the others are to be ended all the same
                    self.end(place, pids)
        apart = [round(now - was, 1) for now, was in zip(after, before, strict=True)]
        if any(abs(it) > MIB_APART for it in apart):
            self.wrong.append(f"round {number}: {apart} MiB are not back")
        return {
            "idle_mib": idle,
            "before_mib": before,
            "full_mib": full,
            "after_mib": after,
            "apart_mib": apart,
            "ended_mib": self.settled(idle),
            "free_seconds": round(seconds, 2),
            "ended": len(freed.freed),
            "killed": len(freed.killed),
            "health": [(gpu.name, gpu.health, list(gpu.findings)) for gpu in found.gpus],
            "problems": list(found.problems),
        }


_KINDS = ("live", "dead parent", "double fork", "workers", "zombie")


class Report:
    """What was found, on the disk after every part. A part that fails is one more thing that is wrong."""

    def __init__(self, out: Path | None) -> None:
        self.out, self.wrong, self.rounds = out, list[str](), list[dict[str, Any]]()
        self.parts: dict[str, Any] = {}
        self.locks: Any = None
        self.notes: list[str] = []
        self.began = time.monotonic()

    def part(self, name: str, verb: Callable[[], Any]) -> Any:
        began = time.monotonic()
        found = None
        try:
            found = verb()
        except (Exception, SystemExit) as fault:
            traceback.print_exc()
            self.wrong.append(f"{name}: {type(fault).__name__}: {str(fault)[-500:]}")
        self.parts[name] = {"seconds": round(time.monotonic() - began, 1)}
        self.write()
        return found

    def value(self) -> dict[str, Any]:
        return {
            "parts": self.parts,
            "locks": self.locks,
            "rounds": self.rounds,
            "notes": self.notes,
            "wrong": self.wrong,
        }

    def write(self) -> None:
        if self.out:
            (self.out / "result.json").write_text(json.dumps(self.value(), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="gpu-status and gpu free against real CUDA processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--bind", type=Path, action="append", default=[], help="a folder that the sandbox needs too")
    asked = parser.parse_args()
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
    real = bool(list(Path("/dev").glob("nvidia[0-9]*")))
    report = Report(asked.out)
    report.write()
    shown: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "dflash-ops.toml"
        name = f"gpu-truth-{os.getpid()}"
        write_inventory(inventory, name)
        try:
            report.part("up", lambda: up(name=name, owner=os.getpid(), binds=asked.bind))
            report.part("sandbox", lambda: in_sandbox(report, inventory, asked.rounds, asked.seconds, shown))
        finally:
            report.part("down", lambda: down(name))
    if asked.out and real:
        report.part("samples", lambda: record_samples(asked.out / "samples"))
    print(json.dumps(report.value(), indent=1))
    print(*shown, sep="\n")
    if asked.out:
        (asked.out / "shown.txt").write_text("\n".join(shown))
    sys.exit(bool(report.wrong))


def write_inventory(file: Path, sandbox: str) -> None:
    count = len(list(Path("/dev").glob("nvidia[0-9]*"))) or 2  # the sandbox has two where the machine has none
    table = '[containers.{}]\nhost = "box"\nvmid = {}\npython = "sandbox"\npath = "/opt/truth"\n'
    table += f"gpus = {list(range(count))}\n"
    hosts = f'default = "own"\n[hosts.box]\nsandbox = "{sandbox}"\n'
    file.write_text(hosts + table.format("own", 200) + table.format("neighbour", 201))


def in_sandbox(report: Report, inventory: Path, rounds: int, seconds: float, shown: list[str]) -> None:
    with Shell() as shell:
        book = load(inventory)
        truth = Truth(shell, book.container("own"), book.container("neighbour"), report.out)
        truth.wrong, truth.notes = report.wrong, report.notes
        report.locks = report.part("locks", truth.locks)
        for number in range(rounds):
            if time.monotonic() - report.began > seconds:
                report.wrong.append(f"round {number}: no time was left for it")
                break
            told = report.part(f"round {number}", lambda number=number: truth.round(number))
            if told is not None:
                report.rounds.append(told)
                report.write()
        table = "head -n 99 /proc/driver/nvidia/version /proc/driver/nvidia/gpus/*/*"
        report.part("table", lambda: truth.keep("driver.txt", "sh", "-c", table))
        report.part("nvidia-smi -q", lambda: truth.keep("nvidia-smi-q.txt", "nvidia-smi", "-q"))
        report.part("help", lambda: truth.keep("help-query-gpu.txt", "nvidia-smi", "--help-query-gpu"))
        environment = {**os.environ, "DFLASH_OPS_INVENTORY": str(inventory)}
        verbs = (["gpu-status"], ["doctor"], ["doctor", "--json"])
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(_said, words, environment) for words in verbs]
        for words, it in zip(verbs, waiting, strict=True):
            shown.append(report.part(" ".join(words), it.result) or f"$ dflash-ops {' '.join(words)}: failed")


def record_samples(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    recorder = Path(__file__).parents[1] / "tests/samples/record.py"
    # In a group of its own, so that what it started ends with it when it hangs.
    asked = subprocess.Popen(
        [sys.executable, recorder, folder],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, errors = asked.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(asked.pid, 9)
        raise
    if asked.returncode:
        raise RuntimeError(errors.decode(errors="replace").strip()[-500:])


def _said(words: list[str], environment: dict[str, str]) -> str:
    line = [sys.executable, "-m", "dflash_ops", *words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
    return f"$ dflash-ops {' '.join(words)} (exit code {done.returncode})\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    main()
