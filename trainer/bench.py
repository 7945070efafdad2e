"""`python -m trainer bench [CONFIG.toml]`: how fast a training with this config is here, what share of the GPUs' limit
that is, and what holds it back. Needs no data: rows are made up. Nothing is saved. Without a config: a target with
random weights in Qwen3-4B's shape, rows of 4,096 tokens, 512 anchors, on one GPU (on a CPU: a tiny one).

The target's part and the drafter's are timed alone first, one row's batch after the other; then all workers of the
layout train together, as `train` does, for --steps steps. The limit is a large bfloat16 matrix product on each GPU.

Exit codes: 0 done; 3 the config is wrong; 1 anything else.
"""

# torch's cuda functions are partly untyped, and transformers gives its Auto classes no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import copy
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer.busy import Busy, advice
from trainer.config import ConfigFault, TrainConfig, load, micro_rows
from trainer.devices import listed, plus
from trainer.draft_config import DraftConfig, default_target_layer_ids
from trainer.features import FeatureBatch, RowBatch
from trainer.layout import Layout, check_layout, parse
from trainer.learner import StepFigures, features_of
from trainer.pipeline import Failure, Pipeline, Stage
from trainer.replicas import Replicas
from trainer.shortage import shortage_in
from trainer.speed import Counted, Times, alternating, counted, matrix_limit, packed_lengths, rates, tflops, where
from trainer.start import Say, TrainingError, fresh_drafter, target_dtype
from trainer.streams import Streams
from trainer.target import TargetModel
from trainer.threads import make_torch_thread_safe, nothing_compiles
from trainer.train import finish_loading, heads_on, note, waiting_bytes
from trainer.warm import BatchShape, batch_shape, made_up_rows, make_learner, warm_up, warm_up_targets
from trainer.workers import TargetWorker, load_targets

CONFIG_CODE = 3
BEFORE = 4  # steps until all queues are as they stay
ALONE = 12  # times that a part is timed alone
LOST = 1.1  # over what the parts take alone: more is lost between them
RATE = 1e-6
# Hidden size, layers, heads, key heads, their size, MLP, vocabulary, tokens of a row, anchors, layers of the drafter.
LARGE = 2560, 36, 32, 8, 128, 9728, 151936, 4096, 512, 5
SMALL = 64, 8, 4, 2, 16, 128, 512, 256, 16, 2


def draft_of(config: TrainConfig, target: TargetModel) -> DraftConfig:
    """The drafter that a config means, the mask token aside, which the data decides."""
    wanted = config.draft
    return target.draft_config(
        wanted.layers,
        wanted.block,
        wanted.target_layer_ids or default_target_layer_ids(target.num_layers, wanted.captured),
        wanted.mask_token_id or 0,
        sliding_window=wanted.sliding_window,
        sliding_layers=wanted.sliding_layers,
        causal=wanted.causal,
    )


