"""Forward and backward passes of micro-batches, by Megatron's schedules.

Owns what a pass takes and gives: this rank's micro-batches, and log-probabilities and entropy of
their trained tokens. The loss is `objective.py`'s, the optimizer's steps are `step.py`'s.

Legend: B samples, R response tokens of the rollout, N trained tokens of a micro-batch, V vocabulary
columns of this tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slurm_rl.config.schema import Train
from slurm_rl.train.batch import (
    MicroBatch,
    Samples,
    conversation_sizes,
    pack_microbatch,
    plan_steps,
    rollout_weights,
)
from slurm_rl.train.vocab_parallel import logprobs_and_entropy


@dataclass(slots=True)
class Engine:
    """What a step works on: Megatron's objects, and the numbers that they go with.

    model: the wrapped model; vocab_size: without padding; temperature: the rollout's;
    per_token: how losses aggregate (`token_weights`).
    """

    model: Any
    optimizer: Any
    scheduler: Any
    vocab_size: int
    temperature: float
    per_token: bool
    optimizer_steps: int = 0


def policy_logprobs(
    engine: Engine, microbatches: list[MicroBatch], *, temperature: float | None = None
) -> list[torch.Tensor]:
    """Log-probabilities float32[N] of each micro-batch's trained tokens, without gradient.

    Logits are divided by `temperature` (None: the rollout's) first. Empty except on the last
    pipeline rank.
    """
    asked = engine if temperature is None else replace(engine, temperature=temperature)

    def report(batch: MicroBatch, logits_bSV: torch.Tensor) -> Any:
        logprobs_N, _ = predict(asked, batch, logits_bSV)
        return logprobs_N.sum(), count(0, logits_bSV), {"logprobs": logprobs_N}

    with torch.no_grad():
        parts = run_microbatches(engine.model, microbatches, report, forward_only=True)
    return [part["logprobs"] for part in parts]


def run_microbatches(
    model: Any,
    microbatches: list[MicroBatch],
    loss: Callable[..., Any],
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Forward (and backward) passes by Megatron's schedule, with pipelines or without.

    `loss(batch, logits_bSV)` gives (sum to differentiate, denominator, report); the reports
    come back in order, on the last pipeline rank.
    """
    # A bfloat16 wrapper would make a float32 copy of all logits; only some are needed.
    extra = {"fp32_output": False} if _is_float16_wrapped(model) else {}

    def forward(batches: Iterator[MicroBatch], module: Any) -> Any:
        batch = next(batches)
        tokens = batch.tokens_bS
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return module(tokens, positions, None, **extra), partial(loss, batch)

    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(microbatches),
        model=[model],
        num_microbatches=len(microbatches),
        # With pipelines the shapes travel along (`variable_seq_lengths`).
        seq_length=microbatches[0].tokens_bS.shape[1],
        micro_batch_size=microbatches[0].tokens_bS.shape[0],
        forward_only=forward_only,
    )
    return reports


def predict(engine: Engine, batch: MicroBatch, logits_bSV: torch.Tensor) -> Any:
    return logprobs_and_entropy(
        logits_bSV.flatten(0, 1).index_select(0, batch.position_N),
        targets_N=batch.targets_N,
        temperature=engine.temperature,
        vocab_size=engine.vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
    )


def pack_own_share(
    engine: Engine, samples: Samples, *, arrays_R: dict[str, torch.Tensor], train: Train
) -> list[list[MicroBatch]]:
    """This data-parallel rank's micro-batches of each optimizer step, on its device."""
    plan = plan_steps(
        conversation_sizes(samples).tolist(),
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        dp_size=parallel_state.get_data_parallel_world_size(),
    )
    weights_R = rollout_weights(samples, per_token=engine.per_token)
    config = engine.model.config
    tp_size = config.tensor_model_parallel_size
    device = torch.cuda.current_device()
    return [
        [
            pack_microbatch(
                samples,
                members,
                arrays_R=arrays_R,
                weights_R=weights_R,
                per_token=engine.per_token,
                length_multiple=tp_size if config.sequence_parallel else 1,
            ).to(device)
            for members in ranks[parallel_state.get_data_parallel_rank()]
        ]
        for ranks in plan
    ]


def _is_float16_wrapped(model: Any) -> bool:
    return type(getattr(model, "module", None)).__name__ == "Float16Module"


def count(value: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int, device=like.device)
