"""A training, top to bottom: rows -> the target's features -> the drafter's loss -> an update, again and again.

Row i always makes the same batch, and step n always learns from the same rows, whatever the threads' timing: the same
config and data give the same losses, and a resumed run repeats the uninterrupted one, bit for bit on the same devices.
"""

# torch's random functions and tolist are partly untyped.
# pyright: reportUnknownMemberType=false

import math
import threading
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Literal, cast

from trainer.blocks import TILE
from trainer.checkpoint import Progress, load_checkpoint, save_checkpoint
from trainer.config import TrainConfig, default_gamma
from trainer.features import FeatureBatch, RowBatch
from trainer.feed import Feed
from trainer.journal import Clock, Journal, now
from trainer.learner import Learner, StepFigures, features_of
from trainer.loss import LossTerms, Weighting
from trainer.optim import learning_rate, make_optimizer
from trainer.pipeline import Pipeline
from trainer.records import RunDir, StepRecord, checkpoint_name
from trainer.start import (
    Say,
    TrainingError,
    draft_config,
    find_checkpoint,
    fresh_drafter,
    pick_device,
    read,
    start_weights,
    target_dtype,
)
from trainer.target import load_target
from trainer.threads import nothing_compiles

DEPTH = 2  # batches that wait between two threads

Outcome = Literal["finished", "stopped"]


def train(
    config: TrainConfig,
    run_dir: Path,
    *,
    init_from: Path | None = None,
    resume: Path | None = None,
    stop: threading.Event | None = None,
    say: Say = print,
) -> Outcome:
    """Trains a drafter and writes the run's records and checkpoints into `run_dir`.

    A run_dir with checkpoints is resumed. Otherwise `resume` names the folder of an earlier run to go on from, or
    `init_from` (before config.init_from) a drafter whose weights to start with. Setting `stop` ends the training after
    the step under way, on a checkpoint. `say` prints a line of the log. On an error, status.json says "failed" and why.
    """
    run = RunDir(run_dir)
    journal = Journal(run, config.train.steps, say)
    try:
        outcome = _train(config, run, journal, init_from, resume, stop or threading.Event(), say)
    except Exception as error:
        journal.update(state="failed", error=f"{type(error).__name__}: {error}".split("\n")[0])
        raise
    journal.update(state=outcome)
    say(f"{outcome} at step {journal.status.step}/{config.train.steps}")
    return outcome


