"""The optimizer and its schedule: Megatron's, with horizons of their own.

The learning rate's horizon is `train.lr_decay_iters`, counted in optimizer steps, fixed when
the run is made; it never follows `num_rollout`, so that a run can be extended.
"""

from __future__ import annotations

from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.muon as muon
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slurm_rl.config.train_schema import Update
from slurm_rl.errors import ConfigError
from slurm_rl.train import adam
from slurm_rl.train.chunks import model_chunks
from slurm_rl.train.options import MegatronOptions
from slurm_rl.train.packages import refusal


def build_optimizer(model: Any, options: MegatronOptions) -> Any:
    """Megatron's (distributed) Adam over the wrapped model's parameters, or Muon."""
    adam.install()
    fields = {
        "use_distributed_optimizer": True,
        "min_lr": 0.0,
        **options.optimizer,
        "bf16": model.config.bf16,
        "params_dtype": torch.bfloat16 if model.config.bf16 else torch.float32,
    }
    try:
        config = megatron_optimizer.OptimizerConfig(**fields)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise refusal(error) from error
    make = megatron_optimizer.get_megatron_optimizer
    if config.optimizer == "muon":
        _check_muon(config)
        make = muon.get_megatron_muon_optimizer
    optimizer = make(config, model_chunks(model), use_gloo_process_groups=False)
    model.config.grad_scale_func = optimizer.scale_loss
    for inner in optimizer.chained_optimizers:
        if hasattr(inner, "get_parameter_state_dp_zero"):
            _keep_padding(inner)
    return optimizer


def _check_muon(config: Any) -> None:
    if config.use_distributed_optimizer:
        raise ConfigError(
            "train.megatron.optimizer = muon cannot be with use_distributed_optimizer: it needs "
            "whole matrices, which that splits over the data-parallel ranks",
            hint="set train.megatron.use_distributed_optimizer: false",
        )


def _keep_padding(optimizer: Any) -> None:
    """Make the state that the optimizer gathers for a checkpoint lie where it is read.

    Megatron-core 0.16.1 drops the padding between buckets when it gathers the buffers, and
    then cuts parameters out by offsets that include it. With several buckets (tied
    embeddings under pipeline parallelism, overlapped gradient reduction) every parameter
    behind a padded bucket was saved shifted, with no more than a warning about the last one.
    """
    gather = optimizer.get_parameter_state_dp_zero

    def gather_with_padding(*args: Any, **kwargs: Any) -> Any:
        state = gather(*args, **kwargs)
        for number, buffer in enumerate(optimizer.buffers):
            if state is not None and buffer.numel != buffer.numel_unpadded:
                for tensors in state[number].values():
                    for key in ("param", "exp_avg", "exp_avg_sq"):
                        tensors[key] = _spread_buckets(tensors[key], buffer)
        return state

    optimizer.get_parameter_state_dp_zero = gather_with_padding


def _spread_buckets(compact: torch.Tensor, buffer: Any) -> torch.Tensor:
    """The buffer's buckets, back at their own offsets; zeros in the padding."""
    padded = torch.zeros(buffer.numel, dtype=compact.dtype)
    start = 0
    for bucket in buffer.buckets:
        part = compact[start : start + bucket.numel_unpadded]
        padded[bucket.offset : bucket.offset + len(part)] = part
        start += len(part)
    return padded


def build_scheduler(optimizer: Any, train: Update, options: MegatronOptions) -> Any:
    """Learning rate and weight decay as functions of the number of optimizer steps taken.

    Raises ConfigError if the style needs a horizon and there is none, or if the warm-up is
    not shorter than it.
    """
    schedule, config = options.schedule, optimizer.chained_optimizers[0].config
    style = schedule.get("lr_decay_style", "constant")
    horizon = _horizon(train, style=style)
    start = schedule.get("start_weight_decay")
    end = schedule.get("end_weight_decay")
    try:
        return OptimizerParamScheduler(
            optimizer,
            init_lr=schedule.get("lr_warmup_init", 0.0),
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=train.lr_warmup_iters,
            lr_decay_steps=horizon,
            lr_decay_style=style,
            start_wd=config.weight_decay if start is None else start,
            end_wd=config.weight_decay if end is None else end,
            wd_incr_steps=horizon,
            wd_incr_style=schedule.get("weight_decay_incr_style", "constant"),
            wsd_decay_steps=schedule.get("lr_wsd_decay_iters"),
            lr_wsd_decay_style=schedule.get("lr_wsd_decay_style", "exponential"),
        )
    except AssertionError as error:
        raise ConfigError(
            "train.megatron: the schedule is not consistent: 0 <= min_lr <= lr, "
            "lr_warmup_init <= lr, start_weight_decay <= end_weight_decay, and WSD needs "
            "lr_wsd_decay_iters"
        ) from error


def _horizon(train: Update, *, style: str) -> int:
    if style != "constant" and train.lr_decay_iters is None:
        raise ConfigError(
            f"train.megatron.lr_decay_style = {style!r} needs train.lr_decay_iters",
            hint="the horizon in optimizer steps; it stays when the run is extended",
        )
    horizon = train.lr_decay_iters or train.lr_warmup_iters + 1
    if train.lr_warmup_iters >= horizon:
        raise ConfigError(
            f"train.lr_warmup_iters = {train.lr_warmup_iters} is not shorter than "
            f"train.lr_decay_iters = {horizon}"
        )
    return horizon


def current_lr(optimizer: Any) -> float:
    """The learning rate of the next optimizer step."""
    return float(optimizer.param_groups[0]["lr"])
