"""An interpreter that cannot run a stage: what is said of it, and which setting is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError
from slurm_rl.launch.interpreter import check_interpreter, explain_exit
from slurm_rl.launch.payload import LocalRunner, SrunRunner
from slurm_rl.types import Order, dump_record

PYXIS = {"runtime": "pyxis", "image": "/i.sqsh", "python": "python9"}


def make_settings(folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "run": {"name": "t", "dir": str(folder)},
        "hf_checkpoint": "unused",
        "num_rollout": 2,
        "launcher": "local",
        "rollout": {"prompt_data": "p.jsonl", "rollout_batch_size": 1, "rm_type": "gsm8k"},
        "train": {"global_batch_size": 1},
        "eval": {"e": {"prompt_data": "e.jsonl"}},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values[section] = {**values[section], key: value} if key else value
    return Settings.model_validate(values)


def make_attempt(folder: Path, settings: Settings, kind: str) -> Path:
    (folder / "resolved.json").write_text(settings.model_dump_json())
    order = Order("r", "r", kind, 0, 0, str(folder), str(folder / "resolved.json"), "", {})
    (folder / "order.json").write_bytes(dump_record(order))
    return folder / "order.json"


@pytest.mark.parametrize(
    ("kind", "changes", "setting"),
    [
        ("train", {"train__python": "/no/p"}, "train.python = /no/p"),
        ("train", {"host_python": "/no/p", "rollout__python": "/no/q"}, "host_python = /no/p"),
        ("eval-e", {"rollout__python": "/no/p", "host_python": "/no/q"}, "rollout.python = /no/p"),
        ("eval-e", {"eval": {"e": {"prompt_data": "e", "python": "/no/p"}}}, "eval.e.python = /no"),
        ("train", {"train__python": "no-such-python"}, "train.python = no-such-python"),
    ],
)
def test_a_path_that_leads_nowhere(
    tmp_path: Path, kind: str, changes: dict[str, Any], setting: str
) -> None:
    """Neither launcher starts anything then."""
    settings = make_settings(tmp_path, **changes)
    order = make_attempt(tmp_path, settings, kind)
    for runner in (LocalRunner(settings), SrunRunner(settings)):
        with pytest.raises(ConfigError, match=rf"^{setting}.* is no program on this node") as told:
            runner.start(order, kind=kind)
        assert told.value.blame == "user" and "\n" not in str(told.value)
    assert not list(tmp_path.glob("rank-*.log"))


def test_among_many_nodes_it_may_be_one_that_lacks_it(tmp_path: Path) -> None:
    """It is tried once more, elsewhere; the same at the same place then halts."""
    settings = make_settings(tmp_path, launcher="slurm", train__python="/no/p")
    order = make_attempt(tmp_path, settings, "train")
    with pytest.raises(ConfigError) as told:
        SrunRunner(settings).start(order, kind="train")
    assert told.value.blame == "repeat"
    assert getattr(told.value, "place", "") == "train.python"


def test_what_is_found_by_the_stages_own_path(tmp_path: Path) -> None:
    (tmp_path / "my-python").write_text("#!/bin/sh\n")
    (tmp_path / "my-python").chmod(0o755)
    settings = make_settings(tmp_path, train__python="my-python")
    check_interpreter(settings, "train", {"PATH": str(tmp_path)})
    with pytest.raises(ConfigError):
        check_interpreter(settings, "train", {"PATH": "/usr/bin"})


def test_inside_of_a_container_nothing_can_be_seen(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, launcher="slurm", train__container=PYXIS)
    check_interpreter(settings, "train", {})


@pytest.mark.parametrize(
    ("kind", "changes", "setting"),
    [
        ("train", {"train__python": "python9"}, "train.python = python9"),
        ("train", {}, "train.python is not set, and slurm-rl's own interpreter"),
        ("train", {"container": PYXIS}, "container.python = python9"),
        ("rollout", {"rollout__container": PYXIS}, "rollout.container.python = python9"),
    ],
)
@pytest.mark.parametrize("package", [False, True], ids=["no-package", "no-library"])
def test_what_python_itself_says_of_a_package_that_is_not_there(
    tmp_path: Path, kind: str, changes: dict[str, Any], setting: str, package: bool
) -> None:
    """With the package, what it imports first is missing."""
    make_attempt(tmp_path, make_settings(tmp_path, **changes), kind)
    argv = [sys.executable, "-S", "-m", "slurm_rl.stages", "order.json"]
    source = Path(__file__).parents[3] if package else tmp_path
    with open(tmp_path / "rank-1.log", "wb") as log:
        done = subprocess.run(argv, cwd=source, env={}, stdout=log, stderr=log)
    (tmp_path / "rank-0.log").write_bytes(b"")
    assert done.returncode == 1
    told = explain_exit(tmp_path)
    assert told is not None and str(told).startswith(f"{setting} cannot import slurm_rl: ")
    assert ("No module named 'slurm_rl'" in str(told)) != package
    assert "ModuleNotFoundError" in str(told) and "\n" not in str(told)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ModuleNotFoundError: No module named 'mine'\nwent on\n",
        "2026 [run] ERROR slurm_rl.stages: no module named mine\n",
        "Killed\n",
    ],
)
def test_another_end_is_no_interpreters_fault(tmp_path: Path, text: str) -> None:
    make_attempt(tmp_path, make_settings(tmp_path), "train")
    (tmp_path / "rank-0.log").write_text(text)
    assert explain_exit(tmp_path) is None
