"""Kinds of sites: with and without accounting, with and without a user signal at a preemption,
processes tracked by cgroups or not, and jobs of root and of an ordinary user.

Four clusters have every pair of the first three; on each, root and an ordinary user have a run of
their own at the same time. Every run is preempted once, loses a supervisor once, and must end with
the digests of an undisturbed run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm.cluster import Cluster, running, wait_for
from slurm.processes import find_payloads, find_supervisors
from toy.commands import ToyRun
from toy.interpreter import write_interpreter
from toy.model import write_model

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "slurm_cluster.sh"
USER = "slurm-rl-tester"
#: accounting, preempt_send_user_signal, process tracking: every pair of values.
SITES = [
    ("0", "0", "linuxproc"),
    ("0", "1", "cgroup"),
    ("1", "0", "cgroup"),
    ("1", "1", "linuxproc"),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Person:
    """Somebody with a run: how they start a program, and with which Python."""

    name: str
    prefix: tuple[str, ...]
    python: str

    def type(self, *argv: str) -> str:
        """`slurm-rl ARGV`; its standard output."""
        code = "from slurm_rl.cli.main import entry; entry()"
        done = subprocess.run(
            [*self.prefix, self.python, "-c", code, *argv],
            env=os.environ | {"PYTHONPATH": python_path(), "SLURM_CLUSTER_DIR": cluster_dir()},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, f"{self.name}: slurm-rl {argv}: {done.stdout}{done.stderr}"
        return done.stdout


def cluster_dir() -> str:
    """Where the cluster is that Slurm's commands go to now."""
    return str(Path(os.environ["SLURM_CONF"]).parents[1])


def python_path() -> str:
    return f"{ROOT}:{sysconfig.get_paths()['purelib']}"


def find_people() -> tuple[list[Person], str]:
    """Root, and the ordinary user if there is a Python that he may run; else why not."""
    people = [Person("root", (), sys.executable)]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = (str(TOOL), "as", USER)
    said = ""
    for python in (sys.executable, shutil.which(version, path="/usr/local/bin:/usr/bin")):
        if python is None:
            continue
        # It may start, and yet lie in a folder that is closed to him.
        code = f"import shutil, slurm_rl.launch.job, slurm_rl.cli.main; shutil.which({python!r})[0]"
        argv = [*prefix, python, "-c", code]
        env = os.environ | {"PYTHONPATH": python_path()}
        done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True)
        if done.returncode == 0:
            return [*people, Person(USER, prefix, python)], ""
        said = done.stderr.strip().splitlines()[-1]
    return people, f"an ordinary user cannot run {version} with these packages: {said}"


def why_no_cgroups() -> str:
    """Empty if process tracking by cgroups can be tried here."""
    for place in ("freezer", "."):
        folder = Path("/sys/fs/cgroup") / place
        if place == "." and not (folder / "cgroup.controllers").exists():
            return "/sys/fs/cgroup has neither a freezer (v1) nor cgroup.controllers (v2)"
        if folder.is_dir():
            try:
                (folder / "slurm-rl-probe").mkdir()
                (folder / "slurm-rl-probe").rmdir()
                return ""
            except OSError as error:
                return f"{folder}: {error.strerror}"
    return "/sys/fs/cgroup is not mounted"


