"""A tiny target and data for it, made once for all tests of the trainer."""

from pathlib import Path

import pytest
from tiny import tiny_training


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/, train.jsonl, heldout.jsonl and config.toml; tests only read it."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_training(folder)
    return folder
