"""doctor and shell with the local launcher, through the real commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy.commands import PROGRAM, ToyRun, wait_until
from toy.program import fail_stage

from slurm_rl.launch.build import open_run
from slurm_rl.launch.doctor_folder import SHELL, work_folder
from slurm_rl.launch.local import this_place
from slurm_rl.launch.shell import find_inputs, make_scratch, shell_environment
from slurm_rl.storage.control import read_control
from slurm_rl.types import StageRef

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
pytestmark = pytest.mark.timeout(180)


def call(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([PROGRAM, *argv], env=env, capture_output=True, text=True, timeout=150)


def doctor(folder: Path, *argv: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, what `--json` says, and stderr, for the quickstart below `folder`."""
    done = call("doctor", str(CONFIG), "--set", f"run.dir={folder}", "--json", *argv, **environment)
    return done.returncode, json.loads(done.stdout), done.stderr


def lines(facts: dict[str, Any], level: str) -> dict[str, str]:
    return {f["name"]: f["found"] for f in facts["findings"] if f["level"] == level}


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*"))


# -- doctor -----------------------------------------------------------------------------------


def test_a_good_folder_is_good_and_nothing_is_left(tmp_path: Path) -> None:
    status, facts, _ = doctor(tmp_path)
    assert status == 0, facts
    names = {finding["name"] for finding in facts["findings"]}
    assert {"publish without replacing", "fsync", "clock", "space", "quota", "purge"} <= names
    assert not names & {"Slurm", "visibility"}, "a local run asks no scheduler"
    assert os.listdir(tmp_path) == []


def test_a_person_gets_a_line_each_and_a_verdict(tmp_path: Path) -> None:
    done = call("doctor", str(CONFIG), "--set", f"run.dir={tmp_path}")
    assert done.returncode == 0 and done.stderr == ""
    *findings, verdict = done.stdout.strip().splitlines()
    assert all(line.split()[0] in ("ok", "warn") for line in findings)
    assert "nothing is bad" in verdict


def test_what_a_crash_left_is_taken_away(tmp_path: Path) -> None:
    left = tmp_path / ".doctor-0123abcd"
    (left / "files").mkdir(parents=True)
    (left / "owner").write_text(f"{this_place()}\n999999999\n1\n")
    assert doctor(tmp_path)[0] == 0
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_room_is_bad_and_exits_with_2(tmp_path: Path) -> None:
    big = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 2000}
    sets = [f"--set=init_model.config.{key}={value}" for key, value in big.items()]
    status, facts, err = doctor(tmp_path, *sets)
    assert status == 2 and "space" in lines(facts, "bad"), facts
    assert err.strip().splitlines()[-1].startswith("slurm-rl: ")


