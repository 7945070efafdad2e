"""env sync, check, list, warm: small wheels that the tests build themselves, real venvs, no network."""

import base64
import hashlib
import json
import os
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, Cli
from in_container import folder_of
from in_process import InProcess

from dflash_ops import environment as verbs
from dflash_ops import wheels
from dflash_ops.command import Command, Container, Pins
from dflash_ops.errors import BusyError, ConfigError, NotFoundError, PreflightError, VerificationError
from dflash_ops.progress import Progress
from dflash_ops.remote import environment, requirements, rundir, venv
from dflash_ops.remote.answers import Fault
from dflash_ops.shell import Shell
from dflash_ops.wheels import Machine

RELEASE = "20261129-120000-nogit-0000000"  # and one digit


def make_wheel(
    folder: Path, name: str, version: str, *, tags: str = "py3-none-any", needs: tuple[str, ...] = ()
) -> str:
    """A wheel with one module; gives its line of a lock."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n",
    }
    if name == "torch":
        build = version.partition("+")[2]
        cuda = repr(f"{build[2:-1]}.{build[-1]}") if build.startswith("cu") else None
        files["torch/version.py"] = f"__version__ = {version!r}\ncuda: Optional[str] = {cuda}\n"
    record = ""
    for place, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{place},sha256={digest},{len(text)}\n"
    wheel = folder / f"{name}-{version}-{tags}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for place, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(place, (2026, 1, 1, 0, 0, 0)), text)
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def release_with(container: Container, lock: str, digit: int = 0, **files: str) -> str:
    """A release that is current, as a deploy leaves it, and its id."""
    name = f"{RELEASE}{digit}"
    trainer = folder_of(container) / "releases" / name / "trainer"
    trainer.mkdir(parents=True, exist_ok=True)
    (trainer / "requirements.lock").write_text(lock)
    for file, text in files.items():
        (trainer / f"{file}.py").write_text(text)
    current = folder_of(container) / "current"
    current.unlink(missing_ok=True)
    current.symlink_to(f"releases/{name}")
    return name


@pytest.fixture
def base(box: Box) -> Container:
    """A container whose Python has no uv beside it, and no packages that matter: a fresh box."""
    return replace(box.container, python=os.path.realpath(sys.executable), pins=Pins())


@pytest.fixture(params=["uv", "pip"])
def either(request: pytest.FixtureRequest, box: Box, base: Container, soak: bool) -> Container:
    """One that has uv, and one that has not. pip takes its time: daily it builds once, in a test of its own."""
    if request.param == "pip":
        return base if soak else pytest.skip("--soak")
    assert (Path(sys.executable).parent / "uv").exists(), "it is in the dev extra: pip install -e '.[dev]'"
    return replace(box.container, pins=Pins())


@pytest.fixture
def house(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


def installed(shell: Shell, container: Container) -> dict[str, Any]:
    words = (f"{container.path}/env/current/bin/python", "-I", "-c", "import one; print(one.version)")
    return shell.run(container, Command(words), check=True).out.decode().strip()


# -- sync


def test_environments_come_and_go(shell: Shell, either: Container, house: Path) -> None:
    """Built from wheels without a network; the next lock's beside it; back again without building."""
    first = "# python >= 3.9\n" + make_wheel(house, "one", "1.0", needs=("two",)) + make_wheel(house, "two", "2.0")
    make_wheel(house, "other", "9.9")
    release = release_with(either, first)
    installer = "pip" if either.python == os.path.realpath(sys.executable) else "uv"
    assert verbs.list_all(shell, either) == []
    made = verbs.sync(shell, either, wheelhouse=house)
    assert (made.made, made.previous, made.release, made.installer) == (True, None, release, installer)
    assert made.sent == sum((house / f"{name}-py3-none-any.whl").stat().st_size for name in ("one-1.0", "two-2.0"))
    assert installed(shell, either) == "1.0" and made.need_bytes > made.sent
    found = verbs.check(shell, either)
    assert found.ok and found.environment == made.environment
    assert found.python == f"{either.path}/env/{made.environment}/bin/python"
    again = verbs.sync(shell, either, wheelhouse=house)
    assert (again.made, again.environment, again.previous) == (False, made.environment, made.environment)

    second = make_wheel(house, "one", "1.1") + make_wheel(house, "two", "2.0")
    release_with(either, second, 1)
    stale = verbs.check(shell, either)
    assert [(row.name, row.wanted, row.has) for row in stale.rows if not row.ok] == [("one", "1.1", "1.0")]
    newer = verbs.sync(shell, either, wheelhouse=house)
    assert newer.made and newer.previous == made.environment and installed(shell, either) == "1.1"
    old = verbs.sync(shell, either, release, wheelhouse=house)
    assert not old.made and old.environment == made.environment and installed(shell, either) == "1.0"
    listed = verbs.list_all(shell, either)
    assert [(it.id, it.current, it.whole) for it in listed] == [
        (made.environment, True, True),
        (newer.environment, False, True),
    ]
    assert all(it.size and it.size > 1000 and it.made_at and it.python for it in listed)
    # What was harmed meanwhile is made anew.
    (harmed,) = (folder_of(either) / "env" / "current").glob("lib/python3*/site-packages/two-2.0.dist-info")
    shutil.rmtree(harmed)
    assert not verbs.check(shell, either, release).ok
    mended = verbs.sync(shell, either, release, wheelhouse=house)
    assert mended.made and mended.environment == made.environment and verbs.check(shell, either, release).ok
    left = sorted(entry.name for entry in (folder_of(either) / "env").iterdir())
    assert left == sorted(("current", made.environment, newer.environment))


