"""Advantages of a whole rollout, one for each response token.

Owns the way from rewards, and from what other stages computed, to the arrays that the loss reads.
Every rank computes them for the whole rollout: whitening and group statistics know no layout, and
actor and critic get the same numbers from the same files.

Samples that are parts of one conversation (`rollout_index`) count as one in their group, with the
mean of their rewards. Estimators by token take each sample as an episode of its own.

Legend: B samples, U conversations, R response tokens of all samples laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slurm_rl.algorithms.advantages import group_advantages, rloo_advantages
from slurm_rl.algorithms.distillation import distillation_advantages
from slurm_rl.algorithms.kl import kl_estimate
from slurm_rl.algorithms.numerics import sequence_of_tokens, sequence_sums
from slurm_rl.algorithms.token_advantages import (
    gae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
    whiten,
)
from slurm_rl.config.train_schema import Teacher, Train
from slurm_rl.errors import ConfigError, CorruptError
from slurm_rl.train.batch import Samples, conversation_sizes


@dataclass(frozen=True, slots=True)
class Signals:
    """What was computed for the response tokens of a rollout, float32[R] each, if it was.

    proximal: log-probs of the policy before its update, in the trainer's numbers; reference: of the
    policy that KL is measured against; teacher: of the teacher, at the sampled tokens; values: the
    critic's before its update. top_ids int64[R, K], top_logprobs float32[R, K]: the teacher's
    likeliest tokens.
    """

    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    values: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def need(self, name: str) -> torch.Tensor:
        """One of them; CorruptError if no stage has computed it."""
        found: torch.Tensor | None = getattr(self, name)
        if found is None:
            raise CorruptError(f"no stage has computed {name} of the rollout's tokens")
        return found

    def joined(self, **others: torch.Tensor | None) -> Signals:
        """The same with `others`, where they are given, in place of what there is."""
        return replace(self, **{name: v for name, v in others.items() if v is not None})

    def distilled(self, advantages_R: torch.Tensor, teacher: Teacher) -> torch.Tensor:
        """Advantages with the distance to the teacher's sampled tokens, or with the top tokens'
        distance a term of the loss, as they are; without the task's rewards if those do not count.
        """
        task_R = advantages_R if teacher.use_rewards else torch.zeros_like(advantages_R)
        if teacher.top_logprobs_num is not None:
            return task_R
        student_R, teacher_R = self.need("proximal"), self.need("teacher")
        return task_R + distillation_advantages(
            student_R, teacher_logprobs_N=teacher_R, coef=teacher.coef
        )


@dataclass(frozen=True, slots=True)
class Episodes:
    """A rollout as an estimator sees it; what a custom one is called with.

    rewards_B float32, lengths_B int64 (response tokens), group_index_B and rollout_index_B int64;
    mask_R uint8; kl_R float32 if a KL penalty is part of the reward, values_R if there is a critic.
    """

    rewards_B: torch.Tensor
    lengths_B: torch.Tensor
    group_index_B: torch.Tensor
    rollout_index_B: torch.Tensor
    mask_R: torch.Tensor
    kl_R: torch.Tensor | None = None
    values_R: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Estimates:
    """advantages_R float32, 0 where masked; returns_R: the critic's targets, with a critic."""

    advantages_R: torch.Tensor
    returns_R: torch.Tensor | None = None


#: A custom estimator: the episodes and `train` -> advantages[R], or (advantages[R], returns[R]).
Estimator = Callable[[Episodes, Train], Any]


def estimate(
    samples: Samples, *, train: Train, signals: Signals, custom: Estimator | None = None
) -> Estimates:
    """Advantages by `train.advantage_estimator`, or by the user's own.

    Raises CorruptError if something that the estimator needs was not computed, and ConfigError if
    the user's own returns something else.
    """
    episodes = read_episodes(samples, train=train, signals=signals)
    if custom is not None:
        found = _checked(custom(episodes, train), episodes)
    elif train.advantage_estimator == "gae":
        found = _gae(episodes, train)
    elif train.advantage_estimator == "reinforce_plus_plus":
        rewards_R = _token_rewards(episodes, train)
        found = Estimates(
            reinforce_plus_plus(
                rewards_R,
                lengths_B=episodes.lengths_B,
                mask_R=episodes.mask_R,
                gamma=train.gamma,
            )
        )
    else:
        found = Estimates(_by_group(samples, episodes, train))
    if train.normalize_advantages and not train.advantage_estimator.startswith("reinforce"):
        return Estimates(whiten(found.advantages_R, mask_R=episodes.mask_R), found.returns_R)
    return found


