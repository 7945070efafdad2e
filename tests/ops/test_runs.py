"""Runs as values: ids, what facts mean, what an answer says."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dflash_ops import cli_many, cli_train, render_runs, run_request, runs, train
from dflash_ops.command import Command, Container, Host, Result, line
from dflash_ops.errors import BusyError, ConfigError, NotFoundError, OpsError, PreflightError, UsageFault
from dflash_ops.remote import answers, rundir
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import RunState
from dflash_ops.shell import Shell

BOX = Container(Host("lab", "lab"), 200, gpus=(3, 1))
STATUS = {"state": "training", "step": 7, "total_steps": 10, "updated_at": "2026-11-29T12:00:00Z"}
FINISHED = {**STATUS, "state": "finished"}


def facts(**more: Any) -> dict[str, Any]:
    return {
        "run_id": "a-b-20261129-120000-abcd",
        "run": {"release": "r1", "gpus": [0], "created_at": "2026-11-29T12:00:00.000Z", "resumes": None},
        "state": {},
        "exit": None,
        "status": STATUS,
        "supervisor_alive": False,
        "child_alive": False,
        "starting": False,
        "log_bytes": 3,
        "checkpoints": ["step-00000005"],
        **more,
    }


def ended(code: int | None, *, stopped: bool = False, signal: int | None = None) -> dict[str, Any]:
    return {"code": code, "signal": signal, "stopped": stopped, "ended_at": "x", "seconds": 1.0, "last_lines": ["end"]}


@pytest.mark.parametrize(
    ("more", "state", "exit_code", "own_code"),
    [
        ({"supervisor_alive": True}, RunState.RUNNING, 101, 101),
        ({"starting": True}, RunState.STARTING, 101, 101),
        ({}, RunState.LOST, 100, 100),
        ({"child_alive": True}, RunState.LOST, 100, 100),
        ({"exit": ended(0), "status": FINISHED}, RunState.FINISHED, 0, 0),
        ({"exit": ended(0), "supervisor_alive": True}, RunState.FINISHED, 0, 0),
        ({"exit": ended(7)}, RunState.FAILED, 100, 7),
        ({"exit": ended(137, signal=9)}, RunState.FAILED, 100, 137),
        ({"exit": ended(0, stopped=True)}, RunState.STOPPED, 103, 103),
        ({"exit": ended(137, stopped=True, signal=9)}, RunState.STOPPED, 103, 103),
        ({"exit": ended(143, stopped=True, signal=15)}, RunState.STOPPED, 103, 103),
        ({"exit": ended(None, stopped=True)}, RunState.STOPPED, 103, 103),
        # Asked to stop, but it crashed; asked to stop, but it had just finished.
        ({"exit": ended(1, stopped=True)}, RunState.FAILED, 100, 1),
        ({"exit": ended(0, stopped=True), "status": FINISHED}, RunState.FINISHED, 0, 0),
        # A signal that was not ours: it saved and ended, before its last step.
        ({"exit": ended(0), "status": {**STATUS, "state": "stopped"}}, RunState.STOPPED, 103, 103),
        ({"exit": ended(14)}, RunState.FAILED, 100, 14),
        ({"supervisor_alive": True, "state": {"state": "stalled"}}, RunState.STALLED, 101, 101),
        ({"supervisor_alive": True, "state": {"state": "waiting"}}, RunState.WAITING, 101, 101),
        # The last words of a supervisor that is gone are no longer true.
        ({"state": {"state": "stalled"}}, RunState.LOST, 100, 100),
    ],
)
def test_what_the_facts_mean(more: dict[str, Any], state: RunState, exit_code: int, own_code: int) -> None:
    run = runs.run_of(facts(**more))
    assert (run.state, run.exit_code, run.own_code) == (state, exit_code, own_code)
    assert run.name == "a-b"
    assert run.id in run.verdict() and state.value in run.verdict() and "step 7/10" in run.verdict()
    record = json.loads(json.dumps(run.to_json()))
    assert (record["schema_version"], record["state"], record["status"]["step"]) == (1, state.value, 7)
    render_runs.show_runs([run])
    render_runs.show_run(run)


def test_a_run_that_was_stopped_before_its_first_checkpoint_names_the_one_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {**facts()["run"], "resumes": "a-20261129-110000-abcd"}
    none = runs.run_of(facts(run=record, checkpoints=[], exit=ended(0, stopped=True)))
    own = runs.run_of(facts(run=record, exit=ended(0, stopped=True)))
    for run, from_ in ((none, "a-20261129-110000-abcd"), (own, own.id)):
        render_runs.note_verdict(run)
        assert f"go on: --resume {from_}\n" in capsys.readouterr().err
    render_runs.show_run(none)
    assert "it had gone on from a-20261129-110000-abcd; go on: --resume a-20261129" in capsys.readouterr().out


def test_skipped_steps_are_told_wherever_a_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.run_of(facts(status={**STATUS, "skipped": 2}, supervisor_alive=True))
    assert run.verdict() == f"run {run.id} is running at step 7/10 (2 skipped)"
    assert run.to_json()["status"]["skipped"] == 2
    render_runs.show_runs([run])
    assert "7/10 (2 skipped)" in capsys.readouterr().out
    # The trainer of an earlier release counts none.
    assert runs.run_of(facts(supervisor_alive=True)).progress == "7/10"


def test_figures_are_shown_as_far_as_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    held = {"heldout_loss": 4.5, "heldout_accept": 1.25}
    expected = {
        (): [],
        ("loss",): ["loss 3.0000"],
        ("loss", "accept"): ["loss 3.0000, acceptance length 1.50"],
        ("heldout_loss", "heldout_accept"): ["held out: loss 4.5000, acceptance length 1.25"],
        ("heldout_loss", "heldout_accept", "heldout_cycle_accept"): [
            "held out: loss 4.5000, acceptance length 1.25, 1.75 tokens a cycle"
        ],
        ("decoded_accept",): ["decoded: 2.25 tokens a cycle"],
    }
    figures = {"loss": 3.0, "accept": 1.5, "heldout_cycle_accept": 1.75, "decoded_accept": 2.25, **held}
    for names, lines in expected.items():
        run = runs.run_of(facts(status={**STATUS, **{name: figures[name] for name in names}}, checkpoints=[]))
        render_runs.show_runs([run])
        capsys.readouterr()
        render_runs.show_run(run)
        assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:]] == lines


def test_a_url_that_can_not_be_is_not_shown() -> None:
    assert run_request.check_url("https://x/y") and run_request.check_url("slack://a/b")
    for wrong in ("hush", "", "https://hu sh", "://hush"):
        with pytest.raises(UsageFault) as caught:
            run_request.check_url(wrong)
        assert "hu" not in str(caught.value)
    assert "hush" not in repr(StartRequest("a", "", "c", notify=("https://hush",)))


def test_missing_and_newer_records_are_no_error() -> None:
    bare = runs.run_of(facts(run={}, status={"state": "a newer word"}, exit={}))
    assert (bare.release, bare.status, bare.code, bare.state) == (None, None, None, RunState.FAILED)


_moments = st.datetimes(datetime(2000, 1, 1), timezones=st.just(UTC))


@given(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True), _moments)
def test_run_ids(name: str, moment: datetime) -> None:
    assert run_request.check_name(name) == name
    run_id = run_request.new_run_id(name, moment)
    assert rundir.name_of(run_id) == name
    assert re.fullmatch(rf"{name}-\d{{8}}-\d{{6}}-[0-9a-f]{{4}}", run_id)


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a b", "é", "a\n", "a" * 41, "../x", "a.b"])
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageFault):
        run_request.check_name(name)


def test_gpu_words() -> None:
    assert run_request.parse_gpus("all", BOX) is None
    assert run_request.parse_gpus("none", BOX) == ()
    assert run_request.parse_gpus("1,0", BOX) == (1, 0)
    assert run_request.parse_gpus("7", replace(BOX, gpus=())) == (7,)
    for wrong in ("2", "0,0", "x", "", "0,", "-1", "0 1", "²"):
        with pytest.raises(UsageFault):
            run_request.parse_gpus(wrong, BOX)


@pytest.mark.parametrize("wrong", ["A=1\nhush hush", "A=1\nB=hu\0sh hush\n", "A=1\n# \0\n"])
def test_env_names_never_show_a_value(wrong: str) -> None:
    assert run_request.env_names("A=1\n# c\n\nB_2= x y \n", "f") == ["A", "B_2"]
    with pytest.raises(ConfigError) as caught:
        run_request.env_names(wrong, "secrets.env")
    assert "secrets.env:2" in str(caught.value) and "hush" not in str(caught.value)
    assert caught.value.next


@pytest.mark.parametrize(
    "words",
    [
        ["stop", ""],
        ["logs", ""],
        ["status", ""],
        ["wait", ""],
        ["restart", ""],
        ["stop", "--session", ""],
        ["start", "c", "--resume", ""],
        ["start", "c", "--init-from", ""],
    ],
)
def test_an_empty_word_is_not_the_default(words: list[str]) -> None:
    assert isinstance(CliRunner().invoke(cli_train.app, words).exception, UsageFault)


def test_a_config_that_can_not_be_read(tmp_path: Path) -> None:
    inventory = tmp_path / "dflash-ops.toml"
    inventory.write_text('[hosts.lab]\naddress = "lab"\n[containers.box]\nhost = "lab"\nvmid = 200\n')
    words = ["start", str(tmp_path), "--inventory", str(inventory)]
    error = CliRunner().invoke(cli_train.app, words).exception
    assert isinstance(error, ConfigError)
    assert error.why == "Is a directory" and error.next


# -- commands


def test_a_start_is_one_command_with_its_locks_in_the_hosts_order() -> None:
    request = StartRequest("a", "x = 1", "c.toml", env="TOKEN=hush\n")
    command = run_request.start_command(BOX, request, "a-20261129-120000-abcd")
    text = line(BOX, command).text.decode()
    assert text.startswith("exec sh -c ") and " gpu-locks 1 3 -- lxc-attach -n 200 " in text
    assert "a-20261129-120000-abcd" in text
    assert b"hush" in command.stdin and "hush" not in text and "hush" not in repr(request)
    assert b'"gpus": [0, 1]' in command.stdin


# -- answers


def result(out: bytes, code: int = 0, err: bytes = b"") -> Result:
    return Result(BOX, Command(("x",)), code, out, err)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("config", ConfigError), ("preflight", PreflightError), ("busy", BusyError), ("not_found", NotFoundError)],
)
def test_refusals_become_their_errors(kind: str, error: type[OpsError]) -> None:
    reply = {"ok": False, "kind": kind, "what": "no", "why": "because", "next": "do", "where": ""}
    with pytest.raises(error, match=r"no \(lab / container 200\): because. Next: do"):
        runs.answer(result(json.dumps(reply).encode(), answers.EXIT_CODES[kind]))
    assert answers.EXIT_CODES[kind] == error.exit_code


def test_an_answer_behind_noise() -> None:
    assert runs.answer(result(b'motd\n{"ok": true, "a": 1}\n'))["a"] == 1


@given(st.binary())
def test_any_answer_is_an_error_of_ours_or_an_answer(out: bytes) -> None:
    for read in (runs.answer, runs.started):
        try:
            read(result(out, 1, b"Traceback\nValueError: x"))
        except OpsError as error:
            assert error.exit_code
    with pytest.raises(OpsError):
        runs.log_header(out, "lab")


def test_no_python_there() -> None:
    with pytest.raises(PreflightError, match="no Python"):
        runs.answer(result(b"", 127, b"env: python4: No such file or directory\n"))


def test_a_traceback_there_is_one_line_here() -> None:
    with pytest.raises(OpsError) as caught:
        runs.answer(result(b"", 1, b"Traceback (most recent call last):\n  File x\nValueError: bad\n"))
    assert "ValueError: bad" in str(caught.value) and "Traceback" not in str(caught.value)


# -- for people


def test_short_commands() -> None:
    assert render_runs.short("/opt/venv/bin/python -m trainer", 40) == "python -m trainer"
    assert render_runs.short("a " + "b" * 100, 10) == "a bbbbbbb…"


def test_spans_and_moments() -> None:
    assert [render_runs.span(it) for it in (None, 0.4, 61, 3600, 90_061)] == [
        None,
        "0 s",
        "1 m 1 s",
        "1 h 0 m",
        "1 d 1 h",
    ]
    now = datetime(2026, 11, 29, 12, 0, 5, tzinfo=UTC)
    assert render_runs.ago("2026-11-29T12:00:00.000Z", now) == "5 s ago"
    assert render_runs.ago("soon", now) is None
    assert render_runs.ago(None, now) is None
    assert render_runs.ago("2026-11-29T12:00:05.000Z", now - timedelta(seconds=2)) is not None


@given(st.text())
def test_nothing_but_text_and_colours_reaches_a_terminal(text: str) -> None:
    shown = render_runs.printable(text)
    rest = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", rest)


def test_printable() -> None:
    assert (
        render_runs.printable("a\x1b[31mred\x1b[0m\tb\r\n\x1b]0;title\x07\x1b[2J\x00é")
        == "a\x1b[31mred\x1b[0m\tb\r\n?]0;title???é"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stop", "a"], "the stop goes on in the container: dflash-ops train wait a\n"),
        (["stop"], "the stop goes on in the container: dflash-ops train wait\n"),
        (["stop", "--session", "x"], "goes on in the container: dflash-ops train list --all\n"),
        (["restart", "a"], "goes on in the container: dflash-ops train status a\n"),
        (["wait", "a"], "left it; the run goes on\n"),
    ],
)
def test_ctrl_c_says_what_goes_on(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    class Book:
        def container(self, _: object) -> Container:
            return BOX

    for name in ("stop", "stop_session", "restart", "wait"):
        monkeypatch.setattr(train, name, leave)
    monkeypatch.setattr(cli_many, "load_inventory", lambda _: Book())
    monkeypatch.setattr(Shell, "begin", lambda *_: None)
    done = CliRunner().invoke(cli_train.app, words)
    assert done.exit_code == 130 and done.stderr.endswith(says), done.output


@pytest.mark.parametrize("words", [["stop", "--grace", "inf"], ["restart", "--stall-minutes", "inf"]])
def test_seconds_without_end_are_refused(words: list[str]) -> None:
    done = CliRunner().invoke(cli_train.app, words)
    assert isinstance(done.exception, UsageFault) and "no number" in str(done.exception)


@pytest.mark.parametrize("wrong", ["https://user:hush@x/y", "https://hush@x", "https:///hush", "https://x:hush/"])
def test_a_webhook_that_can_not_be_sent_to_is_refused_and_not_shown(wrong: str) -> None:
    with pytest.raises(UsageFault) as caught:
        run_request.check_url(wrong)
    assert "hush" not in str(caught.value) and "--notify" in caught.value.next