def test_nonsense_is_told_in_one_line(tmp_path: Path) -> None:
    for argv in (["--stage", "eval"], ["--stage", "train", "--no-jobs"]):
        told = call("doctor", str(CONFIG), "--set", f"run.dir={tmp_path}", *argv)
        assert told.returncode == 2 and len(told.stderr.strip().splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_without_slurm_the_rest_is_still_looked_at(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{tmp_path / 'empty'}"
    status, facts, _ = doctor(tmp_path, "--set", "launcher=slurm", PATH=path)
    assert status == 6 and list(lines(facts, "bad")) == ["Slurm"]
    assert "publish without replacing" in lines(facts, "ok")


@pytest.mark.slow
def test_the_train_stage_is_tried_with_all_its_ranks(tmp_path: Path) -> None:
    status, facts, _ = doctor(tmp_path, "--stage", "train", "--set", "train.num_ranks=2")
    assert status == 0, facts
    good = lines(facts, "ok")
    assert "gloo over 2 rank(s): right" in good["all-reduce"]
    assert "2 on 1 node(s)" in good["ranks"] and "all 2 ranks" in good["import megatron.core"]
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_role_is_tried_with_its_own_ranks_and_its_own_model(tmp_path: Path) -> None:
    model = tmp_path / "critic-model"
    sets = ["critic.megatron.lr=1e-3", "critic.num_ranks=2", f"critic.hf_checkpoint={model}"]
    sets += ["train.advantage_estimator=gae"]
    argv = [word for one in sets for word in ("--set", one)]
    status, facts, _ = doctor(tmp_path / "runs", "--stage", "critic", *argv)
    assert status == 2 and f"{model} has no config.json" in lines(facts, "bad")["model"], facts
    good = lines(facts, "ok")
    assert "gloo over 2 rank(s): right" in good["all-reduce"]
    assert "all 2 ranks" in good["import megatron.core"] and "services" not in good
    told = call("doctor", str(CONFIG), "--set", f"run.dir={tmp_path}", "--stage", "teacher")
    assert told.returncode == 2 and "--stage = 'teacher' is not one of" in told.stderr


@pytest.mark.slow
def test_the_stage_of_a_run_reads_its_committed_inputs(tmp_path: Path) -> None:
    sets = [
        f"--set=run.dir={tmp_path}",
        "--set=num_rollout=1",
        "--set=rollout.rollout_batch_size=4",
    ]
    assert call("submit", str(CONFIG), *sets, "--wait").returncode == 0
    run = tmp_path / "quickstart"
    before = sorted(run.rglob("*"))
    done = call("doctor", str(run), "--stage", "train", "--json")
    assert done.returncode == 0, done.stdout
    assert "checkpoint" in lines(json.loads(done.stdout), "ok")["inputs"]
    assert [path for path in sorted(run.rglob("*")) if path not in before] == []


@pytest.mark.slow
def test_the_rollout_stage_imports_the_users_reward_from_his_code(tmp_path: Path) -> None:
    code = tmp_path / "mine"
    code.mkdir()
    (code / "__init__.py").write_text("")
    (code / "rewards.py").write_text("def good(args, sample): return 1.0\n")
    sets = ["--stage", "rollout", "--set", f"code=[{code}]", "--set", "rollout.rm_type=null"]
    runs = tmp_path / "runs"
    status, facts, _ = doctor(runs, *sets, "--set", "rollout.custom_rm_path=mine.rewards.good")
    assert status == 0 and "mine.rewards.good" in lines(facts, "ok")["reward"], facts
    sets += ["--set", "network_interface=nowhere0"]
    status, facts, _ = doctor(runs, *sets, "--set", "rollout.custom_rm_path=mine.rewards.bad")
    bad = lines(facts, "bad")
    assert status == 2 and set(bad) == {"data", "address"}, facts
    assert "no function 'bad'" in bad["data"] and "nowhere0" in bad["address"]
    assert hidden(tmp_path) == []


def test_an_interpreter_without_the_package_is_found(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named slurm_rl' >&2\nexit 1\n")
    python.chmod(0o755)
    status, facts, _ = doctor(
        tmp_path / "runs", "--stage", "train", "--set", f"train.python={python}"
    )
    assert status == 2 and "No module named slurm_rl" in lines(facts, "bad")["ranks"]


# -- shell ------------------------------------------------------------------------------------

RUN_STAGE = "$SLURM_RL_PYTHON -u -m slurm_rl.stages $SLURM_RL_ORDER"


@pytest.fixture(scope="module")
def halted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyRun]:
    """A toy run whose first rollout is committed and whose first train stage is not."""
    run = ToyRun(tmp_path_factory.mktemp("halted"))
    run.write()
    run.command("submit", str(run.config), TOY_SECOND="0.1")
    fail_stage(run.root, "train", 0, how="user", times=1)
    assert run.command("watch", str(run.root)).returncode == 4
    wait_until(lambda: not run.running())
    yield run
    run.command("cancel", str(run.root))


def committed(run: ToyRun) -> set[str]:
    names = ("COMMIT", "claim.*", "HALT", "PAUSE", "timeline-*")
    return {str(path) for name in names for path in run.root.rglob(name)}


def open_shell(run: ToyRun, command: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return run.command("shell", str(run.root), *argv, "--command", command)


def test_the_shell_names_order_inputs_and_interpreter(halted: ToyRun) -> None:
    done = open_shell(halted, "env", "--stage", "train", "-i", "0")
    env = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert env["SLURM_RL_STAGE"] == "train"
    assert Path(env["SLURM_RL_INPUT_ROLLOUT"]).parent.name == "rollout.t0"
    assert Path(env["SLURM_RL_INPUT_CHECKPOINT"]).parent.name == "init.t0"
    assert env["SLURM_RL_PYTHON"].endswith("toy-python")
    assert env["SLURM_RL_ORDER"].startswith(str(halted.root / "control" / ".shell-"))


def test_inputs_and_the_rest_of_the_run_are_read_only(halted: ToyRun) -> None:
    probe = (
        "test $SLURM_RL_READONLY = 1 || exit 9; touch mine || exit 8;"
        " touch $SLURM_RL_INPUT_ROLLOUT/x && exit 7;"
        f" touch {halted.root}/control/PAUSE && exit 6;"
        " cd ../../../iterations && touch x && exit 5; true"
    )
    done = open_shell(halted, probe, "-i", "0", "--stage", "train")
    if done.returncode == 9:
        pytest.skip("this machine lets nobody make a mount namespace")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Read-only file system") == 3


def test_the_commands_exit_status_is_the_shells(halted: ToyRun) -> None:
    assert open_shell(halted, "exit 7", "-i", "0").returncode == 7
    assert open_shell(halted, "kill -TERM $$", "-i", "0").returncode == 143


@pytest.mark.parametrize(
    ("argv", "status", "word"),
    [
        (["-i", "1", "--stage", "rollout"], 3, "is not committed"),
        (["-i", "9"], 2, "not one of 0 to 2"),
        (["-i", "0", "--stage", "eval"], 2, "no stage 'eval'"),
        (["-i", "0", "--shard", "3"], 2, "shard"),
    ],
)
def test_what_cannot_be_opened_is_one_line(
    halted: ToyRun, argv: list[str], status: int, word: str
) -> None:
    told = open_shell(halted, "true", *argv)
    assert told.returncode == status and word in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1
    assert hidden(halted.root) == []


def test_doctor_of_a_run_leaves_it_as_it_is(halted: ToyRun) -> None:
    before = committed(halted)
    done = halted.command("doctor", str(halted.root))
    assert done.returncode == 0, done.stderr
    assert committed(halted) == before and hidden(halted.root) == []


def test_a_stage_run_there_commits_nothing_and_the_run_goes_on(
    halted: ToyRun, undisturbed: dict[str, str]
) -> None:
    """Last of those that share the run: it ends it."""
    before = committed(halted)
    assert not any("train.t0/COMMIT" in path for path in before)
    keep = halted.folder / "kept.json"
    forge = "cp $SLURM_RL_INPUT_ROLLOUT/../COMMIT COMMIT"
    command = f"{RUN_STAGE} && cp result.json {keep} && {forge}"
    done = open_shell(halted, command, "-i", "0", "--stage", "train")
    assert done.returncode == 0, done.stderr
    assert json.loads(keep.read_text())["files"], "the stage's own program did its whole work"
    assert committed(halted) == before
    assert hidden(halted.root) == [], "the scratch directory is gone"
    run_unprotected(halted)
    assert committed(halted) == before
    assert halted.command("resume", str(halted.root), "--wait").returncode == 0
    assert halted.digests() == undisturbed


def run_unprotected(run: ToyRun) -> None:
    """The stage's program on a shell's order, where nothing is mounted read-only."""
    opened = open_run(run.root)
    control, ref = read_control(opened.run), StageRef(0, "train")
    inputs = list(find_inputs(opened, control, ref).values())
    with work_folder(opened.run.control_dir, prefix=SHELL) as folder:
        scratch = make_scratch(opened, control, ref, inputs=inputs, folder=folder)
        env = shell_environment(scratch, os.environ)
        argv = ["sh", "-c", RUN_STAGE]
        done = subprocess.run(argv, env=env, cwd=scratch.folder, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert (scratch.folder / "result.json").is_file()


def test_a_shells_environment_holds_what_the_configuration_sets(tmp_path: Path) -> None:
    run = ToyRun(tmp_path)
    secrets = tmp_path / "secrets.env"
    secrets.write_text("TOKEN=hidden\n")
    secrets.chmod(0o600)
    run.write(env={"A": "top"}, env_file=str(secrets))
    value = yaml.safe_load(run.config.read_text())
    value["rollout"]["env"] = {"A": "own"}
    run.config.write_text(yaml.safe_dump(value))
    assert run.command("submit", str(run.config), "--wait").returncode == 0
    shown = open_shell(run, "echo $A $TOKEN", "-i", "1", "--stage", "rollout")
    assert shown.stdout.split() == ["own", "hidden"]
    assert open_shell(run, "echo $A $TOKEN", "-i", "1", "--stage", "train").stdout.split() == [
        "top",
        "hidden",
    ]