def _train(
    config: TrainConfig,
    run: RunDir,
    journal: Journal,
    init_from: Path | None,
    resume: Path | None,
    stop: threading.Event,
    say: Say,
) -> Outcome:
    settings = config.train
    device = pick_device(settings.device)
    target_device = pick_device(settings.target_device or settings.device)
    if device.type == "cuda" and config.data.row_tokens % TILE:
        raise TrainingError(f"data.row_tokens {config.data.row_tokens}: on a GPU it must be a multiple of {TILE}")

    # What is learned from, and by whom.
    target = load_target(config.target.path, target_device, target_dtype(config, target_device))
    draft = draft_config(config, target)
    data = read(config.data.train, config, target, draft, say)
    feed = Feed(config, data, read(config.data.heldout, config, target, draft, say) if config.data.heldout else None)
    model = fresh_drafter(draft, settings.seed).to(device)
    optimizer = make_optimizer(model, lr=settings.lr, weight_decay=settings.weight_decay)
    learner = Learner(
        model,
        target.head_weight.to(device),
        optimizer,
        Weighting(settings.loss, gamma=settings.gamma or default_gamma(draft.block_size), alpha=settings.alpha),
        chunk_blocks=settings.chunk_blocks,
        clip=settings.clip,
    )

    # Where it starts.
    earlier = find_checkpoint(run, resume, say)
    if earlier:
        progress = load_checkpoint(earlier, model, optimizer)
        say(f"resuming from {earlier} at step {progress.step}")
        if progress.step > settings.steps:
            raise TrainingError(f"train.steps is {settings.steps}, but step {progress.step} is done already: raise it")
        if progress.data_digest != data.digest:
            say(f"the data has changed since then: going on with row {progress.row} of what is there now")
    else:
        start_weights(model, init_from or config.init_from, say)
        progress = Progress(step=0, row=0, data_digest=data.digest)
    is_own = earlier is not None and earlier.parent == run.checkpoints
    journal.resume(progress.step, progress.first_loss, earlier.name if earlier and is_own else None)
    say(
        f"training {sum(p.numel() for p in model.parameters()):,} weights on {device}, target {config.target.path} on "
        f"{target_device}: {len(data.documents)} conversations, {feed.rows.epoch_rows()} rows an epoch, "
        f"{settings.rows_per_step} rows of {config.data.row_tokens} tokens and {settings.anchors} blocks a row a step"
    )

    def features(rows: RowBatch) -> FeatureBatch:
        return features_of(target, rows.pinned() if target_device.type == "cuda" else rows, draft, device)

    def save(done: Progress, figures: StepFigures | None) -> None:
        if figures:
            finite(done.step, figures)  # before the last good checkpoint goes for it
        path = save_checkpoint(run.checkpoints, model, optimizer, done, settings.keep)
        journal.update(step=done.step, checkpoint=path.name)
        say(f"saved {path.name}")

    if earlier and not is_own:
        save(progress, None)  # from here on the run can do without the earlier one

    if device.type == "cuda" and progress.step < settings.steps:
        learner.warm_up(features(feed.learning_batch(progress.row)))  # in this thread alone: see threads.py

    # The loop. The feed and the target work ahead in their own threads; the drafter learns in this one.
    journal.update(state="training")
    clock = Clock()
    figures: StepFigures | None = None
    source = feed.batches(progress.step, progress.row)
    with nothing_compiles(device), Pipeline[FeatureBatch](source, [("target", features)], DEPTH) as pipeline:
        results = iter(pipeline)
        for step in range(progress.step + 1, settings.steps + 1):
            if stop.is_set():
                break
            lr = learning_rate(step, steps=settings.steps, highest=settings.lr, warmup_ratio=settings.warmup_ratio)
            tokens = 0
            for batch in islice(results, feed.batches_per_step):
                learner.learn(batch)
                tokens += batch.tokens
            figures = learner.update(lr)
            clock.add(tokens)

            measured = None
            if feed.measures_after(step) and not stop.is_set():
                measured = heldout_figures(learner, islice(results, feed.heldout_batches), stop)
            if step % settings.log_every == 0 or step in (1, settings.steps) or measured:
                loss, accuracy, accept, grad_norm = finite(step, figures)
                record = StepRecord(
                    step=step,
                    loss=loss,
                    accuracy=accuracy,
                    accept=accept,
                    lr=lr,
                    grad_norm=grad_norm,
                    tokens=tokens,
                    tokens_per_s=clock.lap(),
                    seconds=clock.seconds(),
                    time=now(),
                    heldout_loss=measured[0] if measured else None,
                    heldout_accept=measured[1] if measured else None,
                )
                journal.record(record)
            progress = Progress(
                step=step,
                row=progress.row + settings.rows_per_step,
                data_digest=data.digest,
                first_loss=journal.status.first_loss,
            )
            if step % settings.checkpoint_every == 0 or step == settings.steps:
                save(progress, figures)
        # Here and not below: the threads may take long to stop, or never do.
        if journal.status.checkpoint != checkpoint_name(progress.step):
            save(progress, figures)
    for name in pipeline.left_behind:
        say(f"the thread {name!r} is still busy and was left behind")
    return "finished" if progress.step == settings.steps else "stopped"


def finite(step: int, figures: StepFigures) -> tuple[float, float, float, float]:
    """Loss, accuracy, acceptance length and gradient norm of a step. Raises TrainingError: it has blown up."""
    loss, accuracy, accept, grad_norm = figures.read()[:4]
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise TrainingError(f"step {step}: loss {loss}, gradient norm {grad_norm}")
    return loss, accuracy, accept, grad_norm


def heldout_figures(
    learner: Learner, held: Iterable[FeatureBatch], stop: threading.Event
) -> tuple[float, float] | None:
    """Loss and acceptance length over all held-out batches; None when `stop` cut the measurement."""
    total: LossTerms | None = None
    for batch in held:
        if stop.is_set():
            return None
        terms = learner.measure(batch)
        total = terms if total is None else total + terms
    assert total is not None, "held-out data has at least one row"
    loss, _, accept = cast(list[float], total.figures().tolist())
    return loss, accept