def test_another_build_of_torch_brings_what_nobody_has_locked(shell: Shell, either: Container, house: Path) -> None:
    container = replace(either, pins=Pins(torch="cpu"))
    lock = make_wheel(house, "one", "1.0") + make_wheel(house, "two", "2.0") + "torch==2.0\nnvidia-cublas==1.0\n"
    make_wheel(house, "torch", "2.0+cpu", needs=("two", "three"))
    make_wheel(house, "three", "3.0")
    release_with(container, lock)
    made = verbs.sync(shell, container, wheelhouse=house)
    assert (made.torch, installed(shell, container)) == ("2.0+cpu", "1.0")
    found = verbs.check(shell, container)
    assert [row.name for row in found.rows][3:] == ["torch", "one", "two"] and found.ok
    (house / "three-3.0-py3-none-any.whl").unlink()
    release_with(container, lock + "# another\n")
    with pytest.raises(PreflightError, match=r"pip install failed .*three"):
        verbs.sync(shell, container, wheelhouse=house)
    assert [(it.whole, it.current) for it in verbs.list_all(shell, container)] == [(True, True), (False, False)]


def test_by_pip(shell: Shell, base: Container, house: Path, cli: Cli) -> None:
    release_with(base, make_wheel(house, "one", "1.0"))
    made = verbs.sync(shell, base, wheelhouse=house)
    assert (made.installer, installed(shell, base)) == ("pip", "1.0")
    # `exec` runs its Python, by its real path.
    where = cli("exec", "--", "python", "-c", "import one, sys; print(sys.prefix)")
    assert where.stdout.decode() == f"{base.path}/env/{made.environment}\n"


def test_a_cut_build_is_begun_anew(shell: Shell, either: Container, house: Path) -> None:
    """At its first word, as by Ctrl-C; nothing is current until it is whole."""

    class Cut(Progress):
        def step(self, text: str) -> None:
            if text.startswith("  "):
                raise KeyboardInterrupt

    release_with(either, make_wheel(house, "one", "1.0"))
    with pytest.raises(KeyboardInterrupt):
        verbs.sync(shell, either, wheelhouse=house, progress=Cut())
    assert [it for it in verbs.list_all(shell, either) if it.whole or it.current] == []
    done = verbs.sync(shell, either, wheelhouse=house)  # the lock of the one that was cut is free
    assert done.made and installed(shell, either) == "1.0"
    assert [it.id for it in verbs.list_all(shell, either)] == [done.environment]


def test_two_syncs_at_once(shell: Shell, base: Container, house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "_PATIENCE_SECONDS", 0.2)
    release_with(base, make_wheel(house, "one", "1.0"))
    chosen, tried = wheels.chosen, []

    def meanwhile(*words: Any) -> list[wheels.Wheel]:
        with (
            Shell() as other,
            pytest.raises(BusyError, match=r"another env sync is going on .*held by \w+@.* since 20"),
        ):
            verbs.sync(other, base, wheelhouse=house)
        tried.append(True)
        raise PreflightError("enough")

    monkeypatch.setattr(wheels, "chosen", meanwhile)
    with pytest.raises(PreflightError, match="enough"):
        verbs.sync(shell, base, wheelhouse=house)
    assert tried and chosen
    assert verbs.list_all(shell, base) == []  # and the lock is free: nothing was begun


