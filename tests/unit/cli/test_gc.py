"""gc, and what other commands say of what it deleted; on a run without jobs."""

from __future__ import annotations

import dataclasses
import os
import tarfile
from pathlib import Path

import pytest
from toy.yard import Yard
from typer.testing import CliRunner

from slurm_rl.chain.gc import collect, collect_quietly
from slurm_rl.cli.gc import collect_garbage, lease_iteration
from slurm_rl.cli.logs import show_logs
from slurm_rl.cli.main import app
from slurm_rl.cli.verify import print_path, verify_run
from slurm_rl.errors import CorruptError, NothingDone, PrunedError, StorageError
from slurm_rl.launch.build import open_run
from slurm_rl.storage.control import write_pause
from slurm_rl.storage.records import records_of


def make_yard(folder: Path, **rules: object) -> Yard:
    local = {"launcher": "local", "num_rollout": 20}
    yard = Yard(folder, {"gc_grace_s": 0.05, **rules}, local)
    yard.commit_until(5)
    return yard


def tidy(yard: Yard) -> None:
    collect_garbage(yard.run.root, dry_run=False, wait=True)


def test_a_dry_run_says_what_would_go_and_why_the_rest_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yard = make_yard(tmp_path, keep_every=2)
    yard.commit(yard.slot(5, "rollout").stage)
    alive = yard.abandon(yard.slot(5, "train"))
    before = sorted(yard.run.root.rglob("*"))
    collect_garbage(yard.run.root, dry_run=True, wait=False)
    shown = capsys.readouterr().out
    assert "would be marked  i0000.train.t0  " in shown and "older than what is kept" in shown
    assert "would be marked: 2 in all" in shown
    for why in (
        "one of the last 2 iterations",
        "retention.keep_every = 2",
        "samples stay (retention.keep_samples)",
        "initial weights",
        "it may still commit",
    ):
        assert why in shown, shown
    assert sorted(yard.run.root.rglob("*")) == before
    assert alive.exists()


def test_gc_marks_waits_and_deletes_also_on_a_paused_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yard = make_yard(tmp_path)
    write_pause(yard.run, "lunch")
    collect_garbage(yard.run.root, dry_run=False, wait=False)
    shown = capsys.readouterr().out
    assert "marked  i0002.train.t0" in shown and "deleted by the first gc (or tick) after" in shown
    tidy(yard)
    assert "deleted  i0002.train.t0" in capsys.readouterr().out
    assert yard.pruned() == {f"i{i:04d}.train" for i in range(3)}
    tidy(yard)
    assert "gone       3" in capsys.readouterr().out


def test_unset_it_says_how_to_set_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yard = make_yard(tmp_path, keep_last=None)
    tidy(yard)
    assert "retention.keep_last=4" in capsys.readouterr().out
    assert yard.pruned() == set()


def test_what_cannot_be_done_is_an_error(tmp_path: Path) -> None:
    yard = make_yard(tmp_path, archive=str(tmp_path / "cold"))
    with pytest.raises(StorageError, match="no directory that can be written"):
        for _ in range(3):
            tidy(yard)
    assert yard.pruned() == set()


def test_verify_tells_pruned_from_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yard = make_yard(tmp_path)
    tidy(yard)
    # The commits are hand-made: their stages say nothing of parents that verify would miss.
    verify_run(yard.run.root, iteration=None)
    assert "the files of 3 were pruned by retention" in capsys.readouterr().out
    (yard.run.slot_dir(yard.slot(4, "train")) / "a0001-feed1" / "weights" / "model").unlink()
    with pytest.raises(CorruptError, match="1 damaged"):
        verify_run(yard.run.root, iteration=None)


def test_path_says_that_it_was_pruned_and_where_the_copy_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cold").mkdir()
    yard = make_yard(tmp_path, archive=str(tmp_path / "cold"))
    tidy(yard)
    capsys.readouterr()
    place = tmp_path / "cold" / "toy-abcdef01" / "iterations" / "000001" / "train.t0"
    with pytest.raises(PrunedError, match=f"pruned by retention .*a copy is in {place}"):
        print_path(yard.run.root, "weights", iteration=1)
    assert (place / "a0001-feed1" / "weights" / "model").exists()
    print_path(yard.run.root, "weights", iteration=4)
    assert capsys.readouterr().out.endswith("weights\n")


def test_logs_say_where_folded_records_are(tmp_path: Path) -> None:
    yard = make_yard(tmp_path)
    yard.commit_until(20)
    tidy(yard)
    collect_garbage(yard.run.root, dry_run=False, wait=False)
    (tar,) = records_of(yard.run, 1)
    with pytest.raises(NothingDone, match=f"folded into {tar}; `tar -xf {tar}"):
        show_logs(yard.run.root, iteration=1, stage="train", num_lines=3, only_list=False)
    with tarfile.open(tar) as file:
        assert "train.t0/a0001-feed1/rank-0.log" in file.getnames()
    show_logs(yard.run.root, iteration=19, stage="train", num_lines=3, only_list=True)


def test_a_lease_by_hand_keeps_an_iteration_and_gc_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yard = make_yard(tmp_path)
    lease_iteration(yard.run.root, iteration=1, hours=1.0, why="eval on math")
    shown = capsys.readouterr().out
    collect_garbage(yard.run.root, dry_run=False, wait=False)
    assert "eval on math" in capsys.readouterr().out
    for _ in range(2):
        collect(open_run(yard.run.root).keeper)
    assert yard.pruned() <= {"i0000.train", "i0002.train"}
    os.unlink(shown.split("rm ")[1].strip())
    tidy(yard)
    assert "i0001.train" in yard.pruned()
    with pytest.raises(PrunedError):
        lease_iteration(yard.run.root, iteration=1, hours=1.0, why="")


def test_beside_an_advance_it_never_fails_and_needs_to_be_asked_for(tmp_path: Path) -> None:
    yard = make_yard(tmp_path)
    (yard.run.root / "leases").mkdir()
    (yard.run.root / "leases" / "lease.ab").write_text("{")
    collect_quietly(open_run(yard.run.root).keeper)

    def bug() -> float:
        raise ZeroDivisionError

    os.unlink(yard.run.root / "leases" / "lease.ab")
    collect_quietly(dataclasses.replace(open_run(yard.run.root).keeper, clock=bug))
    other = make_yard(tmp_path / "other", keep_last=None)
    before = sorted(other.run.root.rglob("*"))
    collect_quietly(other.keeper())
    assert sorted(other.run.root.rglob("*")) == before


@pytest.mark.parametrize("name", ["gc", "lease"])
def test_the_command_explains_itself(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0 and "Example: slurm-rl" in shown.stdout
