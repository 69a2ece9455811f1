"""One iteration of updates, from a rollout to changed weights. Read `train_policy`.

What it does, in order: log-probabilities of the policy before the update (the proximal policy) and
of the reference, for the whole rollout; advantages and corrections of them; then, for each epoch
and each global batch, the loss, its gradient, checks, and one optimizer step. `train_critic` is the
same for values. What is left out here: files, commits, ranks finding each other, how micro-batches
are cut (`batch.py`) and run (`forward.py`), and what the loss is (`objective.py`).

Legend: B samples, U conversations, R response tokens of the rollout, N trained tokens of a
micro-batch, n those of this context rank, V vocabulary columns of this tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slurm_rl.config.train_schema import Critic, Teacher, Train, Update
from slurm_rl.seeds import derive_seed
from slurm_rl.train.batch import MicroBatch, Samples, conversation_sizes
from slurm_rl.train.corrections import CustomCorrection, correct
from slurm_rl.train.forward import (
    Engine,
    count,
    own_share,
    policy_logprobs,
    predict,
    reports_here,
    run_microbatches,
)
from slurm_rl.train.gap import check_gap, measure_gap
from slurm_rl.train.guards import check_finite, check_first_kl, check_first_ratio, check_tokens
from slurm_rl.train.objective import CriticObjective, CustomLoss, PolicyObjective
from slurm_rl.train.optimizer import current_lr
from slurm_rl.train.partial import StepState
from slurm_rl.train.returns import Estimator, Signals, estimate, summarize_estimates
from slurm_rl.train.top_logprobs import predict_top
from slurm_rl.train.values import predict_values
from slurm_rl.train.weighting import CustomReducer, loss_weights

#: Computes log-probabilities of micro-batches under another model, the reference; `max_tokens` as
#: in `policy_logprobs`.
Reference = Callable[..., list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The user's own parts of the algorithm, where there are any."""

    advantage: Estimator | None = None
    loss: CustomLoss | None = None
    reducer: CustomReducer | None = None
    correction: CustomCorrection | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """One iteration's work.

    signals: what other stages computed for the samples. attempt_dir: where partial saves of an
    iteration that was `made_from` these inputs go, if the role's `save_steps` asks for them.
    is_first: whether the reference is the policy itself, before its first update. is_supervised:
    whether the samples are answers to be learnt, and not the policy's own.
    """

    samples: Samples
    signals: Signals = field(default_factory=Signals)
    hooks: Hooks = field(default_factory=Hooks)
    attempt_dir: Path | None = None
    made_from: str = ""
    is_first: bool = False
    is_supervised: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """An iteration's work and how far it is; the same for policy and critic.

    seed: of the order of later epochs. resumed: an earlier process did these optimizer steps, and
    the engine holds what they made. after_step: called with the state after each step, and the
    number of all steps.
    """

    work: Work
    seed: int = 0
    resumed: StepState | None = None
    after_step: Callable[[StepState, int], None] = lambda state, num_steps: None


# long: one iteration from top to bottom, to be read in one sitting
def train_policy(
    engine: Engine,
    task: Task,
    *,
    train: Train,
    teacher: Teacher | None = None,
    reference: Reference | None = None,
    first_gap: float | None = None,
) -> dict[str, float]:
    """Update the policy by the rollout; returns metrics under their `train/` names.

    reference: computes the reference's log-probs, if no stage has. first_gap: the mean gap of the
    run's first iteration, None if this is the first (`gap.py`).

    Raises NumericsError before the optimizer steps if a loss or a gradient is not finite, if the
    rollout's log-probs are too far from the policy's, if in iteration 0 the reference is not the
    policy, or if the policy, before its first step, is not the proximal policy.
    """
    if task.work.is_supervised:
        with engine.at_temperature(1.0):
            return train_supervised(engine, task, train=train)
    samples, signals, hooks = task.work.samples, task.work.signals, task.work.hooks
    state = task.resumed or _look_before(engine, task, role=train, reference=reference)
    # What a stage has computed once counts wherever KL does; the ratio is to our own numbers.
    signals = signals.joined(reference=state.reference)
    stored = signals if signals.proximal is not None else signals.joined(proximal=state.proximal)
    signals = signals.joined(proximal=state.proximal)
    gap = measure_gap(samples, state.proximal)
    check_gap(gap, train=train, first=first_gap)
    metrics = {} if gap is None else gap.metrics()
    metrics |= check_first_kl(
        samples, stored, is_own=task.work.is_first, limit=train.check_first_kl
    )

    estimates = estimate(samples, train=train, signals=stored, custom=hooks.advantage)
    metrics |= summarize_estimates(samples, estimates, signals)
    advantages_R = estimates.advantages_R
    if teacher is not None:
        advantages_R = signals.distilled(advantages_R, teacher)
    correction_R, found = correct(samples, signals, train=train, custom=hooks.correction)
    metrics |= found

    arrays_R = {"advantages": advantages_R, "proximal": state.proximal}
    if train.use_kl_loss:
        arrays_R["reference"] = signals.need("reference")
    if correction_R is not None:
        arrays_R["correction"] = correction_R
    objective = PolicyObjective(train, teacher, hooks.loss)
    if objective.distils:
        arrays_R |= {
            "top_ids": signals.need("top_ids"),
            "top_logprobs": signals.need("top_logprobs"),
        }
        check_tokens(arrays_R["top_ids"], below=engine.vocab_size)

    def loss(batch: MicroBatch, logits_1nV: torch.Tensor) -> Any:
        top_NK = predict_top(engine, batch, logits_1nV) if objective.distils else None
        logprobs_N, entropy_N = predict(engine, batch, logits_1nV)
        total, report = objective.loss(batch, logprobs_N, entropy_N, top_NK)
        return total, count(batch.denominator, logits_1nV), report

    updates = _Updates(engine, task, train, objective.sums, loss, train.check_first_ratio)
    return metrics | updates.run(state, arrays_R)


