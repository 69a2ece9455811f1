"""Leases: what they cover, when they end, and what a crash of a holder leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rl.errors import CorruptError, PrunedError
from slurm_rl.storage.durable import make_directory
from slurm_rl.storage.leases import (
    LEASE_S,
    check_lease,
    drop_lease,
    forget_dead_leases,
    hold,
    leases_dir,
    read_leases,
    renew_lease,
    take_lease,
)
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import (
    Pruned,
    check_there,
    is_condemned,
    publish_pruned,
    publish_tombstone,
    read_tombstone,
    remove_tombstone,
    tombstones_in,
)
from slurm_rl.types import Slot

STAGE = Slot(3, "rollout", 1)
SHARD = Slot(3, "rollout", 1, 7)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    for slot in (STAGE, SHARD):
        make_directory(found.slot_dir(slot), below=tmp_path)
    return found


def test_a_lease_covers_a_stage_and_its_shards_and_nothing_else(run: RunDir) -> None:
    whole = take_lease(run, [STAGE], holder="me", now=0.0)
    part = take_lease(run, [SHARD], holder="me", now=0.0)
    for lease in (whole, part):
        assert lease.covers(STAGE) and lease.covers(SHARD)
    assert whole.covers(Slot(3, "rollout", 1, 8))
    assert not part.covers(Slot(3, "rollout", 1, 8))
    for other in (
        Slot(3, "rollout", 11),
        Slot(3, "rollout", 0),
        Slot(3, "train", 1),
        Slot(31, "rollout", 1),
    ):
        assert not whole.covers(other) and not part.covers(other)


def test_it_ends_by_age_and_is_renewed_only_in_time(run: RunDir) -> None:
    lease = take_lease(run, [STAGE], holder="me", now=100.0)
    assert lease.is_live(100.0 + LEASE_S - 1) and not lease.is_live(100.0 + LEASE_S)
    renewed = renew_lease(run, lease, now=100.0 + LEASE_S - 1)
    assert renewed is not None and renewed.is_live(100.0 + 2 * LEASE_S - 2)
    assert read_leases(run) == [renewed]
    assert renew_lease(run, renewed, now=1e9) is None


def test_one_that_ran_out_is_taken_again_unless_it_is_too_late(run: RunDir) -> None:
    lease = take_lease(run, [STAGE], holder="me", now=0.0)
    again = check_lease(run, lease, [STAGE], now=1e6)
    assert again.is_live(1e6) and [x.token for x in read_leases(run)] == [lease.token]
    publish_tombstone(run, STAGE, clock=lambda: 1e6)
    still = check_lease(run, again, [STAGE], now=1e6 + 1)
    assert still.is_live(1e6 + 1), "a lease from before the mark goes on"
    with pytest.raises(PrunedError):
        check_lease(run, still, [STAGE], now=2e6)
    assert read_leases(run) == []


def test_the_lease_is_written_before_the_tombstone_is_looked_for(run: RunDir) -> None:
    publish_tombstone(run, STAGE, clock=lambda: 0.0)
    with pytest.raises(PrunedError), hold(run, [SHARD], holder="me", clock=lambda: 0.0):
        raise AssertionError("it may not be read")
    assert read_leases(run) == [], "who is refused leaves no lease"
    remove_tombstone(run, STAGE)
    with hold(run, [SHARD], holder="me", clock=lambda: 0.0):
        assert len(read_leases(run)) == 1
    assert read_leases(run) == []


def test_dead_leases_are_forgotten_and_dropping_twice_is_fine(run: RunDir) -> None:
    dead = take_lease(run, [STAGE], holder="dead", now=0.0, lifetime_s=10.0)
    alive = take_lease(run, [STAGE], holder="me", now=95.0, lifetime_s=10.0)
    forget_dead_leases(run, read_leases(run), now=100.0)
    assert read_leases(run) == [alive]
    drop_lease(run, dead)
    drop_lease(run, alive)
    assert read_leases(run) == []


def test_damage_is_never_read_as_no_lease(run: RunDir) -> None:
    take_lease(run, [STAGE], holder="me", now=0.0)
    (path,) = leases_dir(run).iterdir()
    for text in ("", "{", "[]", '{"token": "a"}'):
        path.write_text(text)
        with pytest.raises(CorruptError, match="not a lease"):
            read_leases(run)


# -- tombstones -----------------------------------------------------------------------------------


def test_the_grace_begins_after_the_tombstone_is_there(run: RunDir) -> None:
    """A writer that hangs between the clock and the mark would give readers no grace."""
    seen = []

    def clock() -> float:
        seen.append((run.slot_dir(STAGE) / "TOMBSTONE").exists())
        return 5.0

    found = publish_tombstone(run, STAGE, clock=clock)
    assert seen == [True] and found.since == 5.0
    assert publish_tombstone(run, STAGE, clock=lambda: 9.0) == found


def test_a_tombstone_without_a_beginning_gets_one(run: RunDir) -> None:
    first = publish_tombstone(run, STAGE, "a0001-x", clock=lambda: 5.0)
    (run.slot_dir(STAGE) / f"TOMBSTONE.a0001-x.since-{first.token}").unlink()
    found = read_tombstone(run, STAGE, "a0001-x")
    assert found is not None and found.since is None
    assert publish_tombstone(run, STAGE, "a0001-x", clock=lambda: 7.0).since == 7.0


def test_an_old_beginning_does_not_count_for_a_new_tombstone(run: RunDir) -> None:
    publish_tombstone(run, STAGE, clock=lambda: 5.0)
    (run.slot_dir(STAGE) / "TOMBSTONE").unlink()  # a crash, or another gc, left the rest
    assert publish_tombstone(run, STAGE, clock=lambda: 500.0).since == 500.0
    remove_tombstone(run, STAGE)
    assert run.fs.list(run.slot_dir(STAGE)) == ["shard-0007"]


def test_an_abandoned_attempt_does_not_condemn_the_commit(run: RunDir) -> None:
    publish_tombstone(run, STAGE, "a0001-x", clock=lambda: 5.0)
    assert not is_condemned(run, STAGE)
    assert tombstones_in(run.fs.list(run.slot_dir(STAGE))) == ["a0001-x"]
    check_there(run, STAGE)


def test_pruned_says_where_the_copy_is_and_damage_to_it_raises(run: RunDir) -> None:
    publish_pruned(run, STAGE, Pruned("t", 3, 30, "/cold/run"))
    with pytest.raises(PrunedError, match=r"3 files .*a copy is in /cold/run"):
        check_there(run, SHARD)
    (run.slot_dir(STAGE) / "PRUNED").write_text("{")
    with pytest.raises(CorruptError, match="PRUNED"):
        check_there(run, SHARD)
