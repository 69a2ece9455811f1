"""The critic stage: values of a rollout by the critic as it is, then the critic's own update.

Reads the rollout (with its scores, and the KL penalty that is part of the reward), and the critic
that the last commit names. Publishes the values of the rollout's tokens, from before the update,
beside checkpoint and weights from after it: the train stage of the iteration reads the former, the
critic stage of the next one the latter.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rl.config.schema import Settings
from slurm_rl.stages.hooks import read_hooks
from slurm_rl.stages.signals import read_signals, write_signals
from slurm_rl.stages.train_samples import read_batch
from slurm_rl.stages.training import (
    check_same,
    check_versions_follow,
    made_from,
    run_role,
    save_role,
)
from slurm_rl.types import Order, Result

if TYPE_CHECKING:
    from slurm_rl.train.trainer import Trainer


def run_critic(order: Order, settings: Settings) -> Result:
    """One iteration in a process of its own; every rank runs it. Rank 0's result holds the files.

    Raises what `open_role` and `critic_iteration` raise; on disk are then files that nothing names.
    """
    return run_role(order, settings, "critic", critic_iteration)


def critic_iteration(trainer: Trainer, order: Order) -> Result:
    """Values, update, save, and the content of the commit, with an open trainer.

    Raises CorruptError if the order does not continue where the critic is, or if its inputs are of
    different histories; NumericsError and DataError as the trainer does.
    """
    from slurm_rl.train.returns import estimate
    from slurm_rl.train.step import Work

    settings, folder = trainer.settings, Path(order.attempt_dir)
    check_versions_follow(trainer, order)
    check_same(order, "the rollout's iteration", order.input("rollout").iteration, order.iteration)
    batch, hooks = read_batch(order, settings), read_hooks(settings)
    signals = read_signals(order, batch.samples)
    # What an earlier attempt computed, if this one goes on from it: the critic has moved since.
    before = trainer.take_state()
    values_R = trainer.values(batch.samples) if before is None else before.proximal
    signals = signals.joined(values=values_R)
    targets = estimate(batch.samples, train=settings.train, signals=signals, custom=hooks.advantage)
    assert targets.returns_R is not None
    work = Work(
        batch.samples,
        signals=signals,
        # The reducer is the policy loss's; the critic has a `loss_aggregation` of its own.
        hooks=dataclasses.replace(hooks, reducer=None),
        attempt_dir=folder,
        made_from=made_from(order, settings),
    )
    metrics = trainer.step_critic(work, targets.returns_R)
    saved = save_role(trainer, order)
    if not saved.files:
        return saved
    files = [*saved.files, *write_signals(folder, batch.samples, {"values": values_R})]
    return dataclasses.replace(
        saved, files=sorted(files, key=lambda entry: entry.path), metrics=metrics | saved.metrics
    )
