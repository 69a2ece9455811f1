"""The local launcher end to end: separate processes, the commands, kills, and bad input."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from toy.commands import ToyRun, wait_until
from toy.program import fail_stage

pytestmark = pytest.mark.timeout(120)


def test_a_run_completes_and_can_be_looked_at(toy_run: ToyRun, undisturbed: dict[str, str]) -> None:
    done = toy_run.command("submit", str(toy_run.config), "--wait")
    assert done.returncode == 0, done.stderr
    assert len(undisturbed) == 7 and toy_run.digests() == undisturbed
    assert len(set(undisturbed.values())) == 7

    status = toy_run.command("status", str(toy_run.root), "--json")
    facts = json.loads(status.stdout)
    assert (facts["state"], facts["done"], facts["jobs"]) == ("complete", 3, [])
    assert toy_run.command("verify", str(toy_run.config)).returncode == 0
    weights = toy_run.command("path", str(toy_run.root), "weights").stdout.strip()
    assert json.loads(Path(weights, "state.json").read_text())["version"] == 3

    again = toy_run.command("submit", str(toy_run.config), "--wait")
    assert again.returncode == 0 and toy_run.digests() == undisturbed
    lines = toy_run.command("watch", str(toy_run.root)).stdout.splitlines()
    assert lines[:2] == ["so far: 7 stages, up to i0002.train", "complete: 7 stages"]
    assert toy_run.command("resume", str(toy_run.root)).returncode == 0
    assert not toy_run.running()


@pytest.mark.parametrize(
    "changes",
    [{"chain__pack": "iteration"}, {"rollout__shards": 2}],
    ids=["pack-iteration", "two-shards"],
)
def test_packing_and_shards_do_not_change_what_is_trained(
    toy_run: ToyRun, undisturbed: dict[str, str], changes: dict[str, object]
) -> None:
    toy_run.write(**changes)
    done = toy_run.command("submit", str(toy_run.config), "--wait")
    assert done.returncode == 0, done.stderr
    last = json.loads((toy_run.root / "iterations/000002/train.t0/COMMIT").read_bytes())
    assert toy_run.digests().keys() >= undisturbed.keys()
    weights = last["content"]["weights"]["digest"]
    plain = ToyRun(toy_run.folder / "plain")
    plain.folder.mkdir()
    plain.write()
    assert plain.command("submit", str(plain.config), "--wait").returncode == 0
    reference = json.loads((plain.root / "iterations/000002/train.t0/COMMIT").read_bytes())
    assert reference["content"]["weights"]["digest"] == weights


def test_kills_at_any_time_leave_the_same_history(
    toy_run: ToyRun, undisturbed: dict[str, str]
) -> None:
    watcher = toy_run.start("submit", str(toy_run.config), "--wait", TOY_SECOND="0.1")
    num_killed = 0
    for stage, delay_s in (("000000/rollout", 0.0), ("000001/rollout", 0.3), ("000002/train", 0.0)):
        wait_until((toy_run.root / f"iterations/{stage}.t0/claim.0001").exists)
        time.sleep(delay_s)
        num_killed += toy_run.kill_jobs()
    _, err = watcher.communicate(timeout=100)
    assert watcher.returncode == 0, err
    assert num_killed >= 3
    assert toy_run.digests() == undisturbed
    claims = list((toy_run.root / "iterations").rglob("claim.0002"))
    assert claims, "no stage was interrupted in the middle"


@pytest.mark.parametrize("moment", ["scheduler/*", "iterations/000000/rollout.t0/claim.0001"])
def test_ctrl_c_stops_the_processes_and_resume_goes_on(
    toy_run: ToyRun, undisturbed: dict[str, str], moment: str
) -> None:
    """At any time from the first job on, whether it is watched already or not."""
    watcher = toy_run.start("submit", str(toy_run.config), "--wait", TOY_SECOND="0.2")
    wait_until(lambda: any(toy_run.root.glob(moment)))
    watcher.send_signal(signal.SIGINT)
    out, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 130 and "Continue with: slurm-rl resume" in out
    wait_until(lambda: not toy_run.running())
    assert toy_run.command("status", str(toy_run.root), "--json").stdout.count('"paused"')
    done = toy_run.command("resume", str(toy_run.root), "--wait")
    assert done.returncode == 0, done.stderr
    assert toy_run.digests() == undisturbed


def test_a_cause_that_is_the_users_halts_at_once(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), TOY_SECOND="0.3")
    fail_stage(toy_run.root, "train", 0, how="user", times=1)
    halted = toy_run.command("watch", str(toy_run.root))
    assert halted.returncode == 4
    assert "told to fail (user)" in halted.stderr and "Traceback" not in halted.stderr
    assert len(halted.stderr.strip().splitlines()) == 1
    wait_until(lambda: not toy_run.running())
    assert toy_run.command("submit", str(toy_run.config)).returncode == 4
    assert toy_run.command("resume", str(toy_run.root), "--wait").returncode == 0


def test_a_stage_that_always_fails_is_tried_so_often_and_no_more(toy_run: ToyRun) -> None:
    toy_run.write(chain={"max_attempts": 2, "heartbeat_s": 0.2, "lease_s": 2, "retry_delay_s": 0.1})
    toy_run.command("submit", str(toy_run.config), TOY_SECOND="0.2")
    fail_stage(toy_run.root, "rollout", 0, how="system", times=9)
    halted = toy_run.command("watch", str(toy_run.root))
    assert halted.returncode == 4
    assert "2 attempts ended without a commit" in halted.stderr
    assert "told to fail (system)" in halted.stderr


def test_a_second_submit_with_other_settings_is_told(toy_run: ToyRun) -> None:
    assert toy_run.command("submit", str(toy_run.config), "--wait").returncode == 0
    before = toy_run.digests()
    other = toy_run.command("submit", str(toy_run.config), "--set", "seed=7")
    assert other.returncode == 2 and "seed was 1234, now 7" in other.stderr
    assert toy_run.digests() == before


def test_a_run_of_a_newer_format_is_refused(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), "--wait")
    path = toy_run.root / "run.json"
    path.write_text(path.read_text().replace('"format":1', '"format":99'))
    for command in ("status", "resume", "verify", "cancel", "pause"):
        told = toy_run.command(command, str(toy_run.root))
        assert told.returncode == 5 and "format 99 is newer" in told.stderr
        assert len(told.stderr.strip().splitlines()) == 1


def test_a_damaged_commit_is_named_and_halts(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), TOY_SECOND="0.3")
    commit = toy_run.root / "iterations/000000/rollout.t0/COMMIT"
    wait_until(commit.exists)
    good = commit.read_bytes()
    commit.write_bytes(good.replace(b'"num_samples":4', b'"num_samples":5'))
    told = toy_run.command("watch", str(toy_run.root))
    assert told.returncode in (4, 5) and "COMMIT" in told.stderr
    wait_until(lambda: (toy_run.root / "control/HALT").exists())
    wait_until(lambda: not toy_run.running())
    assert not (toy_run.root / "iterations/000001/rollout.t0/COMMIT").exists()
    assert toy_run.command("verify", str(toy_run.root)).returncode == 5
    commit.write_bytes(good)
    assert toy_run.command("resume", str(toy_run.root), "--wait").returncode == 0


def test_no_run_is_one_clear_line(toy_run: ToyRun) -> None:
    for command in ("status", "resume", "pause", "cancel", "verify", "logs", "path", "metrics"):
        told = toy_run.command(command, str(toy_run.folder / "nowhere"))
        assert told.returncode == 2 and "no run here" in told.stderr
        assert len(told.stderr.strip().splitlines()) == 1


def test_logs_and_metrics_come_from_the_newest_attempts(toy_run: ToyRun) -> None:
    toy_run.command("submit", str(toy_run.config), "--wait")
    listed = toy_run.command("logs", str(toy_run.root), "-i", "1", "--stage", "train", "--list")
    assert listed.returncode == 0
    assert "000001/train.t0/a0001-" in listed.stdout and "/logs/train.0001." in listed.stdout
    rows = toy_run.command("metrics", str(toy_run.root), "--jsonl").stdout.splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == [0, 1, 2]
    assert toy_run.command("logs", str(toy_run.root), "-i", "9").returncode == 3