def test_what_a_wheelhouse_lacks_is_said_before_anything_is_built(shell: Shell, base: Container, house: Path) -> None:
    lock = make_wheel(house, "one", "1.0") + make_wheel(house, "two", "2.0")
    lock += "three==3.0 ; python_version < '3.0'\nfour==4.0 ; sys_platform == 'linux'\n"
    (house / "two-2.0-py3-none-any.whl").rename(house / "two-2.0-cp311-cp311-macosx_11_0_arm64.whl")
    make_wheel(house, "four", "4.1")
    release_with(base, lock)
    with pytest.raises(
        PreflightError, match=r"lacks packages .*: two 2\.0 \(has 2\.0\), four 4\.0 \(has 4\.1\), for Py"
    ):
        verbs.sync(shell, base, wheelhouse=house)
    with pytest.raises(NotFoundError, match=r"no such wheelhouse"):
        verbs.sync(shell, base, wheelhouse=house / "gone")
    (house / "sub").mkdir()
    with pytest.raises(NotFoundError, match=r"no wheel in the wheelhouse .*pip download"):
        verbs.sync(shell, base, wheelhouse=house / "sub")
    assert not [name for name in (folder_of(base) / "env").glob("[!.]*")]


def test_a_wheel_that_is_not_the_locked_one(shell: Shell, base: Container, house: Path) -> None:
    lock = make_wheel(house, "one", "1.0")
    with (house / "one-1.0-py3-none-any.whl").open("ab") as file:
        file.write(b"x")
    release_with(base, lock)
    with pytest.raises(VerificationError, match=r"a wheel is not the locked one .*one-1\.0"):
        verbs.sync(shell, base, wheelhouse=house)


def test_a_wheel_that_is_no_archive(house: Path) -> None:
    make_wheel(house, "one", "1.0")
    (house / "one-1.0-py3-none-any.whl").write_text("<html>not found</html>")
    (wheel,) = wheels.in_folder(house)
    with pytest.raises(VerificationError, match=r"that is no wheel .*one-1\.0.*download it again"):
        _ = wheel.unpacked_bytes


def test_wheels_of_a_failed_build_go_with_the_next_of_another_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "releases" / f"{RELEASE}0"
    (release / "trainer").mkdir(parents=True)
    (release / "trainer" / "requirements.lock").write_text("one==1\n")
    monkeypatch.setattr(environment, "environment_id", lambda *words: "0123456789ab")
    (tmp_path / "precious").mkdir()
    for name in (".wheels-0123456789ab", ".wheels-aaaaaaaaaaaa", ".wheels-mine"):
        (tmp_path / "env" / name).mkdir(parents=True)
        (tmp_path / "env" / name / "one.whl").touch()
    (tmp_path / "env" / ".wheels-bbbbbbbbbbbb").symlink_to(tmp_path / "precious")
    monkeypatch.setattr(venv.Attending, "hear", lambda self: None)  # the other end leaves before it begins
    asked = {"release": release.name, "pins": requirements.Pins()._asdict(), "patience": 0, "client": "me"}
    assert venv.sync(tmp_path, asked)["event"] == "left"
    left = sorted(entry.name for entry in (tmp_path / "env").iterdir())
    assert left == [".wheels-0123456789ab", ".wheels-mine"] and (tmp_path / "precious").is_dir()


def test_another_python_makes_another_environment() -> None:
    facts = {"python_version": "3.11", "python_full_version": "3.11.4", "implementation_name": "cpython"}
    first = environment.environment_id(b"", {}, facts, "/usr/bin/python3.11")
    assert first == environment.environment_id(b"", {}, dict(facts), "/usr/bin/python3.11")
    others = [
        environment.environment_id(b"", {}, {**facts, "python_full_version": "3.11.9"}, "/usr/bin/python3.11"),
        environment.environment_id(b"", {}, facts, "/opt/conda/bin/python3.11"),
        environment.environment_id(b"", {}, {**facts, "implementation_name": "pypy"}, "/usr/bin/python3.11"),
    ]
    assert len({first, *others}) == 4


