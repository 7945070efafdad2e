"""The exit codes are a promise to scripts; an error is one line."""

import pytest

from dflash_ops import errors

TABLE = {
    "OpsError": 1,
    "UsageFault": 2,
    "ConfigError": 3,
    "UnreachableError": 4,
    "LinkLostError": 4,
    "HostKeyError": 5,
    "PreflightError": 6,
    "BusyError": 7,
    "NotFoundError": 8,
    "VerificationError": 9,
    "RunFailedError": 100,
    "StillRunningError": 101,
    "CancelledError": 103,
    "TimedOutError": 124,
}


def test_every_error_has_the_exit_code_of_the_table() -> None:
    found = {
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OpsError)
    }
    assert found == TABLE


@pytest.mark.parametrize("name", TABLE)
def test_the_tree_in_the_docstring_names_every_error_with_its_code(name: str) -> None:
    assert f"{name} ({TABLE[name]})" in (errors.__doc__ or "")


def test_an_error_says_what_where_why_and_what_to_run_next() -> None:
    error = errors.PreflightError(
        "deploy stopped", where="lab / container 200", why="it is stopped", next="pct start 200"
    )
    assert str(error) == "deploy stopped (lab / container 200): it is stopped. Next: pct start 200"


def test_an_error_stays_one_line_whatever_a_program_said() -> None:
    assert errors.OpsError("failed", why="first\n\n second \nthird").line() == "failed: first; second; third"
