"""A second `submit` into a run: taken anew, continued, or refused with what to type."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy.model import write_model

from slurm_rl.cli.change import change_run
from slurm_rl.cli.submit import make_run
from slurm_rl.config.load import load_config
from slurm_rl.errors import ConfigError, NothingDone
from slurm_rl.launch.build import OpenRun, open_run
from slurm_rl.launch.local import SpoolEntry, process_start, this_place
from slurm_rl.launch.stage_settings import parse_settings
from slurm_rl.storage.control import Change, read_control, write_change, write_pause
from slurm_rl.storage.intents import Intent, publish_intent
from slurm_rl.types import Slot, StageRef

PROGRAM = str(Path(sys.executable).with_name("slurm-rl"))
Make = Callable[..., tuple[OpenRun, bool]]


def write_config(folder: Path, **changes: Any) -> Path:
    """A configuration; `section__key` changes a value."""
    value: dict[str, Any] = {
        "run": {"name": "run", "dir": str(folder / "runs")},
        "hf_checkpoint": str(write_model(folder / "model")),
        "num_rollout": 3,
        "launcher": "local",
        "rollout": {
            "engine": "embedded",
            "prompt_data": str(folder / "prompts.jsonl"),
            "label_key": "label",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rm_type": "exact_match",
        },
        "train": {"global_batch_size": 4, "megatron": {"lr": 1e-3}},
    }
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    for name, change in changes.items():
        section, _, key = name.partition("__")
        value[section] = {**value.get(section, {}), key: change} if key else change
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **changes: make_run(load_config(write_config(tmp_path, **changes)))


def intend(opened: OpenRun, creator: str, *, age_s: float = 0.0) -> Path:
    """An intent of the first stage, as of a submission that left no id."""
    folder = opened.run.slot_dir(Slot(0, "init", 0))
    created = opened.chain.clock() - age_s
    assert publish_intent(opened.run, folder, Intent(1, "token", created, creator))
    return folder


def grow_old(opened: OpenRun) -> None:
    """It was made an hour ago, and whoever made it left no intent."""
    path = opened.run.root / "run.json"
    identity = json.loads(path.read_text())
    path.write_text(json.dumps(identity | {"created": identity["created"] - 3600.0}))


def ended_process() -> str:
    done = subprocess.Popen(["true"])
    done.wait()
    return f"{socket.gethostname()}:{done.pid}"


@pytest.mark.parametrize("leaves", ["nothing", "ended", "old"])
def test_a_run_that_never_began_takes_new_settings(make: Make, leaves: str) -> None:
    first, _ = make(seed=1)
    if leaves == "nothing":
        grow_old(first)
    if leaves == "ended":
        intend(first, ended_process())
    if leaves == "old":
        intend(first, "elsewhere:1", age_s=3600.0)
    second, is_new = make(seed=2, rollout__shards=2)
    assert is_new and second.run.root == first.run.root
    assert (second.settings.seed, second.settings.rollout.shards) == (2, 2)
    assert json.loads((second.run.root / "resolved.json").read_text())["seed"] == 2
    assert second.identity.run_id != first.identity.run_id
    assert not list(second.run.root.rglob("submit.*")), "what was intended is not this run's"
    assert make(seed=2, rollout__shards=2)[1] is False


def leave_spool(opened: OpenRun) -> None:
    name = f"run.i0000.init.{opened.identity.short_id}abcdef"
    entry = SpoolEntry(
        "1", name, os.getpid(), process_start(os.getpid()), time.time(), place=this_place()
    )
    folder = opened.run.scheduler_dir / "jobs"
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps(asdict(entry)))


def leave(name: str) -> Callable[[OpenRun], None]:
    def write(opened: OpenRun) -> None:
        (intend(opened, ended_process()) / name).write_text("1")

    return write


@pytest.mark.parametrize(
    "begin",
    [
        leave("submit.0001.id"),
        leave("submit.0001.seen"),
        leave("claim.0001"),
        leave("COMMIT"),
        lambda opened: intend(opened, "elsewhere:1"),
        lambda opened: intend(opened, f"{socket.gethostname()}:{os.getppid()}"),
        leave_spool,
        lambda opened: write_pause(opened.run, "by me"),
        lambda opened: None,
    ],
    ids=["id", "seen", "claim", "COMMIT", "elsewhere", "alive", "queued", "paused", "young"],
)
def test_a_run_that_may_have_begun_stays_as_it_is(
    make: Make, begin: Callable[[OpenRun], None]
) -> None:
    first, _ = make()
    begin(first)
    before = sorted(first.run.root.rglob("*"))
    with pytest.raises(ConfigError, match="has begun with other settings") as told:
        make(num_rollout=5, slurm={"comment": "a b"}, rollout__rm_type="f1")
    assert sorted(first.run.root.rglob("*")) == before
    assert open_run(first.run.root).identity == first.identity
    assert "num_rollout was 3, now 5; rollout.rm_type was 'exact_match', now 'f1'" in str(
        told.value
    )
    root = first.run.root
    start = told.value.hint.index("`slurm-rl set")
    words = shlex.split(told.value.hint[start + 1 : told.value.hint.index("`", start + 1)])
    assert words[:3] == ["slurm-rl", "set", str(root)]
    assert f"`slurm-rl resume {root}` continues it as it is" in told.value.hint
    if (root / "iterations/000000/init.t0/submit.0001.id").exists():
        change_run(root, words[3:])  # what it says is what `set` takes
        assert make(num_rollout=5, slurm={"comment": "a b"}, rollout__rm_type="f1")[1] is False


def test_what_is_fixed_is_not_said_to_be_set(make: Make) -> None:
    first, _ = make()
    leave("submit.0001.id")(first)
    with pytest.raises(ConfigError) as told:
        make(seed=7, num_rollout=5)
    assert "seed is fixed when a run is made: choose another run.name" in told.value.hint
    assert "slurm-rl set" not in told.value.hint


def test_code_that_was_adopted_is_the_configurations_own(make: Make, tmp_path: Path) -> None:
    """`set code=…`, and the same folder in the configuration, mean the same run."""
    for name, text in (("one", "x = 1\n"), ("two", "x = 2\n"), ("three", "x = 3\n")):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib" / "mine.py").write_text(text)
    one, two, three = (str(tmp_path / name / "lib") for name in ("one", "two", "three"))
    first, _ = make(code=[one])
    leave("submit.0001.id")(first)
    change_run(first.run.root, [f"code={two}"])
    assert make(code=[two])[1] is False
    with pytest.raises(ConfigError, match=r"code was .*one.*, now .*three") as told:
        make(code=[three])
    assert f"`slurm-rl set {first.run.root} code={three}` changes the run" in told.value.hint
    change_run(first.run.root, [f"code={three}", "num_rollout=4"])
    assert make(code=[three], num_rollout=4)[1] is False
    assert len(read_control(first.run).changes) == 2


def test_mended_code_of_a_run_that_never_began_is_taken(make: Make, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("x = (\n")
    first, _ = make(code=[str(tmp_path / "lib")])
    grow_old(first)
    (tmp_path / "lib" / "mine.py").write_text("x = 1\n")
    second, is_new = make(code=[str(tmp_path / "lib")])
    assert is_new and second.identity.code_digest != first.identity.code_digest
    leave("submit.0001.id")(second)
    (tmp_path / "lib" / "mine.py").write_text("x = 2\n")
    third, is_new = make(code=[str(tmp_path / "lib")])
    assert not is_new and third.identity == second.identity, "a run keeps its snapshot"


@pytest.mark.slow
def test_a_partition_that_is_refused_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the real command, with a small script in the place of each of Slurm's."""
    scripts = {
        "sbatch": (
            f"cat > {tmp_path}/script\n"
            f"if grep -q 'partition=right' {tmp_path}/script; then echo 7; exit; fi\n"
            "echo 'sbatch: error: invalid partition specified: wrong' >&2; exit 1"
        ),
        "squeue": "true",
        "scontrol": "true",
        "sacct": "true",
        "srun": "true",
    }
    (tmp_path / "bin").mkdir()
    for name, body in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def submit(partition: str) -> subprocess.CompletedProcess[str]:
        slurm = {"partition": partition, "time": "00:10:00"}
        config = write_config(tmp_path, launcher="slurm", slurm=slurm)
        argv = [PROGRAM, "submit", str(config)]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)

    refused = submit("wrong")
    assert refused.returncode == 6 and "invalid partition" in refused.stderr
    mended = submit("right")
    assert mended.returncode == 0, mended.stderr
    assert "it is made anew" in mended.stdout and "submitted" in mended.stdout
    other = submit("wrong")
    assert other.returncode == 2
    assert "slurm.partition was 'right', now 'wrong'" in other.stderr
    assert "slurm.partition=wrong` changes the run" in other.stderr


def test_what_a_stuck_stage_would_use_counts_too(make: Make) -> None:
    """The rate was changed, the train stage halted for it, and the change back holds behind it."""
    opened, _ = make()
    for iteration, kind, lr in ((0, "train", 0.5), (1, "rollout", 1e-3)):
        values = {"train.megatron.lr": lr}
        write_change(opened.run, Change(iteration, kind, values, None, "me"))
    change_run(opened.run.root, ["train.megatron.lr=1e-3"])
    control = read_control(opened.run)
    held = parse_settings(opened.identity, control, at=StageRef(0, "train"))
    assert held.train.megatron["lr"] == 1e-3
    with pytest.raises(NothingDone, match="that is how it is already"):
        change_run(opened.run.root, ["train.megatron.lr=1e-3"])


def test_of_a_pool_that_is_fixed_nothing_else_is_said(make: Make) -> None:
    opened, _ = make(rollout__pools={"a": {"shards": 1}, "b": {"shards": 1}})
    for word in ("rollout.pools.b.shards=2", "rollout.pools.c={shards: 1}"):
        with pytest.raises(ConfigError, match="is fixed when a run is made"):
            change_run(opened.run.root, [word])
