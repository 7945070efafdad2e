"""What the tests share: one sandbox for the whole session, an inventory of it, and the command line run for real."""

import gc
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import documented
import forked
import pytest
from hypothesis import HealthCheck, settings

from dflash_ops import hints
from dflash_ops.command import Container, Host
from dflash_ops.inventory import load
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell
from trainer.models import models_folder

# As the trainer's own command line does, before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Images for containers tell Python to keep no byte code: here each of a thousand processes would compile what it
# imports anew, and each worker of pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long counts whole, not a seeded tenth of them")


def pytest_configure(config: pytest.Config) -> None:
    # Who runs us in the background may ignore Ctrl-C; then so would every program that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Examples come from a fixed seed: a failure is there again in the next run.
    # No example is too slow, alone or with others: a busy machine says nothing of the code.
    for name, count in (("tenth", 20), ("soak", 200)):
        settings.register_profile(
            name, max_examples=count, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile("soak" if config.getoption("--soak") else "tenth")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: looking through it for garbage takes some third of the collection. It is
    not frozen, for then gc.get_objects would not tell of it, by which the trainer repairs torch."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def share(soak: bool, request: pytest.FixtureRequest) -> Callable[[list], list]:
    """A tenth of the cases, the same ones each time; all of them with --soak."""

    def pick(cases: list) -> list:
        if soak:
            return cases
        return random.Random(request.node.name).sample(cases, max(1, len(cases) // 10))

    return pick


@pytest.fixture(scope="session")
def _users_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {
        "XDG_CONFIG_HOME": tmp_path_factory.getbasetemp() / "users-config",
        "XDG_CACHE_HOME": tmp_path_factory.mktemp("users-cache", numbered=False),
    }
    (ours := folders["XDG_CACHE_HOME"] / "dflash-ops").mkdir()
    (ours / "models").symlink_to(models_folder())  # what `make setup` has made
    return folders


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, _users_folders: dict[str, Path]) -> None:
    """No setting of the person who runs the tests reaches them, and nothing is left in that person's folders."""
    for variable, folder in _users_folders.items():
        monkeypatch.setenv(variable, str(folder))
    hints.said_target(None)  # what a command line in this process said before
    hints.said_inventory(None)
    for name in (
        "DFLASH_OPS_INVENTORY",
        "DFLASH_OPS_SANDBOX",
        "DFLASH_OPS_TARGET",
        "DFLASH_SHARED",
        "SSH_AUTH_SOCK",
        "DFLASH_OPS_SSH_CONFIG",
        "DFLASH_OPS_PVE_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def sandbox() -> Generator[SandboxState, None, None]:
    """A sandbox of this session's own; it ends with this process, however that ends."""
    if os.geteuid() != 0:
        pytest.skip("the sandbox needs root")
    from dflash_ops.sandbox import down, up

    name = f"test-{os.getpid()}"
    state = up(name=name, owner=os.getpid())
    yield state
    down(name)


@dataclass(frozen=True)
class Box:
    """A container's own place for one test: an inventory file whose default it is."""

    inventory: Path
    sandbox: SandboxState

    @property
    def container(self) -> Container:
        return load(self.inventory).container()

    @property
    def host(self) -> Host:
        return self.container.host


def write_inventory(folder: Path, sandbox: str, *, vmid: int = 200, python: str = "sandbox", more: str = "") -> Path:
    """An inventory whose default container has a folder of its own, so that tests do not meet."""
    file = folder / "dflash-ops.toml"
    file.write_text(
        f'default = "trainer"\n[hosts.box]\nsandbox = "{sandbox}"\n'
        f'[containers.trainer]\nhost = "box"\nvmid = {vmid}\npython = "{python}"\n'
        f'path = "/opt/test-{secrets.token_hex(4)}"\n{more}'
    )
    return file


@pytest.fixture
def box(sandbox: SandboxState, tmp_path: Path) -> Box:
    """Container 200 of the session's sandbox, with an empty folder."""
    return Box(write_inventory(tmp_path, sandbox.name), sandbox)


@pytest.fixture
def shell() -> Iterator[Shell]:
    with Shell() as shell:
        yield shell


@dataclass(frozen=True)
class Cli:
    """dflash-ops, run as a process of its own, with the box's inventory."""

    inventory: Path

    def __call__(
        self, *words: str | bytes, stdin: bytes = b"", cwd: Path | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        environment = self.environment()
        if forked.can_be(environment):
            done = forked.run(words, stdin=stdin, cwd=cwd, environment=environment, timeout=timeout)
        else:
            done = subprocess.run(
                self.words(*words), input=stdin, capture_output=True, cwd=cwd, env=environment, timeout=timeout
            )
        documented.confirm(words, done.stdout)
        return done

    def start(self, *words: str | bytes, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.words(*words),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=cwd,
            env=self.environment(),
            # A shell's background job, which the tests may be, ignores Ctrl-C, and so do its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def words(self, *words: str | bytes) -> list[str | bytes]:
        return [sys.executable, "-W", "error", "-m", "dflash_ops", *words]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "DFLASH_OPS_INVENTORY": str(self.inventory)}


@pytest.fixture
def cli(box: Box) -> Cli:
    return Cli(box.inventory)
