"""Critic, moving reference and teacher on a real Slurm: preempted and killed, the same digests.

What it is compared with is the same configuration by the local launcher.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from slurm.cluster import Cluster, wait_for
from slurm.test_chain import Chain, _job_of, _kill_supervisor, _preempt
from toy.roles import STAGES, make_teacher, roles_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class RolesChain(Chain):
    """The run with every role; its jobs are found by `quick.` like those of the quickstart."""

    def __init__(self, folder: Path, teacher: Path) -> None:
        super().__init__(folder)
        self.teacher = teacher

    def write(self, **changes: object) -> None:
        value = roles_config(self.folder, self.teacher)
        value["run"]["name"] = "quick"
        value["network_interface"] = "lo"
        value["chain"] = {"heartbeat_s": 1, "lease_s": 5, "retry_delay_s": 1, "tick_s": 15}
        value["chain"]["submit_deadline_s"] = 15
        self.config.write_text(yaml.safe_dump(value | changes))


def test_with_every_role_preempted_and_killed_it_ends_the_same(
    cluster: Cluster, tmp_path: Path
) -> None:
    teacher = make_teacher(tmp_path / "teacher" / "model")
    for folder in (tmp_path, tmp_path.parent, tmp_path / "teacher", teacher):
        folder.chmod(0o755)
    here = RolesChain(tmp_path / "here", teacher)
    here.write()
    here.call("submit", str(here.config), "--wait")
    assert len(here.digests()) == len(STAGES)

    chain = RolesChain(tmp_path / "slurm", teacher)
    chain.write(
        launcher="slurm",
        host_python=sys.executable,
        slurm={"partition": "low", "time": "00:08:00", "cpus_per_task": 1, "mem": "1500M"},
        tick={"slurm": {"mem": "200M"}},
    )
    chain.call("submit", str(chain.config))
    _await_work(chain, "i0000.critic")
    _preempt(cluster, chain, "i0000.critic")
    _await_work(chain, "i0001.reference")
    job_id = _job_of(cluster, "quick.i0001.reference.")
    _kill_supervisor("quick.i0001.reference.")
    wait_for(lambda: cluster.show(job_id)["JobState"] == "FAILED", what="the job's failure")
    _await_work(chain, "i0001.train")
    _preempt(cluster, chain, "i0001.train")
    last = chain.stage_dir("i0001.train") / "COMMIT"
    wait_for(last.exists, what="the last commit", timeout_s=400)
    assert chain.digests() == here.digests()
    for stage in ("i0000.critic", "i0001.reference", "i0001.train"):
        assert list(chain.stage_dir(stage).glob("claim.0002")), f"{stage} was not disturbed"
    chain.call("verify", str(chain.root))
    wait_for(
        lambda: not cluster.call("squeue", "-h", "-o", "%j").strip(),
        what="an empty queue: a complete run leaves nothing behind",
        timeout_s=60,
    )


def _await_work(chain: Chain, stage: str) -> None:
    wait_for(lambda: chain.is_working(stage), what=f"work on {stage}", timeout_s=400)
