from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.derive import (
    gpu_count,
    num_gpus,
    parse_wall_time,
    stage_container,
    stage_env,
    stage_fallback,
    stage_python,
    stage_signal_s,
    stage_slurm,
    stage_time_s,
)
from slurm_rl.config.roles import num_ranks
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.config.stages import needs_score, stage_kinds

Load = Callable[..., Settings]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:30:15", 5415),
        ("20:00:00", 72000),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("100:00:00", 360000),
        ("0", None),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_wall_times_in_every_form_of_slurm(text: str, seconds: int | None) -> None:
    assert parse_wall_time(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "-1", "1:2:3:4", "1-", "1-1:1:1:1", "a:b", "1.5", " 1"])
def test_what_is_no_wall_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not a wall time"):
        parse_wall_time(text)


@given(st.integers(1, 10**7))
def test_a_written_wall_time_reads_back(seconds: int) -> None:
    days, rest = divmod(seconds, 86400)
    text = f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    assert parse_wall_time(text) == seconds


@pytest.mark.parametrize(("request_", "count"), [(8, 8), ("8", 8), ("a100:4", 4), (None, None)])
def test_gpus_of_a_request(request_: int | str | None, count: int | None) -> None:
    assert gpu_count(request_) == count


def test_a_stage_wins_over_the_top_and_unset_options_are_left_out(load: Load) -> None:
    settings = load(
        slurm={"account": "a", "partition": "p", "requeue": True, "signal_s": 60},
        train__slurm={"partition": "q", "nodes": 2, "hint": "nomultithread"},
    )
    assert stage_slurm(settings, "train") == {
        "account": "a",
        "partition": "q",
        "nodes": 2,
        "requeue": True,
        "hint": "nomultithread",
    }
    assert stage_slurm(settings, "rollout") == {"account": "a", "partition": "p", "requeue": True}
    assert (stage_signal_s(settings, "train"), stage_time_s(settings, "train")) == (60, None)


def test_a_tick_keeps_the_site_but_not_the_size(load: Load) -> None:
    settings = load(
        slurm={
            "account": "a",
            "nodes": 8,
            "gpus_per_node": 8,
            "exclusive": True,
            "time": "4:00:00",
        },
        tick={"slurm": {"partition": "cpu", "time": "00:05:00"}},
    )
    assert stage_slurm(settings, "tick") == {
        "account": "a",
        "partition": "cpu",
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": 1,
        "time": "00:05:00",
    }


def test_signal_s_has_a_default(load: Load) -> None:
    assert stage_signal_s(load(), "train") == 120
    assert stage_signal_s(load(train__slurm__signal_s=300), "train") == 300


def test_env_container_and_interpreter(load: Load) -> None:
    settings = load(
        env={"A": 1, "B": "x"},
        host_python="/host/python",
        container={"runtime": "apptainer", "image": "/x.sif", "bind": ["/a"]},
        train__env={"A": 2.5},
        train__container={"runtime": "none"},
        rollout__container={"runtime": "apptainer", "image": "/y.sif", "python": "/opt/python"},
    )
    assert stage_env(settings, "train") == {"A": "2.5", "B": "x"}
    assert stage_env(settings, "rollout") == {"A": "1", "B": "x"}
    assert stage_container(settings, "init").image == "/x.sif"
    assert stage_container(settings, "rollout").bind == []
    assert stage_python(settings, "train") == "/host/python"
    assert stage_python(settings, "rollout") == "/opt/python"
    assert stage_python(settings, "init") == "python3"
    assert stage_python(load(), "train") is None


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 1),
        ({"train__num_ranks": 4}, 4),
        ({"launcher": "slurm", "slurm": {"nodes": 2, "gpus_per_node": "h100:8"}}, 16),
        ({"launcher": "slurm", "slurm": {"nodes": 2}}, 1),
        ({"launcher": "slurm", "train__slurm": {"gpus_per_node": 4}}, 4),
        ({"launcher": "local", "slurm": {"nodes": 2, "gpus_per_node": 8}}, 1),
    ],
)
def test_ranks_of_the_train_job(load: Load, values: dict[str, Any], ranks: int) -> None:
    assert num_ranks(load(**values)) == ranks


NOT_SHAPING: list[dict[str, Any]] = [
    {"run__dir": "/elsewhere", "run__name": "other"},
    {"hf_checkpoint": "/other/place"},
    {"num_rollout": 9},
    {"rollout__prompt_data": "/other/p.jsonl"},
    {"rollout__shards": 2},
    {"rollout__concurrency": 3},
    {"rollout__sglang_env": {"A": 1}},
    {"rollout__server_start_timeout_s": 3},
    {"train__slurm": {"nodes": 1, "time": "1:00:00"}},
    {"train__python": "/p"},
    {"train__env": {"A": 1}},
    {"train__deadline_s": 3},
    {"train__check_first_ratio": 0.5},
    {"train__num_ranks": 1},
    {"chain__window": 7},
    {"env": {"A": 1}},
    {"launcher": "slurm"},
]
SHAPING: list[dict[str, Any]] = [
    {"seed": 1},
    {"deterministic": True, "rollout__sglang": {"enable_deterministic_inference": True}},
    {"rollout__rollout_temperature": 0.5},
    {"rollout__rollout_stop": ["/a"]},
    {"rollout__rollout_stop": ["/b/a"]},
    {"rollout__sglang": {"tp_size": 2}},
    {"rollout__rm_type": "f1"},
    {"train__megatron__lr": 2e-6},
    {"train__micro_batch_size": 4},
    {"train__num_ranks": 2},
    {"train__lr_decay_iters": 10},
]


