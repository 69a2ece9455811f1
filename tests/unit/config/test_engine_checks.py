"""Rules about the rollout's engines, each by the line that a person reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_rl.config.engine_checks import gpus_per_server
from slurm_rl.config.roles import stage_ranks
from slurm_rl.config.schema import Settings

Load = Callable[..., Settings]
Complaints = Callable[..., list[str]]
SLURM = {"launcher": "slurm"}
EMBEDDED = {"rollout__engine": "embedded"}
NODES = {**SLURM, "rollout__engine_nodes": 2, "rollout__sglang": {"tp_size": 16}}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {**EMBEDDED, "rollout__replicas": 2},
            "rollout.replicas has no effect with engine: embedded; take it out, or set engine: sglang",
        ),
        (
            {**EMBEDDED, "rollout__engine_nodes": 2},
            "rollout.engine_nodes has no effect with engine: embedded; take it out, or set engine: sglang",
        ),
        (
            {**EMBEDDED, "rollout__concurrency": 9},
            "rollout.concurrency has no effect with engine: embedded; take it out, or set engine: sglang",
        ),
        (
            {**EMBEDDED, "rollout__request_timeout_s": 9.0},
            "rollout.request_timeout_s has no effect with engine: embedded; take it out, or set engine: sglang",
        ),
        (
            {**EMBEDDED, "rollout__sglang_env": {"A": 1}},
            "rollout.sglang_env has no effect with engine: embedded; take it out, or set engine: sglang",
        ),
        (
            {"rollout__embedded_threads": 2},
            "rollout.embedded_threads = 2 has no effect with engine: sglang; take it out, or set engine: embedded",
        ),
        (
            {
                "rollout__rollout_min_p": 0.1,
                "rollout__sglang": {"enable_deterministic_inference": True},
            },
            "rollout.rollout_min_p = 0.1 cannot be with enable_deterministic_inference; set it to 0, and use rollout_top_p",
        ),
        (
            {
                "eval": {"a": {"prompt_data": "/p.jsonl", "rollout_min_p": 0.1}},
                "rollout__sglang": {"enable_deterministic_inference": True},
            },
            "eval.a.rollout_min_p = 0.1 cannot be with enable_deterministic_inference; set it to 0, and use rollout_top_p",
        ),
        (
            {"rollout__sglang": {"tp_size": 0}},
            "rollout.sglang.tp_size = 0 must be at least 1; raise it",
        ),
        (
            {"rollout__stage_weights": "shm"},
            'rollout.stage_weights = "shm" must be an absolute path; write it as /dev/shm, or with a variable that the node sets, as $TMPDIR',
        ),
        (
            {"rollout__stage_weights_gb": 9.0},
            "rollout.stage_weights_gb = 9.0 has no effect without stage_weights; name the node's folder as stage_weights, or take it out",
        ),
        (
            {
                **SLURM,
                "rollout__replicas": 3,
                "rollout__sglang": {"tp_size": 2},
                "rollout__slurm__gpus_per_node": 4,
            },
            "rollout.replicas = 3 of 2 GPUs each do not fit on the 4 GPUs of a node; lower it, or ask for more GPUs",
        ),
        (
            {**NODES, "rollout__slurm": {"nodes": 2}, "rollout__replicas": 2},
            "rollout.replicas = 2 is given beside engine_nodes = 2: one server takes all the nodes; use shards instead",
        ),
        (
            {**NODES, "rollout__slurm": {"nodes": 2}, "rollout__sglang": {"tp_size": 7}},
            "rollout.engine_nodes = 2 does not divide tp × pp = 7; raise rollout.sglang.tp_size, or lower it",
        ),
        (
            {
                **NODES,
                "rollout__slurm": {"nodes": 2},
                "rollout__sglang": {"tp_size": 2, "dp_size": 2},
            },
            "rollout.sglang.dp_size = 2 cannot be with engine_nodes = 2, unless enable_dp_attention is set; use shards or replicas for copies of the model",
        ),
        (
            NODES,
            "rollout.engine_nodes = 2 is not the 1 node(s) of a rollout job; set rollout.slurm.nodes: 2",
        ),
        (
            {**NODES, "rollout__slurm": {"nodes": 2, "gpus_per_node": 4}},
            "rollout.sglang needs 8 GPUs (tp × pp × dp), but a node of the job has 4; lower tp_size or dp_size, or ask for more",
        ),
    ],
)
def test_each_rule_says_what_and_how_to_mend_it(
    complaints: Complaints, values: dict[str, Any], line: str
) -> None:
    assert line in complaints(**values)


@pytest.mark.parametrize(
    "values",
    [
        {
            **SLURM,
            "rollout__replicas": 2,
            "rollout__sglang": {"tp_size": 2},
            "rollout__slurm__gpus_per_node": 4,
        },
        {**NODES, "rollout__slurm": {"nodes": 2, "gpus_per_node": 8}},
        {
            **SLURM,
            "rollout__replicas": 2,
            "rollout__sglang": {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True},
            "rollout__slurm__gpus_per_node": 8,
        },
        {"rollout__rollout_min_p": 0.1},
        {"rollout__stage_weights": "$TMPDIR/w", "rollout__stage_weights_gb": 9.0},
        {**EMBEDDED, "rollout__stage_weights": "/dev/shm", "rollout__embedded_threads": 2},
        {"rollout__engine_nodes": 2, "rollout__sglang": {"tp_size": 2}},
    ],
)
def test_what_can_take_effect_is_accepted(load: Load, values: dict[str, Any]) -> None:
    load(**values)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"tp_size": 2, "pp_size": 3, "dp_size": 4}, 24),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 4),
    ],
)
def test_gpus_of_a_server(options: dict[str, Any], expected: int) -> None:
    assert gpus_per_server(options) == expected


def test_a_stage_has_as_many_processes_as_its_server_has_nodes(load: Load) -> None:
    settings = load(**NODES, rollout__slurm={"nodes": 2}, train__num_ranks=4)
    assert [stage_ranks(settings, kind) for kind in ("train", "rollout", "init", "score")] == [
        4,
        2,
        1,
        1,
    ]
