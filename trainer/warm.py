"""Compiles once, in one thread, all that a training will run: the drafters' forward and backward, to learn and to
measure, and the layers of targets that are run by hand. After it, a compilation is an error: threads.nothing_compiles.

What is compiled goes by shapes, types and devices alone: it needs no data and no target. `python -m trainer warm`
(prewarm.py) does the same for a training to come.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trainer.compile_cache import use_compile_cache
from trainer.compiled import compiled
from trainer.config import TrainConfig, default_gamma
from trainer.data import Row, make_row
from trainer.documents import Document
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.features import FeatureBatch, RowBatch
from trainer.feed import row_batch
from trainer.learner import Learner, features_of
from trainer.loss import Weighting
from trainer.optim import make_optimizer
from trainer.target import TargetModel
from trainer.threads import make_compiler_thread_safe

FORMS = 24  # in which a function is compiled for one device, at most: 2 of the drafter, 4 of the loss, 12 of the update
COMPILE_SECONDS = 900.0  # that one drafter may take cold: nothing in between says that the compiler gets on

Say = Callable[[str], None]
Allow = Callable[[float], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class BatchShape:
    """What all batches of a training are like."""

    rows: int  # of one forward
    row_tokens: int
    anchors: int  # of a row
    dtype: torch.dtype  # of what the target gives: features and embeddings
    teacher: bool  # whether the target's last states come along


@dataclass(frozen=True)
class Warmed:
    """A device that has compiled all it needs."""

    device: str
    seconds: float
    compiled: int  # graphs
    found: int  # graphs that the compile cache had

    @property
    def state(self) -> str:
        if not self.compiled:
            return "warm" if self.found else "nothing to compile"
        return "partly warm" if self.found else "cold"

    def __str__(self) -> str:
        graphs = f"{self.compiled} graphs compiled, {self.found} from the compile cache"
        return f"{self.device} warmed up in {self.seconds:.1f} s, {self.state}: {graphs}"


def batch_shape(config: TrainConfig, rows: int, dtype: torch.dtype) -> BatchShape:
    """rows: of one forward. dtype: the target's."""
    settings = config.train
    return BatchShape(rows, config.data.row_tokens, settings.anchors, dtype, settings.objective != "cross-entropy")


def make_learner(config: TrainConfig, model: DraftModel, head_VH: Tensor) -> Learner:
    """The learner of a drafter as the config wants it. model, head_VH: on the drafter's device.

    The head is taken as a plain tensor: dynamo would compile once more for a parameter, which it is on its own device.
    """
    settings = config.train
    gamma = settings.gamma or default_gamma(model.config.block_size)
    return Learner(
        model,
        head_VH.detach(),
        make_optimizer(model, lr=settings.lr, weight_decay=settings.weight_decay),
        Weighting(settings.loss, gamma=gamma, alpha=settings.alpha),
        chunk_blocks=settings.chunk_blocks,
        clip=settings.clip,
        objective=settings.objective,
    )


def warm_up(
    learners: Sequence[Learner],
    shape: BatchShape,
    *,
    say: Say,
    check: Callable[[], None] = lambda: None,
    allow: Allow = contextlib.nullcontext,
) -> list[Warmed]:
    """Compiles all that these learners will run, one after the other, in this thread. A line is said for each device.

    To be called while no other thread uses torch, under the streams that the learners will use. Their weights and the
    random generators stay as they are. check: called before each learner's turn; may raise, so that a stop needn't
    wait for all. allow: given the seconds that a learner's turn may take, it is open meanwhile (the watchdog's). On
    the CPU nothing is compiled, and nothing is done.
    """
    learners = [learner for learner in learners if learner.device.type == "cuda"]
    if not learners:
        return []
    folder = use_compile_cache(say)
    devices = ", ".join(dict.fromkeys(str(learner.device) for learner in learners))
    say(f"warming up {devices}, one after the other; compile cache: {folder or 'none that lasts'}")
    return compile_all(learners, shape, say=say, check=check, allow=allow)


def warm_up_targets(
    targets: Sequence[TargetModel],
    shape: BatchShape,
    layer_ids: Sequence[int],
    *,
    fp8: bool = False,
    say: Say,
    check: Callable[[], None] = lambda: None,
    allow: Allow = contextlib.nullcontext,
) -> list[Warmed]:
    """Makes these targets fast for rows of this shape (TargetModel.prepare), one after the other, in this thread.

    As warm_up, before it or after it. On the CPU there is nothing to do. Raises TargetError where fp8 is asked for and
    can't be had.
    """
    wanted = [target for target in dict.fromkeys(targets) if fp8 or _is_gpu(target.device)]
    if not wanted:
        return []
    use_compile_cache(say)
    if (safety := make_compiler_thread_safe()) and safety.left:
        say(str(safety))
    warmed: list[Warmed] = []
    for target in wanted:
        check()
        started, before = time.perf_counter(), _graphs()
        with allow(COMPILE_SECONDS), _forms_for(len(wanted)):
            target.prepare(shape.rows, shape.row_tokens, layer_ids, final=shape.teacher, fp8=fp8, compiled=compiled)
        if gpus := [d for d in {parameter.device for parameter in target.model.parameters()} if _is_gpu(d)]:
            for device in gpus:
                torch.cuda.synchronize(device)  # what it made of its weights, other streams will read
            torch.cuda.empty_cache()  # and what it made them of is nobody's any more: on all GPUs, so once all are done
        made, found = (now - then for now, then in zip(_graphs(), before, strict=True))
        warmed.append(Warmed(f"the target on {target.device}", time.perf_counter() - started, made, found))
        say(str(warmed[-1]))
    return warmed


