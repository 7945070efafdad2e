"""A tiny target and data for it, made once for all tests of the trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import Nursery
from tiny import tiny_training
from torch_repaired import as_it_came, undo
from transformers import AutoTokenizer

from trainer.threads import ThreadSafety, make_torch_thread_safe


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/, train.jsonl, heldout.jsonl and config.toml; tests only read it."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_training(folder)
    return folder


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(_nursery: Nursery) -> Iterator[Nursery]:
    """Starts trainers as processes; what a test leaves of them is killed."""
    yield _nursery
    _nursery.clear()


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[int]:
    """torch on one thread: for tiny matrices a second one is of no use, and on a busy machine it is waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield before
    torch.set_num_threads(before)


@pytest.fixture
def all_threads(_threads: int) -> Iterator[None]:
    """As many threads as torch takes by itself, for what must hold with them."""
    torch.set_num_threads(_threads)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    """The tiny target's; tests only read it."""
    return AutoTokenizer.from_pretrained(tiny_folder / "target")


@pytest.fixture
def own(tiny_folder: Path) -> Any:
    """The same, for a test that changes it."""
    return AutoTokenizer.from_pretrained(tiny_folder / "target")


# --- torch beside threads: tests with `safety` have it repaired, the others as it came ---


@pytest.fixture(scope="module")
def torch_undone_at_the_end() -> Iterator[None]:
    yield
    undo()


@pytest.fixture
def torch_as_it_came(request: pytest.FixtureRequest, torch_undone_at_the_end: None) -> Iterator[None]:
    with as_it_came(repaired="safety" in request.fixturenames):
        yield


@pytest.fixture
def safety(torch_as_it_came: None) -> ThreadSafety:
    return make_torch_thread_safe()


@pytest.fixture
def runs(soak: bool) -> range:
    """Of a race."""
    return range(50 if soak else 5)
