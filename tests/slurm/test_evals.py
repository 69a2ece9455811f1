"""Score stages, evaluations and an outage on a real Slurm, with toy stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm.cluster import Cluster, wait_for
from slurm.processes import find_supervisors
from slurm.runs import open_run, write
from toy.commands import ToyRun
from toy.program import set_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DUE = [f"i000{version}.eval-{name}" for version in (0, 2) for name in ("judged", "plain")]


@pytest.fixture
def scored(cluster: Cluster, tmp_path: Path) -> ToyRun:
    """Both ends evaluated by `judged`, which asks a service, and by `plain`; scores are jobs."""
    run = open_run(tmp_path)
    data = {"prompt_data": str(run.folder / "prompts.jsonl")}
    write(run, score={"enabled": True, "poll_s": 0.5}, eval={"judged": data, "plain": data})
    return run


def states(run: ToyRun) -> dict[str, str]:
    told = run.command("eval", str(run.root), "--json")
    assert told.returncode == 0, told.stderr
    return {row["ref"]: row["state"] for row in json.loads(told.stdout)}


def deferred(run: ToyRun) -> list[Path]:
    ends = run.root.glob("iterations/*/*/a*/ended.json")
    return [path for path in ends if b"deferred" in path.read_bytes()]


def test_an_outage_delays_a_run_and_changes_nothing(
    cluster: Cluster, scored: ToyRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    local = ToyRun(tmp_path_factory.mktemp("local"))
    data = {"prompt_data": str(local.folder / "prompts.jsonl")}
    local.write(num_rollout=2, score={"enabled": True}, eval={"judged": data, "plain": data})
    assert local.command("submit", str(local.config), "--wait").returncode == 0

    assert scored.command("submit", str(scored.config)).returncode == 0
    set_service(scored.root, is_down=True)
    wait_for(lambda: deferred(scored), what="a deferred stage", timeout_s=90)
    explained = scored.command("explain", str(scored.root)).stdout
    assert "waits for service judge (down since" in explained, explained
    set_service(scored.root, is_down=False)
    done = scored.command("watch", str(scored.root))
    assert done.returncode == 0, done.stderr
    assert states(scored) == dict.fromkeys(DUE, "done")
    assert scored.digests() == local.digests()
    wait_for(lambda: not cluster.job_names(), what="an empty queue", timeout_s=60)
    assert scored.command("verify", str(scored.root)).returncode == 0


def test_a_job_that_evaluates_is_killed_and_does_it_again(cluster: Cluster, scored: ToyRun) -> None:
    assert scored.command("submit", str(scored.config)).returncode == 0
    evaluation = scored.root / "iterations" / "000000" / "eval-plain.t0"

    def kill() -> bool:
        found = [p for p in find_supervisors(scored.root) if ".i0000.eval-plain" in p.job]
        return bool(list(evaluation.glob("claim.*"))) and any(p.kill() for p in found)

    wait_for(kill, what="an evaluation to kill", timeout_s=90)
    done = scored.command("watch", str(scored.root))
    assert done.returncode == 0, done.stderr
    assert states(scored) == dict.fromkeys(DUE, "done")
    assert len(list(evaluation.glob("claim.*"))) == 2

    later = scored.command("eval", str(scored.root), "--version", "1", "--set", "plain")
    assert later.returncode == 0 and "i0001.eval-plain: job" in later.stdout, later.stderr
    wait_for(lambda: states(scored).get("i0001.eval-plain") == "done", what="its result")
    wait_for(lambda: not cluster.job_names(), what="an empty queue", timeout_s=60)
