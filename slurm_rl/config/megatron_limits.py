"""Settings of Megatron-core by themselves: values that the trainer supports, ranges of numbers, and
what has no effect here, each with the reason. What holds between them is `megatron_checks.py`'s.
"""

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
_OVERLAP = "it needs overlap_moe_expert_parallel_comm, whose schedule takes the model apart"


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting may be: `least` and `most` are among them, `above` and `below`
    are not.

    Example: `Range(least=0, below=1)` of a moving average's factor.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def complain(self, value: float) -> tuple[str, str] | None:
        """(rule, fix) for a number that is out of it."""
        if self.least is not None and value < self.least:
            return f"must be at least {self.least:g}", "raise it"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}", "raise it"
        if self.most is not None and value > self.most:
            return f"must be at most {self.most:g}", "lower it"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}", "lower it"
        return None


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
    "delay_wgrad_compute": Only((False,), _OVERLAP),
    "ep_overlap_early_attn_memory_release": Only((False,), _OVERLAP),
    "gradient_accumulation_fusion": Only((False,), "its kernel is Apex's"),
    "defer_embedding_wgrad_compute": Only(
        (False,), "it needs gradient_accumulation_fusion, whose kernel is Apex's"
    ),
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

_COUNT, _NOT_NEGATIVE, _ABOVE_0 = Range(least=1), Range(least=0), Range(above=0)
_DECAY, _SHARE = Range(least=0, below=1), Range(least=0, most=1)

#: Every number that a person may set -> what it may be. 0 of clip_grad: no clipping.
MEGATRON_RANGES: Mapping[str, Range] = {
    **dict.fromkeys("adam_beta1 adam_beta2 muon_momentum".split(), _DECAY),
    **dict.fromkeys(
        "adam_eps loss_scale muon_extra_scale_factor activation_func_clamp_value".split(),
        _ABOVE_0,
    ),
    **dict.fromkeys(
        # With a rate of 0 everything is computed and nothing learnt: people look for faults so.
        "lr decoupled_lr min_lr decoupled_min_lr lr_warmup_init"
        " weight_decay start_weight_decay end_weight_decay clip_grad"
        " cpu_offloading_num_layers min_offloaded_tensor_size cuda_graph_warmup_steps"
        " num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 wgrad_deferral_limit fp8_margin"
        " num_microbatches_with_partial_activation_checkpoints".split(),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"
        " expert_model_parallel_size expert_tensor_parallel_size"
        " virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage"
        " recompute_num_layers lr_wsd_decay_iters muon_num_ns_steps bucket_size"
        " suggested_communication_unit_size fp8_amax_history_len fp8_interval"
        " moe_deepep_num_sms moe_hybridep_num_sms".split(),
        _COUNT,
    ),
    "optimizer_offload_fraction": _SHARE,
}

_FP16 = "it is of fp16's loss scale, and bf16 needs none"
_INFERENCE = "it is of Megatron's inference, and the rollout's engine samples"
_CLIP_QK = "the trainer does not clip queries and keys"
_OWN_LOSS = "log-probs and their loss are the trainer's own"

#: What would be taken and do nothing -> why. Its default may stand.
MEGATRON_IDLE: Mapping[str, str] = {
    "sgd_momentum": "the optimizer is never SGD",
    **dict.fromkeys(
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis".split(), _FP16
    ),
    **dict.fromkeys(
        "inference_sampling_seed mlp_chunks_for_prefill inference_rng_tracker flash_decode"
        " inference_fuse_tp_communication use_inference_optimized_layers".split(),
        _INFERENCE,
    ),
    **dict.fromkeys("qk_clip qk_clip_alpha qk_clip_threshold".split(), _CLIP_QK),
    **dict.fromkeys("cross_entropy_loss_fusion cross_entropy_fusion_impl".split(), _OWN_LOSS),
    "max_seqlen_per_dp_cp_rank": "max_tokens_per_gpu balances the samples",
}

#: What only TransformerEngine's modules do: it has no effect with `transformer_impl: local`.
MEGATRON_TE_ONLY = (
    "cp_comm_type",
    "moe_grouped_gemm",
    "fp8",
    "fp4",
    "tp_comm_overlap",
    "cpu_offloading",
)