def train_supervised(engine: Engine, task: Task, *, train: Train) -> dict[str, float]:
    """Raise the log-probability of the samples' tokens: supervised fine-tuning.

    The loss is their negative log-probability, at the engine's temperature, aggregated as the
    policy's. Nothing is compared with an engine or a reference. Raises as `train_policy`.
    """
    plain = {"policy_loss": "pg", "use_kl_loss": False, "entropy_coef": 0.0}
    train = train.model_copy(update=plain)
    state = task.resumed or _look_before(engine, task, role=train, reference=None)
    objective = PolicyObjective(train)

    def loss(batch: MicroBatch, logits_1nV: torch.Tensor) -> Any:
        total, report = objective.loss(batch, *predict(engine, batch, logits_1nV))
        return total, count(batch.denominator, logits_1nV), report

    arrays_R = {"advantages": torch.ones_like(state.proximal), "proximal": state.proximal}
    updates = _Updates(engine, task, train, objective.sums, loss, train.check_first_ratio)
    return updates.run(state, arrays_R)


def train_critic(
    engine: Engine, task: Task, *, critic: Critic, returns_R: torch.Tensor
) -> dict[str, float]:
    """Update the critic towards `returns_R`; returns metrics under `train/critic-…`.

    The values before the update are those of its signals. Raises NumericsError as `train_policy`.
    """
    values_R = task.work.signals.need("values")
    state = task.resumed or StepState(proximal=values_R)
    objective = CriticObjective(critic)

    def loss(batch: MicroBatch, out_1n1: torch.Tensor) -> Any:
        total, report = objective.loss(batch, predict_values(batch, out_1n1))
        return total, count(batch.denominator, out_1n1), report

    arrays_R = {"values": state.proximal, "returns": returns_R}
    names = {"phase": "critic_train", "prefix": "train/critic-"}
    limit = FIRST_VALUE_TOLERANCE
    updates = _Updates(engine, task, critic, objective.sums, loss, limit, **names)
    return updates.run(state, arrays_R)


#: Largest |value - value before the update| accepted before the critic's first step.
FIRST_VALUE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class _Updates:
    """The optimizer steps of an iteration: epochs of global batches of micro-batches.

    phase: under which their time is taken. prefix: begins the names of their metrics.
    """

    engine: Engine
    task: Task
    role: Update
    sums: tuple[str, ...]
    loss: Callable[[MicroBatch, torch.Tensor], Any]
    first_limit: float
    phase: str = "actor_train"
    prefix: str = "train/"

    def run(self, state: StepState, arrays_R: dict[str, torch.Tensor]) -> dict[str, float]:
        """Take the steps that `state` has not, each reported in it; the iteration's metrics."""
        with self.engine.meter.phase(self.phase):
            self._take_steps(state, arrays_R)
        return self._summarize(state.reports)

    def _take_steps(self, state: StepState, arrays_R: dict[str, torch.Tensor]) -> None:
        work = self.task.work
        weights_R = loss_weights(work.samples, role=self.role, custom=work.hooks.reducer)
        number = 0
        for epoch in range(self.role.epochs):
            order = epoch_order(work.samples, seed=self.task.seed, epoch=epoch)
            steps = own_share(
                self.engine,
                work.samples,
                arrays_R=arrays_R,
                weights_R=weights_R,
                order=order,
                **batch_sizes(self.role, work.samples),
            )
            for microbatches in steps:
                if number >= state.num_steps:
                    state.reports.append(self._step(microbatches, is_first=number == 0))
                    self.task.after_step(state, len(steps) * self.role.epochs)
                number += 1

    def _step(self, microbatches: list[MicroBatch], *, is_first: bool) -> dict[str, float]:
        engine = self.engine
        engine.model.zero_grad_buffer()
        engine.optimizer.zero_grad()
        parts = run_microbatches(engine.model, microbatches, self.loss)
        report = _reduce_report(parts, microbatches, self.sums)
        where = f"optimizer step {engine.optimizer_steps + 1}"
        check_finite(report[self.sums[0]], what="the loss", where=where)
        if is_first:
            check_first_ratio(report["ratio_max"], limit=self.first_limit, where=where)

        # Megatron steps on a gradient that is not finite unless it scales the loss (fp16).
        engine.optimizer.prepare_grads()
        check_finite(engine.optimizer.get_grad_norm(), what="the gradient's norm", where=where)
        report["lr"] = current_lr(engine.optimizer)
        _, report["grad_norm"], _ = engine.optimizer.step()
        engine.scheduler.step(increment=1)
        engine.optimizer_steps += 1
        return report

    def _summarize(self, reports: list[dict[str, float]]) -> dict[str, float]:
        """Means over the optimizer steps, the last rate."""
        prefix = self.prefix
        out = {
            f"{prefix}{name}": sum(report[name] for report in reports) / len(reports)
            for name in (*self.sums, "grad_norm")
        }
        out[f"{prefix}first_ratio_diff_max"] = reports[0]["ratio_max"]
        out[f"{prefix}lr"] = reports[-1]["lr"]
        out[f"{prefix}num_optimizer_steps"] = float(len(reports))
        return out