def read_episodes(samples: Samples, *, train: Train, signals: Signals) -> Episodes:
    """What an estimator is given. Raises CorruptError without the log-probs of a KL penalty."""
    kl_R = None
    if train.kl_coef > 0:
        kl_R = kl_estimate(
            signals.need("proximal"),
            reference_logprobs_N=signals.need("reference"),
            kind=train.kl_reward_type,
        )
    return Episodes(
        rewards_B=torch.from_numpy(samples.rewards),
        lengths_B=torch.from_numpy(samples.response_lengths.astype(np.int64)),
        group_index_B=torch.from_numpy(samples.group_index),
        rollout_index_B=torch.from_numpy(samples.rollout_index),
        mask_R=torch.from_numpy(samples.loss_mask),
        kl_R=kl_R,
        values_R=signals.values,
    )


def summarize_estimates(
    samples: Samples, estimates: Estimates, signals: Signals
) -> dict[str, float]:
    """Means over the trained tokens, under slime's names."""
    trained_R = torch.from_numpy(samples.loss_mask) != 0
    found = {
        "log_probs": signals.proximal,
        "ref_log_probs": signals.reference,
        "teacher_log_probs": signals.teacher,
        "advantages": estimates.advantages_R,
        "returns": estimates.returns_R,
        "values": signals.values,
    }
    return {
        f"rollout/{name}": float(values_R[trained_R].double().mean())
        for name, values_R in found.items()
        if values_R is not None and bool(trained_R.any())
    }


def spread(values_B: torch.Tensor, samples: Samples) -> torch.Tensor:
    """One value a sample as one a response token, [R]."""
    return values_B.repeat_interleave(torch.from_numpy(samples.response_lengths.astype(np.int64)))


def _by_group(samples: Samples, episodes: Episodes, train: Train) -> torch.Tensor:
    """Estimators that compare the conversations of one prompt."""
    sizes_U = conversation_sizes(samples)
    starts_U = np.cumsum(sizes_U) - sizes_U
    rewards = _sample_rewards(episodes, train).numpy()
    rewards_U = torch.from_numpy(np.add.reduceat(rewards, starts_U) / sizes_U.astype(np.float32))
    group_U = episodes.group_index_B[starts_U]
    lengths_U = torch.from_numpy(np.add.reduceat(episodes.lengths_B.numpy(), starts_U))
    if train.advantage_estimator == "reinforce_plus_plus_baseline":
        return reinforce_plus_plus_baseline(
            rewards_U, group_index_B=group_U, lengths_B=lengths_U, mask_R=episodes.mask_R
        )
    if train.advantage_estimator == "rloo":
        advantages_U = rloo_advantages(rewards_U, group_index_B=group_U)
    else:
        std = train.normalize_advantages_std
        advantages_U = group_advantages(rewards_U, group_index_B=group_U, divide_by_std=std)
    return advantages_U.repeat_interleave(lengths_U)


def _sample_rewards(episodes: Episodes, train: Train) -> torch.Tensor:
    """Each sample's reward, less its whole KL penalty."""
    if episodes.kl_R is None:
        return episodes.rewards_B
    sample_R = sequence_of_tokens(episodes.lengths_B, num_tokens=len(episodes.mask_R))
    trained_R = torch.where(episodes.mask_R != 0, episodes.kl_R, 0.0)
    number = len(episodes.lengths_B)
    kl_B = sequence_sums(trained_R, sequence_N=sample_R, num_sequences=number)
    return episodes.rewards_B - train.kl_coef * kl_B.to(torch.float32)


def _token_rewards(episodes: Episodes, train: Train) -> torch.Tensor:
    return token_rewards(
        episodes.rewards_B,
        lengths_B=episodes.lengths_B,
        mask_R=episodes.mask_R,
        kl_R=episodes.kl_R,
        kl_coef=train.kl_coef,
    )


def _gae(episodes: Episodes, train: Train) -> Estimates:
    if episodes.values_R is None:
        raise CorruptError("gae needs a critic's values, and no stage computed them")
    advantages_R, returns_R = gae(
        _token_rewards(episodes, train),
        values_R=episodes.values_R,
        lengths_B=episodes.lengths_B,
        mask_R=episodes.mask_R,
        gamma=train.gamma,
        lambd=train.lambd,
    )
    return Estimates(advantages_R, returns_R)


def _checked(made: Any, episodes: Episodes) -> Estimates:
    parts = made if isinstance(made, tuple) else (made,)
    shape = episodes.mask_R.shape
    fits = all(torch.is_tensor(part) and part.shape == shape for part in parts)
    if not fits or len(parts) not in (1, 2):
        raise ConfigError(
            f"train.custom_advantage_path returned {_describe(made)}, not float[{shape[0]}]",
            hint="one advantage for each response token; with a critic (advantages, returns)",
        )
    if episodes.values_R is not None and len(parts) == 1:
        raise ConfigError(
            "train.custom_advantage_path returned no targets for the critic",
            hint="return (advantages, returns)",
        )
    return Estimates(*(part.detach().to(torch.float32) for part in parts))


def _describe(made: Any) -> str:
    return f"a tensor of {tuple(made.shape)}" if torch.is_tensor(made) else type(made).__name__
