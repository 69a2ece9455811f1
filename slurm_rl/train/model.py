"""Megatron's GPTModel for a geometry, with its weights from Hugging Face files.

Parameters are zeros until they are loaded (`loading.py`). No
random number is drawn, so that building a model never disturbs a random state.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from slurm_rl.errors import ConfigError
from slurm_rl.train.families import check_layout
from slurm_rl.train.geometry import Geometry
from slurm_rl.train.loading import mark_split_parameters
from slurm_rl.train.options import MegatronOptions
from slurm_rl.train.spec import block_spec

log = logging.getLogger(__name__)

#: What the user may set otherwise. Fused kernels need Apex or a CUDA compiler.
_DEFAULTS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    # Not used, but Megatron refuses variable lengths with its own default.
    "moe_token_dispatcher_type": "alltoall",
}


def model_config(
    geometry: Geometry, options: MegatronOptions, *, deterministic: bool
) -> TransformerConfig:
    """Megatron's configuration: the geometry, then the user's options.

    `bf16` unset means: as the model's files are. Raises ConfigError if the layout does not
    fit the model or Megatron refuses the combination.
    """
    check_layout(geometry, tp_size=options.tp_size, pp_size=options.pp_size)
    bf16 = is_bf16(geometry, options)
    dtype = torch.bfloat16 if bf16 else torch.float32
    fields: dict[str, Any] = {
        "num_layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "ffn_hidden_size": geometry.ffn_hidden_size,
        "num_attention_heads": geometry.num_heads,
        "num_query_groups": geometry.num_groups,
        "kv_channels": geometry.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": geometry.norm_epsilon,
        "qk_layernorm": geometry.qk_norm,
        "add_qkv_bias": geometry.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": options.pp_size > 1,
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "deterministic_mode": deterministic,
        **_DEFAULTS,
        **options.transformer,
        "calculate_per_token_loss": True,
    }
    try:
        return TransformerConfig(**fields | {"bf16": bf16})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"train.megatron: Megatron-core refuses it: {error}") from error


def is_bf16(geometry: Geometry, options: MegatronOptions) -> bool:
    """Whether the model computes in bfloat16: `train.megatron.bf16`, else as its files are."""
    return geometry.dtype == "bfloat16" if options.bf16 is None else bool(options.bf16)


def build_model(geometry: Geometry, config: TransformerConfig) -> GPTModel:
    """This rank's part of the model, with every parameter zero."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=geometry.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=geometry.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=geometry.tied,
        position_embedding_type="rope",
        rotary_base=geometry.rope_theta,
        rope_scaling=geometry.rope_factor is not None,
        rope_scaling_factor=geometry.rope_factor or 8.0,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    mark_split_parameters(model, geometry)
    return model.cuda()


def wrap_model(model: GPTModel, options: MegatronOptions) -> DistributedDataParallel:
    """The model with gradient buffers, reduced over the data-parallel ranks."""
    config = model.config
    defaults = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
    inner = Float16Module(config, model) if config.bf16 else model
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(**defaults | options.ddp), inner
    )
    config.finalize_model_grads_func = finalize
    if wrapped.ddp_config.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync
        config.grad_sync_func = wrapped.start_grad_sync
    return wrapped
