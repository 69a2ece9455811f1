"""Wishes and givings-up on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rl.errors import CorruptError
from slurm_rl.storage.control import Control
from slurm_rl.storage.evals import (
    GivenUp,
    forgive_given_up,
    publish_given_up,
    publish_wish,
    read_given_up,
    read_wishes,
)
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Slot, StageRef

SLOT = Slot(12, "eval-aime", 1)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_wish_is_its_name_and_stays_as_it_was_made(run: RunDir) -> None:
    assert read_wishes(run) == ()
    refs = [StageRef(12, "eval-b_2"), StageRef(3, "eval-a"), StageRef(1_000_000, "eval-a-x")]
    for ref in refs:
        publish_wish(run, ref, by="me")
        publish_wish(run, ref, by="another")
    assert read_wishes(run) == tuple(sorted(refs))
    assert b'"me"' in (run.root / "evals" / "000012.eval-b_2").read_bytes()


@pytest.mark.parametrize(
    "name", [".tmp-000012.eval-a", "12.eval-a", "000012.train", "000012.eval-"]
)
def test_what_is_no_wish(run: RunDir, name: str) -> None:
    (run.root / "evals").mkdir()
    (run.root / "evals" / name).write_text("{}")
    assert read_wishes(run) == ()


def test_the_latest_giving_up_counts_until_it_is_forgiven(run: RunDir) -> None:
    first, second = GivenUp(2, 2, "once", "/log", 5.0), GivenUp(4, 3, "twice")
    publish_given_up(run, SLOT, first)
    assert read_given_up(run, Control(), SLOT) == first
    pardon = forgive_given_up(first, SLOT)
    assert pardon == {"i0012.eval-aime.t1": 2, "i0012.eval-aime": 2}
    forgiven = Control(forgiven=tuple(pardon.items()))
    assert read_given_up(run, forgiven, SLOT) is None
    publish_given_up(run, SLOT, second)
    assert read_given_up(run, forgiven, SLOT) == second
    assert read_given_up(run, Control(), Slot(12, "eval-aime", 0)) is None


def test_one_without_an_attempt_is_forgiven_too(run: RunDir) -> None:
    """Its jobs ended before they could look for work."""
    lost = GivenUp(0, 16, "jobs ended")
    publish_given_up(run, SLOT, lost)
    assert read_given_up(run, Control(), SLOT) == lost
    pardon = tuple(forgive_given_up(lost, SLOT).items())
    assert read_given_up(run, Control(forgiven=pardon), SLOT) is None


@pytest.mark.parametrize("text", ["", "{", '{"epoch": 1}', "[]"])
def test_a_damaged_one_is_damage(run: RunDir, text: str) -> None:
    publish_given_up(run, SLOT, GivenUp(1, 1, "x"))
    (run.slot_dir(SLOT) / "given-up.0001").write_text(text)
    with pytest.raises(CorruptError, match=r"given-up\.0001: not a giving-up"):
        read_given_up(run, Control(), SLOT)
