"""The records: whole at every moment, and no step twice after a resume."""

from pathlib import Path

from trainer.journal import Journal, now
from trainer.records import RunDir, StepRecord, read_metrics, read_status


def record(step: int, loss: float = 2.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        accuracy=0.5,
        accept=1.5,
        lr=6e-4,
        grad_norm=1.0,
        tokens=100,
        tokens_per_s=1234.0,
        seconds=1.0,
        time=now(),
    )


def test_status_and_metrics_follow_the_steps(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(RunDir(tmp_path / "run"), 20, said.append)
    started = read_status((tmp_path / "run/status.json").read_bytes())
    assert started is not None and (started.state, started.step, started.loss) == ("starting", 0, None)
    journal.record(record(1, loss=5.0))
    journal.record(record(2, loss=4.0).model_copy(update={"heldout_loss": 4.5, "heldout_accept": 1.2}))
    journal.record(record(3, loss=3.0))
    status = read_status((tmp_path / "run/status.json").read_bytes())
    assert status is not None
    assert (status.state, status.step, status.total_steps) == ("training", 3, 20)
    assert (status.first_loss, status.loss, status.heldout_loss) == (5.0, 3.0, 4.5)
    assert [r.step for r in read_metrics((tmp_path / "run/metrics.jsonl").read_bytes())] == [1, 2, 3]
    assert said[0] == "step 1/20 loss 5.0000 accept 1.50 lr 6.0e-04 1234 tok/s"
    assert said[1].endswith("1234 tok/s | held-out loss 4.5000 accept 1.20")


def test_a_resume_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    journal = Journal(run, 20, print)
    for step in range(1, 6):
        journal.record(record(step, loss=10.0 - step))
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 6, "lo')
    assert [r.step for r in read_metrics(run.metrics.read_bytes())] == [1, 2, 3, 4, 5]
    again = Journal(run, 20, print)
    again.resume(3, 9.0, "step-00000003")
    assert (again.status.step, again.status.first_loss, again.status.loss) == (3, 9.0, 7.0)
    again.record(record(4))
    assert [r.step for r in read_metrics(run.metrics.read_bytes())] == [1, 2, 3, 4]
    assert run.metrics.read_bytes().endswith(b"}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events", "metrics.jsonl", "status.json"]


def test_readers_bear_other_versions_and_garbage() -> None:
    assert read_status(b"{") is None and read_status(b"") is None
    newer = b'{"schema_version": 2, "state": "training", "step": 1, "total_steps": 2, "updated_at": "", "more": 1}'
    status = read_status(newer)
    assert status is not None and status.schema_version == 2
    line = record(1).model_dump_json().encode()
    assert [r.step for r in read_metrics(b"\n\x00\xff\n{}\n" + line)] == [1]


def test_a_skipped_step_leaves_the_figures_of_the_one_before_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    run = RunDir(tmp_path)
    journal = Journal(run, 20, said.append)
    skipped = {"loss": None, "accuracy": None, "accept": None, "grad_norm": None, "skipped": 1}
    journal.record(record(1).model_copy(update=skipped))
    assert (journal.status.loss, journal.status.first_loss, journal.status.skipped) == (None, None, 1)
    journal.record(record(2, loss=3.0).model_copy(update={"skipped": 1}))
    journal.record(record(3).model_copy(update={**skipped, "skipped": 2}))
    assert (journal.status.step, journal.status.loss, journal.status.accept) == (3, 3.0, 1.5)
    assert (journal.status.first_loss, journal.status.skipped) == (3.0, 2)
    assert said[2] == "step 3/20 skipped (2 so far): its loss or gradient is not finite, lr 6.0e-04 1234 tok/s"
    read = read_metrics(run.metrics.read_bytes())
    assert [(r.step, r.loss, r.grad_norm, r.skipped) for r in read] == [
        (1, None, None, 1),
        (2, 3.0, 1.0, 1),
        (3, None, None, 2),
    ]
    assert b"NaN" not in run.metrics.read_bytes()  # which is no JSON
    Journal(run, 20, said.append).resume(3, 3.0, None, skipped=2)
    status = read_status(run.status.read_bytes())
    assert status is not None and (status.loss, status.accept, status.skipped) == (3.0, 1.5, 2)
    Journal(run, 20, said.append).resume(2, 3.0, None, skipped=1)  # an earlier checkpoint counts fewer
    status = read_status(run.status.read_bytes())
    assert status is not None and (status.loss, status.skipped) == (3.0, 1)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    full = record(1).model_copy(
        update={
            "accuracy_by_slot": (0.5, None, 0.25),
            "queues": {"source": 0, "target": 2},
            "memory_mib": 12.5,
            "heldout_loss": 4.0,
            "heldout_accept": 1.5,
            "heldout_cycle_accept": 1.75,
            "decoded_accept": 2.25,
            "decoded_accept_micro": 2.5,
            "decoded_histogram": {1: 3, 16: 1},
        }
    )
    said: list[str] = []
    Journal(RunDir(tmp_path), 20, said.append).record(full)
    assert read_metrics(RunDir(tmp_path).metrics.read_bytes()) == [full]
    assert said[-1].endswith(
        "| held-out loss 4.0000 accept 1.50, 1.75 a cycle | decoded 2.25 a cycle, micro 2.50 (1:3 16:1)"
    )
    status = read_status(RunDir(tmp_path).status.read_bytes())
    assert status is not None and (status.heldout_cycle_accept, status.decoded_accept) == (1.75, 2.25)


def test_what_was_decoded_last_stays_over_other_measurements_and_a_resume(tmp_path: Path) -> None:
    run, said = RunDir(tmp_path), list[str]()
    journal = Journal(run, 20, said.append)
    for step, more in {
        1: {"decoded_accept": 1.5}, 2: {"heldout_loss": 4.0}, 3: {"decoded_accept": 2.5}, 4: {}
    }.items():  # fmt: skip
        journal.record(record(step).model_copy(update=more))
    for resumed, accept in ((4, 2.5), (2, 1.5), (0, None)):
        status = read_status(run.status.read_bytes())
        assert status is not None and status.decoded_accept == (2.5 if resumed == 4 else {2: 2.5, 0: 1.5}[resumed])
        Journal(run, 20, said.append).resume(resumed, None, None)
        status = read_status(run.status.read_bytes())
        assert status is not None and status.decoded_accept == accept


def test_records_of_the_first_version_are_read() -> None:
    line = (
        b'{"schema_version":1,"step":1,"loss":6.4,"accuracy":0.1,"accept":1.1,"lr":0.0006,"grad_norm":2.5,"tokens":90,'
        b'"tokens_per_s":900.0,"seconds":0.1,"time":"2026-11-01T00:00:00.000+00:00"}'
    )
    (old,) = read_metrics(line)
    assert (old.loss, old.skipped, old.accuracy_by_slot, old.queues, old.memory_mib) == (6.4, 0, None, None, None)
    status = read_status(b'{"schema_version":1,"state":"finished","step":1,"total_steps":1,"updated_at":"","loss":6.4}')
    assert status is not None and (status.skipped, status.heldout_cycle_accept) == (0, None)
