"""A training, top to bottom: rows -> the target's features -> the drafter's loss -> an update, again and again.

Row i always makes the same batch, and step n always learns from the same rows, whatever the threads' timing: the same
config and data give the same losses, and a resumed run repeats the uninterrupted one, bit for bit on the same devices.
"""

import contextlib
import copy
import threading
from collections.abc import Generator, Iterable
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from trainer import sizes
from trainer.acceptance import CycleFigures
from trainer.checkpoint import Progress, Score, Written, judge, read_state, restore, write_score
from trainer.config import TrainConfig, idle_keys
from trainer.devices import listed, plus
from trainer.diagnosis import explain
from trainer.features import FeatureBatch, RowBatch
from trainer.feed import Feed
from trainer.heldout import HeldoutFigures, heldout_figures
from trainer.journal import Journal
from trainer.layout import check_layout, parse
from trainer.live import HeldoutDecoder, heldout_prompts, measuring
from trainer.locks import locked
from trainer.optim import learning_rate
from trainer.origin import changes_since, origin_of
from trainer.patience import GaveUp, Patience
from trainer.pipeline import Failure, Pipeline, Stage
from trainer.randomness import seed_all
from trainer.records import RunDir
from trainer.replicas import Replicas
from trainer.saving import Saver
from trainer.shortage import note_worker, shortage_in
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
    place_after,
    soft_cost_line,
    start_weights,
)
from trainer.state import checkpoint_folders
from trainer.streams import Streams
from trainer.tally import Step, Tally, measured_figures
from trainer.threads import make_torch_thread_safe, nothing_compiles
from trainer.warm import batch_shape, make_learner, warm_up, warm_up_targets
from trainer.watchdog import Watchdog
from trainer.workers import Meter, TargetWorker, load_targets

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
        except BaseException as error:  # a worker may have raised SystemExit
            explain(error)
            told = shortage_in(error, config) or error
            with contextlib.suppress(OSError):  # the disk may be what failed: its error is the one to tell
                journal.update(state="failed", error=f"{type(told).__name__}: {told}".split("\n")[0].removesuffix(": "))
            if told is not error:
                raise told from error
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
    settings, layout = config.train, parse(config.layout)
    devices = [torch.device(name) for name in layout.drafters]
    replicas_count = len(devices)

    # What is wrong is told before hours of preparation.
    for line in (*idle_keys(config), *check_layout(config, layout)):
        say(line)
    check_paths(config)
    earlier = find_checkpoint(run, resume, say)
    if earlier:
        journal.goes_on_from(read_state(earlier).progress.step)
    if earlier and init_from:
        say(f"--init-from {init_from} does nothing: the training goes on from {earlier}")

    # What is learned from, and by whom.
    targets = load_targets(config, layout)
    target = targets[0]
    if reason := sizes.too_long(target.config, config.data.row_tokens):
        raise TrainingError(f"the target {config.target.path}: {reason}")
    check_fits(config, target, earlier)
    data, heldout = data_of(config, target, run, stop, say)
    feed = Feed(config, data, heldout, replicas_count)
    for line in feed.report:
        say(line)
    draft = draft_config(config, target, [data, heldout] if heldout else [data], earlier)
    learns_distribution = settings.objective != "cross-entropy"
    if learns_distribution:
        say(soft_cost_line(config, draft))

    # Before anything compiles, and before there are threads.
    safety = make_torch_thread_safe(settings.fx_fix)
    if safety.left:
        say(str(safety))

    # Where it starts.
    origin = origin_of(config, devices[0])
    model = fresh_drafter(draft, settings.seed)
    before = read_state(earlier) if earlier else None
    if before is None:
        seed_all(settings.seed)
        start_weights(model, init_from or config.init_from, say, target)
    heads = {each.device: each.head_weight for each in reversed(targets)}
    learners = [
        make_learner(config, copy.deepcopy(model).to(device), heads.setdefault(device, target.head_weight.to(device)))
        for device in devices
    ]
    streams, failure = Streams(devices), Failure()
    patience = Patience(stop, failure)
    watchdog = Watchdog(config.layout.stall_seconds, lambda report: stalled(journal, run, report), what="the training")

    def beat() -> None:
        """Something got on."""
        watchdog.beat()
        patience.beat()

    replicas = Replicas(
        learners,
        optimizer=config.layout.optimizer,
        reduce=config.layout.reduce,
        check_every=config.layout.check_every,
        steps_done=before.progress.step if before else 0,
        streams=streams,
        failed=note,
        beat=beat,
        failure=failure,
    )
    if earlier:
        progress = restore(earlier, replicas.state)
        say(f"resuming from {earlier} at step {progress.step}")
        if before and before.origin:
            for line in changes_since(before.origin, origin):
                say(line)
    else:
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
        f"training {sum(p.numel() for p in model.parameters()):,} weights on {listed(layout.drafters)}, target "
        f"{config.target.path} on {listed(map(plus, layout.targets))}: {len(data):,} conversations, about "
        f"{feed.rows.about_rows:,} rows an epoch, {settings.rows_per_step} rows of {config.data.row_tokens} tokens and "
        f"{settings.anchors} blocks a row a step"
    )

    def saved(written: Written) -> None:
        journal.update(checkpoint=written.path.name)
        say(f"saved {written.path.name}{', the best so far' if written.best else ''}")

    def still_wanted() -> None:
        watchdog.beat()
        if stop.is_set():
            raise Stopped

    def decodes_after(step: int) -> bool:
        return decoder is not None and (step % settings.decode_every == 0 or step == settings.steps)

    def measures_after(step: int) -> bool:
        return feed.measures_after(step) or decodes_after(step)

    decoder = None
    if heldout and settings.decode_every:
        prompts = heldout_prompts(
            heldout, target, settings.decode_prompts, settings.decode_tokens, block=draft.block_size
        )
        decoder = HeldoutDecoder(target, learners[0].model, devices[0], prompts, settings.decode_tokens)

    # The workers: the feed and the targets work ahead in their own threads, and each drafter learns in its own.
    places = [[torch.device(name) for name in names] for names in layout.targets]
    workers = [
        TargetWorker(each, draft, place, devices, anchors=settings.anchors, teacher=learns_distribution)
        for each, place in zip(targets, places, strict=True)
    ]
    target_stage = Stage("target", workers)
    # A stop may have come before what was to be measured after the last step was.
    unmeasured = progress.unmeasured and is_own and measures_after(progress.step)
    source = feed.batches(progress.step, cursor, measured=not (unmeasured and feed.measures_after(progress.step)))
    with (
        streams.current(),
        watchdog,
        Saver(
            run.checkpoints, replicas.state, keep=settings.keep, origin=origin, saved=saved, say=say, beat=beat
        ) as saver,
    ):
        finish_loading([*devices, *(device for place in places for device in place)])
        if progress.step < settings.steps or unmeasured:
            shape = batch_shape(config, feed.micro_rows, target.dtype)
            warm_up_targets(
                targets,
                shape,
                draft.target_layer_ids,
                fp8=config.target.fp8,
                say=say,
                check=still_wanted,
                allow=watchdog.allow,
            )
            warm_up(learners, shape, say=say, check=still_wanted, allow=watchdog.allow)
        with (
            nothing_compiles(devices),
            replicas,
            Pipeline[FeatureBatch](
                source,
                [target_stage],
                # One more waits with each drafter.
                max(1, config.layout.depth - 1) * replicas_count,
                config.layout.queue_mib * 2**20 * replicas_count,
                size=waiting_bytes,
                failed=note,
                beat=beat,
                failure=failure,
            ) as pipeline,
            patience,
        ):
            watchdog.ask(pipeline.doing)
            watchdog.ask(replicas.doing)
            meter = Meter(
                layout,
                dict(zip(target_stage.workers(), (worker.clock for worker in workers), strict=True)),
                replicas.clocks,
                queues=pipeline.depths,
                threads=lambda: {**pipeline.busy(), **replicas.busy()},
                most_drafters=settings.rows_per_step,
            )
            tally = Tally(
                journal,
                devices=[*devices, *(device for place in places for device in place)],
                log_every=settings.log_every,
                load=meter.load,
                skipped=progress.skipped,
                skipped_in_a_row=progress.skipped_in_a_row,
                say=say,
            )

            @contextlib.contextmanager
            def aside() -> Generator[None]:
                """What is no training: in no figure of speed, and no worker's waiting."""
                with tally.paused(), replicas.paused(), meter.paused():
                    yield

            journal.update(state="training")
            last_saved = progress.step if is_own else None
            if before and not is_own:
                # From here on the run can do without the earlier one.
                saver.save(progress, before.score)
                last_saved = progress.step
            elif earlier and progress.step == settings.steps:
                saver.tidy(earlier)  # which no save will do any more
            results = iter(pipeline)
            score: Score | None = None  # of the last step

            def measure(step: int) -> tuple[HeldoutFigures | None, CycleFigures | None]:
                """What is due after a step, of what is to be measured; None for what a stop has cut."""
                figured = decoded = None
                with aside():
                    if feed.measures_after(step) and not stop.is_set():
                        batches = islice(results, feed.heldout_batches)
                        figured = heldout_figures(replicas, batches, stop, late=replicas_count)
                    if decoder and decodes_after(step) and not stop.is_set():
                        decoded = decoder.measure(stop, beat)
                return figured, decoded

            def cut(step: int, figured: HeldoutFigures | None, decoded: CycleFigures | None) -> bool:
                return (feed.measures_after(step) and figured is None) or (decodes_after(step) and decoded is None)

            try:
                if unmeasured and earlier:
                    measured, decoded = measure(progress.step)
                    if not cut(progress.step, measured, decoded):
                        score = scores.score(measured, decoded) if scores else None
                        progress = progress.model_copy(update={"unmeasured": False})
                        journal.amend(progress.step, measured_figures(measured, decoded))
                        write_score(earlier, progress, score, settings.keep)
                for step in range(progress.step + 1, settings.steps + 1):
                    if stop.is_set():
                        break
                    lr = learning_rate(
                        step, steps=settings.steps, highest=settings.lr, warmup_ratio=settings.warmup_ratio
                    )
                    tokens = learn_from(islice(results, feed.batches_per_step), replicas)
                    figures = replicas.update(lr)
                    rows = feed.source(step)
                    progress = Progress(
                        step=step,
                        row=rows.after.row,
                        cursor=rows.after,
                        data_digest=data.digest,
                        packing=feed.rows.packing,
                    )

                    measured = decoded = score = None
                    if measures_after(step):
                        progress = progress.model_copy(update={"unmeasured": True})
                        if not stop.is_set():
                            tally.settle()
                            figures.read()  # waits for the step, which is training, before what is none begins
                            measured, decoded = measure(step)
                        progress = progress.model_copy(update={"unmeasured": cut(step, measured, decoded)})
                        score = scores.score(measured, decoded) if scores else None
                    tally.add(Step(rows, lr, tokens, figures, measured, decoded))
                    # What is decoded is saved too: else its score were for nothing.
                    if step % settings.checkpoint_every == 0 or step == settings.steps or decoded is not None:
                        tally.settle()
                        # While steps are skipped nothing is learned, and an older checkpoint may be better.
                        if not tally.skipped_in_a_row:
                            with aside():
                                replicas.check()
                                saver.save(tally.noted(progress), score)
                            last_saved = step
                            journal.update(step=step)
                    saver.poll()
                replicas.check()
            except GaveUp as error:
                say(f"{error}: the step under way is given up")
            # Here and not below: the threads may take long to stop, or never do.
            tally.settle()
            if last_saved != progress.step:
                saver.save(tally.noted(progress), score)
                journal.update(step=progress.step)
            saver.wait()
    for name in (*pipeline.left_behind, *replicas.left_behind):
        say(f"the thread {name!r} is still busy and was left behind")
    return "finished" if progress.step == settings.steps and not progress.unmeasured else "stopped"


def learn_from(batches: Iterable[FeatureBatch], replicas: Replicas) -> int:
    """Gives them to their drafters; the tokens in them."""
    tokens = 0
    for batch in batches:
        tokens += batch.tokens
        replicas.learn(batch)
    return tokens


def note(error: BaseException) -> None:
    """Keeps, in the thread that failed, what only there is to be seen."""
    note_worker(error)
    explain(error)


def finish_loading(devices: Iterable[torch.device]) -> None:
    """Waits for what was queued on the devices' first streams: what comes is queued on others."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def waiting_bytes(batch: RowBatch | FeatureBatch) -> int:
    """What a batch takes of a drafter's memory while it waits."""
    return batch.device_bytes() if isinstance(batch, FeatureBatch) else 0


def stalled(journal: Journal, run: RunDir, report: str) -> None:
    """The record of a training that the watchdog ends, with what was saved that nobody has told of yet."""
    journal.update(state="failed", error=report.split("\n")[0])
    # Behind the record, for the disk may be what hangs. A later step's is a damaged one that was passed over.
    reached = journal.status.step
    own = [path.name for path in checkpoint_folders(run.checkpoints) if int(path.name.rpartition("-")[2]) <= reached]
    if own:
        journal.update(checkpoint=own[0])
