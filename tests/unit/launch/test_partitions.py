"""Partitions that are not there are named before anything is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_rl.config.problems import format_path
from slurm_rl.config.schema import Settings
from slurm_rl.launch.partitions import find_unknown

KNOWN = ("cpu", "main", "preempt")


def settings(**changes: Any) -> Settings:
    value: dict[str, Any] = {
        "run": {"name": "t", "dir": "/runs"},
        "hf_checkpoint": "/m",
        "num_rollout": 2,
        "slurm": {"partition": "main"},
        "rollout": {"prompt_data": "/p", "rollout_batch_size": 4, "rm_type": "f1"},
        "train": {"global_batch_size": 1},
    }
    for name, change in changes.items():
        section, _, key = name.partition("__")
        value[section] = {**value.get(section, {}), key: change} if key else change
    return Settings.model_validate(value)


def pools(**slurm: Any) -> dict[str, Any]:
    return {"fixed": {"shards": 1}, "spot": {"shards": 1, "slurm": slurm}}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"slurm": {}}, []),  # the default one
        ({"slurm": {"partition": "main, preempt"}}, []),
        ({"slurm": {"partition": "mian"}}, ["slurm.partition"]),
        ({"slurm": {"partition": "main,x"}}, ["slurm.partition"]),
        ({"train__slurm": {"partition": "x"}}, ["train.slurm.partition"]),
        ({"rollout__pools": pools(partition="x")}, ["rollout.pools.spot.slurm.partition"]),
        (
            {"rollout__pools": pools(fallback={"after": "10", "partition": "x"})},
            ["rollout.pools.spot.slurm.fallback.partition"],
        ),
        ({"slurm": {"partition": "x", "clusters": "other"}}, []),
        ({"tick__slurm": {"partition": "x"}}, ["tick.slurm.partition"]),
        ({"tick__slurm": {"partition": "x"}, "submit_from": "login"}, []),
    ],
)
def test_each_place_is_named_once(changes: dict[str, Any], found: list[str]) -> None:
    problems = find_unknown(settings(**changes), KNOWN)
    assert [format_path(problem.path) for problem in problems] == found


def test_what_was_meant_is_said() -> None:
    (problem,) = find_unknown(settings(slurm={"partition": "mian"}), KNOWN)
    assert (problem.rule, problem.fix) == ("is no partition of this cluster", "did you mean main?")
    (problem,) = find_unknown(settings(slurm={"partition": "zzzzzz"}), KNOWN)
    assert problem.fix == "one of cpu, main, preempt"