def test_who_failed_is_said_by_its_name(tmp_path: Path) -> None:
    words = [venv.commands("python3", tmp_path, by, {}, None, None) for by in (("uv", "/x/uv"), ("pip",))]
    said = [[venv._program(command) for command in commands] for commands in words]
    assert said == [["uv venv", "uv pip install", "uv pip check"], ["venv", "pip install", "pip check"]]


def test_no_room_is_said_before_anything_is_built(
    shell: Shell, base: Container, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_with(base, make_wheel(house, "one", "1.0"))
    old = folder_of(base) / "env" / "old"
    old.mkdir(parents=True)
    (old / "pyvenv.cfg").touch()
    (old / "env.json").write_text('{"bytes": 1073741824}')
    monkeypatch.setattr(wheels.Wheel, "unpacked_bytes", 1 << 60)
    says = (
        r"no space for the environment .*about 115292\d+ bytes are needed, \d+ are free; not in use: old \(1\.0 GiB\)"
        r"\. Next: dflash-ops env prune --keep 1$"
    )
    with pytest.raises(PreflightError, match=says):
        verbs.sync(shell, base, wheelhouse=house)
    assert [it.id for it in verbs.list_all(shell, base)] == ["old"]


def test_what_is_run_where_there_is_an_index() -> None:
    """Its own index for a pinned torch, beside the usual one; hashes for all that is locked."""
    pinned, index = {"torch": "2.13.0+cu126"}, "https://there/cu126"
    by_pip = venv.commands("python3", Path("/e/x"), ("pip",), pinned, index, None)
    assert [" ".join(words) for words in by_pip] == [
        "python3 -m venv /e/x",
        "/e/x/bin/python -m pip install --only-binary :all: --require-hashes --no-deps -r /e/x/locked.txt",
        "/e/x/bin/python -m pip install --only-binary :all: torch==2.13.0+cu126 -c /e/x/versions.txt "
        "--extra-index-url https://there/cu126",
        "/e/x/bin/python -m pip check",
    ]
    by_uv = venv.commands("python3", Path("/e/x"), ("uv", "/bin/uv"), pinned, index, None)
    assert [" ".join(words[:4]) for words in by_uv] == [
        "/bin/uv venv --python python3", "/bin/uv pip install --python", "/bin/uv pip install --python",
        "/bin/uv pip check --python",
    ]  # fmt: skip
    assert by_uv[2][-4:] == ["--extra-index-url", index, "--index-strategy", "unsafe-best-match"]
    assert venv.commands("python3", Path("/e/x"), ("pip",), {}, None, None) == [by_pip[0], by_pip[1], by_pip[3]]
    offline = venv.commands("python3", Path("/e/x"), ("pip",), pinned, index, Path("/w"))
    assert index not in offline[2] and offline[2][-3:] == ["--no-index", "--find-links", "/w"]


# -- check


def test_both_columns_and_an_exit_code(box: Box, cli: Cli, shell: Shell, tmp_path: Path) -> None:
    """The sandbox's own Python, against a lock that wants another transformers and a package that is not there."""
    release_with(box.container, "numpy==0.1\nrich==0.1 ; sys_platform == 'win32'\nno-such-thing==1\n")
    here = InProcess(cli.inventory)
    done = here("env", "check")
    text = done.stdout.decode()
    assert done.returncode == 6 and done.stderr == b""
    assert "numpy" in text and "0.1" in text and "no-such-thing" in text and "rich" not in text
    assert "2 of 6 differ" in text
    found = verbs.check(shell, box.container)
    assert not found.ok and found.environment is None
    assert {row.name: row.has for row in found.rows if not row.ok}["no-such-thing"] is None
    (tmp_path / "config.toml").write_text("")
    start = here("train", "start", str(tmp_path / "config.toml"), "--gpus", "none")
    assert start.returncode == 6 and b"no-such-thing: wanted 1, has nothing" in start.stderr
    with pytest.raises(NotFoundError, match="nearest: 20261129-120000-nogit-00000000"):
        verbs.check(shell, box.container, "20261129-120000-nogit-11111111")


def test_without_a_release_or_a_lock(shell: Shell, box: Box) -> None:
    with pytest.raises(NotFoundError, match="nothing is deployed"):
        verbs.check(shell, box.container)
    name = release_with(box.container, "")
    (folder_of(box.container) / "releases" / name / "trainer" / "requirements.lock").unlink()
    with pytest.raises(NotFoundError, match=r"does not say what it needs .*it has no trainer/requirements\.lock"):
        verbs.check(shell, box.container)
    release_with(box.container, "one >= 2\n")
    with pytest.raises(ConfigError, match=r"a line that is no NAME==VERSION .*one >= 2"):
        verbs.check(shell, box.container)


def test_what_we_test_with_is_what_is_locked(box: Box) -> None:
    """constraints.txt and trainer/requirements.lock agree, and this Python has it all."""
    root = Path(__file__).parents[2]
    has = environment.look(sys.executable)
    pins = requirements.Pins(torch=box.container.pins.torch)
    rows = environment.compare(environment.read_lock(root), pins, has, gpus=False)
    assert len(rows) > 50 and [row for row in rows if not row["ok"]] == []


LOCK = """\
# made for python >= 3.11
torch==2.13.0 ; sys_platform == 'linux' \\
    --hash=sha256:00 \\
    --hash=sha256:11
    # via something
Some_Thing[extra]==1.0
nvidia-cuda-runtime==13.0.96 ; platform_machine == 'x86_64' or platform_machine == 'aarch64'
nvidia-cublas==13.1
triton==3.7 ; python_full_version < '3.15'
transformers==5.24.0
only-new==1 ; python_version >= '3.12' and python_version not in '3.13 3.14'
"""
FACTS = {
    "python_version": "3.11",
    "python_full_version": "3.11.7",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
}


def has(**packages: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): version for name, version in packages.items()}
    return {"facts": FACTS, "packages": named, "torch_cuda": "13.0", "glibc": "2.36"}


