"""What one micro-batch adds to the loss, and what is reported of it.

Owns the sum that is differentiated and the sums that are shown, for the policy and for the critic.
How log-probabilities come about is `forward.py`'s; the formulas are `algorithms/`'s.

Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slurm_rl.algorithms.distillation import topk_kl
from slurm_rl.algorithms.kl import kl_estimate
from slurm_rl.algorithms.losses import (
    PolicyLoss,
    cispo_loss,
    gspo_loss,
    policy_gradient_loss,
    ppo_clip_loss,
    weighted_sum,
)
from slurm_rl.algorithms.numerics import importance_ratio
from slurm_rl.algorithms.value import value_loss
from slurm_rl.config.train_schema import Critic, Teacher, Train
from slurm_rl.train.batch import MicroBatch

#: Sums over trained tokens, each weighted as the loss is; divided by the denominator.
POLICY_SUMS = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "kl_loss")
#: One more with the KL to a teacher in the loss.
DISTILL_SUM = "distill_loss"
CRITIC_SUMS = ("value_loss", "value_clipfrac", "values", "returns")


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The trained tokens of a micro-batch, as a policy loss sees them: float32[N] each.

    logprobs_N carries the gradient; proximal_N is the policy before the first update, rollout_N the
    engine's. sequence_N int64[N]: which of `num_sequences` samples a token is of.
    """

    logprobs_N: torch.Tensor
    proximal_N: torch.Tensor
    rollout_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_N: torch.Tensor
    num_sequences: int


#: A custom policy loss: the tokens and `train` -> `PolicyLoss`.
CustomLoss = Callable[[PolicyTokens, Train], PolicyLoss]


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The policy's loss: the surrogate, the entropy bonus, the KL to the reference.

    teacher: with `top_logprobs_num`, the KL to it is one more term.
    """

    train: Train
    teacher: Teacher | None = None
    custom: CustomLoss | None = None

    @property
    def distils(self) -> bool:
        return self.teacher is not None and self.teacher.top_logprobs_num is not None

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of what `loss` reports, in order."""
        return (*POLICY_SUMS, DISTILL_SUM) if self.distils else POLICY_SUMS

    def loss(
        self,
        batch: MicroBatch,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        top_logprobs_NK: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The micro-batch's weighted sum of losses, and what to report.

        logprobs_N, entropy_N: of the policy that is trained, with gradient; top_logprobs_NK: its
        log-probabilities of the teacher's likeliest tokens.
        """
        train, arrays = self.train, batch.arrays
        policy = self._surrogate(batch, logprobs_N)
        pg_N = policy.loss_N * arrays["correction"] if "correction" in arrays else policy.loss_N
        total_N = pg_N - train.entropy_coef * entropy_N
        kl_N = torch.zeros_like(pg_N)
        if train.use_kl_loss:
            kl_N = self._kl(batch, logprobs_N)
            total_N = total_N + train.kl_loss_coef * kl_N
        values = [pg_N, policy.clipped_N, arrays["proximal"] - logprobs_N, entropy_N, kl_N]
        if self.teacher is not None and top_logprobs_NK is not None:
            distill_N = topk_kl(
                top_logprobs_NK,
                teacher_logprobs_NK=arrays["top_logprobs"],
                direction=self.teacher.kl_direction,
            )
            total_N = total_N + self.teacher.coef * distill_N
            values.append(distill_N)
        loss = weighted_sum(total_N, weights_N=batch.weights_N)
        return loss, _report([total_N, *values], batch, policy.ratio_N)

    def _surrogate(self, batch: MicroBatch, logprobs_N: torch.Tensor) -> PolicyLoss:
        train = self.train
        advantages_N, proximal_N = batch.arrays["advantages"], batch.arrays["proximal"]
        if self.custom is not None:
            tokens = PolicyTokens(
                logprobs_N,
                proximal_N,
                batch.rollout_N,
                advantages_N,
                batch.sequence_N,
                batch.num_sequences,
            )
            return self.custom(tokens, train)
        fixed = {"proximal_logprobs_N": proximal_N, "advantages_N": advantages_N}
        if train.policy_loss == "pg":
            return policy_gradient_loss(logprobs_N, **fixed)
        low, high = train.eps_clip, train.eps_clip_high
        if train.policy_loss == "cispo":
            return cispo_loss(logprobs_N, **fixed, eps_clip=low, eps_clip_high=high)
        if train.policy_loss == "gspo":
            return gspo_loss(
                logprobs_N,
                **fixed,
                sequence_N=batch.sequence_N,
                num_sequences=batch.num_sequences,
                eps_clip=low,
                eps_clip_high=high,
            )
        return ppo_clip_loss(
            logprobs_N,
            **fixed,
            eps_clip=low,
            eps_clip_high=high,
            eps_clip_c=train.eps_clip_c,
        )

    def _kl(self, batch: MicroBatch, logprobs_N: torch.Tensor) -> torch.Tensor:
        ratio_N = None
        if self.train.use_unbiased_kl:
            ratio_N = importance_ratio(logprobs_N, proximal_logprobs_N=batch.arrays["proximal"])
        return kl_estimate(
            logprobs_N,
            reference_logprobs_N=batch.arrays["reference"],
            kind=self.train.kl_loss_type,
            importance_ratio_N=ratio_N,
        )


@dataclass(frozen=True, slots=True)
class CriticObjective:
    """The critic's loss: the squared distance to the returns, clipped."""

    critic: Critic

    @property
    def sums(self) -> tuple[str, ...]:
        return CRITIC_SUMS

    def loss(
        self, batch: MicroBatch, values_N: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The micro-batch's weighted sum of losses, and what to report."""
        old_N, returns_N = batch.arrays["values"], batch.arrays["returns"]
        found = value_loss(
            values_N,
            proximal_values_N=old_N,
            returns_N=returns_N,
            eps_clip=self.critic.value_clip,
        )
        loss = weighted_sum(found.loss_N, weights_N=batch.weights_N)
        parts = [found.loss_N, found.clipped_N, values_N, returns_N]
        # As a policy's ratio: how far the critic is from itself before its first step.
        return loss, _report(parts, batch, 1.0 + (values_N - old_N).detach())


def _report(values: list[torch.Tensor], batch: MicroBatch, ratio_N: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad():
        sums = torch.stack([weighted_sum(v, weights_N=batch.weights_N) for v in values])
        away_N = (ratio_N - 1.0).abs()
        # A token that counts nothing may hold anything.
        away_N = torch.where(batch.weights_N != 0, away_N, torch.zeros_like(away_N))
        return {"sums": sums, "ratio": away_N.max() if len(away_N) else away_N.new_zeros(())}