def compile_all(
    learners: Sequence[Learner],
    shape: BatchShape,
    *,
    say: Say,
    check: Callable[[], None] = lambda: None,
    allow: Allow = contextlib.nullcontext,
) -> list[Warmed]:
    """warm_up on any device, wherever torch keeps what it compiles."""
    if (safety := make_compiler_thread_safe()) and safety.left:
        say(str(safety))
    by_device: dict[torch.device, list[int]] = {}
    for number, learner in enumerate(learners):
        by_device.setdefault(learner.device, []).append(number)
    warmed: list[Warmed] = []
    for device, here in by_device.items():
        started, before = time.perf_counter(), _graphs()
        for number in here:
            check()
            there = torch.cuda.device(device) if _is_gpu(device) else contextlib.nullcontext()
            with allow(COMPILE_SECONDS), _forms_for(len(learners)), there:
                try:
                    learners[number].warm_up(made_up_batch(learners[number].model.config, shape, device))
                except Exception as error:
                    error.add_note(f"while {device} was warmed up, in which nothing else runs")
                    with contextlib.suppress(AttributeError):  # as shortage.note_worker does in a drafter's thread
                        error.worker = f"drafter-{number}" if len(learners) > 1 else "drafter"  # type: ignore[attr-defined]
                    raise
        if _is_gpu(device):
            torch.cuda.synchronize(device)
        made, found = (now - then for now, then in zip(_graphs(), before, strict=True))
        warmed.append(Warmed(str(device), time.perf_counter() - started, made, found))
        say(str(warmed[-1]))
    return warmed


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@contextlib.contextmanager
def _forms_for(learners: int) -> Generator[None]:
    """Lets dynamo keep as many forms of a function as these need. On its own it refuses the 9th over all devices, and
    three need more. (Equal ones on one device share theirs.) The settings are this thread's; they are asked only where
    something is compiled.
    """
    import torch._dynamo.config as dynamo  # takes seconds, which a training on the CPU needn't spend

    settings: Any = dynamo
    with settings.patch(
        recompile_limit=max(settings.recompile_limit, FORMS * learners),
        accumulated_recompile_limit=max(settings.accumulated_recompile_limit, 4 * FORMS * learners),
    ):
        yield


def _graphs() -> tuple[int, int]:
    """How many graphs Inductor has compiled in this process, and how many it found in its cache."""
    from torch._dynamo.utils import counters

    inductor = cast("dict[str, int]", counters["inductor"])
    made = inductor.get("fxgraph_cache_miss", 0) + inductor.get("fxgraph_cache_bypass", 0)
    return made, inductor.get("fxgraph_cache_hit", 0)


# --- a batch without data and without a target ---------------------------------------------------------------------


class _MadeUp:
    """In a target's place: features and embeddings drawn by a random generator of their own."""

    def __init__(self, draft: DraftConfig, shape: BatchShape, device: torch.device) -> None:
        self.device = device
        self._draft, self._dtype = draft, shape.dtype
        self._random = torch.Generator(device).manual_seed(0)

    def _drawn(self, ids: Tensor, size: int) -> Tensor:
        return torch.randn(*ids.shape, size, generator=self._random, dtype=self._dtype, device=self.device)

    def embedding(self, ids: Tensor) -> Tensor:
        return self._drawn(ids, self._draft.hidden_size)

    def features(self, ids_BS: Tensor, *_: object) -> Tensor:
        return self._drawn(ids_BS, self._draft.feature_size)

    def features_and_final(self, ids_BS: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return self.features(ids_BS), self._drawn(ids_BS, self._draft.hidden_size)


def made_up_rows(shape: BatchShape, lengths: Sequence[int] | None = None, vocabulary: int = 1) -> RowBatch:
    """Rows of random tokens, all to be learned from. lengths: of each row's documents; None: one fills it."""
    random = np.random.default_rng(0)

    def row(number: int) -> Row:
        documents = [
            Document(random.integers(0, vocabulary, length), np.ones(length, dtype=np.bool_))
            for length in lengths or [shape.row_tokens]
        ]
        return make_row(number, documents, shape.row_tokens)

    return row_batch([row(number) for number in range(shape.rows)], shape.anchors, seed=0)


def made_up_batch(
    draft: DraftConfig, shape: BatchShape, device: torch.device, rows: RowBatch | None = None
) -> FeatureBatch:
    """A batch laid out as those of a training; rows: None: of one document each."""
    target: Any = _MadeUp(draft, shape, device)
    rows = rows or made_up_rows(shape)
    return features_of(target, rows, draft, device, anchors=shape.anchors, teacher=shape.teacher)