EVERYTHING = {
    "torch": "2.13.0", "some_thing": "1.0", "nvidia_cuda_runtime": "13.0.96", "nvidia_cublas": "13.1", "triton": "3.7",
    "transformers": "5.24.0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("pins", "packages", "cuda", "differ"),
    [
        ({}, {}, "13.0", {}),
        ({}, {"torch": "2.13.0+cu130"}, "13.0", {}),  # any build of it, of the right CUDA
        ({}, {"torch": "2.13.0+cpu"}, "none", {"CUDA of torch": ("13.0", "none")}),
        (
            {},
            {"triton": None, "some_thing": "1.0.1"},
            "13.0",
            {"triton": ("3.7", None), "some-thing": ("1.0", "1.0.1")},
        ),
        ({"torch": "cpu"}, {"torch": "2.13.0+cpu", "nvidia_cublas": None, "triton": None}, "none", {}),
        ({"torch": "cpu"}, {}, "13.0", {"torch": ("2.13.0+cpu", "2.13.0"), "CUDA of torch": ("none", "13.0")}),
        ({"torch": "cu126"}, {"torch": "2.13.0+cu126", "nvidia_cublas": "12.6"}, "12.6", {}),
        ({"torch": "2.12.1+cu126"}, {}, "12.6", {"torch": ("2.12.1+cu126", "2.13.0")}),
        ({"transformers": "5.20.0"}, {}, "13.0", {"transformers": ("5.20.0", "5.24.0")}),
    ],
)
def test_what_is_compared(pins: dict, packages: dict, cuda: str, differ: dict) -> None:
    there = {name: version for name, version in {**EVERYTHING, **packages}.items() if version}
    rows = environment.compare(
        requirements.parse(LOCK), requirements.Pins(**pins), {**has(**there), "torch_cuda": cuda}, gpus=False
    )
    assert {row["name"]: (row["wanted"], row["has"]) for row in rows if not row["ok"]} == differ
    assert [row["name"] for row in rows[:5]] == ["python", "CUDA of torch", "driver", "torch", "transformers"]


@pytest.mark.parametrize(
    ("smi", "gpus", "ok", "driver"),
    [
        ("echo 580.65.06", True, True, "580.65.06"),
        ("echo 575.1", True, False, "575.1"),
        ("echo broken; exit 9", True, False, None),
        ("exit 9", False, True, None),
    ],
)
def test_the_driver(tmp_path: Path, monkeypatch, smi: str, gpus: bool, ok: bool, driver: str | None) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    row = environment.compare(requirements.parse(LOCK), requirements.Pins(), has(**EVERYTHING), gpus)[2]
    assert row == {"name": "driver", "wanted": ">= 580", "has": driver, "ok": ok}


