"""A training, top to bottom: rows -> the target's features -> the drafter's loss -> an update, again and again.

Row i always makes the same batch, and step n always learns from the same rows, whatever the threads' timing: the same
config and data give the same losses, and a resumed run repeats the uninterrupted one, bit for bit on the same devices.
"""

import contextlib
import copy
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trainer import sizes
from trainer.checkpoint import Progress, Written, judge, read_state
from trainer.config import TrainConfig, idle_keys
from trainer.course import Course, Due
from trainer.devices import listed, plus
from trainer.diagnosis import explain
from trainer.draft_config import DraftConfig
from trainer.features import FeatureBatch, RowBatch
from trainer.feed import Feed
from trainer.journal import Journal
from trainer.layout import Layout, check_layout, parse
from trainer.learner import Learner
from trainer.live import Measuring, heldout_decoder, measuring
from trainer.locks import locked
from trainer.origin import origin_of
from trainer.patience import GaveUp, Patience
from trainer.pipeline import Failure, Pipeline, Stage
from trainer.prepared import Prepared
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
    resumed,
    soft_cost_line,
    start_weights,
)
from trainer.state import checkpoint_folders
from trainer.streams import Streams
from trainer.tally import Tally
from trainer.target import TargetModel
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
    """The whole way; the steps are in course.py."""
    settings, layout = config.train, parse(config.layout)
    devices = [torch.device(name) for name in layout.drafters]
    places = [[torch.device(name) for name in names] for names in layout.targets]
    everywhere = [*devices, *(device for place in places for device in place)]

    earlier = checked(config, layout, run, journal, init_from, resume, say)
    ground = ground_of(config, layout, run, earlier, stop, say)
    # Before anything compiles, and before there are threads.
    safety = make_torch_thread_safe(settings.fx_fix)
    if safety.left:
        say(str(safety))

    # Those who learn.
    origin = origin_of(config, devices[0])
    before = read_state(earlier) if earlier else None
    learners = learners_of(config, ground, devices, init_from or config.init_from, fresh=before is None, say=say)
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

    # Where they start.
    feed = ground.feed
    progress = resumed(earlier, before, replicas.state, origin, say) if earlier and before else ground.begin()
    cursor = place_after(progress, feed.rows, say)
    is_own = earlier is not None and earlier.parent == run.checkpoints
    scores = measuring(config, ground.heldout.digest) if ground.heldout else None
    if scores and is_own:
        tell_of_the_best(run, scores, say)
    journal.resume(progress.step, progress.first_loss, earlier.name if earlier and is_own else None, progress.skipped)
    say(headline(config, layout, ground, learners[0]))
    decoder = heldout_decoder(
        config, ground.heldout, ground.targets[0], learners[0].model, devices[0], block=ground.draft.block_size
    )
    due = Due(settings, feed, decoder)
    # A stop may have come before what was to be measured after the last step was.
    unmeasured = progress.unmeasured and is_own and due.measuring(progress.step)

    def saved(written: Written) -> None:
        journal.update(checkpoint=written.path.name)
        say(f"saved {written.path.name}{', the best so far' if written.best else ''}")

    def still_wanted() -> None:
        watchdog.beat()
        if stop.is_set():
            raise Stopped

    # The workers: the feed and the targets work ahead in their own threads, and each drafter learns in its own.
    workers = [
        TargetWorker(each, ground.draft, place, devices, anchors=settings.anchors, teacher=learns_distribution(config))
        for each, place in zip(ground.targets, places, strict=True)
    ]
    target_stage = Stage("target", workers)
    source = feed.batches(progress.step, cursor, measured=not (unmeasured and due.figures(progress.step)))
    with (
        streams.current(),
        watchdog,
        Saver(
            run.checkpoints, replicas.state, keep=settings.keep, origin=origin, saved=saved, say=say, beat=beat
        ) as saver,
    ):
        finish_loading(everywhere)
        if progress.step < settings.steps or unmeasured:
            shape = batch_shape(config, feed.micro_rows, ground.targets[0].dtype)
            warm_up_targets(
                ground.targets,
                shape,
                ground.draft.target_layer_ids,
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
                max(1, config.layout.depth - 1) * len(devices),
                config.layout.queue_mib * 2**20 * len(devices),
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
                devices=everywhere,
                log_every=settings.log_every,
                load=meter.load,
                skipped=progress.skipped,
                skipped_in_a_row=progress.skipped_in_a_row,
                say=say,
            )
            course = Course(
                settings,
                feed,
                iter(pipeline),
                replicas,
                progress=progress,
                last_saved=progress.step if is_own else None,
                due=due,
                decoder=decoder,
                scores=scores,
                tally=tally,
                meter=meter,
                saver=saver,
                journal=journal,
                stop=stop,
                beat=beat,
            )
            journal.update(state="training")
            if before and not is_own:
                course.save_as_own(before.score)
            elif earlier and progress.step == settings.steps:
                saver.tidy(earlier)  # which no save will do any more
            try:
                if unmeasured and earlier:
                    course.catch_up(earlier)
                course.go_on()
            except GaveUp as error:
                say(f"{error}: the step under way is given up")
            # Here and not below: the threads may take long to stop, or never do.
            course.end()
    for name in (*pipeline.left_behind, *replicas.left_behind):
        say(f"the thread {name!r} is still busy and was left behind")
    return "finished" if course.finished else "stopped"


