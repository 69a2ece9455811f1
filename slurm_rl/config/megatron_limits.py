"""Settings of Megatron-core that the trainer supports at some values only, each with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Only:
    """The values that a setting may have, and why it may have no other."""

    values: tuple[Any, ...]
    why: str

    @property
    def names(self) -> str:
        """The values, as they are written: `0.0`, or `"adam" or "muon"`."""
        return " or ".join(json.dumps(value) for value in self.values)


_TWICE = "the same tokens must get the same log-probs twice"
_REWARD = "the reward is the objective, and its weight would change with the samples' lengths"
_DROPPED = "tokens would be dropped, depending on what is batched with them"
_SHARDED = "its parameters and checkpoints are in a form of their own"
_EVEN = "layers are split evenly over the pipeline"
_MODEL = "routing is the model's own"

MEGATRON_ONLY: Mapping[str, Only] = {
    "hidden_dropout": Only((0.0,), _TWICE),
    "attention_dropout": Only((0.0,), _TWICE),
    "fp16": Only((False,), "its loss scale skips optimizer steps; bf16 needs none"),
    "optimizer": Only(("adam", "muon"), "checkpoints do not hold another one's state"),
    "transformer_impl": Only(("local", "transformer_engine"), "others have no gradients"),
    "use_megatron_fsdp": Only((False,), _SHARDED),
    "use_custom_fsdp": Only((False,), _SHARDED),
    "num_distributed_optimizer_instances": Only(
        (1,), "a checkpoint gathers the state over all data-parallel ranks"
    ),
    "overlap_param_gather_with_optimizer_step": Only(
        (False,), "a checkpoint knows one optimizer, not one for each chunk of the model"
    ),
    "pipeline_model_parallel_layout": Only((None,), _EVEN),
    "num_layers_in_first_pipeline_stage": Only((None,), _EVEN),
    "num_layers_in_last_pipeline_stage": Only((None,), _EVEN),
    "account_for_embedding_in_pipeline_split": Only((False,), _EVEN),
    "account_for_loss_in_pipeline_split": Only((False,), _EVEN),
    "overlap_moe_expert_parallel_comm": Only((False,), "its schedule takes the model apart"),
    "gradient_accumulation_fusion": Only((False,), "its kernel is Apex's"),
    "hybrid_context_parallel": Only((False,), "max_tokens_per_gpu balances the samples"),
    "hierarchical_context_parallel_sizes": Only(
        (None,), "keys and values are gathered over all context ranks at once"
    ),
    "moe_router_load_balancing_type": Only(("none",), _REWARD),
    "moe_aux_loss_coeff": Only((0.0,), _REWARD),
    "moe_z_loss_coeff": Only((None,), _REWARD),
    "moe_router_bias_update_rate": Only((0.0,), "the engine would have to route by it too"),
    "moe_input_jitter_eps": Only((None,), _TWICE),
    "moe_router_force_load_balancing": Only((False,), "it routes at random"),
    "moe_expert_capacity_factor": Only((None,), _DROPPED),
    "moe_pad_expert_input_to_capacity": Only((False,), _DROPPED),
    "moe_token_dropping": Only((False,), _DROPPED),
    "moe_router_topk_limited_devices": Only((None,), _MODEL),
    "moe_latent_size": Only((None,), _MODEL),
    "moe_use_legacy_grouped_gemm": Only((False,), _SHARDED),
    "moe_extended_tp": Only((False,), "it is expert_tensor_parallel_size now"),
    "moe_enable_routing_replay": Only(
        (False,), "rollout.use_rollout_routing_replay: true is what replays the engine's routing"
    ),
    "moe_per_layer_logging": Only((False,), "nothing reads it"),
}

#: Of mixtures of experts, what the model's config.json decides.
MOE_OWNED = (
    "num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk"
    " moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor"
    " moe_router_enable_expert_bias moe_router_num_groups moe_router_group_topk"
    " moe_shared_expert_intermediate_size moe_shared_expert_gate"
).split()
