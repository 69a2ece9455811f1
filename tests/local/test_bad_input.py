"""Bad input and damage, through the real commands: one clear line, the right exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy.commands import ToyRun, wait_until
from toy.program import fail_stage


def one_line(told: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The command ended with `code` and one line that holds `words`."""
    assert told.returncode == code, told.stderr
    assert len(told.stderr.strip().splitlines()) == 1, told.stderr
    for word in words:
        assert word in told.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rolout": {}}, ("rolout", "rollout")),
        ({"rollout__rollout_batch_size": "four"}, ("rollout_batch_size", "whole number")),
        ({"hf_checkpoint": "/nowhere"}, ("hf_checkpoint", "/nowhere")),
        ({"rollout__input_key": "question"}, ("question", "prompt")),
        ({"env": {"A B": "x"}}, ("env",)),
        ({"chain": {"lease_s": float("inf")}}, ("chain.lease_s",)),
    ],
)
def test_a_wrong_configuration_makes_no_run(
    toy_run: ToyRun, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    toy_run.write(**changes)
    one_line(toy_run.command("submit", str(toy_run.config)), 2, *words)
    assert not toy_run.root.exists()


def test_empty_data_is_named(toy_run: ToyRun) -> None:
    (toy_run.folder / "prompts.jsonl").write_text("\n")
    one_line(toy_run.command("submit", str(toy_run.config)), 2, "prompts.jsonl", "empty")


def test_two_folders_of_code_with_one_name_are_refused(toy_run: ToyRun) -> None:
    for parent in ("one", "two"):
        (toy_run.folder / parent / "lib").mkdir(parents=True)
    toy_run.write(code=[str(toy_run.folder / parent / "lib") for parent in ("one", "two")])
    one_line(toy_run.command("submit", str(toy_run.config)), 2, "two folders are called 'lib'")


def test_what_is_not_a_run_or_not_an_iteration(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), "--wait")
    one_line(toy_run.command("verify", str(toy_run.root), "-i", "99"), 2, "not one of 0 to 2")
    one_line(toy_run.command("path", str(toy_run.root), "-i", "-3"), 2, "not one of 0 to 2")
    one_line(toy_run.command("status", "/etc/hostname"), 2, "is a file")


def test_settings_that_did_not_exist_then_or_do_not_exist_now(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), "--wait")
    path = toy_run.root / "run.json"
    raw = json.loads(path.read_text())
    del raw["settings"]["rollout"]["request_timeout_s"]
    path.write_text(json.dumps(raw))
    assert toy_run.command("submit", str(toy_run.config)).returncode == 0
    raw["settings"]["newer"] = 1
    path.write_text(json.dumps(raw))
    one_line(toy_run.command("status", str(toy_run.root)), 5, "newer", "which made the run")


def test_committed_files_that_are_gone(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), "--wait")
    for folder in (toy_run.root / "iterations/000002/train.t0").glob("a0*"):
        shutil.rmtree(folder)
    one_line(toy_run.command("path", str(toy_run.root), "weights"), 5, "committed, but gone")
    told = toy_run.command("verify", str(toy_run.root))
    assert told.returncode == 5 and "checkpoint/state.json" in told.stderr


def test_verify_misses_a_commit_that_others_were_made_from(toy_run: ToyRun) -> None:
    """Also where the first iteration that is not complete lies before what was made from it."""
    toy_run.command("submit", str(toy_run.config), "--wait")
    (toy_run.root / "iterations/000002/train.t0/COMMIT").unlink()  # as if it were still to come
    for stage, child in (("train", "i0002.rollout"), ("rollout", "i0001.train")):
        path = toy_run.root / f"iterations/000001/{stage}.t0/COMMIT"
        kept = path.read_bytes()
        path.unlink()
        told = toy_run.command("verify", str(toy_run.root))
        assert told.returncode == 5, told.stdout
        lines = [line for line in told.stderr.splitlines() if f"i0001.{stage}, whose" in line]
        assert any(child in line and "COMMIT is gone" in line for line in lines), told.stderr
        assert not path.exists()
        path.write_bytes(kept)
        assert toy_run.command("verify", str(toy_run.root)).returncode == 0


def test_verify_misses_the_weights_of_an_evaluation(toy_run: ToyRun) -> None:
    questions = toy_run.folder / "questions.jsonl"
    questions.write_text('{"prompt": "a", "label": "b"}\n')
    toy_run.write(eval={"plain": {"prompt_data": str(questions)}})
    done = toy_run.command("submit", str(toy_run.config), "--wait")
    assert done.returncode == 0, done.stderr
    (toy_run.root / "iterations/000002/train.t0/COMMIT").unlink()
    told = toy_run.command("verify", str(toy_run.root))
    assert told.returncode == 5 and "i0003.eval-plain: its weights" in told.stderr, told.stderr
    assert "i0002.train, whose COMMIT is gone" in told.stderr