@pytest.fixture(scope="module")
def inputs() -> Iterator[Path]:
    """A folder that everybody may read, with the model and the prompts."""
    if os.getuid() != 0:
        pytest.skip("a cluster of namespaces needs root")
    with tempfile.TemporaryDirectory(prefix="matrix-") as name:
        folder = Path(name)
        write_model(folder / "model")
        (folder / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
        folder.chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def reference(inputs: Path) -> dict[str, str]:
    run = make_run(inputs, Person("reference", (), sys.executable), launcher="local")
    assert run.command("submit", str(run.config), "--wait").returncode == 0
    return run.digests()


def make_run(inputs: Path, person: Person, **changes: object) -> ToyRun:
    run = ToyRun(Path(tempfile.mkdtemp(prefix=f"{person.name}-", dir=inputs)))
    run.folder.chmod(0o755)
    chain = {"heartbeat_s": 0.5, "lease_s": 4, "retry_delay_s": 0.5, "submit_deadline_s": 8}
    run.write(
        num_rollout=2,
        hf_checkpoint=str(inputs / "model"),
        rollout__prompt_data=str(inputs / "prompts.jsonl"),
        chain=chain | {"tick_s": 8},
        env={"TOY_SECOND": "0.5"},
        **changes,
    )
    write_interpreter(run.folder / "toy-python", python=person.python)
    return run


@pytest.mark.parametrize(("accounting", "user_signal", "proctrack"), SITES)
def test_a_site(
    inputs: Path,
    reference: dict[str, str],
    accounting: str,
    user_signal: str,
    proctrack: str,
) -> None:
    if proctrack == "cgroup" and (reason := why_no_cgroups()):
        pytest.skip(reason)
    people, why_not = find_people()
    knobs = {"ACCOUNTING": accounting, "USER_SIGNAL": user_signal, "PROCTRACK": proctrack}
    root = Path(tempfile.mkdtemp(prefix="site-", dir="/tmp"))
    with running(Cluster(root, num_nodes=2, knobs=knobs)) as cluster:
        runs = {person: submit(inputs, person) for person in people}
        check_site(cluster, runs, proctrack)
        preempt(cluster, runs)
        kill_supervisors(list(runs.values()))
        for person, run in runs.items():
            last = run.root / "iterations" / "000001" / "train.t0" / "COMMIT"
            wait_for(last.exists, what=f"end of the run of {person.name}", timeout_s=120)
            assert run.digests() == reference, person.name
            person.type("verify", str(run.root))
        wait_for(lambda: not cluster.job_names(), what="an empty queue", timeout_s=60)
        check_accounting(is_on=accounting == "1", names=list(runs))
    if why_not:
        pytest.skip(f"done for root; {why_not}")


def submit(inputs: Path, person: Person) -> ToyRun:
    run = make_run(
        inputs,
        person,
        launcher="slurm",
        host_python=person.python,
        slurm={"partition": "low", "time": "00:05:00", "cpus_per_task": 1},
    )
    if person.prefix:
        subprocess.run(["chown", "-R", f"{person.name}:", run.folder], check=True)
    person.type("submit", str(run.config))
    return run


def check_site(cluster: Cluster, runs: dict[Person, ToyRun], proctrack: str) -> None:
    """That the cluster is of the kind it was meant to be, and each job its user's."""
    config = cluster.call("scontrol", "show", "config")
    assert f"proctrack/{proctrack}" in config
    for person, run in runs.items():
        cgroup, owner = wait_for(
            lambda r=run: look_at_work(r), what=f"work of {person.name}", timeout_s=60
        )
        assert "/job_" in cgroup or proctrack == "linuxproc"
        assert owner == person.name


def look_at_work(run: ToyRun) -> tuple[str, str] | None:
    """Control groups and owner of a program of the run; None while none works."""
    for process in find_payloads(run.root):
        place = Path(f"/proc/{process.pid}")
        try:
            return (place / "cgroup").read_text(), place.owner()
        except OSError:
            continue  # it has ended meanwhile
    return None


def preempt(cluster: Cluster, runs: dict[Person, ToyRun]) -> None:
    """Take every node for a moment; each run's running job must go back to the queue."""
    running_jobs = {
        p: wait_for(lambda r=run: find_supervisors(r.root), what=f"a job of {p.name}")[0].job
        for p, run in runs.items()
    }
    before = {name: claims(run) for name, run in runs.items()}
    cluster.call(
        "sbatch", "-p", "high", "--exclusive", "-N2", "-J", "urgent", "-o", "/dev/null",
        "--wrap", "sleep 1",
    )  # fmt: skip
    for person, run in runs.items():
        wait_for(
            lambda p=person, r=run: (
                was_requeued(cluster, running_jobs[p]) or claims(r) > before[p] + 1
            ),
            what=f"a requeue of {running_jobs[person]}",
            timeout_s=60,
        )


def was_requeued(cluster: Cluster, name: str) -> bool:
    said = cluster.call("squeue", "-h", "-t", "all", "-n", name, "-o", "%i").split()
    return any(int(cluster.show(job_id)["Restarts"]) > 0 for job_id in said)


def claims(run: ToyRun) -> int:
    return len(list(run.root.glob("iterations/*/*/claim.????")))


def kill_supervisors(runs: list[ToyRun]) -> None:
    """SIGKILL of the supervisor under a program at work; another attempt must be made."""
    before = {}
    for run in runs:
        wait_for(lambda r=run: find_payloads(r.root), what=f"work of {run.root}", timeout_s=60)
        before[run.root] = claims(run)
        wait_for(
            lambda r=run: sum(process.kill() for process in find_supervisors(r.root)),
            what=f"a supervisor of {run.root}",
        )
    for run in runs:
        wait_for(
            lambda r=run: claims(r) > before[r.root],
            what=f"another attempt of {run.root}",
            timeout_s=90,
        )


def check_accounting(*, is_on: bool, names: list[Person]) -> None:
    done = subprocess.run(
        ["sacct", "-a", "-n", "-X", "-o", "User%20,JobName%40"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode == 0) is is_on, done.stderr
    for person in names:
        assert not is_on or person.name in done.stdout, "sacct does not know the user's jobs"