class Bench:
    """A training's workers without data, records and checkpoints."""

    def __init__(
        self, config: TrainConfig, layout: Layout, targets: Sequence[TargetModel], *, packed: bool, say: Say
    ) -> None:
        self.config, self.layout, self.targets = config, layout, targets
        self.devices = [torch.device(name) for name in layout.drafters]
        self.draft, settings = draft_of(config, targets[0]), config.train
        make_torch_thread_safe(settings.fx_fix)
        model = fresh_drafter(self.draft, settings.seed)
        heads = heads_on(self.devices, targets)
        self.learners = [make_learner(config, copy.deepcopy(model).to(d), heads[d]) for d in self.devices]
        self.shape: BatchShape = batch_shape(config, micro_rows(config), targets[0].dtype)
        self.shape = replace(self.shape, teacher=settings.objective != "cross-entropy")
        lengths = packed_lengths(config.data.row_tokens, settings.seed) if packed else None
        self.rows = made_up_rows(self.shape, lengths, self.draft.vocab_size)
        self.counted: Counted = counted(self.draft, self.rows)
        self.streams = Streams(self.devices)
        finish_loading([*self.devices, *(torch.device(name) for place in layout.targets for name in place)])
        with self.streams.current():
            self.warmed = warm_up_targets(
                targets, self.shape, self.draft.target_layer_ids, fp8=config.target.fp8, say=say
            ) + warm_up(self.learners, self.shape, say=say)

    def alone(self) -> dict[str, Times]:
        """The target's part and the drafter's of one batch, by turns."""
        target, learner, device = self.targets[0], self.learners[0], self.devices[0]
        with self.streams.current():
            held = self._features(target, device)

            def step() -> None:
                learner.learn(held)
                learner.update(RATE)

            with nothing_compiles(self.devices):
                target_times = alternating({"": lambda: self._features(target, device)}, target.device, rounds=ALONE)
                return {"target": target_times[""], **alternating({"drafter": step}, device, rounds=ALONE)}

    def _features(self, target: TargetModel, device: torch.device) -> FeatureBatch:
        anchors = self.shape.anchors
        return features_of(target, self.rows, self.draft, device, anchors=anchors, teacher=self.shape.teacher)

    def together(self, steps: int) -> tuple[list[float], dict[str, Busy]]:
        """Seconds of each step of all workers, and what each worker's device did meanwhile."""
        settings, layout, failure = self.config.train, self.config.layout, Failure()
        per_drafter = -(-settings.rows_per_step // (len(self.devices) * self.shape.rows))

        def source() -> Iterator[RowBatch]:
            for _ in range((BEFORE + steps) * per_drafter):
                for replica in range(len(self.devices)):
                    yield replace(self.rows, replica=replica)

        places = [[torch.device(name) for name in names] for names in self.layout.targets]
        workers = [
            TargetWorker(
                target, self.draft, place, self.devices, anchors=self.shape.anchors, teacher=self.shape.teacher
            )
            for target, place in zip(self.targets, places, strict=True)
        ]
        stage, count = Stage("target", workers), len(self.devices)
        with (
            self.streams.current(),
            nothing_compiles(self.devices),
            Replicas(
                self.learners,
                optimizer=layout.optimizer,
                reduce=layout.reduce,
                streams=self.streams,
                failed=note,
                failure=failure,
            ) as replicas,
            Pipeline[FeatureBatch](
                source(),
                [stage],
                max(1, layout.depth - 1) * count,
                layout.queue_mib * 2**20 * count,
                size=waiting_bytes,
                failed=note,
                failure=failure,
            ) as pipeline,
        ):
            clocks = dict(zip(stage.workers(), (worker.clock for worker in workers), strict=True)) | replicas.clocks
            results, ended, late = iter(pipeline), list[float](), deque[StepFigures]()
            behind = 1 if self.devices[0].type == "cuda" else 0  # steps: as a training does, nothing waits for the last
            before = {name: clock.read() for name, clock in clocks.items()}
            for step in range(BEFORE + steps):
                if step == BEFORE:
                    before = {name: clock.read() for name, clock in clocks.items()}
                for _ in range(per_drafter * count):
                    replicas.learn(next(results))
                late.append(replicas.update(RATE))
                if step == BEFORE + steps - 1:
                    behind = 0
                while len(late) > behind:
                    late.popleft().read()
                    ended.append(time.perf_counter())
            spent = {name: clock.read() - before[name] for name, clock in clocks.items()}
        seconds = [after - then for then, after in pairwise(ended)]
        return seconds[-steps:], spent

    def report(self, steps: int) -> dict[str, Any]:
        """All of it, for JSON."""
        config, layout = self.config, self.layout
        limits = {name: matrix_limit(torch.device(name)) for name in layout.names}
        alone = self.alone()
        seconds, spent = self.together(steps)
        times = Times.of(seconds)
        rows = config.train.rows_per_step
        tokens = rows * config.data.row_tokens
        operations = self.counted.total * rows / self.shape.rows
        reached = tflops(operations, times.median)
        batch_tokens = self.shape.rows * config.data.row_tokens
        found: dict[str, Any] = {
            "where": where(self.devices[0]),
            "target": config.target.path,
            "fp8": config.target.fp8,
            "layout": {"targets": [plus(place) for place in layout.targets], "drafters": list(layout.drafters)},
            "step": {"rows": rows, "row_tokens": config.data.row_tokens, "anchors": config.train.anchors},
            "documents_a_row": int(self.rows.document_ids_BS[0].max()) + 1,
            "steps": len(seconds),
            **rates(tokens, operations, times),
            "limit_tflops": {name: float(f"{limit:.4g}") for name, limit in limits.items()},
            "share_of_limit": round(reached / sum(limits.values()), 4),
            "alone": {
                "target": rates(batch_tokens, self.counted.target, alone["target"]),
                "drafter": rates(batch_tokens, self.counted.drafter, alone["drafter"]),
            },
            "working": {name: round(busy.working / busy.total, 4) for name, busy in spent.items() if busy.total > 0},
            "peak_mib": {name: _peak(torch.device(name)) for name in layout.names},
            "warm_up_seconds": round(sum(one.seconds for one in self.warmed), 1),
        }
        found["held_back_by"] = self.verdict(found, spent)
        return found

    def verdict(self, found: dict[str, Any], spent: dict[str, Busy]) -> str:
        """What holds it back, in words."""
        layout, alone, count = self.layout, found["alone"], len(self.layout.targets)
        limits = found["limit_tflops"]
        batches = found["step"]["rows"] / self.shape.rows
        target_ms, draft_ms = (alone[part]["ms"]["median"] * batches for part in ("target", "drafter"))
        of_limit = {
            "target": alone["target"]["tflops"] / limits[layout.targets[0][-1]],
            "drafter": alone["drafter"]["tflops"] / limits[layout.drafters[0]],
        }
        shares = (
            f"of their devices' limits the target reaches {of_limit['target']:.0%} and the drafter "
            f"{of_limit['drafter']:.0%}"
        )
        step_ms = found["ms"]["median"]
        if set(layout.drafters) & {name for place in layout.targets for name in place}:
            least = target_ms + draft_ms
            both = f"{target_ms:.1f} + {draft_ms:.1f} ms a step alone, {step_ms:.1f} together on {listed(layout.names)}"
            if step_ms > LOST * least:
                return (
                    f"what lies between the kernels ({both}): the host is too slow to queue them, or is busy; {shares}"
                )
            return f"the arithmetic of both ({both}); {shares}"
        needs = {"target": target_ms / count, "drafter": draft_ms / len(layout.drafters)}
        slower = max(needs, key=needs.__getitem__)
        parts = f"{needs['target']:.1f} ms of target and {needs['drafter']:.1f} ms of drafter"
        both = f"a step is {parts}, {step_ms:.1f} measured"
        if step_ms > LOST * needs[slower]:
            return f"what lies between the workers ({both}): copies, sums of gradients, or the host; {shares}"
        kinds = [name for name in spent if name.startswith("drafter")]
        line = advice(
            [busy for name, busy in spent.items() if name not in kinds],
            [spent[name] for name in kinds],
            target_devices=layout.targets,
            draft_devices=layout.drafters,
            gpus=torch.cuda.device_count(),
            most_drafters=self.config.train.rows_per_step,
        )
        return f"the {slower}'s arithmetic ({both}); {shares}" + (f"; {line}" if line else "")


def _peak(device: torch.device) -> int | None:
    return round(torch.cuda.max_memory_allocated(device) / 2**20) if device.type == "cuda" else None


def page(found: dict[str, Any]) -> str:
    """The report in words."""
    step, alone = found["step"], found["alone"]
    limits = ", ".join(f"{name} {limit:,.4g}" for name, limit in found["limit_tflops"].items())
    working = ", ".join(f"{name} {share:.0%}" for name, share in found["working"].items())
    ms = found["ms"]
    return "\n".join(
        [
            f"speed     {found['tokens_per_s']:,} tokens/s: a step of {step['rows']} x {step['row_tokens']:,} tokens "
            f"({found['documents_a_row']} documents a row, {step['anchors']} blocks) in {ms['median']:.1f} ms "
            f"({ms['low']:.1f} to {ms['high']:.1f}, {found['steps']} steps)",
            f"limit     {found['share_of_limit']:.0%} of what matrix products reach there (TFLOP/s: {limits})",
            *(
                f"{name:<9} alone {one['ms']['median']:.1f} ms a batch, {one['tokens_per_s']:,} tokens/s, "
                f"{one['tflops']:,.4g} TFLOP/s"
                for name, one in alone.items()
            ),
            *([f"working   {working} of the time"] if working else []),
            f"held back by {found['held_back_by']}",
        ]
    )


def measure(
    config: TrainConfig, *, steps: int, packed: bool, say: Say, targets: Sequence[TargetModel] | None = None
) -> dict[str, Any]:
    """The report of a config. targets: in place of the config's. Raises TargetError, TrainingError."""
    layout = parse(config.layout)
    if targets is None:
        for line in check_layout(config, layout):
            say(line)
        targets = load_targets(config, layout)
    return Bench(config, layout, targets, packed=packed, say=say).report(steps)


def made_up(sets: Sequence[str]) -> tuple[TrainConfig, list[TargetModel]]:
    """What is measured without a config, a target for each worker. Raises ConfigFault for sets that are wrong."""
    on_gpu = torch.cuda.is_available()
    hidden, layers, heads, narrow, head_dim, inner, vocabulary, tokens, anchors, draft_layers = (
        LARGE if on_gpu else SMALL
    )
    text = (
        f'[target]\npath = "random weights in a shape of Qwen3"\n[draft]\nlayers = {draft_layers}\n'
        f'[data]\ntrain = "none"\nrow_tokens = {tokens}\n'
        f'[train]\nsteps = 1\nrows_per_step = 1\nanchors = {anchors}\nloss = "exp-decay"\n'
    )
    config = load(text.encode(), sets)
    shape = Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=narrow,
        head_dim=head_dim, intermediate_size=inner, vocab_size=vocabulary, max_position_embeddings=40960,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    made: dict[str, TargetModel] = {}
    places = [place[-1] for place in parse(config.layout).targets]  # one that would be spread is on its last device
    for name in dict.fromkeys(places):
        device = torch.device(name)
        with torch.random.fork_rng(devices=[]), device:
            model = AutoModelForCausalLM.from_config(shape, dtype=target_dtype(config, device))
        made[name] = TargetModel(model)
    return config, [made[name] for name in places]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m trainer bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--steps", type=int, default=20, help="to measure (default 20)")
    parser.add_argument("--rows", choices=("one", "packed"), default="packed", help="one document a row, or several")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(words)
    if options.steps < 1:
        parser.error("--steps: at least 1")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    targets = None
    try:
        if options.config is None:
            config, targets = made_up(options.sets)
        else:
            config = load(options.config, options.sets)
    except ConfigFault as fault:
        print(fault, file=sys.stderr)
        return CONFIG_CODE
    try:
        found = measure(config, steps=options.steps, packed=options.rows == "packed", say=say, targets=targets)
    except RuntimeError as error:
        told = error if isinstance(error, TrainingError) else shortage_in(error, config)
        if told is None:
            raise
        raise ValueError(str(told)) from error
    print(json.dumps(found, indent=2) if options.json else page(found))
    return 0