def test_verify_reads_only(toy_run: ToyRun) -> None:
    """A stage whose shards are all there is told, and its commit is left to its next reader."""
    toy_run.write(rollout__shards=2)
    toy_run.command("submit", str(toy_run.config), "--wait")
    commit = toy_run.root / "iterations/000001/rollout.t0/COMMIT"
    commit.unlink()
    before = sorted(toy_run.root.rglob("*"))
    told = toy_run.command("verify", str(toy_run.root))
    assert told.returncode == 0 and "i0001.rollout: all its shards" in told.stdout, told.stderr
    assert sorted(toy_run.root.rglob("*")) == before and not commit.exists()
    (commit.parent / "shard-0001/COMMIT").unlink()
    told = toy_run.command("verify", str(toy_run.root))
    assert told.returncode == 5 and "i0001.rollout, whose COMMIT is gone" in told.stderr


def test_logs_of_a_stage_that_there_is_not(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), "--wait")
    refused = toy_run.command("logs", str(toy_run.root), "--stage", "trian")
    one_line(refused, 2, "'trian'", "init, rollout, train", "did you mean train?")
    assert toy_run.command("logs", str(toy_run.root), "--stage", "train").returncode == 0


def test_a_retry_that_waits_says_for_how_long(toy_run: ToyRun) -> None:
    toy_run.write(chain={"heartbeat_s": 0.2, "lease_s": 2, "retry_delay_s": 60})
    toy_run.command("submit", str(toy_run.config), TOY_SECOND="0.3")
    fail_stage(toy_run.root, "rollout", 0, how="system", times=1)

    def told() -> str:
        return toy_run.command("status", str(toy_run.root)).stdout

    wait_until(lambda: "is pending (begins in" in told())
    assert "()" not in told() and "BeginTime" in told()
    assert " begins in " in toy_run.command("explain", str(toy_run.root)).stdout


def test_junk_beside_the_records_does_not_matter(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), "--wait")
    stage = toy_run.root / "iterations/000000/train.t0"
    for name in ("claim.0001~", "submit.0001.bak", "submit.x.id", "notes"):
        (stage / name).write_text("")
    (toy_run.root / "control/budget-old").write_text("{}")
    (toy_run.root / "head").write_text('{"iteration": 1e999}')
    assert toy_run.command("status", str(toy_run.root)).returncode == 0
    assert toy_run.command("verify", str(toy_run.root)).returncode == 0
    assert toy_run.command("resume", str(toy_run.root)).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    if os.getuid() != 0:
        pytest.skip("only root mounts a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_nothing(
    toy_run: ToyRun, small_disk: Path, undisturbed: dict[str, str]
) -> None:
    toy_run.root = small_disk / "toy"
    toy_run.write(run={"name": "toy", "dir": str(small_disk)})
    assert toy_run.command("submit", str(toy_run.config), TOY_SECOND="0.3").returncode == 0
    wait_until((toy_run.root / "iterations/000000/rollout.t0/COMMIT").exists)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    wait_until(lambda: not toy_run.running(), seconds=60)
    assert not (toy_run.root / "iterations/000001/train.t0/COMMIT").exists()
    filler.unlink()
    done = toy_run.command("resume", str(toy_run.root), "--wait")
    assert done.returncode == 0, done.stderr
    assert toy_run.digests() == undisturbed
    assert toy_run.command("verify", str(toy_run.root)).returncode == 0


BARE = f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n'


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (None, 0, "is no program on this node"),
        (BARE, 0o644, "is not executable"),
        ("#!/nowhere/python\n", 0o755, "cannot be started: No such file or directory"),
        (BARE, 0o755, "cannot import slurm_rl: "),
    ],
    ids=["gone", "no-program", "no-interpreter", "no-package"],
)
def test_an_interpreter_that_cannot_run_a_stage_halts_at_once(
    toy_run: ToyRun, text: str | None, mode: int, words: str
) -> None:
    """It was a program when the run was submitted; what becomes of it, the rollout does here."""
    wrong, other = toy_run.folder / "wrong-python", toy_run.folder / "other-python"
    wrong.write_text(BARE)
    wrong.chmod(0o755)
    toy = toy_run.folder / "toy-python"
    change = f"rm -f {wrong}"
    if text is not None:
        (toy_run.folder / "text").write_text(text)
        change += f" && cp {toy_run.folder / 'text'} {wrong} && chmod {mode:o} {wrong}"
    other.write_text(f'#!/bin/sh\n{change}\nexec {toy} "$@"\n')
    other.chmod(0o755)
    toy_run.write(rollout__python=str(other), train__python=str(wrong))
    told = toy_run.command("submit", str(toy_run.config), "--wait")
    assert told.returncode == 4, told.stderr
    assert f"i0000.train.t0: train.python = {wrong} {words}" in told.stderr
    assert "slurm-rl set" in told.stderr
    assert len(list(toy_run.root.glob("iterations/000000/train.t0/claim.*"))) == 1
