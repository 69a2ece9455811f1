"""One iteration of training, from a rollout to updated weights. Read `train_rollout`.

What it does, in order: log-probabilities of the policy before the update (the proximal
policy) and of the reference; advantages; then for each global batch the clipped loss, its
gradient, checks, and one optimizer step. What is left out here: files, commits, ranks
finding each other, and how micro-batches are cut (`batch.py`).

Legend: B samples, R response tokens of the rollout, N trained tokens of a micro-batch,
V vocabulary columns of this tensor rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slurm_rl.algorithms.losses import kl_estimate, ppo_clip_loss, weighted_sum
from slurm_rl.config.schema import Train
from slurm_rl.errors import NumericsError
from slurm_rl.train.batch import (
    MicroBatch,
    Samples,
    conversation_sizes,
    pack_microbatch,
    plan_steps,
    rollout_weights,
    sample_advantages,
)
from slurm_rl.train.gap import Gap, check_gap, measure_gap
from slurm_rl.train.optimizer import current_lr
from slurm_rl.train.partial import StepState
from slurm_rl.train.vocab_parallel import logprobs_and_entropy

#: Sums over trained tokens, each weighted as the loss is; divided by the denominator.
SUMS = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "kl_loss")


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


#: Computes log-probabilities of micro-batches under another model: the reference.
Reference = Callable[[list[MicroBatch]], list[torch.Tensor]]


# long: one iteration from top to bottom, to be read in one sitting
def train_rollout(
    engine: Engine,
    samples: Samples,
    *,
    train: Train,
    reference: Reference | None = None,
    resumed: StepState | None = None,
    after_step: Callable[[StepState, int], None] = lambda state, num_steps: None,
    first_gap: float | None = None,
) -> dict[str, float]:
    """Train on every sample once; returns metrics under their `train/` names.

    resumed: an earlier process did these optimizer steps, and the engine holds what they made.
    after_step: called with the state after each step, and the number of all steps.
    first_gap: the mean gap of the run's first iteration, None if this is the first (`gap.py`).

    Raises NumericsError before the optimizer steps if a loss or a gradient is not finite, if the
    rollout's log-probs are too far from the policy's, or if the policy, before its first step, is
    not the proximal policy (`train.check_first_ratio`).
    """
    advantages_B = sample_advantages(samples, divide_by_std=train.normalize_advantages_std)
    steps = _pack_own_share(engine, samples, advantages_B=advantages_B, train=train)

    everything = [batch for microbatches in steps for batch in microbatches]
    if resumed is not None:
        state = resumed
    else:
        # The policy before any update: the same micro-batches as in training, so that the first
        # ratio is exactly 1.
        proximal = policy_logprobs(engine, everything)
        state = StepState(proximal, reference(everything) if reference is not None else [])
    _hand_out(state, everything)
    gap = measure_gap(everything)
    check_gap(gap, train=train, first=first_gap)

    loss = partial(_loss, engine=engine, train=train)
    for number, microbatches in enumerate(steps):
        if number < state.num_steps:
            continue
        engine.model.zero_grad_buffer()
        engine.optimizer.zero_grad()
        parts = run_microbatches(engine.model, microbatches, loss)
        report = _reduce_report(parts, microbatches)
        where = f"optimizer step {engine.optimizer_steps + 1}"
        _check_finite(report["loss"], what="the loss", where=where)
        if number == 0:
            _check_first_ratio(report["ratio_max"], limit=train.check_first_ratio, where=where)

        # Megatron steps on a gradient that is not finite unless it scales the loss (fp16).
        engine.optimizer.prepare_grads()
        _check_finite(engine.optimizer.get_grad_norm(), what="the gradient's norm", where=where)
        report["lr"] = current_lr(engine.optimizer)
        _, report["grad_norm"], _ = engine.optimizer.step()
        engine.scheduler.step(increment=1)
        engine.optimizer_steps += 1
        state.reports.append(report)
        after_step(state, len(steps))
    return _summarize(state.reports, gap)


def _hand_out(state: StepState, microbatches: list[MicroBatch]) -> None:
    """Give each micro-batch its log-probabilities from before the first step."""
    if not parallel_state.is_pipeline_last_stage():
        return
    for batch, logprobs_N in zip(microbatches, state.proximal, strict=True):
        batch.proximal_N = logprobs_N.to(batch.tokens_bS.device)
    for batch, logprobs_N in zip(microbatches, state.references, strict=bool(state.references)):
        batch.reference_N = logprobs_N.to(batch.tokens_bS.device)


def policy_logprobs(
    engine: Engine, microbatches: list[MicroBatch], *, temperature: float | None = None
) -> list[torch.Tensor]:
    """Log-probabilities float32[N] of each micro-batch's trained tokens, without gradient.

    Logits are divided by `temperature` (None: the rollout's) first. Empty except on the last
    pipeline rank.
    """
    asked = engine if temperature is None else replace(engine, temperature=temperature)

    def report(batch: MicroBatch, logits_bSV: torch.Tensor) -> Any:
        logprobs_N, _ = _predict(asked, batch, logits_bSV)
        return logprobs_N.sum(), _count(0, logits_bSV), {"logprobs": logprobs_N}

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


def _loss(batch: MicroBatch, logits_bSV: torch.Tensor, *, engine: Engine, train: Train) -> Any:
    """The micro-batch's weighted sum of losses, its denominator, and what to report."""
    assert batch.proximal_N is not None
    logprobs_N, entropy_N = _predict(engine, batch, logits_bSV)
    policy = ppo_clip_loss(
        logprobs_N,
        proximal_logprobs_N=batch.proximal_N,
        advantages_N=batch.advantages_N,
        eps_clip=train.eps_clip,
        eps_clip_high=train.eps_clip_high,
    )
    total_N = policy.loss_N - train.entropy_coef * entropy_N
    kl_N = torch.zeros_like(policy.loss_N)
    if batch.reference_N is not None:
        kl_N = kl_estimate(
            logprobs_N, reference_logprobs_N=batch.reference_N, kind=train.kl_loss_type
        )
        total_N = total_N + train.kl_loss_coef * kl_N
    loss = weighted_sum(total_N, weights_N=batch.weights_N)

    with torch.no_grad():
        values = (
            total_N,
            policy.loss_N,
            policy.clipped_N,
            batch.proximal_N - logprobs_N,
            entropy_N,
            kl_N,
        )
        sums = torch.stack([weighted_sum(v, weights_N=batch.weights_N) for v in values])
        ratio = _max((policy.ratio_N - 1.0).abs())
    return loss, _count(batch.denominator, logits_bSV), {"sums": sums, "ratio": ratio}


def _predict(engine: Engine, batch: MicroBatch, logits_bSV: torch.Tensor) -> Any:
    return logprobs_and_entropy(
        logits_bSV.flatten(0, 1).index_select(0, batch.position_N),
        targets_N=batch.targets_N,
        temperature=engine.temperature,
        vocab_size=engine.vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
    )


def _pack_own_share(
    engine: Engine, samples: Samples, *, advantages_B: torch.Tensor, train: Train
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
                advantages_B=advantages_B,
                weights_R=weights_R,
                per_token=engine.per_token,
                length_multiple=tp_size if config.sequence_parallel else 1,
            ).to(device)
            for members in ranks[parallel_state.get_data_parallel_rank()]
        ]
        for ranks in plan
    ]


