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
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from slurm_rl.models.geometry import Geometry, gpt_fields, megatron_fields
from slurm_rl.models.splits import check_split
from slurm_rl.train import experts, fused, latent
from slurm_rl.train.chunks import Chunks, model_chunks
from slurm_rl.train.loading import mark_split_parameters
from slurm_rl.train.options import MegatronOptions
from slurm_rl.train.packages import refusal
from slurm_rl.train.post_norms import add_post_norms
from slurm_rl.train.rows import RowsModel
from slurm_rl.train.spec import block_spec
from slurm_rl.train.value_head import ValueModel

log = logging.getLogger(__name__)

#: What the user may set otherwise. Fused kernels need Apex or a CUDA compiler.
_DEFAULTS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "transformer_impl": "local",
    # Not used, but Megatron refuses variable lengths with its own default.
    "moe_token_dispatcher_type": "alltoall",
    # The reward is the objective: no loss for balance, and no bias that moves by itself.
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
}


def model_config(
    geometry: Geometry, options: MegatronOptions, *, deterministic: bool
) -> TransformerConfig:
    """Megatron's configuration: the geometry, then the user's options.

    `bf16` unset means: as the model's files are. Raises ConfigError if the layout does not
    fit the model or Megatron refuses the combination.
    """
    layout = options.layout
    _check_split(geometry, options)
    bf16 = is_bf16(geometry, options)
    dtype = torch.bfloat16 if bf16 else torch.float32
    with_kernels = fused.are_on(options)
    fields: dict[str, Any] = {
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Pipelines send shapes along; experts get as many tokens as come.
        "variable_seq_lengths": layout.pipeline > 1 or layout.experts > 1,
        # Interleaved, two neighbours may exchange activations and gradients in one batch, which
        # mixes them up if there are but two ranks; overlapped, each goes by itself.
        "overlap_p2p_comm": layout.chunks > 1,
        "batch_p2p_comm": layout.chunks == 1,
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "deterministic_mode": deterministic,
        **_DEFAULTS,
        "bias_activation_fusion": fused.fuses_swiglu(options, on=with_kernels),
        **options.transformer,
        **megatron_fields(geometry),
        "activation_func": torch.nn.functional.silu,
        "calculate_per_token_loss": True,
    }
    kind = TransformerConfig if geometry.mla is None else MLATransformerConfig
    try:
        config = kind(**fields | {"bf16": bf16})
    except (ValueError, AssertionError, ImportError, NotImplementedError) as error:
        raise refusal(error) from error
    fused.switch(config, on=with_kernels)
    return config


def is_bf16(geometry: Geometry, options: MegatronOptions) -> bool:
    """Whether the model computes in bfloat16: `train.megatron.bf16`, else as its files are."""
    return geometry.dtype == "bfloat16" if options.bf16 is None else bool(options.bf16)


def _check_split(geometry: Geometry, options: MegatronOptions) -> None:
    is_sequence_parallel = bool(options.transformer.get("sequence_parallel"))
    check_split(geometry, options.layout, sequence_parallel=is_sequence_parallel)


def build_model(geometry: Geometry, config: TransformerConfig) -> Any:
    """This rank's part of the model, with every parameter zero; `Chunks` if it is interleaved."""
    if config.num_moe_experts is not None:
        experts.install()
    if geometry.mla is not None:
        latent.install()
    num_chunks = config.virtual_pipeline_model_parallel_size
    if num_chunks is None:
        return _build_chunk(geometry, config)
    return Chunks(_build_chunk(geometry, config, vp_stage=i) for i in range(num_chunks))


def _build_chunk(
    geometry: Geometry, config: TransformerConfig, *, vp_stage: int | None = None
) -> RowsModel:
    spec = block_spec(config, vp_stage=vp_stage)
    if geometry.post_norms:
        add_post_norms(spec)
    kind = ValueModel if geometry.value_head else RowsModel
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = kind(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=geometry.padded_vocab(config.tensor_model_parallel_size),
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        parallel_output=True,
        vp_stage=vp_stage,
        **gpt_fields(geometry),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    mark_split_parameters(model, geometry)
    return model.cuda()


def wrap_model(model: Any, options: MegatronOptions) -> Any:
    """The model, or each of its chunks, with gradient buffers, reduced over the data-parallel
    ranks."""
    chunks = [_wrap_chunk(c, options, number=i) for i, c in enumerate(model_chunks(model))]
    config = model.config
    config.finalize_model_grads_func = finalize
    if chunks[0].ddp_config.overlap_grad_reduce:
        # Megatron wants one function, or one for each of several chunks.
        no_sync, start = ([c.no_sync for c in chunks], [c.start_grad_sync for c in chunks])
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        config.grad_sync_func = start if len(chunks) > 1 else start[0]
    return Chunks(chunks) if isinstance(model, Chunks) else chunks[0]


def _wrap_chunk(
    model: RowsModel, options: MegatronOptions, *, number: int
) -> DistributedDataParallel:
    config = model.config
    defaults = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
    inner = Float16Module(config, model) if config.bf16 else model
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()  # Float16Module has rounded it
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(**defaults | options.ddp),
        inner,
        # Its first backward pass is the only one that is not hidden behind others.
        disable_bucketing=number > 0,
    )
