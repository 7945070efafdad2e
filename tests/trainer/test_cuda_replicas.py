"""On GPUs: replicas that share one, or have one each, take the steps of a single learner, and the host waits for none.

To be run on a machine with two GPUs: what needs both is skipped with one.
"""

import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import at
from test_draft import CONFIG
from test_learner import document
from test_replicas import assert_same_bits, bits
from tiny_runs import silent
from torch import Tensor

from trainer.checkpoint import restore, write_checkpoint
from trainer.checksums import checksums
from trainer.data import Row, make_row
from trainer.draft import DraftModel
from trainer.features import FeatureBatch
from trainer.feed import row_batch
from trainer.learner import Figures, Learner, features_of
from trainer.loss import Weighting
from trainer.optim import make_optimizer
from trainer.reduction import Reduction
from trainer.replicas import Replicas
from trainer.snapshot import HostCopy
from trainer.start import TrainingError
from trainer.streams import Streams
from trainer.target import TargetModel, load_target
from trainer.threads import nothing_compiles
from trainer.warm import BatchShape, compile_all

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(600),  # the kernels are compiled
    # torch's compiler and its kernels warn about themselves.
    pytest.mark.filterwarnings("default"),
]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here")
SHAPE = BatchShape(rows=1, row_tokens=384, anchors=24, dtype=torch.bfloat16, teacher=False)
ROWS = [
    [make_row(4 * step + n, [document(40 + 70 * n, 10 * step + n), document(90, step)], 384) for n in range(4)]
    for step in range(3)
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cuda:0", torch.bfloat16)


def learners_on(target: TargetModel, devices: Sequence[int]) -> list[Learner]:
    """Equal ones that are warmed up, on the GPUs of these numbers."""
    learners: list[Learner] = []
    for device in (torch.device("cuda", number) for number in devices):
        torch.manual_seed(0)
        model = DraftModel(target.draft_config(2, 16, (1, 2, 3))).to(device)
        optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
        head_VH, weighting = target.head_weight.to(device), Weighting("d-pace")
        learners.append(Learner(model, head_VH, optimizer, weighting, chunk_blocks=20, clip=0.05))
    compile_all(learners, SHAPE, say=silent)
    for device in devices:
        torch.cuda.synchronize(device)
    return learners


def batches_of(target: TargetModel, learners: Sequence[Learner], rows: Sequence[Row]) -> list[FeatureBatch]:
    """A batch of each row, for the replicas in turn, on their devices and ready."""
    made: list[FeatureBatch] = []
    for number, row in enumerate(rows):
        replica = number % len(learners)
        batch = replace(row_batch([row], 24, 0), replica=replica)
        learner = learners[replica]
        made.append(features_of(target, batch, learner.model.config, learner.device, anchors=24).sent())
    return made


def run(
    target: TargetModel, devices: Sequence[int], steps: Sequence[Sequence[Row]] = ROWS, **named: Any
) -> tuple[list[Figures], dict[str, Tensor]]:
    """The figures of some steps, and weights and moments after them."""
    learners, figures = learners_on(target, devices), list[Figures]()
    streams = Streams([learner.device for learner in learners])
    with (
        streams.current(),
        nothing_compiles([learner.device for learner in learners]),
        Replicas(learners, streams=streams, check_every=1, **named) as replicas,
    ):
        for rows in steps:
            for batch in batches_of(target, learners, rows):
                replicas.learn(batch)
            figures.append(replicas.update(1e-3).read())
        replicas.check()
        snapshot = HostCopy().take(replicas.state).arrived()
    return figures, {name: tensor.clone() for name, tensor in (*snapshot.weights.items(), *snapshot.moments.items())}


def assert_like_one(target: TargetModel, figures: Sequence[Figures]) -> None:
    """As a single learner's, but for the order of sums and what bfloat16 rounds otherwise after a step of it."""
    single, _ = run(target, [0])
    for one, other in zip(figures, single, strict=True):
        assert one.finite and one.loss == pytest.approx(other.loss, rel=5e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)
    assert figures[0].loss == pytest.approx(single[0].loss, rel=1e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_replicas_on_one_gpu_take_the_steps_of_one(count: int, target: TargetModel) -> None:
    figures, ended = run(target, [0] * count)
    assert_like_one(target, figures)
    for optimizer in ("replicated", "sharded"):
        again, same = run(target, [0] * count, optimizer=optimizer)
        assert again == figures
        assert_same_bits(same, ended)


@two_gpus
def test_replicas_on_two_gpus_take_the_steps_of_one(target: TargetModel) -> None:
    figures, ended = run(target, [0, 1])
    assert_like_one(target, figures)
    for optimizer in ("replicated", "sharded"):
        again, same = run(target, [0, 1], optimizer=optimizer)
        assert again == figures
        assert_same_bits(same, ended)
    shared, same = run(target, [0, 0])  # where they are changes no bit either
    assert shared == figures
    assert_same_bits(same, ended)


@two_gpus
def test_nccl_adds_up_what_copies_do(target: TargetModel) -> None:
    """Of two numbers there is one sum only: here even the bits are the same. One group call a step."""
    figures, ended = run(target, [0, 1])
    for optimizer in ("replicated", "sharded"):
        other, same = run(target, [0, 1], optimizer=optimizer, reduce="nccl")
        assert other == figures
        assert_same_bits(same, ended)


@pytest.mark.parametrize("devices", [[0, 0], pytest.param([0, 1], marks=two_gpus)])
@pytest.mark.parametrize("reduce", ["copies", "nccl"])
@pytest.mark.parametrize("optimizer", ["replicated", "sharded"])
def test_nothing_of_a_step_waits_for_a_device(
    devices: list[int], reduce: Any, optimizer: Any, target: TargetModel
) -> None:
    """Nor a checksum: torch refuses what waits for all that is queued, and an update comes back before it is done."""
    if reduce == "nccl" and devices == [0, 0]:
        pytest.skip("nccl wants a GPU for each")
    learners = learners_on(target, devices)
    streams = Streams([learner.device for learner in learners])
    steps = [batches_of(target, learners, rows) for rows in ROWS]
    with (
        streams.current(),
        Replicas(learners, optimizer=optimizer, reduce=reduce, streams=streams, check_every=1) as replicas,
    ):
        for batch in steps[0]:
            replicas.learn(batch)
        replicas.update(1e-3).read()  # what is done once is done
        busy = [torch.randn(4096, 4096, device=learner.device) for learner in learners]
        torch.cuda.set_sync_debug_mode("error")
        for batch in steps[1]:
            replicas.learn(batch)
        with replicas.paused():
            pass  # the threads have queued all they have
        for _ in range(200):  # a second of work or so before the update's turn comes
            busy = [(one @ one).tanh() for one in busy]
        ended = [torch.cuda.Event() for _ in learners]
        for event, learner in zip(ended, learners, strict=True):
            event.record(torch.cuda.current_stream(learner.device))
        figures = replicas.update(1e-3)
        assert not any(event.query() for event in ended)
        torch.cuda.set_sync_debug_mode("default")
        assert figures.read().finite
        replicas.check()


@pytest.mark.parametrize("devices", [[0, 0], pytest.param([0, 1], marks=two_gpus)])
def test_a_flipped_bit_is_found_on_the_gpu(devices: list[int], target: TargetModel) -> None:
    learners = learners_on(target, devices)
    weights = learners[1].model.fc.weight.detach()
    on_the_host = checksums([weights.cpu()])
    assert torch.equal(checksums([weights]).cpu(), on_the_host)
    with Replicas(learners, check_every=1) as replicas:
        replicas.check()
        weights.view(torch.int32)[1, 2] ^= 1 << 7
        torch.cuda.synchronize(weights.device)
        device = f"cuda:{devices[1]}"
        with pytest.raises(TrainingError, match=rf"drafter-1 \({device}\) are not equal .* differ in fc.weight\. "):
            replicas.check()


@pytest.mark.parametrize("devices", [[0, 0, 0], pytest.param([0, 1], marks=two_gpus)])
def test_a_sharded_checkpoint_is_gone_on_from_by_others(
    devices: list[int], target: TargetModel, tmp_path: Path
) -> None:
    learners = learners_on(target, devices)
    streams = Streams([learner.device for learner in learners])
    with streams.current(), Replicas(learners, optimizer="sharded", streams=streams) as replicas:
        for rows in ROWS:
            for batch in batches_of(target, learners, rows):
                replicas.learn(batch)
            replicas.update(1e-3)
        write_checkpoint(tmp_path, HostCopy().take(replicas.state), at(3), keep=1)
    kinds: list[tuple[list[int], Any]] = [(devices, "sharded"), ([0], "replicated"), ([0, 0], "replicated")]
    for others, optimizer in kinds:
        fresh = Replicas(learners_on(target, others), optimizer=optimizer)
        restore(tmp_path / "step-00000003", fresh.state)
        here, there = ({name: tensor.cpu() for name, tensor in bits(one.state).items()} for one in (fresh, replicas))
        assert_same_bits(here, there)


def test_a_replica_has_two_batches_on_its_gpu_at_most(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far ahead of it the host could be: each batch holds the memory of its features until it is learned."""
    learners, begun, learn = learners_on(target, [0]), threading.Semaphore(0), Learner.learn

    def counted(self: Learner, batch: FeatureBatch) -> None:
        begun.release()
        learn(self, batch)

    monkeypatch.setattr(Learner, "learn", counted)
    streams, batches = Streams([learners[0].device]), batches_of(target, learners, ROWS[0])
    busy = torch.randn(8192, 8192, device="cuda:0")
    torch.cuda.synchronize()
    with streams.current(), Replicas(learners, streams=streams) as replicas:
        for _ in range(300):  # seconds of work before the first batch's turn comes
            busy = (busy @ busy).tanh()
        ended = torch.cuda.Event()
        ended.record()
        for batch in batches[:3]:
            replicas.learn(batch)
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
        third = begun.acquire(timeout=0.1)
        assert not ended.query() and not third
        assert replicas.update(1e-3).read().finite
        assert begun.acquire(timeout=60)


@pytest.mark.parametrize("reduce", ["copies", "nccl"])
@pytest.mark.parametrize(
    "devices", [[0, 0, 0], pytest.param([0, 1], marks=two_gpus), pytest.param([1, 0, 1], marks=two_gpus)]
)
def test_sums_and_copies_are_those_of_the_host_whatever_the_gpus_still_have_to_do(
    devices: list[int], reduce: Any
) -> None:
    """To the bit, with gradients that come late and memory that is used again at once: no order is left to chance."""
    if reduce == "nccl" and len(set(devices)) < len(devices):
        pytest.skip("nccl wants a GPU for each")
    places = [torch.device("cuda", number) for number in devices]
    torch.manual_seed(0)
    fresh = DraftModel(CONFIG)
    models = [copy.deepcopy(fresh).to(place) for place in places]
    streams, reduction = Streams(places), Reduction(models, reduce)
    drawn = [[[torch.randn(p.shape).pin_memory() for p in fresh.parameters()] for _ in places] for _ in range(6)]
    busy = [torch.randn(2048, 2048, device=place) for place in places]
    for place in places:
        torch.cuda.synchronize(place)
    seen: list[list[list[Tensor]]] = []
    with streams.current():
        reduction.prepare()
        for gradients in drawn:
            for number, (model, place) in enumerate(zip(models, places, strict=True)):
                for _ in range(5 + 20 * number):  # some are late
                    busy[number] = (busy[number] @ busy[number]).tanh()
                one = busy[number][0, 0] * 0 + 1
                for parameter, gradient in zip(model.parameters(), gradients[number], strict=True):
                    parameter.grad = gradient.to(place, non_blocking=True) * one
            reduction.sum_gradients(everywhere=True)
            for owner, own in enumerate(reduction.shards):
                for index in own:
                    parameter = reduction.parameters[owner][index]
                    assert parameter.grad is not None
                    parameter.data.add_(parameter.grad)
            reduction.spread_weights()
            seen.append([[p.grad.clone() for p in model.parameters() if p.grad is not None] for model in models])
            for model in models:
                model.zero_grad(set_to_none=True)
    for place in places:
        torch.cuda.synchronize(place)
    weights = [parameter.detach().clone() for parameter in fresh.parameters()]
    for gradients, replicas in zip(drawn, seen, strict=True):
        sums = [sum(parts[1:], parts[0]) for parts in zip(*gradients, strict=True)]
        weights = [weight + total for weight, total in zip(weights, sums, strict=True)]
        for replica in replicas:
            assert all(torch.equal(got.cpu(), total) for got, total in zip(replica, sums, strict=True))
    for model in models:
        assert all(torch.equal(p.detach().cpu(), w) for p, w in zip(model.parameters(), weights, strict=True))
