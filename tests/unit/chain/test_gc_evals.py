"""Garbage collection and evaluations: what one still reads stays, and no longer than that."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy.yard import GRACE_S, Yard

from slurm_rl.storage.control import read_control, write_budget
from slurm_rl.storage.evals import (
    GivenUp,
    forgive_given_up,
    publish_given_up,
    publish_wish,
)
from slurm_rl.storage.tombstones import is_condemned
from slurm_rl.types import StageRef

DATA = {"prompt_data": "none"}


@pytest.fixture
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def make_yard(folder: Path, *, fold_behind: int | None = None, **evals: dict[str, Any]) -> Yard:
    sets = {name: {**DATA, **values} for name, values in evals.items()}
    return Yard(folder, {"keep_last": 2}, {"eval": sets}, fold_behind=fold_behind)


def test_weights_stay_while_an_evaluation_of_them_is_due(folder: Path) -> None:
    yard = make_yard(folder, aime={"interval": 2}, gpqa={"interval": 3})
    yard.commit_until(8)
    yard.collect_all()
    # Versions 2, 3, 4 and 6 are due; of iterations the newest two stay anyway.
    assert yard.pruned() == {"i0000.train", "i0004.train"}
    yard.check()
    for version in (2, 3, 4):
        yard.commit(StageRef(version, "eval-aime" if version % 2 == 0 else "eval-gpqa"))
    yard.collect_all()
    assert yard.pruned() == {f"i{i:04d}.train" for i in (0, 1, 2, 3, 4)}
    yard.check()


def test_one_that_was_given_up_needs_them_no_more_until_it_is_forgiven(folder: Path) -> None:
    yard = make_yard(folder, aime={"interval": 2})
    yard.commit_until(7)
    gone = {version: GivenUp(3, 3, "why") for version in (2, 4)}
    for version, given_up in gone.items():
        publish_given_up(yard.run, yard.slot(version, "eval-aime"), given_up)
    slot = yard.slot(4, "eval-aime")
    write_budget(yard.run, forgive_given_up(gone[4], slot))
    yard.collect_all()
    assert yard.pruned() == {"i0000.train", "i0001.train", "i0002.train", "i0004.train"}


def test_a_wish_within_the_grace_takes_the_mark_back(folder: Path) -> None:
    yard = make_yard(folder, aime={"before_training": False})
    yard.commit_until(6)
    yard.collect()
    assert is_condemned(yard.run, yard.slot(1, "train"))
    publish_wish(yard.run, StageRef(2, "eval-aime"), by="me")
    yard.now += GRACE_S + 1
    yard.collect()
    assert not is_condemned(yard.run, yard.slot(1, "train"))
    assert yard.pruned() == {"i0000.train", "i0002.train", "i0003.train"}


def test_what_a_rewind_set_aside_is_not_kept_for_them(folder: Path) -> None:
    yard = make_yard(folder, aime={"interval": 1})
    yard.commit_until(3)
    old = yard.slot(1, "train")
    yard.rewind(1)
    yard.commit_until(8)
    yard.collect_all()
    assert yard.missing(old)
    assert yard.pruned() == set()
    yard.check()


def test_records_of_one_that_may_still_be_done_stay_as_they_are(folder: Path) -> None:
    """Its claims and intents are read by whoever wants to do it."""
    yard = make_yard(folder, fold_behind=1, aime={"before_training": False})
    yard.commit_until(8)
    publish_wish(yard.run, StageRef(1, "eval-aime"), by="me")
    yard.attempt(yard.slot(1, "eval-aime"), "beef")
    yard.collect_all()
    folder_of = yard.run.slot_dir(yard.slot(1, "eval-aime"))
    assert (folder_of / "claim.0001").exists()
    assert not (yard.run.slot_dir(yard.slot(2, "rollout")) / "claim.0001").exists(), (
        "none is folded"
    )
    yard.commit(StageRef(1, "eval-aime"))
    yard.collect_all()
    assert not (folder_of / "claim.0001").exists()
    assert read_control(yard.run).halt is None
    yard.check()
