"""Folding records: nothing that people may want is lost, nothing that is committed is touched."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from toy.world import FastFs
from toy.yard import Yard

from slurm_rl.errors import CorruptError
from slurm_rl.storage.commits import file_path, read_commit
from slurm_rl.storage.records import find_records, fold_records, records_of
from slurm_rl.storage.rundir import RunDir

POOLS = {"fixed": {"shards": 1}, "spot": {"shards": 1}}


def make_yard(folder: Path, **changes: object) -> Yard:
    yard = Yard(folder, changes=changes or {"shards": 2})
    yard.commit_until(2)
    return yard


def committed_files(yard: Yard) -> list[Path]:
    found = []
    for kind in ("rollout", "train"):
        slot = yard.slot(1, kind)
        commit = read_commit(yard.run, slot)
        assert commit is not None
        found += [file_path(yard.run, slot, commit, entry.path) for entry in commit.files]
    return found


def read_tars(run: RunDir) -> dict[str, bytes]:
    found = {}
    for path in records_of(run, 1):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


@pytest.mark.parametrize("changes", [{"shards": 2}, {"pools": POOLS}], ids=["array", "pools"])
def test_every_record_is_in_the_tar_byte_by_byte(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    yard = make_yard(tmp_path, **changes)
    committed = committed_files(yard)
    root = yard.run.iteration_dir(1)
    (root / "logs" / "train.0001.log").write_bytes(bytes(range(256)) * 100)
    own = root / "rollout.t0" / "shard-0000" / "a0001-feed1" / "mine" / "notes.json"
    own.parent.mkdir()
    own.write_text("a user's own file")
    before = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    num = fold_records(yard.run, 1, committed=committed)
    folded = read_tars(yard.run)
    after = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    del after["records.0001.tar"]
    assert num == len(folded) and folded.keys().isdisjoint(after)
    assert {**folded, **after} == before
    assert {name.rpartition("/")[2] for name in folded} >= {
        "claim.0001",
        "submit.0001",
        "submit.0001.id",
        "order.json",
        "ended.json",
        "heartbeat",
        "rank-0.log",
        "journal.jsonl",
        "train.0001.log",
    }
    kept = {str(path.relative_to(root)) for path in [*committed, own]}
    commits = {
        f"{stage}/COMMIT"
        for stage in ("rollout.t0", "rollout.t0/shard-0000", "rollout.t0/shard-0001", "train.t0")
    }
    assert after.keys() == kept | commits
    folders = {path.name for path in (root / "rollout.t0").iterdir() if path.is_dir()}
    assert folders == {"shard-0000", "shard-0001"}, "what is empty goes"


def test_what_comes_late_goes_into_the_next_number(tmp_path: Path) -> None:
    yard = make_yard(tmp_path)
    committed = committed_files(yard)
    fold_records(yard.run, 1, committed=committed)
    late = yard.run.slot_dir(yard.slot(1, "train")) / "submit.0002"
    late.write_text("late")
    again = yard.run.slot_dir(yard.slot(1, "train")) / "claim.0001"
    again.write_bytes(read_tars(yard.run)["train.t0/claim.0001"])  # unlinked, and the power went
    fold_records(yard.run, 1, committed=committed)
    assert [path.name for path in records_of(yard.run, 1)] == [
        "records.0001.tar",
        "records.0002.tar",
    ]
    with tarfile.open(records_of(yard.run, 1)[1]) as tar:
        assert tar.getnames() == ["train.t0/submit.0002"]
    assert find_records(yard.run, 1, committed=committed) == []


def test_an_original_that_differs_from_the_tar_stays(tmp_path: Path) -> None:
    yard = make_yard(tmp_path)
    committed = committed_files(yard)
    log = yard.run.iteration_dir(1) / "logs" / "train.0001.log"

    class Writer(FastFs):
        """A zombie writes on between the tar and the deletion."""

        def link(self, source: Path, target: Path) -> None:
            super().link(source, target)
            log.write_text(log.read_text() + "late words")

    fold_records(RunDir(yard.run.root, Writer()), 1, committed=committed)
    assert "late words" in log.read_text()
    fold_records(yard.run, 1, committed=committed)
    assert read_tars(yard.run)["logs/train.0001.log"].endswith(b"late words")


def test_a_tar_that_cannot_be_read_stops_it(tmp_path: Path) -> None:
    yard = make_yard(tmp_path)
    committed = committed_files(yard)
    before = len(find_records(yard.run, 1, committed=committed))
    (yard.run.iteration_dir(1) / "records.0001.tar").write_bytes(b"torn" * 200)
    with pytest.raises(CorruptError, match=r"records\.0001\.tar"):
        fold_records(yard.run, 1, committed=committed)
    assert len(find_records(yard.run, 1, committed=committed)) == before


def test_without_hard_links_it_works_as_well(tmp_path: Path) -> None:
    class NoLinks(FastFs):
        def link(self, source: Path, target: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

    yard = Yard(tmp_path, changes={"num_rollout": 6}, fold_behind=0)
    yard.run = RunDir(yard.run.root, NoLinks())
    yard.commit_until(6)
    yard.abandon(yard.slot(1, "train"))
    yard.collect_all()
    yard.collect_all()
    assert yard.pruned() == {f"i{i:04d}.train" for i in range(4)}
    tars = records_of(yard.run, 1)
    assert [path.name for path in tars] == ["content"] and tarfile.is_tarfile(tars[0])
    left = {p.name for p in yard.run.slot_dir(yard.slot(1, "train")).iterdir()}
    assert left == {"COMMIT", "PRUNED"}
