"""One iteration of training, from a rollout to updated weights. Read `train_rollout`.

What it does, in order: log-probabilities of the policy before the update (the proximal
policy) and of the reference; advantages; then for each global batch the clipped loss, its
gradient, checks, and one optimizer step. What is left out here: files, commits, ranks
finding each other, how micro-batches are cut (`batch.py`) and run (`forward.py`).

Legend: B samples, R response tokens of the rollout, V vocabulary columns of this tensor rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slurm_rl.config.schema import Train
from slurm_rl.errors import NumericsError
from slurm_rl.train.batch import MicroBatch, Samples
from slurm_rl.train.forward import (
    Engine,
    count,
    pack_own_share,
    policy_logprobs,
    predict,
    run_microbatches,
)
from slurm_rl.train.gap import Gap, check_gap, measure_gap
from slurm_rl.train.objective import SUMS, policy_loss
from slurm_rl.train.optimizer import current_lr
from slurm_rl.train.partial import StepState
from slurm_rl.train.returns import sample_advantages, spread

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
    arrays_R = {"advantages": spread(advantages_B, samples)}
    steps = pack_own_share(engine, samples, arrays_R=arrays_R, train=train)

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

    def loss(batch: MicroBatch, logits_bSV: torch.Tensor) -> Any:
        total, report = policy_loss(batch, *predict(engine, batch, logits_bSV), train=train)
        return total, count(batch.denominator, logits_bSV), report

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