def test_an_old_python() -> None:
    old = has(**EVERYTHING)
    old["facts"] = {**FACTS, "python_full_version": "3.10.9", "python_version": "3.10"}
    row = environment.compare(requirements.parse(LOCK), requirements.Pins(), old, gpus=False)[0]
    assert (row["wanted"], row["has"], row["ok"]) == (">= 3.11", "3.10.9", False)


@pytest.mark.parametrize(
    ("marker", "holds"),
    [
        ("", True),
        ("python_version < '3.9'", False),  # by numbers: as text 3.11 would be less
        ("python_full_version >= '3.11.0' and sys_platform != 'win32'", True),
        ("(sys_platform == 'darwin' or platform_machine in 'x86_64 amd64') and '3.10' < python_version", True),
        ("sys_platform == 'linux' and not_a_name == 'x'", False),
    ],
)
def test_markers(marker: str, holds: bool) -> None:
    assert requirements.applies(marker, FACTS) is holds


@pytest.mark.parametrize(
    "line", ["one", "one>=1", "one==1 ; sys_platform", "one==1 ; 1 + 1", "one @ file:///x", "-r x"]
)
def test_a_lock_holds_nothing_else(line: str) -> None:
    with pytest.raises(Fault, match="the lock has a"):
        requirements.parse(f"two==2\n{line}\n")


def test_the_trainers_python(tmp_path: Path) -> None:
    """None was made: the inventory's; else the current one by its real path; a broken one is refused, not passed by."""
    assert environment.python_of(tmp_path, "python3") == "python3"
    python = tmp_path / "env" / "abc" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "env" / "current").symlink_to("abc")
    with pytest.raises(Fault, match="the environment is not whole"):
        environment.python_of(tmp_path, "python3")
    (tmp_path / "env" / "abc" / "env.json").write_text("{}")
    assert environment.python_of(tmp_path, "python3") == str(python)


def test_who_uses_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Living runs, by the Python that they were started with; a damaged one is not made anew under them."""
    commands = {"a": f"{tmp_path}/env/abc/bin/python", "b": f"{tmp_path}/env/abcd/bin/python", "c": "python3"}
    runs = [{"run_id": name, "run": {"command": [python, "-m", "trainer"]}} for name, python in commands.items()]
    monkeypatch.setattr(rundir, "live_runs", lambda path: [*runs, {"run_id": "d", "run": {}}])
    assert environment.users(tmp_path, "abc") == ["a"] and environment.users(tmp_path, "ab") == []
    release = tmp_path / "releases" / f"{RELEASE}0"
    (release / "trainer").mkdir(parents=True)
    (release / "trainer" / "requirements.lock").write_text("one==1\n")
    monkeypatch.setattr(environment, "environment_id", lambda *words: "abc")
    asked = {"release": release.name, "pins": requirements.Pins()._asdict(), "patience": 0, "client": "me"}
    with pytest.raises(Fault, match="environment abc is damaged, and in use"):
        venv.sync(tmp_path, asked)


def test_a_start_is_refused_with_both_columns(tmp_path: Path) -> None:
    wanted = {"pins": requirements.Pins()._asdict(), "check": True, "gpus": False}
    environment.refuse_mismatch(tmp_path, tmp_path, sys.executable, wanted)  # it has no lock
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "requirements.lock").write_text("".join(f"no-{n}==1\n" for n in range(7)) + "rich==0.1\n")
    with pytest.raises(Fault) as caught:
        environment.refuse_mismatch(tmp_path, tmp_path, sys.executable, wanted)
    assert caught.value.kind == "preflight"
    assert caught.value.parts["why"].startswith("no-0: wanted 1, has nothing; no-1: wanted 1")
    assert caught.value.parts["why"].endswith("(and 3 more: dflash-ops env check)")
    environment.refuse_mismatch(tmp_path, tmp_path, sys.executable, {**wanted, "check": False})


@pytest.mark.parametrize(
    ("tags", "fits"),
    [
        ("py3-none-any", True),
        ("py2.py3-none-any", True),
        ("py2-none-any", False),
        ("cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64", True),
        ("cp311-cp311-manylinux_2_28_x86_64", True),
        ("cp311-cp311-manylinux_2_39_x86_64", False),
        ("cp311-cp311-manylinux_2_17_aarch64", False),
        ("cp312-cp312-manylinux_2_17_x86_64", False),
        ("cp39-abi3-manylinux_2_17_x86_64", True),
        ("cp312-abi3-manylinux_2_17_x86_64", False),
        ("cp310-cp310-linux_x86_64", False),
        ("cp311-none-linux_x86_64", True),
        ("cp311-cp311t-linux_x86_64", False),
        ("py3-none-macosx_11_0_arm64", False),
        ("py3-none-musllinux_1_2_x86_64", False),
    ],
)
def test_which_wheels_a_machine_takes(tags: str, fits: bool) -> None:
    python, abi, platform = tags.split("-", 2)
    assert Machine((3, 11), "x86_64", (2, 36)).takes(python, abi, platform) is fits
    assert Machine.of({"python_version": "3.11", "platform_machine": "x86_64"}, "2.36") == Machine(
        (3, 11), "x86_64", (2, 36)
    )


# -- warm

WARM = """
import json, os, subprocess, sys
words = sys.argv[1:]
config = open(words[1]).read()
if "wrong" in config:
    sys.exit(sys.stderr.write(f"{words[1]}: wrong: not known\\n") and 3)