def batch_sizes(role: Update, samples: Samples) -> dict[str, Any]:
    """How `own_share` cuts an epoch of these samples."""
    size = role.global_batch_size
    if size is None:
        num = len(conversation_sizes(samples))
        size = -(-num // (role.minibatches or 1))
    return {
        "global_batch_size": size,
        "micro_batch_size": role.micro_batch_size,
        "max_tokens": role.max_tokens_per_gpu,
    }


def steps_per_epoch(role: Update, samples: Samples) -> int:
    """Optimizer steps of one pass over the rollout."""
    num = len(conversation_sizes(samples))
    size: int = batch_sizes(role, samples)["global_batch_size"]
    return -(-num // size)


def epoch_order(samples: Samples, *, seed: int, epoch: int) -> Sequence[int] | None:
    """The conversations' order in an epoch: the rollout's in the first, then drawn by the seed."""
    if epoch == 0:
        return None
    generator = np.random.Generator(np.random.Philox(derive_seed(seed, "epoch", epoch)))
    order: list[int] = generator.permutation(len(conversation_sizes(samples))).tolist()
    return order


def whole_rollout(
    samples: Samples, passes: list[MicroBatch], values: list[torch.Tensor]
) -> torch.Tensor:
    """What the micro-batches of all ranks gave for their trained tokens, as float32[R], on the CPU
    of every rank; 0 where masked.

    values: of this rank's `passes`, which hold the array `index`; empty but on the last pipeline
    rank. Each token is counted by one rank, so that the sum is exact.
    """
    whole_R = torch.zeros(len(samples.loss_mask), device=torch.cuda.current_device())
    if values and reports_here():
        for batch, values_N in zip(passes, values, strict=True):
            whole_R[batch.arrays["index"]] = values_N
    dist.all_reduce(whole_R)
    return whole_R.cpu()


def plan_passes(engine: Engine, samples: Samples, *, role: Update) -> list[MicroBatch]:
    """This rank's micro-batches of the whole rollout for passes without gradient: the same as the
    first epoch's, so that the first ratio is exactly 1."""
    index_R = torch.arange(len(samples.loss_mask))
    steps = own_share(engine, samples, arrays_R={"index": index_R}, **batch_sizes(role, samples))
    return [batch for microbatches in steps for batch in microbatches]


def _look_before(
    engine: Engine, task: Task, *, role: Update, reference: Reference | None
) -> StepState:
    """Log-probabilities from before the first step, of the policy and of the reference."""
    passes = plan_passes(engine, task.work.samples, role=role)
    whole = partial(whole_rollout, task.work.samples, passes)
    budget = role.log_probs_max_tokens_per_gpu
    with engine.meter.phase("log_probs"):
        proximal_R = whole(policy_logprobs(engine, passes, max_tokens=budget))
    known_R = task.work.signals.reference
    if known_R is None and reference is not None:
        with engine.meter.phase("ref_log_probs"):
            known_R = whole(reference(passes, max_tokens=budget))
    return StepState(proximal_R, known_R)


def _reduce_report(
    parts: list[Any], microbatches: list[MicroBatch], names: tuple[str, ...]
) -> dict[str, float]:
    """One report of all ranks; sums as means over the step's denominator."""
    device = torch.cuda.current_device()
    sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
    ratio = torch.zeros((), dtype=torch.float32, device=device)
    if parts and reports_here():
        sums[:-1] = torch.stack([part["sums"] for part in parts]).double().sum(0)
        sums[-1] = sum(batch.denominator for batch in microbatches)
        ratio = torch.stack([part["ratio"] for part in parts]).amax()
    dist.all_reduce(sums)
    dist.all_reduce(ratio, op=dist.ReduceOp.MAX)
    denominator = max(float(sums[-1]), 1.0)
    report = {
        name: float(value) / denominator for name, value in zip(names, sums[:-1], strict=True)
    }
    return report | {"ratio_max": float(ratio)}
