"""What `slurm-rl shell` starts: the stage's own options and container, inputs read-only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_rl.chain.scheduler import LinkRequest
from slurm_rl.config.schema import Settings
from slurm_rl.launch.sbatch import plan_options
from slurm_rl.launch.shell import (
    Scratch,
    plan_shell_options,
    render_local,
    render_salloc,
    shell_environment,
)
from slurm_rl.types import Input, Order, StageRef


def make_scratch(tmp_path: Path, **changes: Any) -> Scratch:
    secrets = tmp_path / "secrets.env"
    secrets.write_text("TOKEN=s3cret\n")
    value: dict[str, Any] = {
        "run": {"name": "demo", "dir": str(tmp_path / "runs")},
        "hf_checkpoint": str(tmp_path / "model"),
        "num_rollout": 2,
        "setup": ["module load x", "export A=1"],
        "env_file": str(secrets),
        "host_python": "/opt/host/python",
        "slurm": {"partition": "gpu", "time": "04:00:00", "comment": "a;b c", "exclusive": True},
        "rollout": {
            "prompt_data": str(tmp_path / "data" / "p.jsonl"),
            "rollout_batch_size": 8,
            "rm_type": "exact_match",
            "slurm": {"gpus_per_node": 4, "cpus_per_task": 8, "requeue": True},
        },
        "train": {"global_batch_size": 8, "megatron": {"lr": 1e-6}},
        **changes,
    }
    for folder in ("runs/demo", "model", "data"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    folder = tmp_path / "runs" / "demo" / "control" / ".shell-0a" / "scratch-0a"
    inputs = {"weights": Input("weights", 0, "train", "xxh3:1", "/there")}
    order = Order("/r", "id", "rollout", 1, 0, str(folder), "/s", "", inputs)
    return Scratch(Settings.model_validate(value), order, folder)


def test_the_allocation_has_the_stages_options_and_no_others(tmp_path: Path) -> None:
    scratch = make_scratch(tmp_path)
    options = plan_shell_options(scratch.settings, "rollout", token="0a")
    request = LinkRequest("x", (), (StageRef(0, "rollout"),), log="/log")
    stage = plan_options(scratch.settings, request)
    ours = {"job_name", "output", "open_mode", "chdir", "requeue", "signal"}
    assert {k: v for k, v in options.items() if k != "job_name"} == {
        key: value for key, value in stage.items() if key not in ours
    }
    assert options["job_name"] == "demo.shell-rollout.shell0a"


def test_salloc_then_setup_on_the_node_then_a_read_only_run(tmp_path: Path) -> None:
    scratch = make_scratch(tmp_path)
    argv = render_salloc(scratch, ["sh", "-c", "true"], time=None, is_terminal=True)
    step, setup, lock = (argv.index(word) for word in ("srun", "bash", "/opt/host/python"))
    assert argv[0] == "salloc" and step < setup < lock
    assert "--comment=a;b c" in argv[:step] and "--exclusive" in argv[:step]
    assert {"--pty", "--overlap", "--ntasks=1", "--cpus-per-task=8"} <= set(argv[step:setup])
    assert argv[setup + 2] == 'module load x\nexport A=1\nexec "$@"'
    folder, run, model = (
        str(p) for p in (scratch.folder, tmp_path / "runs/demo", tmp_path / "model")
    )
    assert argv[lock:] == [
        "/opt/host/python", "-m", "slurm_rl.launch.readonly", folder, run, model, "--",
        "sh", "-c", "true",
    ]  # fmt: skip


def test_a_wall_time_of_ones_own_and_no_terminal(tmp_path: Path) -> None:
    argv = render_salloc(make_scratch(tmp_path), ["x"], time="00:10:00", is_terminal=False)
    assert [word for word in argv if word.startswith("--time")] == ["--time=00:10:00"]
    assert "--pty" not in argv


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_container_binds_everything_read_only_but_the_scratch_directory(
    tmp_path: Path, runtime: str
) -> None:
    container = {"runtime": runtime, "image": "/img/x", "args": ["--nv"]}
    scratch = make_scratch(tmp_path, container=container)
    argv = render_salloc(scratch, ["sh", "-c", "true"], time=None, is_terminal=False)
    if runtime == "apptainer":
        binds = [argv[i + 1] for i, word in enumerate(argv) if word == "--bind"]
        assert argv.index("srun") < argv.index("bash") < argv.index("apptainer")
    else:
        (mounts,) = [w for w in argv if w.startswith("--container-mounts=")]
        binds = mounts.partition("=")[2].split(",")
        assert argv.index("bash") < argv.index("srun"), "the container begins with the step"
        assert "--container-name=slurm-rl-scratch-0a" in argv
    run = tmp_path / "runs" / "demo"
    assert f"{run}:{run}:ro" in binds
    assert binds[-1] == f"{scratch.folder}:{scratch.folder}", "deeper ones come later"
    assert all(bind.endswith(":ro") for bind in binds[:-1])
    assert "slurm_rl.launch.readonly" not in argv
    assert argv[-3:] == ["sh", "-c", "true"]


@pytest.mark.parametrize("runtime", ["none", "apptainer", "pyxis"])
def test_secrets_travel_in_the_environment_alone(tmp_path: Path, runtime: str) -> None:
    container = {"runtime": runtime} if runtime == "none" else {"runtime": runtime, "image": "x"}
    scratch = make_scratch(tmp_path, container=container)
    argv = render_salloc(scratch, ["x"], time=None, is_terminal=True)
    assert "s3cret" not in " ".join(argv)
    env = shell_environment(scratch, {"HOME": "/h", "SLURM_JOB_ID": "7", "SBATCH_QOS": "x"})
    assert env["TOKEN"] == "s3cret" and env["HOME"] == "/h"
    assert "SLURM_JOB_ID" not in env and "SBATCH_QOS" not in env
    assert env["SLURM_RL_INPUT_WEIGHTS"] == "/there"
    assert env["SLURM_RL_ORDER"] == str(scratch.folder / "order.json")
    if runtime == "apptainer":
        assert env["APPTAINERENV_SLURM_RL_ORDER"] == env["SLURM_RL_ORDER"]


def test_locally_no_setup_and_no_allocation(tmp_path: Path) -> None:
    scratch = make_scratch(tmp_path, launcher="local")
    argv = render_local(scratch, ["sh", "-c", "true"])
    assert argv[:3] == ["/opt/host/python", "-m", "slurm_rl.launch.readonly"]
