"""The quickstart on a real Slurm: two nodes, preemptions, a job that dies, the same digests.

The reference is the same configuration by the local launcher: how jobs are run is no part of the
content.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from slurm.cluster import Cluster, wait_for

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(sys.executable).with_name("slurm-rl"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


class Chain:
    """One run, its commands, and what squeue said on the way."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.config = folder / "config.yaml"
        self.root = folder / "quick"
        self.seen: list[str] = []

    def write(self, **changes: object) -> None:
        value = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
        value["run"] = {"name": "quick", "dir": str(self.folder)}
        value["num_rollout"] = 2
        value["rollout"] |= {
            "prompt_data": str(ROOT / "configs" / "data" / "quickstart.jsonl"),
            "rollout_batch_size": 64,
            "n_samples_per_prompt": 4,
        }
        value["train"] |= {"global_batch_size": 32, "micro_batch_size": 16, "num_ranks": 2}
        value["network_interface"] = "lo"
        value["chain"] = {"heartbeat_s": 1, "lease_s": 5, "retry_delay_s": 1, "tick_s": 15}
        value["chain"]["submit_deadline_s"] = 15
        self.config.write_text(yaml.safe_dump(value | changes))

    def call(self, *argv: str) -> str:
        done = subprocess.run([PROGRAM, *argv], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def stage_dir(self, stage: str) -> Path:
        iteration, kind = stage.split(".")
        return self.root / "iterations" / f"{int(iteration[1:]):06d}" / f"{kind}.t0"

    def is_working(self, stage: str) -> bool:
        logs = self.stage_dir(stage).glob("a0*/rank-0.log")
        done = (self.stage_dir(stage) / "COMMIT").exists()
        assert not done, f"{stage} committed before it could be disturbed"
        return any(log.stat().st_size for log in logs)

    def digests(self) -> dict[str, str]:
        found = {}
        for path in (self.root / "iterations").glob("*/*.t0/COMMIT"):
            found[f"{path.parents[1].name}/{path.parent.name}"] = json.loads(path.read_bytes())[
                "digest"
            ]
        return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    chain = Chain(tmp_path_factory.mktemp("reference"))
    chain.write()
    chain.call("submit", str(chain.config), "--wait")
    digests = chain.digests()
    assert len(digests) == 5
    return digests


@pytest.fixture
def login_side() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of the login node, ended at the end."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.terminate()
        process.wait(10)


@pytest.mark.parametrize("submit_from", ["anywhere", "login"])
def test_preempted_and_killed_it_ends_the_same(
    cluster: Cluster,
    reference: dict[str, str],
    tmp_path: Path,
    submit_from: str,
    login_side: list[subprocess.Popen[bytes]],
) -> None:
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    chain = Chain(tmp_path / "slurm")
    chain.write(
        launcher="slurm",
        submit_from=submit_from,
        host_python=sys.executable,
        slurm={"partition": "low", "time": "00:08:00", "cpus_per_task": 1, "mem": "1500M"},
        tick={"slurm": {"mem": "200M"}},
    )
    value = yaml.safe_load(chain.config.read_text())
    value["train"]["slurm"] = {"nodes": 2, "ntasks_per_node": 1}
    chain.config.write_text(yaml.safe_dump(value))
    chain.call("submit", str(chain.config))
    if submit_from == "login":
        # What a crontab line would do, only more often.
        loop = f"while sleep 5; do {PROGRAM} advance {chain.root}; done"
        login_side.append(subprocess.Popen(["bash", "-c", loop], stdout=subprocess.DEVNULL))
    names = cluster.call("squeue", "-h", "-o", "%j").split()
    assert any(name.startswith("quick.i0000.rollout.") for name in names)
    # The second tick is submitted later than the first, on purpose.
    num_ticks = sum(name.startswith("quick.tick.") for name in names)
    assert num_ticks == (1 if submit_from == "anywhere" else 0)

    for stage in ("i0000.rollout", "i0000.train"):
        wait_for(lambda s=stage: chain.is_working(s), what=f"work on {stage}", timeout_s=120)
        _record(cluster, chain, f"{stage} runs")
        _preempt(cluster, chain, stage)
    wait_for(lambda: chain.is_working("i0001.rollout"), what="the next rollout", timeout_s=150)
    job_id = _job_of(cluster, "quick.i0001.rollout.")
    _kill_supervisor("quick.i0001.rollout.")
    wait_for(lambda: cluster.show(job_id)["JobState"] == "FAILED", what="the job's failure")
    _record(cluster, chain, "the second rollout's job was killed")

    last = chain.stage_dir("i0001.train") / "COMMIT"
    wait_for(last.exists, what="the last commit", timeout_s=240)
    assert chain.digests() == reference
    assert list(chain.stage_dir("i0000.rollout").glob("claim.0002"))
    assert list(chain.stage_dir("i0000.train").glob("claim.0002"))
    assert list(chain.stage_dir("i0001.rollout").glob("claim.0002"))
    chain.call("verify", str(chain.root))
    chain.call("advance", str(chain.root))
    wait_for(
        lambda: not cluster.call("squeue", "-h", "-o", "%j").strip(),
        what="an empty queue: a complete run leaves nothing behind",
        timeout_s=60,
    )
    if target := os.environ.get("SLURM_RL_RECORD_SQUEUE"):
        target = f"{target}.{submit_from}"
        Path(target).write_text("\n\n".join(chain.seen) + "\n")


def _preempt(cluster: Cluster, chain: Chain, stage: str) -> None:
    """Take every node for a moment with a job of the higher partition."""
    job_id = _job_of(cluster, f"quick.{stage}.")
    before = int(cluster.show(job_id)["Restarts"])
    urgent = cluster.call(
        "sbatch", "--parsable", "-p", "high", "--exclusive", f"-N{cluster.num_nodes}",
        "--mem=0", "-o", "/dev/null", "--wrap", "sleep 2",
    ).strip()  # fmt: skip
    wait_for(
        lambda: int(cluster.show(job_id)["Restarts"]) > before,
        what=f"a requeue of {stage}",
        timeout_s=90,
    )
    _record(cluster, chain, f"{stage} was preempted")
    wait_for(lambda: cluster.state(urgent) in ("COMPLETED", ""), what="the urgent job's end")


def _kill_supervisor(prefix: str) -> None:
    """SIGKILL to the batch process whose job's name begins with `prefix`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "slurm_rl.launch.job" in words and any(word.startswith(prefix) for word in words):
            os.kill(int(path.parent.name), signal.SIGKILL)
            return
    raise AssertionError(f"no process of {prefix}")


def _job_of(cluster: Cluster, prefix: str) -> str:
    """Id of the running job whose name begins with `prefix`."""
    for line in cluster.call("squeue", "-h", "-t", "R", "-o", "%i %j").splitlines():
        job_id, name = line.split()
        if name.startswith(prefix):
            return job_id
    raise AssertionError(f"no running job {prefix}")


def _record(cluster: Cluster, chain: Chain, what: str) -> None:
    text = cluster.call("squeue", "-o", "%.8i %.9P %.36j %.10T %.8M %.5D %R")
    chain.seen.append(f"# {what} ({time.strftime('%H:%M:%S')})\n{text.rstrip()}")
