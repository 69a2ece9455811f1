"""Scores and evaluations through the real commands and the local launcher."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from toy.commands import ToyRun, wait_until
from toy.program import fail_stage, set_service

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(toy_run: ToyRun) -> ToyRun:
    """Version 0 to 2 by `judged`, which asks a service, and both ends by `plain`."""
    data = {"prompt_data": str(toy_run.folder / "prompts.jsonl")}
    toy_run.write(
        num_rollout=2,
        score={"enabled": True, "poll_s": 0.5},
        eval={"judged": {**data, "interval": 1}, "plain": data},
    )
    return toy_run


def listed(run: ToyRun) -> dict[str, str]:
    """Evaluation -> its state, as the command lists it."""
    told = run.command("eval", str(run.root), "--json")
    assert told.returncode == 0, told.stderr
    return {row["ref"]: row["state"] for row in json.loads(told.stdout)}


def test_a_run_with_scores_and_evaluations(run: ToyRun) -> None:
    done = run.command("submit", str(run.config), "--wait")
    assert done.returncode == 0, done.stderr
    due = [
        "i0000.eval-judged",
        "i0000.eval-plain",
        "i0001.eval-judged",
        "i0002.eval-judged",
        "i0002.eval-plain",
    ]
    assert listed(run) == dict.fromkeys(due, "done")
    assert "i0002.eval-plain mean 2" in " ".join(done.stdout.split())
    # One machine does all in turn: the next rollout waited for the evaluations before it.
    claim = json.loads((run.root / "iterations/000001/rollout.t0/claim.0001").read_bytes())
    before = json.loads((run.root / "iterations/000001/eval-judged.t0/COMMIT").read_bytes())
    assert claim["claimed"] >= before["provenance"]["committed"] - 0.1

    rows = run.command("metrics", str(run.root), "--jsonl").stdout.splitlines()
    found = [json.loads(row) for row in rows]
    assert [row.get("eval/judged") for row in found] == [0, 1, 2]
    assert [row.get("eval/plain") for row in found] == [0, None, 2]
    facts = json.loads(run.command("status", str(run.root), "--json").stdout)
    assert facts["state"] == "complete" and facts["evals"]["eval-plain"] == [2, "mean 2"]
    checked = run.command("verify", str(run.root))
    assert checked.returncode == 0 and "12 commits" in checked.stdout

    damaged = run.root / "iterations/000002"
    (path,) = damaged.glob("eval-plain.t0/a*/found.json")
    path.write_text(path.read_text().replace("2", "3"))
    told = run.command("verify", str(run.root))
    assert told.returncode == 5 and "eval-plain.t0" in told.stderr


def test_any_version_at_any_time_later(run: ToyRun) -> None:
    root = str(run.root)
    assert run.command("submit", str(run.config), "--wait").returncode == 0
    here = run.command("eval", root, "--version", "1", "--set", "plain", "--now")
    assert here.returncode == 0 and "i0001.eval-plain: mean 1" in here.stdout, here.stderr
    again = run.command("eval", root, "--version", "1")
    assert again.returncode == 0
    assert again.stdout.splitlines() == ["i0001.eval-judged: mean 1", "i0001.eval-plain: mean 1"]
    assert run.command("status", root, "--json").stdout.count('"complete"') == 2

    for argv, code, words in [
        (("--version", "3"), 2, "version 3 is not one of 0 to 2"),
        (("--version", "1", "--set", "plian"), 2, "did you mean plain?"),
    ]:
        told = run.command("eval", root, *argv)
        assert told.returncode == code and words in told.stderr
        assert len(told.stderr.strip().splitlines()) == 1


def test_a_job_does_it_where_one_does_not_wait(run: ToyRun) -> None:
    assert run.command("submit", str(run.config), "--wait").returncode == 0
    told = run.command("eval", str(run.root), "--version", "1")
    assert told.returncode == 0 and "i0001.eval-plain: job" in told.stdout
    wait_until(lambda: (run.root / "iterations/000001/eval-plain.t0/COMMIT").exists())
    wait_until(lambda: listed(run).get("i0001.eval-plain") == "done")


def test_a_version_that_was_pruned_names_the_nearest_that_are_there(run: ToyRun) -> None:
    data = {"prompt_data": str(run.folder / "prompts.jsonl"), "interval": 3}
    run.write(num_rollout=6, eval={"plain": data}, retention={"keep_last": 2, "gc_grace_s": 0.1})
    assert run.command("submit", str(run.config), "--wait").returncode == 0
    assert run.command("gc", str(run.root), "--wait").returncode == 0
    told = run.command("eval", str(run.root), "--version", "2")
    assert told.returncode == 3, told.stdout + told.stderr
    assert (
        "version 2 were pruned" in told.stderr and "nearest that are there: 0 and 5" in told.stderr
    )
    assert not (run.root / "evals").exists()


def test_one_that_fails_is_given_up_told_and_opened_again(run: ToyRun) -> None:
    root = str(run.root)
    run.command("submit", str(run.config), TOY_SECOND="0.1")
    fail_stage(run.root, "eval-plain", 2, how="user", times=1)
    done = run.command("watch", root)
    assert done.returncode == 0, done.stderr
    assert "given up: i0002.eval-plain.t0: told to fail (user)" in done.stdout
    assert listed(run)["i0002.eval-plain"].startswith("given up: i0002.eval-plain.t0: told to fail")
    facts = json.loads(run.command("status", root, "--json").stdout)
    assert facts["state"] == "complete" and facts["done"] == 2

    opened = run.command("retry", root, "-i", "2", "--stage", "eval-plain")
    assert opened.returncode == 0, opened.stderr
    wait_until(lambda: listed(run)["i0002.eval-plain"] == "done")
    refused = run.command("retry", root, "-i", "2", "--stage", "eval-plain")
    assert refused.returncode == 3 and "not made twice" in refused.stderr
    assert not list((run.root / "control").glob("timeline-*"))


def test_an_outage_is_told_and_outlived(run: ToyRun) -> None:
    hold = run.folder / "hold"
    hold.write_text("0")  # nothing is graded before the service is down
    run.command("submit", str(run.config), TOY_HOLD=str(hold))
    set_service(run.root, is_down=True)
    hold.write_text("99")
    watcher = run.start("watch", str(run.root))

    def is_deferred() -> bool:
        ends = run.root.glob("iterations/000000/*/a*/ended.json")
        return any(b"deferred" in path.read_bytes() for path in ends)

    wait_until(is_deferred)
    explained = run.command("explain", str(run.root)).stdout
    waiting = Counter(
        line.split()[0]
        for line in explained.splitlines()
        if "waits for service judge (down since" in line
    )
    assert set(waiting.values()) == {1}, explained
    assert "no node is held meanwhile; the next look is due" in explained, explained
    assert f"slurm-rl set {run.root} services.judge.url=URL" in explained, explained
    assert "waits for service judge" in run.command("status", str(run.root)).stdout
    set_service(run.root, is_down=False)
    out, err = watcher.communicate(timeout=100)
    assert watcher.returncode == 0, err
    assert "waits for service judge" in out
    assert set(listed(run).values()) == {"done"}


def test_a_run_without_evaluations_says_how_to_add_one(toy_run: ToyRun) -> None:
    assert toy_run.command("submit", str(toy_run.config), "--wait").returncode == 0
    told = toy_run.command("eval", str(toy_run.root))
    assert told.returncode == 2 and "eval.NAME.prompt_data=FILE" in told.stderr
    scored = toy_run.command("set", str(toy_run.root), "score.enabled=true")
    assert scored.returncode == 2 and "need a score stage" in scored.stderr
    data = Path(toy_run.folder / "prompts.jsonl")
    added = toy_run.command("set", str(toy_run.root), f"eval.late.prompt_data={data}")
    assert added.returncode == 0, added.stderr
    assert toy_run.command("resume", str(toy_run.root), "--wait").returncode == 0
    assert set(listed(toy_run)) == {"i0000.eval-late", "i0003.eval-late"}
