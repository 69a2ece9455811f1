"""Runs of toy stages by the local launcher, as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy.commands import ToyRun


@pytest.fixture
def toy_run(tmp_path: Path) -> Iterator[ToyRun]:
    run = ToyRun(tmp_path)
    run.write()
    yield run
    if (run.root / "run.json").exists():
        run.command("cancel", str(run.root))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of a run that nobody touched."""
    run = ToyRun(tmp_path_factory.mktemp("undisturbed"))
    run.write()
    done = run.command("submit", str(run.config), "--wait")
    assert done.returncode == 0, done.stderr
    return run.digests()
