"""The commands that need no run: what they print, and that they change nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slurm_rl.cli.main import app
from slurm_rl.config.load import load_settings

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = str(Path(sys.executable).with_name("slurm-rl"))


def call(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *argv], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_init_writes_a_configuration_that_loads_and_replaces_none(tmp_path: Path) -> None:
    assert call("init", "my.yaml", cwd=tmp_path).returncode == 0
    path = tmp_path / "my.yaml"
    value = yaml.safe_load(path.read_text())
    value["run"]["dir"] = "/somewhere"
    path.write_text(yaml.safe_dump(value))
    assert load_settings(path).rollout.n_samples_per_prompt == 8
    again = call("init", "my.yaml", cwd=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr


def test_plan_shows_graph_jobs_texts_and_estimates() -> None:
    shown = call("plan", "configs/cluster-qwen3-4b.yaml")
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout
    assert "i0001.rollout x 4 shards <- weights: i0000.train, previous: i0000.rollout" in text
    assert "#SBATCH --array=0,1,2,3" in text or "#SBATCH --array=0-3" in text
    assert "slurm_rl.launch.job tick" in text and "slurm_rl.launch.job link" in text
    assert '#SBATCH --comment="preemption=yes;requeue=true"' in text
    local = call("plan", "configs/quickstart.yaml").stdout
    assert "bytes a parameter" in local and "written in one iteration" in local


def test_validate_names_what_is_missing() -> None:
    told = call("validate", "configs/cluster-qwen3-4b.yaml")
    assert told.returncode == 2
    assert "hf_checkpoint" in told.stderr and "Traceback" not in told.stderr
    assert call("validate", "configs/quickstart.yaml").returncode == 0


@pytest.mark.parametrize("name", ["submit", "status", "logs", "resume", "cancel", "verify", "path"])
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0 and "slurm-rl" in shown.stdout


def test_a_mistyped_command_is_a_usage_error() -> None:
    told = call("sumbit", "x.yaml")
    assert told.returncode == 2 and "Traceback" not in told.stderr
