"""The algorithms whose learning curves are shown, and with which settings.

Pure. What a setting does is in docs/configuration.md; here is what differs from the quickstart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: The mean reward of a rollout that a run is to reach.
TARGET = 0.9
SEEDS = (1, 2, 3)
#: What all runs have in place of the quickstart's: a quarter of the samples, half the rate.
SHARED = (
    "rollout.rollout_batch_size=64",
    "rollout.n_samples_per_prompt=8",
    "train.global_batch_size=64",
    "train.megatron.lr=2.5e-3",
)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """settings: what differs from the shared ones, as for `slurm-rl submit --set`; in them
    `{teacher}` stands for a model that was trained before. budget: updates in which the target is
    to be reached."""

    name: str
    settings: tuple[str, ...] = ()
    budget: int = 40

    def overrides(self, *, seed: int, folder: Path, teacher: Path) -> list[str]:
        """All settings of a run in `folder`. One rollout more than updates: it shows the last."""
        own = [item.replace("{teacher}", str(teacher)) for item in self.settings]
        run = [f"seed={seed}", f"run.dir={folder}", f"num_rollout={self.budget + 1}"]
        return [*SHARED, *own, *run]

    def recorded(self) -> list[str]:
        """What a run's rewards depend on besides its seed."""
        return [*SHARED, *self.settings]

    @property
    def has_teacher(self) -> bool:
        return any("{teacher}" in item for item in self.settings)


_CRITIC = (
    "train.advantage_estimator=gae",
    "train.lambd=0.95",
    "train.normalize_advantages=true",
    "critic.global_batch_size=64",
    "critic.micro_batch_size=64",
    "critic.megatron.lr=5e-3",
    "critic.megatron.clip_grad=1.0",
)
_DISTILLATION = ("teacher.hf_checkpoint={teacher}", "teacher.use_rewards=false")

#: The first is also what the teacher of the distillations is trained by.
ALGORITHMS = (
    Algorithm("grpo"),
    Algorithm(
        "dr_grpo",
        (
            "train.normalize_advantages_std=false",
            "train.loss_aggregation=constant",
            "train.loss_constant_length=2",
        ),
    ),
    Algorithm(
        "dapo",
        (
            "train.loss_aggregation=token",
            "train.eps_clip_high=0.28",
            "rollout.dynamic_sampling_filter_path=nonzero_std",
        ),
    ),
    Algorithm("rloo", ("train.advantage_estimator=rloo",)),
    Algorithm("reinforce_plus_plus", ("train.advantage_estimator=reinforce_plus_plus",)),
    Algorithm(
        "reinforce_plus_plus_baseline",
        ("train.advantage_estimator=reinforce_plus_plus_baseline",),
    ),
    Algorithm(
        "gspo", ("train.policy_loss=gspo", "train.eps_clip=3e-4", "train.eps_clip_high=4e-4")
    ),
    Algorithm(
        "cispo", ("train.policy_loss=cispo", "train.eps_clip=1.0", "train.eps_clip_high=3.0")
    ),
    Algorithm("pg", ("train.policy_loss=pg",)),
    Algorithm("ppo", _CRITIC),
    Algorithm("ppo_kl_reward", (*_CRITIC, "train.kl_coef=0.01")),
    Algorithm("grpo_kl_loss", ("train.use_kl_loss=true", "train.kl_loss_coef=0.01")),
    Algorithm("distillation", _DISTILLATION),
    Algorithm("distillation_top_k", (*_DISTILLATION, "teacher.top_logprobs_num=4")),
    Algorithm("lag_tis", ("chain.lag=1", "train.use_tis=true", "train.megatron.lr=1.25e-3")),
    Algorithm(
        "epochs",
        ("train.global_batch_size=null", "train.minibatches=4", "train.epochs=2"),
    ),
)
NAMES = tuple(algorithm.name for algorithm in ALGORITHMS)
