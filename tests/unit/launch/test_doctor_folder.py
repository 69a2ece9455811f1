"""The folder of doctor and shell: nothing is left, and nobody else's is taken away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurm_rl.launch.doctor_folder import find_parent, is_abandoned, sweep, work_folder
from slurm_rl.launch.ping import Round, await_file, echo, throw_rounds


def test_it_is_removed_with_what_is_in_it_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), work_folder(tmp_path) as folder:
        (folder / "deep" / "er").mkdir(parents=True)
        (folder / "deep" / "er" / "file").write_text("x")
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from slurm_rl.launch.doctor_folder import work_folder\n"
        "with work_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'files').mkdir()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=30)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".doctor-") and (left / "files").is_dir()
    with work_folder(tmp_path) as folder:
        assert sorted(tmp_path.iterdir()) == [folder]
    assert os.listdir(tmp_path) == []


def test_a_doctor_at_work_is_left_alone(tmp_path: Path) -> None:
    with work_folder(tmp_path) as first, work_folder(tmp_path) as second:
        assert first.is_dir() and second.is_dir()
        assert sweep(tmp_path, prefix=".doctor") == []


def test_another_machines_is_left_alone_for_a_day(tmp_path: Path) -> None:
    folder = tmp_path / ".doctor-0001"
    folder.mkdir()
    (folder / "owner").write_text("elsewhere boot ns\n1\n5\n")
    assert not is_abandoned(folder)
    old = time.time() - 2 * 86400
    os.utime(folder, (old, old))
    assert is_abandoned(folder)


def test_one_without_an_owner_is_being_made(tmp_path: Path) -> None:
    (tmp_path / ".doctor-0002").mkdir()
    assert not is_abandoned(tmp_path / ".doctor-0002")


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    for name in (".doctors", "doctor-1", ".shell-1"):
        (tmp_path / name).mkdir()
    with work_folder(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == [".doctors", ".shell-1", "doctor-1"]


def test_where_it_lies(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    assert find_parent(run) == tmp_path
    (run / "control").mkdir(parents=True)
    assert find_parent(run) == run / "control"


# -- throwing files to and fro ----------------------------------------------------------------


def throw(folder: Path, *, patience_s: float = 60.0) -> list[Round]:
    done = threading.Event()
    other = threading.Thread(
        target=echo, args=(folder,), kwargs={"channel": "c", "is_over": done.is_set}
    )
    other.start()
    try:
        return throw_rounds(folder, channel="c", num_rounds=2, patience_s=patience_s)
    finally:
        done.set()
        other.join()


def test_rounds_come_back_and_are_timed(tmp_path: Path) -> None:
    rounds = throw(tmp_path)
    assert len(rounds) == 2
    for entry in rounds:
        assert entry.total_s is not None and 0 < entry.total_s < 60
        assert entry.there is not None and entry.back is not None and entry.latest_s < 60


def test_nobody_there_is_told_after_the_patience_and_not_tried_again(tmp_path: Path) -> None:
    began = time.monotonic()
    rounds = throw_rounds(tmp_path, channel="c", num_rounds=5, patience_s=0.2)
    assert rounds == [Round(None)] and time.monotonic() - began < 30


def test_a_size_that_comes_late_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "ping-c-1"
    path.write_bytes(b"short")

    def grow() -> None:
        time.sleep(0.3)
        path.write_bytes(b"x" * 2000)

    writer = threading.Thread(target=grow)
    writer.start()
    seen = await_file(path, number=1, until=time.monotonic() + 60)
    writer.join()
    assert seen is not None and seen.name_s == 0 and 0 < seen.content_s < 60


def test_a_file_that_never_gets_whole_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "ping-c-1").write_bytes(b"short")
    assert await_file(tmp_path / "ping-c-1", number=1, until=time.monotonic() + 0.2) is None