count = os.path.join(os.environ["DFLASH_SHARED"], "count")
before = os.path.exists(count)
open(count, "w").close()
print("warming", os.environ.get("CUDA_VISIBLE_DEVICES"), words[3:], os.path.basename(os.getcwd()), file=sys.stderr)
device = {"device": "cuda:0", "seconds": 3.0 if before else 40.0, "compiled": 0 if before else 7, "found": 7}
subprocess.Popen(["sleep", "1000"])  # as a compiler's worker that outlives it
print(json.dumps({"cache": "/cache", "devices": [{**device, "state": "warm" if before else "cold"}], "pruned": {}}))
"""


def test_warm_says_what_it_saved(shell: Shell, box: Box, cli: Cli, tmp_path: Path) -> None:
    name = release_with(box.container, "", __main__=WARM, __init__="")
    config = tmp_path / "config.toml"
    config.write_text("good")
    done = cli("--debug", "env", "warm", str(config), "--set", "a=b", "--gpus", "none", "--json")
    document = json.loads(done.stdout)
    assert (document["saved_seconds"], document["seconds"], document["cache"]) == (37.0, 40.0, "/cache")
    assert f"warming  ['--set', 'a=b'] {name}\n" in done.stderr.decode()
    again = cli("env", "warm", str(config)).stdout.decode()
    assert again == "cuda:0: warm, 3.0 s, 0 graphs compiled, 7 from the cache\nall of it was there already, in /cache\n"
    with pytest.raises(ConfigError, match=r"here/config\.toml: wrong: not known"):
        verbs.warm(shell, box.container, "wrong", "here/config.toml")


def test_warm_waits_for_no_gpu_that_a_run_has(shell: Shell, box: Box) -> None:
    container = replace(box.container, gpus=(0, 1))
    lock = "/run/lock/dflash-ops-gpu-1.lock"
    with shell.converse(box.host, Command(("flock", lock, "sh", "-c", "echo held; cat"))) as talk:
        assert talk.hear() == b"held"
        with pytest.raises(BusyError, match=r"a GPU is taken .*gpu-status"):
            verbs.warm(shell, container, "", "config.toml")


# -- the inventory


def test_pins_in_an_inventory(box: Box) -> None:
    more = '[containers.trainer.pins]\ntorch = "cu126"\ncuda_index = "https://there/cu126"\ntransformers = "5.20.0"\n'
    text = box.inventory.read_text()
    from dflash_ops.inventory import parse

    container = parse(text + "env_check = false\n" + more, box.inventory).container()
    assert container.pins == Pins("cu126", "https://there/cu126", "5.20.0") and container.env_check is False
    with pytest.raises(ConfigError, match=r"containers\.trainer\.pins\.troch .*no such key; .*nearest: torch"):
        parse(text + more.replace("torch", "troch"), box.inventory)
    with pytest.raises(ConfigError, match=r"containers\.trainer\.pins\.torch .*not 'newest'"):
        parse(text + more.replace("cu126", "newest", 1), box.inventory)
    torch = parse(text, box.inventory).container().pins.torch
    assert torch and torch[0].isdigit()  # the sandbox's Python has the torch that this machine has
