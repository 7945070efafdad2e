"""A training, top to bottom: rows -> the target's features -> the drafter's loss -> an update, again and again.

Row i always makes the same batch, and step n always learns from the same rows, whatever the threads' timing: the same
config and data give the same losses, and a resumed run repeats the uninterrupted one, bit for bit on the same devices.
"""

import contextlib
import threading
from itertools import islice
from pathlib import Path
from typing import Literal

from trainer import sizes
from trainer.blocks import TILE
from trainer.checkpoint import Progress, Score, Written, judge, load_checkpoint, read_state
from trainer.config import TrainConfig, default_gamma, idle_keys
from trainer.diagnosis import explain
from trainer.features import FeatureBatch, RowBatch
from trainer.feed import Feed
from trainer.heldout import heldout_figures
from trainer.journal import Journal
from trainer.learner import Learner, features_of
from trainer.live import HeldoutDecoder, heldout_prompts, measuring
from trainer.locks import locked
from trainer.loss import Weighting
from trainer.optim import learning_rate, make_optimizer
from trainer.origin import changes_since, origin_of
from trainer.pipeline import Pipeline
from trainer.randomness import seed_all
from trainer.records import RunDir
from trainer.saving import Saver
from trainer.start import (
    Say,
    Stopped,
    TrainingError,
    check_fits,
    check_paths,
    data_of,
    draft_config,
    find_checkpoint,
    fresh_drafter,
    pick_device,
    place_after,
    soft_cost_line,
    start_weights,
    target_dtype,
)
from trainer.tally import Step, Tally
from trainer.target import load_target
from trainer.threads import make_torch_thread_safe, nothing_compiles

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
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"the run's folder {run_dir} can't be made: {error.strerror}") from error
    with locked(run_dir / ".lock", f"the run {run_dir}"):
        journal = Journal(run, config.train.steps, say)
        try:
            outcome = _train(config, run, journal, init_from, resume, stop or threading.Event(), say)
        except Stopped:
            outcome = "stopped"
        except Exception as error:
            explain(error)
            with contextlib.suppress(OSError):  # the disk may be what failed: its error is the one to tell
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

    for line in idle_keys(config):
        say(line)

    # What is wrong is told before hours of preparation.
    check_paths(config)
    earlier = find_checkpoint(run, resume, say)
    if earlier and init_from:
        say(f"--init-from {init_from} does nothing: the training goes on from {earlier}")

    # What is learned from, and by whom.
    target = load_target(config.target.path, target_device, target_dtype(config, target_device))
    if reason := sizes.too_long(target.config, config.data.row_tokens):
        raise TrainingError(f"the target {config.target.path}: {reason}")
    check_fits(config, target, earlier)
    data, heldout = data_of(config, target, run, stop, say)
    feed = Feed(config, data, heldout)
    for line in feed.report:
        say(line)
    draft = draft_config(config, target, [data, heldout] if heldout else [data], earlier)

    # Before anything compiles, and before there are threads.
    safety = make_torch_thread_safe(settings.fx_fix)
    if safety.left:
        say(str(safety))

    model = fresh_drafter(draft, settings.seed).to(device)
    optimizer = make_optimizer(model, lr=settings.lr, weight_decay=settings.weight_decay)
    learner = Learner(
        model,
        target.head_weight.to(device),
        optimizer,
        Weighting(settings.loss, gamma=settings.gamma or default_gamma(draft.block_size), alpha=settings.alpha),
        chunk_blocks=settings.chunk_blocks,
        clip=settings.clip,
        objective=settings.objective,
    )
    learns_distribution = settings.objective != "cross-entropy"
    if learns_distribution:
        say(soft_cost_line(config, draft))

    # Where it starts.
    origin = origin_of(config, device)
    if earlier:
        progress = load_checkpoint(earlier, model, optimizer)
        say(f"resuming from {earlier} at step {progress.step}")
        if before := read_state(earlier).origin:
            for line in changes_since(before, origin):
                say(line)
    else:
        seed_all(settings.seed)
        start_weights(model, init_from or config.init_from, say, target)
        progress = Progress(step=0, row=0, data_digest=data.digest, packing=feed.rows.packing)
    cursor = place_after(progress, feed.rows, say)
    is_own = earlier is not None and earlier.parent == run.checkpoints
    scores = measuring(config, heldout.digest) if heldout else None
    judged = judge(run.checkpoints) if is_own else None
    if scores and judged and judged.best and judged.score:
        for line in scores.differs(judged.best.name, judged.score):
            say(line)
    journal.resume(progress.step, progress.first_loss, earlier.name if earlier and is_own else None, progress.skipped)
    say(
        f"training {sum(p.numel() for p in model.parameters()):,} weights on {device}, target {config.target.path} on "
        f"{target_device}: {len(data):,} conversations, about {feed.rows.about_rows:,} rows an epoch, "
        f"{settings.rows_per_step} rows of {config.data.row_tokens} tokens and {settings.anchors} blocks a row a step"
    )

    def features(rows: RowBatch) -> FeatureBatch:
        rows = rows.pinned() if target_device.type == "cuda" else rows
        return features_of(target, rows, draft, device, anchors=settings.anchors, teacher=learns_distribution)

    def saved(written: Written) -> None:
        journal.update(checkpoint=written.path.name)
        say(f"saved {written.path.name}{', the best so far' if written.best else ''}")

    if device.type == "cuda" and progress.step < settings.steps:
        first = next(Feed(config, data, heldout).batches(progress.step, cursor))
        learner.warm_up(features(first))  # in this thread alone: see threads.py

    decoder = None
    if heldout and settings.decode_every:
        prompts = heldout_prompts(
            heldout, target, settings.decode_prompts, settings.decode_tokens, block=draft.block_size
        )
        decoder = HeldoutDecoder(target, model, device, prompts, settings.decode_tokens)

    # The loop. The feed and the target work ahead in their own threads; the drafter learns in this one.
    journal.update(state="training")
    tally = Tally(
        journal,
        devices=(device, target_device),
        log_every=settings.log_every,
        skipped=progress.skipped,
        skipped_in_a_row=progress.skipped_in_a_row,
        say=say,
    )
    source = feed.batches(progress.step, cursor)
    with (
        nothing_compiles(device),
        Saver(run.checkpoints, model, optimizer, keep=settings.keep, origin=origin, saved=saved, say=say) as saver,
        Pipeline[FeatureBatch](source, [("target", features)], DEPTH, failed=explain) as pipeline,
    ):
        last_saved = progress.step if is_own else None
        if earlier and not is_own:
            # From here on the run can do without the earlier one.
            saver.save(progress, read_state(earlier).score)
            last_saved = progress.step
        elif earlier and progress.step == settings.steps:
            saver.tidy(earlier)  # which no save will do any more
        results = iter(pipeline)
        score: Score | None = None  # of the last step
        for step in range(progress.step + 1, settings.steps + 1):
            if stop.is_set():
                break
            lr = learning_rate(step, steps=settings.steps, highest=settings.lr, warmup_ratio=settings.warmup_ratio)
            tokens = 0
            for batch in islice(results, feed.batches_per_step):
                learner.learn(batch)
                tokens += batch.tokens
            figures = learner.update(lr)

            measured = None
            if feed.measures_after(step) and not stop.is_set():
                tally.settle(pipeline.depths())
                figures.read()  # waits for the step, which is training, before what is none begins
                with tally.paused():
                    measured = heldout_figures(learner, islice(results, feed.heldout_batches), stop)
            decoded = None
            if decoder and (step % settings.decode_every == 0 or step == settings.steps) and not stop.is_set():
                tally.settle(pipeline.depths())
                figures.read()
                with tally.paused():
                    decoded = decoder.measure(stop)
            score = scores.score(measured, decoded) if scores else None
            rows = feed.source(step)
            tally.add(Step(rows, lr, tokens, figures, measured, decoded), pipeline.depths())
            progress = Progress(
                step=step,
                row=rows.after.row,
                cursor=rows.after,
                data_digest=data.digest,
                packing=feed.rows.packing,
            )
            # What is decoded is saved too: else its score were for nothing.
            if step % settings.checkpoint_every == 0 or step == settings.steps or decoded is not None:
                tally.settle(pipeline.depths())
                # While steps are skipped nothing is learned, and an older checkpoint may be better than these weights.
                if not tally.skipped_in_a_row:
                    with tally.paused():
                        saver.save(tally.noted(progress), score)
                    last_saved = step
                    journal.update(step=step)
            saver.poll()
        # Here and not below: the threads may take long to stop, or never do.
        tally.settle(pipeline.depths())
        if last_saved != progress.step:
            saver.save(tally.noted(progress), score)
            journal.update(step=progress.step)
        saver.wait()
    for name in pipeline.left_behind:
        say(f"the thread {name!r} is still busy and was left behind")
    return "finished" if progress.step == settings.steps else "stopped"
