"""`python -m trainer selftest threads`."""

import json
import subprocess

import pytest
import torch

from trainer import selftest, threads
from trainer.selftest import SCENARIOS, Result, Scenario, main, one, table
from trainer.threads import Fix


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(selftest, "SCENARIOS", tuple(scenario for scenario in SCENARIOS if scenario.name in names))


def test_it_shows_a_fault_without_the_repair_and_none_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "flag")
    in_process = selftest.in_process

    def one_process_is_enough(scenario: Scenario, fix: Fix, device: str, runs: int) -> str | None:
        if fix == "per-thread":
            return in_process(scenario, fix, device, runs)
        return in_this_process([scenario.name], fix, runs)[0]

    monkeypatch.setattr(selftest, "in_process", one_process_is_enough)
    assert main(["threads", "--runs", "2", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["held"] is True and told["torch"] == torch.__version__ and told["device"] == "cpu"
    found = told["faults"]["flag"]
    assert found["with"] is None
    if found["without"] is None:
        assert found["verdict"] == "no longer in this torch"
    else:
        assert "is told that it does" in found["without"] and found["verdict"] == "held"


def in_this_process(names: list[str], fix: Fix, runs: int) -> list[str | None]:
    """The repair is made once, for all."""
    try:
        return [one(name, fix, torch.device("cpu"), runs) for name in names]
    finally:
        if safety := threads.installed():
            safety.undo()


def test_every_scenario_holds_in_this_process() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert in_this_process(names, "per-thread", 1) == [None for _ in names]


def test_a_repair_that_does_not_hold_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "flag")
    monkeypatch.setattr(selftest, "in_process", lambda scenario, fix, device, runs: f"bad with {fix}")
    assert main(["threads", "--device", "cpu"]) == 1
    told = capsys.readouterr().out
    assert "FAILED" in told and "bad with off" in told and "THE REPAIR DOES NOT HOLD" in told


def test_a_process_that_dies_or_hangs_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*words: object, **more: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], -11, "", "Fatal Python error\nSegmentation fault\n")

    def hangs(*words: object, **more: object) -> None:
        raise subprocess.TimeoutExpired("python", 300)

    monkeypatch.setattr(subprocess, "run", dies)
    assert selftest.in_process(SCENARIOS[0], "off", "cpu", 1) == "the process ended with code -11: Segmentation fault"
    monkeypatch.setattr(subprocess, "run", hangs)
    assert selftest.in_process(SCENARIOS[0], "off", "cpu", 1) == "it did not end in 300 s"


def test_what_this_torch_no_longer_has_is_told_as_such() -> None:
    by_luck = next(scenario for scenario in SCENARIOS if scenario.by_luck)
    assert Result(SCENARIOS[0], None, None).verdict == "no longer in this torch"
    assert Result(by_luck, None, None).verdict == "did not come up"
    assert Result(by_luck, None, "bad").verdict == "FAILED"
    lines = table([Result(SCENARIOS[0], "x" * 300, None)]).splitlines()
    assert max(map(len, lines)) < 120 and "…" in lines[1] and lines[1].endswith("held")


def test_a_device_that_is_not_here_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="--device cuda: torch sees no GPU here"):
        main(["threads", "--device", "cuda"])
