"""The text of a job: golden files under tests/golden, and the rules behind them."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.chain.scheduler import LinkRequest, WallTime
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError
from slurm_rl.launch.sbatch import (
    fill_template,
    format_ranges,
    plan_options,
    quote_directive,
    read_template,
    render_job,
)
from slurm_rl.types import StageRef

GOLDEN = Path(__file__).parents[2] / "golden"

#: A site with a policy in the comment, GPUs by --gres, and an option that we do not know.
CLUSTER: dict[str, Any] = {
    "run": {"name": "demo", "dir": "/scratch/runs"},
    "num_rollout": 4,
    "gpu_request": "gres",
    "host_python": "/opt/slurm rl/bin/python",
    "setup": ["module purge", "module load apptainer"],
    "env_file": "/home/me/secrets.env",
    "slurm": {
        "account": "abc@a100",
        "comment": "preemption=yes;requeue=true",
        "hint": "nomultithread",
        "exclusive": True,
        "time": "04:00:00",
        "nodes": 1,
        "gpus_per_node": "a100:4",
        "site_plugin": 'say "\\hi"',
    },
    "rollout": {
        "engine": "sglang",
        "shards": 8,
        "prompt_data": "/data/p.jsonl",
        "rollout_batch_size": 8,
        "slurm": {"partition": "preempt", "cpus_per_task": 16, "signal_s": 300},
    },
    "train": {
        "global_batch_size": 8,
        "slurm": {"partition": "main", "nodes": 2, "exclude": "bad1"},
    },
    "tick": {"slurm": {"partition": "cpu"}},
    "score": {"enabled": True, "slurm": {"partition": "cpu"}},
    "eval": {"aime": {"prompt_data": "/data/aime.jsonl", "slurm": {"time": "00:30:00"}}},
}
TRAIN = LinkRequest(
    name="demo.i0012.train.ab12cd34",
    command=("link", "/scratch/runs/demo", "iterations/000012/train.t0/submit.0003", "demo.x"),
    stages=(StageRef(12, "train"),),
    after=("4711",),
    log="/scratch/runs/demo/iterations/000012/logs/train.0003",
    exclude=("n07", "n09"),
)
ROLLOUT = LinkRequest(
    name="demo.i0013.rollout.ab12cd35",
    command=("link", "/scratch/runs/demo", "it's here", "demo.x"),
    stages=(StageRef(13, "rollout"),),
    shards=(0, 1, 2, 5),
    log="/scratch/runs/demo/iterations/000013/logs/rollout.0001",
)
SCORE = LinkRequest(
    name="demo.i0013.score.ab12cd37",
    command=("link", "/scratch/runs/demo", "iterations/000013/score.t0/submit.0002", "demo.x"),
    stages=(StageRef(13, "score"),),
    begin_s=30.0,
    log="/scratch/runs/demo/iterations/000013/logs/score.0002",
)
EVAL = LinkRequest(
    name="demo.i0012.eval-aime.ab12cd38",
    command=("link", "/scratch/runs/demo", "iterations/000012/eval-aime.t0/submit.0001", "demo.x"),
    stages=(StageRef(12, "eval-aime"),),
    log="/scratch/runs/demo/iterations/000012/logs/eval-aime.0001",
)
TICK = LinkRequest(
    name="demo.tick.ab12cd36",
    command=("tick", "/scratch/runs/demo", "demo.tick.ab12cd36"),
    begin_s=599.5,
    log="/scratch/runs/demo/scheduler/tick",
)


def settings(**changed: Any) -> Settings:
    return Settings.model_validate(CLUSTER | changed)


JOBS = {"train": TRAIN, "rollout": ROLLOUT, "tick": TICK, "score": SCORE, "eval": EVAL}


@pytest.mark.parametrize(("name", "request_"), JOBS.items())
def test_text_is_the_golden_one(request_: LinkRequest, name: str) -> None:
    assert render_job(settings(), request_) == (GOLDEN / f"job-{name}.sh").read_text()


@pytest.mark.parametrize("name", JOBS)
def test_bash_accepts_the_text(name: str) -> None:
    subprocess.run(["bash", "-n", str(GOLDEN / f"job-{name}.sh")], check=True)


def test_a_throttled_array_says_how_many_at_once() -> None:
    throttled = {**CLUSTER["rollout"], "array_throttle": 4}
    asked = settings(rollout=throttled)
    assert plan_options(asked, ROLLOUT)["array"] == "0-2,5%4"
    assert "#SBATCH --array=0-2,5%4\n" in render_job(asked, ROLLOUT)
    again = dataclasses.replace(ROLLOUT, shards=(3,), fallback=True)
    assert plan_options(asked, again)["array"] == "3%4"
    assert "array" not in plan_options(asked, TRAIN)


def test_throttled_shards_go_to_their_fallback_like_others() -> None:
    fallback = {"after": "01:00:00", "partition": "spot"}
    rollout = {**CLUSTER["rollout"], "array_throttle": 2}
    rollout["slurm"] = {**rollout["slurm"], "fallback": fallback}
    elsewhere = plan_options(settings(rollout=rollout), dataclasses.replace(ROLLOUT, fallback=True))
    assert (elsewhere["array"], elsewhere["partition"]) == ("0-2,5%2", "spot")


def test_a_pool_asks_for_its_own_and_goes_to_its_own_fallback() -> None:
    pools = {
        "fixed": {"shards": 6, "slurm": {"partition": "main"}},
        "spot": {
            "shards": 2,
            "slurm": {
                "gpus_per_node": "h100:8",
                "fallback": {"after": "01:00:00", "partition": "main", "qos": "long"},
            },
        },
    }
    rollout = {**CLUSTER["rollout"], "pools": pools}
    spot = dataclasses.replace(ROLLOUT, pool="spot", shards=(6, 7))
    options = plan_options(settings(rollout=rollout), spot)
    wanted = ("preempt", "6-7", "gpu:h100:8", 16)
    names = ("partition", "array", "gres", "cpus_per_task")
    assert tuple(options[name] for name in names) == wanted
    gone = plan_options(settings(rollout=rollout), dataclasses.replace(spot, fallback=True))
    assert (gone["partition"], gone["qos"]) == ("main", "long")
    fixed = dataclasses.replace(ROLLOUT, pool="fixed", shards=(0, 1), fallback=True)
    assert plan_options(settings(rollout=rollout), fixed)["partition"] == "main"


def test_unset_and_false_options_are_left_out() -> None:
    options = plan_options(settings(slurm={"qos": None, "exclusive": False}), TRAIN)
    assert "qos" not in options
    text = render_job(settings(slurm={"qos": None, "exclusive": False}), TRAIN)
    assert "qos" not in text and "exclusive" not in text


def with_slurm(**options: Any) -> Settings:
    return settings(slurm=CLUSTER["slurm"] | options)


def test_a_fallback_goes_elsewhere_and_keeps_the_rest() -> None:
    fallback = {"after": "01:00:00", "partition": "spot", "qos": "low"}
    asked = with_slurm(fallback=fallback)
    first = plan_options(asked, TRAIN)
    assert (first["partition"], first.get("qos")) == ("main", None)
    assert not {"fallback", "time_max"} & first.keys()
    elsewhere = plan_options(asked, dataclasses.replace(TRAIN, fallback=True))
    assert elsewhere == first | {"partition": "spot", "qos": "low"}
    own = {**CLUSTER["train"], "slurm": {"fallback": {"after": "60", "qos": "other"}}}
    asked = settings(slurm=asked.slurm.model_dump(exclude_none=True), train=own)
    elsewhere = plan_options(asked, dataclasses.replace(TRAIN, fallback=True))
    assert (elsewhere.get("partition"), elsewhere["qos"]) == (None, "other")


def test_a_wall_time_is_learnt_where_it_is_asked_for() -> None:
    asked = with_slurm(time="auto", time_max="08:00:00")
    assert "time" not in plan_options(asked, TRAIN), "nothing learnt: the site's default"
    learnt = dataclasses.replace(TRAIN, wall=WallTime(5400, 600, 200))
    options = plan_options(asked, learnt)
    assert options["time"] == "0-01:30:00"
    assert options["time_min"] == "0-00:10:00"
    assert options["signal"] == "B:USR1@200"
    fixed = plan_options(with_slurm(), learnt)
    assert fixed["time"] == "04:00:00" and "time_min" not in fixed


@pytest.mark.parametrize("asked", [{"requeue": False}, {"no_requeue": True}])
def test_a_user_may_refuse_requeue(asked: dict[str, Any]) -> None:
    text = render_job(settings(slurm=asked), TRAIN)
    assert "#SBATCH --no-requeue\n" in text
    assert "--requeue" not in text


def test_the_log_is_appended_to_and_its_name_is_taken_literally() -> None:
    request = LinkRequest(name="n.tick.a", command=("tick",), log="/r/100%j/tick")
    options = plan_options(settings(), request)
    assert options["output"] == "/r/100%%j/tick.%j.log"
    assert options["open_mode"] == "append"


def test_gres_joins_what_the_user_asks_for() -> None:
    slurm = {"gpus_per_node": 8, "gres": "shard:2"}
    assert plan_options(settings(slurm=slurm), TRAIN)["gres"] == "gpu:8,shard:2"


def test_gpus_per_node_stays_without_gres() -> None:
    options = plan_options(settings(gpu_request="gpus_per_node"), TRAIN)
    assert options["gpus_per_node"] == "a100:4"
    assert "gres" not in options


@pytest.mark.parametrize(
    ("train", "tasks"),
    [
        ({}, 4),  # 2 nodes × 4 GPUs
        ({"num_ranks": 1}, None),
        ({"num_ranks": 2}, 1),
        ({"slurm": {"nodes": 2, "ntasks_per_node": 3}}, 3),
        ({"slurm": {"nodes": 2, "ntasks": 8}}, None),
    ],
)
def test_the_train_job_has_a_task_for_each_rank(train: dict[str, Any], tasks: int | None) -> None:
    config = settings(train=CLUSTER["train"] | train)
    assert plan_options(config, TRAIN).get("ntasks_per_node") == tasks


def test_secrets_and_environment_stay_out() -> None:
    text = render_job(settings(env={"A_NAME": "a value"}), TRAIN)
    assert "secrets" not in text and "A_NAME" not in text


@pytest.mark.parametrize(
    "changed",
    [
        {"slurm": {"comment": "a\nb"}},
        {"slurm": {"comment": "a\r#SBATCH"}},
        {"setup": ["module purge\nrm x"]},
        {"host_python": "/bin/py\nthon"},
    ],
)
def test_line_breaks_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="line break"):
        render_job(settings(**changed), TRAIN)


def test_the_command_reaches_the_shell_unchanged() -> None:
    text = render_job(settings(), ROLLOUT)
    last = text.strip().splitlines()[-1]
    assert shlex.split(last) == [
        "exec", "/opt/slurm rl/bin/python", "-m", "slurm_rl.launch.job", *ROLLOUT.command
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("a100:4,shard:2", "a100:4,shard:2"),
        ("", '""'),
        ("a b", '"a b"'),
        ("# $HOME 'x'", "\"# $HOME 'x'\""),
        ('say "\\hi"', '"say \\"\\\\hi\\""'),
    ],
)
def test_quoting_for_sbatch(text: str, quoted: str) -> None:
    assert quote_directive(text) == quoted


def test_ranges() -> None:
    assert format_ranges((5, 0, 1, 2, 9, 8)) == "0-2,5,8-9"
    assert format_ranges((3,)) == "3"


def test_a_template_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text("#!/bin/sh\n{{options}}\n{{setup}}\nexec nice {{command}}\n")
    text = render_job(settings(sbatch_template=str(path)), TICK)
    assert "\nexec nice '/opt/slurm rl/bin/python' -m slurm_rl.launch.job tick" in text


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{options}} {{setup}}", r"lacks \{\{command\}\}"),
        ("{{options}} {{setup}} {{command}} {{user}}", r"has \{\{user\}\}; known are"),
    ],
)
def test_a_template_that_cannot_work(template: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fill_template(template, {"options": "", "setup": "", "command": ""})


def test_a_template_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="sbatch_template = /no/such"):
        read_template("/no/such")


def test_braces_of_a_user_are_not_filled_in() -> None:
    parts = {"options": "{{command}}", "setup": "s", "command": "c"}
    assert fill_template("{{options}} {{setup}} {{command}}", parts) == "{{command}} s c"