def _reduce_report(parts: list[Any], microbatches: list[MicroBatch]) -> dict[str, float]:
    """One report of all ranks; `SUMS` as means over the step's denominator."""
    device = torch.cuda.current_device()
    sums = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=device)
    ratio = torch.zeros((), dtype=torch.float32, device=device)
    # Tensor ranks report the same numbers, and only the last pipeline rank has any.
    if parts and parallel_state.get_tensor_model_parallel_rank() == 0:
        sums[:-1] = torch.stack([part["sums"] for part in parts]).double().sum(0)
        sums[-1] = sum(batch.denominator for batch in microbatches)
        ratio = torch.stack([part["ratio"] for part in parts]).amax()
    dist.all_reduce(sums)
    dist.all_reduce(ratio, op=dist.ReduceOp.MAX)
    denominator = max(float(sums[-1]), 1.0)
    report = {name: float(value) / denominator for name, value in zip(SUMS, sums[:-1], strict=True)}
    return report | {"ratio_max": float(ratio)}


def _summarize(reports: list[dict[str, float]], gap: Gap | None) -> dict[str, float]:
    """Metrics of the iteration: means over its optimizer steps, the gap, the last rate."""
    out = {} if gap is None else gap.metrics()
    for name in (*SUMS, "grad_norm"):
        out[f"train/{name}"] = sum(report[name] for report in reports) / len(reports)
    out["train/first_ratio_diff_max"] = reports[0]["ratio_max"]
    out["train/lr"] = reports[-1]["lr"]
    out["train/num_optimizer_steps"] = float(len(reports))
    return out


def _check_finite(value: Any, *, what: str, where: str) -> None:
    if not math.isfinite(float(value)):
        raise NumericsError(
            f"{what} is {float(value)} at {where}; the optimizer has not taken that step",
            hint="look at the rewards and log-probabilities of this rollout; lower the rate",
        )


def _check_first_ratio(value: float, *, limit: float, where: str) -> None:
    # Written so that NaN fails too.
    if not value <= limit:
        raise NumericsError(
            f"before {where} the policy differs from itself: |ratio - 1| is {value:.3g}, "
            f"train.check_first_ratio allows {limit:.3g}",
            hint="the same model gave other log-probabilities twice: dropout, or a kernel that "
            "is not deterministic",
        )


def _is_float16_wrapped(model: Any) -> bool:
    return type(getattr(model, "module", None)).__name__ == "Float16Module"


def _count(value: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int, device=like.device)


def _max(values_N: torch.Tensor) -> torch.Tensor:
    return values_N.max() if len(values_N) else values_N.new_zeros(())
