"""Where the runs of these tests lie: in memory where that can be, since there are thousands."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy.hunt import Arena


@pytest.fixture(scope="session", autouse=True)
def seldom_collected() -> Iterator[None]:
    """Python looks for cycles every 700 records; a run makes millions, and next to no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="slurm-rl-", dir=parent))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def arena(folder: Path) -> Callable[..., Arena]:
    """Makes the ground for many runs of one kind: `arena(shards=2)`."""
    return lambda **changes: Arena(folder, changes)
