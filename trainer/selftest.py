"""`python -m trainer selftest threads`: does this torch, on this device, work beside threads?

Each fault of fx_faults.py, and what it looks like in a training, is brought about in a process of its own without the
repair, and again with it. Exit code 0: with the repair all is well; 1: it is not.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch.compile and create_block_mask have no types)

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trainer.arguments import at_least_one
from trainer.fx_faults import FAULTS, Probe, Turns, first_error, in_threads
from trainer.threads import Fix, make_compiler_thread_safe, make_torch_thread_safe

RUNS = 5
SECONDS = 300  # for one process; one that hangs has failed
CALLS = 1000  # of a compiled function, in each of three threads
WIDTH = 66  # of what went wrong, in the table; --json has it whole
OLD, NEW = "no longer in this torch", "held"


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    prepare: Callable[[torch.device], Probe]  # made before the repair, so that what it wraps is wrapped before
    by_luck: bool = False  # may pass without the repair too


def _add_one(x: Tensor) -> Tensor:
    return x + 1


def compiled_call(device: torch.device) -> Probe:
    """A function that was compiled before the repair is called while another thread traces."""
    compiled = torch.compile(_add_one, backend="inductor" if device.type == "cuda" else "eager")
    x = torch.ones(4, device=device)
    compiled(x)

    def run() -> str | None:
        turns = Turns()

        def body(y: Tensor) -> Tensor:
            turns.reach("tracing")
            turns.wait("called")
            return y * 2

        def call() -> None:
            turns.wait("tracing")
            try:
                compiled(x)
            finally:
                turns.reach("called")

        return first_error(in_threads(lambda: torch.fx.symbolic_trace(body), call))

    return run


def block_masks(device: torch.device) -> Probe:
    """Three threads build block masks and call a kernel that was compiled before: flex attention on a GPU."""
    on_gpu = device.type == "cuda"
    add_one = torch.compile(_add_one, backend="eager")
    attend = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
    rows = torch.ones(1, 1, 256, 64, device=device)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key // 16 <= query // 16

    def work() -> None:
        for _ in range(20):
            blocks = create_block_mask(mask, 1, 1, 256, 256, device=device)
            attend(rows, rows, rows, block_mask=blocks) if on_gpu else add_one(rows)

    work()
    return lambda: first_error(in_threads(work, work, work))


def compiled_forms(device: torch.device) -> Probe:
    """Three threads call a function that was compiled for all that they call it with."""
    compiled = torch.compile(_scaled, backend="eager", dynamic=False)
    sizes = [torch.ones(size, device=device) for size in (3, 4, 5)]
    for size in sizes:
        for negative in (True, False):
            compiled(size, negative)

    def work() -> None:
        for number in range(CALLS):
            compiled(sizes[number % 3], bool(number % 2))

    def run() -> str | None:
        with torch.compiler.set_stance("fail_on_recompile"):
            return first_error(in_threads(work, work, work))

    return run


def _scaled(x: Tensor, negative: bool) -> Tensor:
    return x * -2 if negative else x * 2


SCENARIOS = (
    *(Scenario(fault.name, fault.title, lambda device, probe=fault.probe: probe) for fault in FAULTS),
    Scenario("compiled-call", "a compiled function refuses to run beside a trace", compiled_call),
    Scenario("compiled-forms", "a compiled function has lost a form that it had", compiled_forms, by_luck=True),
    Scenario("block-masks", "block masks in three threads", block_masks, by_luck=True),
)


@dataclass(frozen=True)
class Result:
    scenario: Scenario
    without: str | None  # what went wrong without the repair
    repaired: str | None  # and with it

    @property
    def verdict(self) -> str:
        if self.repaired is not None:
            return "FAILED"
        if self.without is not None:
            return NEW
        return "did not come up" if self.scenario.by_luck else OLD


def try_all(device: str, runs: int, say: Callable[[str], None]) -> list[Result]:
    """Runs every scenario without the repair and with it."""
    results: list[Result] = []
    for scenario in SCENARIOS:
        say(f"{scenario.name}: {scenario.title}")
        without = in_process(scenario, "off", device, runs)
        results.append(Result(scenario, without, in_process(scenario, "per-thread", device, runs)))
    return results


def in_process(scenario: Scenario, fix: Fix, device: str, runs: int) -> str | None:
    """What went wrong in up to `runs` runs of a scenario, in a process of its own."""
    words = ["threads", "--one", scenario.name, "--fix", fix, "--runs", str(runs), "--device", device]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "selftest", *words], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"it did not end in {SECONDS} s"
    for line in reversed(done.stdout.splitlines()):
        if line.startswith('{"wrong"'):
            return cast("str | None", json.loads(line)["wrong"])
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"the process ended with code {done.returncode}: {last}"


def one(name: str, fix: Fix, device: torch.device, runs: int) -> str | None:
    """A scenario, in this process; what went wrong first."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    run = scenario.prepare(device)
    make_torch_thread_safe(fix)
    if "torch._dynamo" in sys.modules:
        make_compiler_thread_safe()
    for number in range(1, runs + 1):
        if (wrong := run()) is not None:
            return f"{wrong} (run {number} of {runs})"
    return None


def table(results: list[Result]) -> str:
    rows = [("FAULT", "WITHOUT THE REPAIR", "WITH IT", "")]
    for result in results:
        rows.append((result.scenario.name, _short(result.without), _short(result.repaired), result.verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _short(wrong: str | None) -> str:
    if wrong is None:
        return "fine"
    return wrong if len(wrong) <= WIDTH else f"{wrong[: WIDTH - 1]}…"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m trainer selftest", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("what", choices=["threads"], help="what is tested")
    parser.add_argument("--runs", type=at_least_one, default=RUNS, help=f"of each fault ({RUNS})")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--one", choices=[scenario.name for scenario in SCENARIOS], help=argparse.SUPPRESS)
    parser.add_argument("--fix", choices=["per-thread", "always-false", "off"], help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    if options.one:
        print(json.dumps({"wrong": one(options.one, options.fix or "per-thread", torch.device(device), options.runs)}))
        sys.stdout.flush()
        os._exit(0)  # a thread that hangs must not keep the process
    what = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {device}"
    if device == "cuda":
        what += f" ({torch.cuda.get_device_name()})"
    quiet = options.json or not sys.stderr.isatty()
    results = try_all(device, options.runs, lambda line: None if quiet else print(line, file=sys.stderr))
    held = all(result.repaired is None for result in results)
    if options.json:
        found = {
            result.scenario.name: {"without": result.without, "with": result.repaired, "verdict": result.verdict}
            for result in results
        }
        print(json.dumps({"torch": torch.__version__, "device": device, "held": held, "faults": found}, indent=2))
    else:
        print(f"{what}\n\n{table(results)}\n\n{'the repair holds' if held else 'THE REPAIR DOES NOT HOLD'}")
    return 0 if held else 1
