"""Room for a stage: what is asked of the file system, and what is asked for."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy.faulty_fs import FaultyFs, StorageFault
from toy.world import FastFs, make_settings

from slurm_rl.config.schema import InitModel, Settings
from slurm_rl.errors import SpaceError, StorageError
from slurm_rl.storage.commits import publish_commit
from slurm_rl.storage.control import Control, TimelineStart
from slurm_rl.storage.durable import list_files
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.space import (
    MARGIN,
    Need,
    Room,
    check_room,
    check_stage_space,
    estimate_need,
    first_need,
    probe_write,
    read_room,
)
from slurm_rl.types import UNUSUAL, Slot

MIB = 1 << 20


@dataclass(frozen=True)
class Disk:
    """What `statvfs` says."""

    f_bavail: int
    f_frsize: int = MIB
    f_files: int = 1000
    f_favail: int = 1000

    def __call__(self, folder: Path) -> Disk:
        return self


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run", FastFs())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return make_settings(tmp_path)


def commit(run: RunDir, slot: Slot, *sizes: int) -> None:
    files = [{"path": str(i), "size_bytes": n, "digest": "x"} for i, n in enumerate(sizes)]
    run.slot_dir(slot).mkdir(parents=True)
    publish_commit(run, slot, content={"files": files}, provenance={"attempt": "a"})


# -- what a stage needs ---------------------------------------------------------------------------


def test_a_stage_needs_what_the_one_before_took_and_a_margin(
    run: RunDir, settings: Settings
) -> None:
    commit(run, Slot(4, "train", 0), 100 * MIB, 50 * MIB)
    need = estimate_need(run, settings, Slot(5, "train", 0), Control())
    assert need.size_bytes == MARGIN * 150 * MIB
    assert need.num_files >= 2
    assert "i0004.train" in need.why


def test_weights_that_were_carried_say_nothing_of_a_checkpoint(run: RunDir, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    slot = Slot(4, "train", 0)
    run.slot_dir(slot).mkdir(parents=True)
    content = {"files": [{"path": "w", "size_bytes": 1, "digest": "x"}], UNUSUAL: "carried"}
    publish_commit(run, slot, content=content, provenance={"attempt": "a"})
    need = estimate_need(run, settings, Slot(5, "train", 0), Control())
    assert need == first_need(settings, "train")


def test_a_shard_needs_what_its_own_shard_took(run: RunDir, settings: Settings) -> None:
    commit(run, Slot(4, "rollout", 0, 0), 10 * MIB)
    commit(run, Slot(4, "rollout", 0, 1), 30 * MIB)
    need = estimate_need(run, settings, Slot(5, "rollout", 0, 1), Control())
    assert need.size_bytes == MARGIN * 30 * MIB


def test_the_one_before_is_that_of_the_current_timeline(run: RunDir, settings: Settings) -> None:
    commit(run, Slot(4, "train", 0), 10 * MIB)
    commit(run, Slot(4, "train", 1), 30 * MIB)
    control = Control(timelines=(TimelineStart(1, 4, "train"),))
    need = estimate_need(run, settings, Slot(5, "train", 1), control)
    assert need.size_bytes == MARGIN * 30 * MIB


def test_the_first_train_stage_needs_the_optimizers_state_too(tmp_path: Path) -> None:
    table = {"w": {"dtype": "BF16", "shape": [1000, 1000], "data_offsets": [0, 2_000_000]}}
    header = json.dumps(table).encode()
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(2_000_000)
    )
    settings = make_settings(tmp_path, hf_checkpoint=str(model))
    # Parameters, master copy and two moments in 32 bits, and the export: 16 to 20 bytes each.
    assert 16_000_000 <= first_need(settings, "train").size_bytes <= 20_000_000
    assert first_need(settings, "init").size_bytes == 0  # it links


def test_a_first_rollout_needs_room_for_its_samples_and_a_shard_for_its_share(
    tmp_path: Path,
) -> None:
    whole = first_need(make_settings(tmp_path, rollout_batch_size=8), "rollout")
    part = first_need(make_settings(tmp_path, rollout_batch_size=8, shards=4), "rollout")
    assert whole.size_bytes == 4 * part.size_bytes > 8 * 2 * 1024 * 16


def test_a_random_model_is_written_by_the_first_stage(tmp_path: Path) -> None:
    model = InitModel(config={"model_type": "llama", "hidden_size": 512}, characters="abc")
    settings = make_settings(tmp_path).model_copy(
        update={"init_model": model, "hf_checkpoint": None}
    )
    assert first_need(settings, "init").size_bytes > 4 * 512 * 512


# -- what there is --------------------------------------------------------------------------------


def test_what_root_alone_may_use_does_not_count(tmp_path: Path) -> None:
    room = read_room(tmp_path, statvfs=Disk(7, f_favail=3))
    assert (room.free_bytes, room.free_files) == (7 * MIB, 3)
    assert Path(room.place).is_mount() and tmp_path.is_relative_to(room.place)


def test_a_file_system_without_a_table_of_inodes_has_no_limit_of_them(tmp_path: Path) -> None:
    room = read_room(tmp_path, statvfs=Disk(7, f_files=0, f_favail=0))
    assert room.free_files is None
    check_room(room, Need(0, 10**9), what="x", run_dir=tmp_path)


def test_the_real_one_is_read(tmp_path: Path) -> None:
    found, room = os.statvfs(tmp_path), read_room(tmp_path)
    assert abs(room.free_bytes - found.f_bavail * found.f_frsize) < 1 << 30


@given(free=st.integers(0, 1 << 50), need=st.integers(0, 1 << 50))
def test_a_stage_starts_if_and_only_if_what_it_needs_is_free(free: int, need: int) -> None:
    starts = True
    try:
        check_room(Room("/scratch", free), Need(need), what="x", run_dir=Path("/run"))
    except SpaceError:
        starts = False
    assert starts == (need <= free)


def test_the_error_names_the_place_what_is_free_what_is_needed_and_what_to_do() -> None:
    with pytest.raises(SpaceError) as said:
        check_room(
            Room("/scratch", 5 * MIB),
            Need(300 << 30, why="1.2 times what i0004.train took"),
            what="i0005.train.t0",
            run_dir=Path("/scratch/run"),
        )
    for part in (
        "/scratch: 5.0 MiB free",
        "i0005.train.t0 needs 300.0 GiB",
        "1.2 times what i0004.train took",
        "retention.keep_last",
        "slurm-rl gc /scratch/run",
        "slurm-rl resume /scratch/run",
    ):
        assert part in str(said.value)
    assert "\n" not in str(said.value)
    with pytest.raises(SpaceError, match="/scratch: 3 inodes free"):
        check_room(Room("/scratch", MIB, 3), Need(1, 4), what="x", run_dir=Path("/r"))


# -- the check as a whole -------------------------------------------------------------------------


def check(run: RunDir, settings: Settings, disk: Any) -> None:
    slot = Slot(5, "train", 0)
    run.fs.mkdir(run.slot_dir(slot))
    check_stage_space(run, settings, slot, Control(), statvfs=disk)


def test_enough_is_enough_and_the_probe_leaves_nothing(run: RunDir, settings: Settings) -> None:
    commit(run, Slot(4, "train", 0), 100 * MIB)
    check(run, settings, Disk(121))
    assert list_files(run.slot_dir(Slot(5, "train", 0))) == []
    with pytest.raises(SpaceError, match=r"119\.0 MiB free, but i0005\.train\.t0 needs 120\.0 MiB"):
        check(run, settings, Disk(119))
    with pytest.raises(SpaceError, match="2 inodes free"):
        check(run, settings, Disk(121, f_favail=2))


@pytest.mark.parametrize("op", ["create", "fsync"])
@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_that_statvfs_does_not_know_is_found_by_writing(
    run: RunDir, settings: Settings, op: str, number: int
) -> None:
    fs = FaultyFs(FastFs(), [StorageFault(number, ops=(op,), path="room", part=0.5)])
    with pytest.raises(SpaceError, match=r"nothing can be written \(10\.0 GiB free for all"):
        check(RunDir(run.root, fs), settings, Disk(10 << 10))
    assert list_files(run.root) == []


def test_what_cannot_be_written_at_all_is_said_as_it_is(run: RunDir, settings: Settings) -> None:
    fs = FaultyFs(FastFs(), [StorageFault(errno.EROFS, ops=("create",))])
    with pytest.raises(StorageError, match="read-only"):
        check(RunDir(run.root, fs), settings, Disk(10))


def test_the_probe_writes_bytes_that_cannot_be_compressed_away(run: RunDir) -> None:
    seen: list[bytes] = []

    class Seeing(FastFs):
        def create(self, path: Path, data: bytes) -> None:
            seen.append(data)
            super().create(path, data)

    run.fs.mkdir(run.root)
    probe_write(run.root, fs=Seeing())
    assert len(seen[0]) >= 4096 and len(set(seen[0])) > 200
