"""A site where only the login node may submit: one submission, and nobody looks again.

A window of links waits in the queue; a link that starts does whatever is next, so that the links
behind a failure are its retries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster, running, wait_for
from slurm.processes import find_supervisors
from toy.commands import ToyRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: Links that are submitted, iterations that must come of them, and those of the whole run.
WINDOW, WANTED, NUM_ROLLOUT = 24, 20, 40
#: An iteration is two attempts: one link of twenty fails. With this seed three do.
FAILURES = "0.025:24"


@pytest.fixture(scope="module")
def login_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.getuid() != 0:
        pytest.skip("a cluster of namespaces needs root")
    root = tmp_path_factory.mktemp("login")
    with running(Cluster(root, knobs={"SUBMIT_FROM": "login"})) as cluster:
        yield cluster


def test_twenty_iterations_from_one_submission(login_cluster: Cluster, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    run = ToyRun(tmp_path)
    run.write(
        launcher="slurm",
        submit_from="login",
        num_rollout=NUM_ROLLOUT,
        host_python=sys.executable,
        slurm={"partition": "low", "time": "00:05:00", "cpus_per_task": 1},
        env={"TOY_SECOND": "0.01", "TOY_FAIL_RATE": FAILURES},
        chain={"pack": "iteration", "window": WINDOW, "heartbeat_s": 1, "lease_s": 5}
        | {"retry_delay_s": 4},
    )
    told = run.command("submit", str(run.config))
    assert told.returncode == 0, told.stderr
    assert len(login_cluster.job_names()) == WINDOW

    # One more link is lost without a word, as with its node.
    wait_for(lambda: run.digests().get("000003/rollout.t0"), what="a rollout", timeout_s=60)
    wait_for(lambda: any(p.kill() for p in find_supervisors(run.root)), what="a job at work")

    wait_for(lambda: not login_cluster.job_names(), what="an end of the queue", timeout_s=180)
    done = [name for name in run.digests() if "train" in name]
    assert len(done) >= WANTED, told_by_logs(run)
    ever = login_cluster.call("squeue", "-h", "-t", "all", "-o", "%j").split()
    assert len(ever) == WINDOW, "somebody submitted"
    assert num_failures(run) >= 3, "too few links failed to show anything"
    verified = run.command("verify", str(run.root))
    assert verified.returncode == 0, verified.stderr

    # Somebody looks at last: the rest is submitted.
    assert run.command("resume", str(run.root)).returncode == 0
    assert len(login_cluster.job_names()) == NUM_ROLLOUT - len(done)
    assert run.command("cancel", str(run.root)).returncode == 0


def test_sbatch_is_refused_on_the_nodes(login_cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match="Access/permission denied"):
        login_cluster.tool("node", "exec", "node1", "sbatch", "--wrap", "true")


def num_failures(run: ToyRun) -> int:
    """Attempts that ended without a commit."""
    claims = list(run.root.glob("iterations/*/*/claim.*"))
    return sum(path.suffix[1:].isdigit() for path in claims) - len(run.digests())


def told_by_logs(run: ToyRun) -> str:
    """The last lines of every job's log, for whoever reads a failure."""
    logs = sorted(run.root.glob("iterations/*/logs/*.log"))
    return "\n".join(
        f"{log.name}:\n" + "\n".join(log.read_text().splitlines()[-4:]) for log in logs
    )
