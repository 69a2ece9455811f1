"""The effects, with small scripts in the place of Slurm's commands."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_rl.chain.scheduler import JobState, LinkRequest
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerError, SchedulerUnavailable, SubmitDeferred, SubmitRefused
from slurm_rl.launch.environment import scrub_environment
from slurm_rl.launch.slurm import SlurmScheduler, expand_nodes, job_nodes

Install = Callable[[str, str], None]

#: Command line -> what a real Slurm answered.
ANSWERS = {
    match[1]: match[2]
    for match in re.finditer(
        r"== (.*)\n((?:.*\n)*?)rc=\d+\n",
        (Path(__file__).parents[2] / "golden" / "control-errors.txt").read_text(),
    )
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a shell script in the place of a command; `$D` is the test's directory."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setenv("D", str(tmp_path))

    def write(name: str, body: str) -> None:
        path = bin_dir / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    write("srun", "exit 1")  # submitit looks whether it is there
    return write


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "q", "dir": str(tmp_path)},
            "num_rollout": 1,
            "rollout": {"prompt_data": "/p", "rollout_batch_size": 1},
            "train": {"global_batch_size": 1},
        }
    )


@pytest.fixture
def scheduler(settings: Settings, install: Install) -> SlurmScheduler:
    return SlurmScheduler(settings, "q", submit_timeout_s=60.0)


@pytest.fixture
def impatient(settings: Settings, install: Install) -> SlurmScheduler:
    return SlurmScheduler(settings, "q", submit_timeout_s=2.0)


REQUEST = LinkRequest(name="q.tick.ab", command=("tick", "/run", "q.tick.ab"), log="/l")


def test_submit_gives_the_script_and_reads_the_id(
    scheduler: SlurmScheduler, install: Install, tmp_path: Path
) -> None:
    install("sbatch", 'cat > $D/script; echo "$@" > $D/args; echo "77;alpha"')
    assert scheduler.submit(REQUEST) == "77"
    assert "#SBATCH --job-name=q.tick.ab\n" in (tmp_path / "script").read_text()
    assert (tmp_path / "args").read_text() == "--parsable\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["args", "bin", "script"]


def test_a_surrounding_job_does_not_leak(
    scheduler: SlurmScheduler,
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaks = {
        "SLURM_JOB_ID": "5",
        "SLURM_MEM_PER_CPU": "1",
        "SLURMD_NODENAME": "n",
        "SBATCH_PARTITION": "x",
        "SRUN_DEBUG": "3",
        "CUDA_VISIBLE_DEVICES": "0",
        "LOCAL_RANK": "0",
        "SLURM_TIME_FORMAT": "relative",
    }
    for name, value in (leaks | {"SLURM_CONF": "/etc/s", "MINE": "1"}).items():
        monkeypatch.setenv(name, value)
    install("sbatch", "env > $D/env; echo 1")
    scheduler.submit(REQUEST)
    seen = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert not seen & leaks.keys()
    assert seen >= {"SLURM_CONF", "MINE", "PATH"}


def test_devices_that_a_person_chose_stay_outside_of_a_job() -> None:
    assert scrub_environment({"CUDA_VISIBLE_DEVICES": "1"}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert scrub_environment({"SQUEUE_STATES": "R", "SCANCEL_STATE": "R"}) == {}


def test_success_without_an_id_is_not_success(scheduler: SlurmScheduler, install: Install) -> None:
    install("sbatch", "echo queued, probably")
    with pytest.raises(SchedulerUnavailable, match="named no job: 'queued, probably'"):
        scheduler.submit(REQUEST)


def test_an_id_with_a_failure_is_not_success(scheduler: SlurmScheduler, install: Install) -> None:
    install("sbatch", "echo 77; echo 'sbatch: error: no such thing' >&2; exit 1")
    with pytest.raises(SubmitRefused, match="no such thing"):
        scheduler.submit(REQUEST)


def test_sbatch_that_hangs_is_left(impatient: SlurmScheduler, install: Install) -> None:
    install("sbatch", "sleep 60")
    began = time.monotonic()
    with pytest.raises(SchedulerUnavailable, match="did not answer in time"):
        impatient.submit(REQUEST)
    assert time.monotonic() - began < 50


def test_sbatch_that_waits_for_room_is_deferred(
    impatient: SlurmScheduler, install: Install
) -> None:
    install(
        "sbatch",
        "echo 'sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying' >&2\n"
        "exec sleep 60",
    )
    with pytest.raises(SubmitDeferred, match="temporarily unable"):
        impatient.submit(REQUEST)


def test_a_machine_without_slurm(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    scheduler = SlurmScheduler(settings, "q")
    with pytest.raises(SchedulerUnavailable, match="launcher: local"):
        scheduler.submit(REQUEST)
    with pytest.raises(SchedulerUnavailable, match="squeue is not there"):
        scheduler.query()


def test_query_asks_once_and_reads(
    scheduler: SlurmScheduler, install: Install, tmp_path: Path
) -> None:
    install(
        "squeue",
        'echo x >> $D/calls; echo "$@" > $D/args; echo $SLURM_TIME_FORMAT > $D/form\n'
        r"printf '8\x1fRUNNING\x1fNone\x1f(null)\x1f1\x1f0:05\x1fn1\x1fq.tick.a\n'",
    )
    (job,) = scheduler.query()
    assert (job.job_id, job.state, job.nodes) == ("8", JobState.RUNNING, "n1")
    assert (tmp_path / "calls").read_text() == "x\n"
    assert (tmp_path / "form").read_text() == "%s\n"
    arguments = (tmp_path / "args").read_text()
    assert f"-u {os.getuid()} -t all -r -o %i" in arguments


def test_a_squeue_that_fails_after_some_lines_says_nothing(
    scheduler: SlurmScheduler, install: Install
) -> None:
    install(
        "squeue",
        r"printf '8\x1fRUNNING\x1fNone\x1f(null)\x1f1\x1f0:05\x1fn1\x1fq.tick.a\n'"
        "\necho 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1",
    )
    with pytest.raises(SchedulerUnavailable, match="Socket timed out"):
        scheduler.query()


def test_cancel_of_ended_jobs_is_no_error(
    scheduler: SlurmScheduler, install: Install, tmp_path: Path
) -> None:
    install(
        "scancel",
        'echo "$@" > $D/args\n'
        "echo 'scancel: error: Kill job error on job id 5: Invalid job id specified' >&2; exit 1",
    )
    scheduler.cancel(["5", "6_1"])
    assert (tmp_path / "args").read_text() == "5 6_1\n"
    scheduler.cancel([])
    scheduler.cancel(["7"], only_pending=True)
    assert (tmp_path / "args").read_text() == "--state=PENDING 7\n"


def test_one_job_that_cannot_be_cancelled_is_an_error(
    scheduler: SlurmScheduler, install: Install
) -> None:
    install(
        "scancel",
        "echo 'scancel: error: Kill job error on job id 5: Invalid job id specified' >&2\n"
        "echo 'scancel: error: Kill job error on job id 6: Unable to contact slurm controller' >&2\n"
        "exit 1",
    )
    with pytest.raises(SchedulerUnavailable, match=r"scancel: Kill job error on job id 6: Unable"):
        scheduler.cancel(["5", "6"])


@pytest.mark.parametrize(
    ("after", "dependency"), [(("9",), "afterany:9"), (("9", "11"), "afterany:9:11"), ((), "")]
)
def test_repoint(
    scheduler: SlurmScheduler,
    install: Install,
    tmp_path: Path,
    after: tuple[str, ...],
    dependency: str,
) -> None:
    install("scontrol", 'echo "$@" > $D/args')
    scheduler.repoint("7", after)
    assert (tmp_path / "args").read_text() == f"update JobId=7 Dependency={dependency}\n"


def test_requeue_that_is_done(scheduler: SlurmScheduler, install: Install) -> None:
    install("scontrol", "exit 0")
    assert scheduler.requeue("7")


@pytest.mark.parametrize("argv", [argv for argv in ANSWERS if argv.startswith("scontrol requeue")])
def test_requeue_that_is_not(scheduler: SlurmScheduler, install: Install, argv: str) -> None:
    install("scontrol", f"cat >&2 <<'END'\n{ANSWERS[argv]}END\nexit 1")
    if argv.endswith("no controller"):
        with pytest.raises(SchedulerUnavailable, match="scontrol requeue: Unexpected message"):
            scheduler.requeue("7")
    else:
        assert not scheduler.requeue("7")


@pytest.mark.parametrize("argv", [argv for argv in ANSWERS if argv.startswith("scontrol update")])
def test_repoint_that_is_not_done(scheduler: SlurmScheduler, install: Install, argv: str) -> None:
    install("scontrol", f"cat >&2 <<'END'\n{ANSWERS[argv]}END\nexit 1")
    if argv.endswith("no controller"):
        with pytest.raises(SchedulerUnavailable, match="scontrol update: Unexpected message"):
            scheduler.repoint("7", ())
    else:
        scheduler.repoint("7", ())  # the job is not pending any more


@pytest.mark.parametrize("job_id", ["", "-u", "7;x", "--user=me", "7_[0-2]"])
def test_what_is_not_an_id_never_reaches_slurm(scheduler: SlurmScheduler, job_id: str) -> None:
    with pytest.raises(SchedulerError, match="not the id"):
        scheduler.cancel([job_id])


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
        ("node1g[0010,0011],node2g0005", ["node1g0010", "node1g0011", "node2g0005"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("", []),
    ],
)
def test_node_lists(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


def test_a_node_list_that_is_none() -> None:
    with pytest.raises(SchedulerError, match="not a list of nodes"):
        expand_nodes("n[1-2")


def test_nodes_of_the_surrounding_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert job_nodes() == ["n1", "n2"]