# --- the way to the first step ---


def checked(
    config: TrainConfig,
    layout: Layout,
    run: RunDir,
    journal: Journal,
    init_from: Path | None,
    resume: Path | None,
    say: Say,
) -> Path | None:
    """Tells what is wrong before hours of preparation. The checkpoint to go on from, if there is one."""
    for line in (*idle_keys(config), *check_layout(config, layout)):
        say(line)
    check_paths(config)
    earlier = find_checkpoint(run, resume, say)
    if earlier:
        journal.goes_on_from(read_state(earlier).progress.step)
    if earlier and init_from:
        say(f"--init-from {init_from} does nothing: the training goes on from {earlier}")
    return earlier


@dataclass(frozen=True)
class Ground:
    """What is learned from, and by what kind of drafter."""

    targets: Sequence[TargetModel]  # one for each target worker, all the same
    data: Prepared
    heldout: Prepared | None
    feed: Feed
    draft: DraftConfig

    def begin(self) -> Progress:
        """Of a training that has done nothing yet."""
        return Progress(step=0, row=0, data_digest=self.data.digest, packing=self.feed.rows.packing)


def ground_of(
    config: TrainConfig, layout: Layout, run: RunDir, earlier: Path | None, stop: threading.Event, say: Say
) -> Ground:
    """Loads the targets and prepares the data. Raises TrainingError, TargetError, DataError; Stopped."""
    targets = load_targets(config, layout)
    target = targets[0]
    if reason := sizes.too_long(target.config, config.data.row_tokens):
        raise TrainingError(f"the target {config.target.path}: {reason}")
    check_fits(config, target, earlier)
    data, heldout = data_of(config, target, run, stop, say)
    feed = Feed(config, data, heldout, len(layout.drafters))
    for line in feed.report:
        say(line)
    draft = draft_config(config, target, [data, heldout] if heldout else [data], earlier)
    if learns_distribution(config):
        say(soft_cost_line(config, draft))
    return Ground(targets, data, heldout, feed, draft)


def learns_distribution(config: TrainConfig) -> bool:
    """Whether the labels are the target's distribution, not the data's tokens."""
    return config.train.objective != "cross-entropy"


def learners_of(
    config: TrainConfig,
    ground: Ground,
    devices: Sequence[torch.device],
    init_from: Path | str | None,
    *,
    fresh: bool,
    say: Say,
) -> list[Learner]:
    """A learner for each device, all with the same weights. fresh: no checkpoint's will take their place."""
    target = ground.targets[0]
    model = fresh_drafter(ground.draft, config.train.seed)
    if fresh:
        seed_all(config.train.seed)
        start_weights(model, init_from, say, target)
    model = model.to(devices[0])  # the first one's: the others have copies of it
    heads = heads_on(devices, ground.targets)
    return [
        make_learner(config, copy.deepcopy(model).to(device) if number else model, heads[device])
        for number, device in enumerate(devices)
    ]


def heads_on(devices: Iterable[torch.device], targets: Sequence[TargetModel]) -> dict[torch.device, Tensor]:
    """The target's head on each device: the one that is there, or a copy."""
    heads = {each.device: each.head_weight for each in reversed(targets)}
    for device in devices:
        if device not in heads:
            heads[device] = targets[0].head_weight.to(device)
    return heads


def tell_of_the_best(run: RunDir, scores: Measuring, say: Say) -> None:
    """Says when the best checkpoint so far can't be compared with what will be measured."""
    judged = judge(run.checkpoints)
    if judged.best and judged.score:
        for line in scores.differs(judged.best.name, judged.score):
            say(line)


def headline(config: TrainConfig, layout: Layout, ground: Ground, learner: Learner) -> str:
    """What is trained, on what, in a line."""
    settings, feed = config.train, ground.feed
    return (
        f"training {sum(p.numel() for p in learner.model.parameters()):,} weights on {listed(layout.drafters)}, target "
        f"{config.target.path} on {listed(map(plus, layout.targets))}: {len(ground.data):,} conversations, about "
        f"{feed.rows.about_rows:,} rows an epoch, {settings.rows_per_step} rows of {config.data.row_tokens} tokens and "
        f"{settings.anchors} blocks a row a step"
    )


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
