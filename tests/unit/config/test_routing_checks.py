"""Rules of rollout.use_rollout_routing_replay, each by the line that a person reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_rl.config.routing_checks import check_dense_layers, check_experts
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest, shaping_settings

Load = Callable[..., Settings]
Complaints = Callable[..., list[str]]
ON = {"rollout__use_rollout_routing_replay": True}
OFF = "or set rollout.use_rollout_routing_replay: false"
MOE = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {**ON, "rollout__partial_rollout": True},
            "rollout.partial_rollout = true cannot be with use_rollout_routing_replay: what was"
            f" carried over has no ids; set it to false, {OFF}",
        ),
        (
            {**ON, "rollout__sglang": {"enable_hierarchical_cache": True}},
            "rollout.sglang.enable_hierarchical_cache = true cannot be with",
        ),
        (
            {**ON, "rollout__sglang": {"speculative_algorithm": "EAGLE"}},
            'rollout.sglang.speculative_algorithm = "EAGLE" cannot be with',
        ),
        (
            {**ON, "rollout__sglang": {"enable_eplb": True}},
            "rollout.sglang.enable_eplb = true cannot be with",
        ),
        (
            {**ON, "rollout__sglang": {"enable_two_batch_overlap": True}},
            "rollout.sglang.enable_two_batch_overlap = true cannot be with",
        ),
        (
            {**ON, "rollout__sglang": {"pp_size": 2}},
            "rollout.sglang.pp_size = 2 cannot be with",
        ),
        (
            {**ON, "rollout__sglang": {"moe_runner_backend": "flashinfer_trtllm"}},
            'rollout.sglang.moe_runner_backend = "flashinfer_trtllm" cannot be with',
        ),
        (
            {"rollout__sglang": {"enable_return_routed_experts": True}},
            "rollout.sglang.enable_return_routed_experts = true is set by the run itself",
        ),
        (
            {**ON, "train__sft_iterations": 1},
            "train.sft_iterations = 1 cannot be with rollout.use_rollout_routing_replay: labels",
        ),
        (
            {**ON, "train__megatron": {"lr": 1e-6, "moe_router_fusion": True}},
            "train.megatron.moe_router_fusion = true cannot be with rollout.",
        ),
        (
            {"train__megatron": {"moe_enable_routing_replay": True}},
            "rollout.use_rollout_routing_replay: true is what replays the engine's routing",
        ),
    ],
)
def test_each_rule_says_what_and_how_to_mend_it(
    complaints: Complaints, values: dict[str, Any], line: str
) -> None:
    found = complaints(**values)
    assert any(line in said for said in found), found


@pytest.mark.parametrize(
    ("changes", "values", "rule"),
    [
        ({}, {}, ""),
        ({"num_experts": 256}, {}, ""),
        ({"num_experts": 257}, {}, "takes at most 256 experts, and the model has 257"),
        ({"num_experts": None}, {}, "has no effect: the model (qwen3_moe) is no mixture"),
        ({"model_type": "glm4_moe"}, {}, ""),
        ({"model_type": "glm4_moe"}, {"rollout__engine": "embedded"}, "needs a model of qwen2_moe"),
        ({}, {"rollout__engine": "embedded"}, ""),
    ],
)
def test_what_the_model_can(load: Load, changes: Any, values: Any, rule: str) -> None:
    found = [p.rule for p in check_experts(load(**ON, **values), MOE | changes)]
    assert [said.startswith(rule) for said in found] == ([True] if rule else [])
    assert not list(check_experts(load(**values), {"model_type": "llama"}))


@pytest.mark.parametrize(
    ("engine", "changes", "layer"),
    [
        ("sglang", {}, None),
        ("sglang", {"mlp_only_layers": [3, 2]}, 2),
        ("sglang", {"decoder_sparse_step": 2}, 0),
        ("sglang", {"mlp_only_layers": [1], "model_type": "deepseek_v3"}, None),
        ("embedded", {"mlp_only_layers": [1]}, None),
    ],
)
def test_layers_that_sglang_would_not_serve(
    load: Load, engine: str, changes: Any, layer: int | None
) -> None:
    config = MOE | {"num_hidden_layers": 4} | changes
    found = [p.render({(): "f"}) for p in check_dense_layers(load(rollout__engine=engine), config)]
    assert len(found) == (layer is not None)
    assert all(f"layer {layer} has no experts" in said for said in found)


def test_it_shapes_numbers_and_digests_of_runs_without_stay(load: Load) -> None:
    plain, routed = load(), load(**ON)
    assert "use_rollout_routing_replay" not in shaping_settings(plain)["rollout"]
    assert settings_digest(plain) != settings_digest(routed)