@pytest.mark.parametrize("values", NOT_SHAPING, ids=str)
def test_the_digest_ignores_what_shapes_no_number(load: Load, values: dict[str, Any]) -> None:
    assert settings_digest(load(**values)) == settings_digest(load())


def test_the_digest_sees_everything_that_shapes_numbers(load: Load) -> None:
    digests = {settings_digest(load(**values)) for values in [{}, *SHAPING]}
    assert len(digests) == len(SHAPING) + 1


def test_the_digest_ignores_folders_in_sglangs_own_settings(load: Load) -> None:
    ours, theirs, other = (
        settings_digest(load(rollout__sglang={"chat_template": text}))
        for text in ("/a/x.jinja", "/b/c/x.jinja", "/a/y.jinja")
    )
    assert ours == theirs != other


# -- scores and evaluations -----------------------------------------------------------------------

GPUS = {"nodes": 4, "gpus_per_node": 8, "exclusive": True, "mem": "64G", "cpus_per_task": 4}
EVALS = {"eval__aime": {"prompt_data": "/d/a.jsonl"}, "eval__b": {"prompt_data": "/d/b.jsonl"}}


def test_a_run_has_the_kinds_that_it_needs(load: Load) -> None:
    assert stage_kinds(load()) == ("init", "rollout", "train", "tick")
    settings = load(score__enabled=True, **EVALS)
    assert stage_kinds(settings) == (
        "init", "rollout", "score", "train", "eval-aime", "eval-b", "tick",
    )  # fmt: skip


def test_a_score_stage_without_a_server_asks_for_no_gpus(load: Load) -> None:
    settings = load(
        slurm={**GPUS, "partition": "p", "gres": "gpu:8", "time": "02:00:00"}, score__enabled=True
    )
    assert needs_score(settings) and num_gpus(settings, "score") == 0
    assert stage_slurm(settings, "score") == {
        "partition": "p", "mem": "64G", "cpus_per_task": 4, "time": "02:00:00", "nodes": 1, "ntasks_per_node": 1,
    }  # fmt: skip
    own = load(slurm=GPUS, score={"enabled": True, "slurm": {"gpus_per_node": 1, "partition": "q"}})
    assert stage_slurm(own, "score")["gpus_per_node"] == 1
    assert stage_slurm(own, "score")["partition"] == "q"


@pytest.mark.parametrize("kind", ["score", "eval-aime"])
def test_what_serves_a_model_asks_for_what_the_rollout_does(load: Load, kind: str) -> None:
    rollout = {
        "gpus_per_node": 2, "partition": "inference", "time": "auto", "time_max": "04:00:00",
        "signal_s": 77, "fallback": {"after": "01:00:00", "qos": "low"},
    }  # fmt: skip
    values = {"slurm": {"account": "a", "gpus_per_node": 8}, "rollout__slurm": rollout, **EVALS}
    values |= {"rollout__env": {"A": "1", "B": "2"}, "rollout__python": "/venv/bin/python"}
    values |= {"score__server": {"hf_checkpoint": "/rm"}, "rollout__rm_type": "served_rm"}
    values["eval__aime"] = {"prompt_data": "/d/a.jsonl", "rm_type": "gsm8k"}
    del values["eval__b"]
    settings = load(**values)
    assert stage_slurm(settings, kind) == stage_slurm(settings, "rollout")
    assert stage_time_s(settings, kind) == 4 * 3600 and stage_signal_s(settings, kind) == 77
    assert stage_fallback(settings, kind) == stage_fallback(settings, "rollout")
    assert stage_env(settings, kind) == {"A": "1", "B": "2"}
    assert stage_python(settings, kind) == "/venv/bin/python"
    assert stage_slurm(settings, "train")["gpus_per_node"] == 8


def test_an_evaluation_may_ask_for_something_else(load: Load) -> None:
    values = {"rollout__slurm": {"gpus_per_node": 8, "partition": "p"}, "rollout__env": {"A": "1"}}
    own = {"slurm": {"gpus_per_node": 1, "time": "00:30:00"}, "env": {"A": "2"}, "python": "py"}
    settings = load(**values, eval__aime={"prompt_data": "/d", **own})
    assert stage_slurm(settings, "eval-aime") == {
        "gpus_per_node": 1,
        "partition": "p",
        "time": "00:30:00",
    }
    assert stage_env(settings, "eval-aime") == {"A": "2"}
    assert stage_python(settings, "eval-aime") == "py"


def test_its_own_interpreter_stands_against_the_rollouts_container(load: Load) -> None:
    container = {"runtime": "apptainer", "image": "/x.sif"}
    settings = load(rollout__container=container, **EVALS)
    assert stage_container(settings, "eval-aime").image == "/x.sif"
    settings = load(rollout__container=container, eval__aime={"prompt_data": "/d", "python": "py"})
    assert stage_container(settings, "eval-aime").runtime == "none"


def test_one_job_of_an_iteration_has_one_shape(load: Load) -> None:
    shape = {"gpus_per_node": 8, "time": "02:00:00"}
    settings = load(slurm=shape, chain__pack="iteration", score__enabled=True)
    assert stage_slurm(settings, "score") == stage_slurm(settings, "train") == shape


def test_the_digest_of_an_evaluation_says_what_it_asked_for(load: Load) -> None:
    def digest(**own: Any) -> str:
        settings = load(eval__aime={"prompt_data": "/d/a.jsonl", **own})
        assert settings_digest(settings) == settings_digest(load())
        return settings_digest(settings, "eval-aime")

    assert digest() == digest(interval=2, before_training=False, slurm={"nodes": 2}, deadline_s=5.0)
    assert digest() != digest(n_samples_per_prompt=16)
    assert digest() != settings_digest(load())
