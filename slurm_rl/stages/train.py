"""The train stage: rollout and checkpoint in, checkpoint and weights out.

Owns what stands between the policy's trainer and the commits: which samples and signals it gets,
the continuity of versions and data cursor, and the commit's content. In the critic's warm-up it
carries the policy forward: the same files under the next version. In one long-lived process,
`open_trainer` once and `train_iteration` for each order do the same as `run_train` does in
processes of their own.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_rl.config.derive import admission
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import is_supervised, moves_reference, uses_reference
from slurm_rl.errors import CorruptError
from slurm_rl.stages.hooks import read_hooks
from slurm_rl.stages.rank import current_rank
from slurm_rl.stages.signals import read_signals
from slurm_rl.stages.train_samples import read_batch, served_version
from slurm_rl.stages.training import (
    check_same,
    check_share,
    check_versions_follow,
    made_from,
    named,
    open_role,
    run_role,
    save_role,
)
from slurm_rl.storage.carry import carry_files
from slurm_rl.types import UNUSUAL, Input, Order, Result

if TYPE_CHECKING:
    from slurm_rl.train.trainer import Trainer


def run_train(order: Order, settings: Settings) -> Result:
    """One iteration in a process of its own; every rank runs it.

    Rank 0's result holds the files of all ranks; the others' hold none. Raises what
    `open_trainer` and `train_iteration` raise; on disk are then files that nothing names.
    """
    if is_warm_up(order, settings):
        return carry_policy(order, settings)
    return run_role(order, settings, "train", train_iteration)


def open_trainer(order: Order, settings: Settings) -> Trainer:
    """The policy's trainer, with what the order continues from (`training.open_role`)."""
    return open_role(order, settings, "train")


def train_iteration(trainer: Trainer, order: Order) -> Result:
    """Train on the order's rollout with an open trainer; save; describe the commit.

    Raises CorruptError if the order does not continue where the trainer is, or if its inputs
    are of different histories; NumericsError and DataError as the trainer does.
    """
    from slurm_rl.train.step import Work

    settings, before = trainer.settings, order.input("checkpoint").content
    _check_continuity(trainer, order)
    batch = read_batch(order, settings)
    signals = read_signals(order, batch.samples)
    work = Work(
        batch.samples,
        signals=signals,
        hooks=read_hooks(settings),
        attempt_dir=Path(order.attempt_dir),
        made_from=made_from(order, settings),
        is_first=_is_own_reference(order, settings),
        is_supervised=is_supervised(settings, order.iteration),
    )
    metrics = trainer.step(
        work,
        reference_dir=_reference_dir(order, trainer) if signals.reference is None else None,
        first_gap=before.get("logprob_gap_first"),
    )
    probe = trainer.probe()
    saved = save_role(trainer, order)
    saved.content["weights"] |= {"probe": probe}
    return dataclasses.replace(
        saved,
        content={
            **saved.content,
            "logprob_gap_first": _first_gap(before.get("logprob_gap_first"), metrics),
            "cursor": order.input("rollout").content.get("cursor", {}),
            **({UNUSUAL: "supervised"} if work.is_supervised else {}),
        },
        metrics=metrics | batch.metrics() | saved.metrics,
    )


def is_warm_up(order: Order, settings: Settings) -> bool:
    """Whether the critic alone is trained in this iteration."""
    critic = settings.critic
    return critic is not None and order.iteration < critic.warmup_iterations


def carry_policy(order: Order, settings: Settings) -> Result:
    """The policy as it is, under the next version; the commit says since when it stands.

    Raises CorruptError if the inputs are of different histories.
    """
    if current_rank(os.environ) != 0:
        return Result(files=[])
    source = order.input("checkpoint")
    content, folder = source.content, Path(order.attempt_dir)
    check_same(order, "the checkpoint's version", content["weights"]["version"], order.iteration)
    _check_rollout(order, settings)
    names = [*named(source, "checkpoint/"), *named(source, "weights/")]
    kept = ("lr", "optimizer_steps", "schedule_step", "num_samples_trained", "logprob_gap_first")
    return Result(
        files=carry_files(source, names, folder),
        content={
            **{name: content[name] for name in kept if name in content},
            "weights": {**content["weights"], "version": order.iteration + 1},
            "carried_since": content.get("carried_since", order.iteration),
            UNUSUAL: "carried",
            "cursor": order.input("rollout").content.get("cursor", {}),
        },
        metrics={"train/carried": 1.0},
    )


def _check_continuity(trainer: Trainer, order: Order) -> None:
    """The trainer must stand where the order continues, and the rollout be made from it."""
    check_versions_follow(trainer, order)
    _check_rollout(order, trainer.settings)


def _check_rollout(order: Order, settings: Settings) -> None:
    source, rollout = order.input("checkpoint"), order.input("rollout")
    before, used = source.content["weights"], rollout.content["weights"]
    for what, is_now, should_be in (
        ("the rollout's iteration", rollout.iteration, order.iteration),
        ("the rollout's weights version", used["version"], served_version(order, settings)),
        (
            "the rollout's weights digest",
            used["digest"] if used["version"] == before["version"] else before["digest"],
            before["digest"],
        ),
    ):
        check_same(order, what, is_now, should_be)
    is_labelled = rollout.content.get(UNUSUAL) == "supervised"
    wanted = is_supervised(settings, order.iteration)
    check_same(order, "the rollout's being made of labels", is_labelled, wanted)
    cursors = source.content.get("cursor"), rollout.content.get("cursor")
    _check_cursor(*cursors, order, may_stay=admission(settings) == "arrival")


def _check_cursor(before: Any, after: Any, order: Order, *, may_stay: bool) -> None:
    """Data must move on: never the same prompts again, never those of another data set.

    may_stay: a batch may be made of carried-over groups alone.
    """
    if not before or not after:
        return
    visits = [int(cursor["visits"]) for cursor in (before, after)]
    if visits[1] < visits[0] or (visits[1] == visits[0] and not may_stay):
        raise CorruptError(
            f"train {order.iteration}: the data cursor went from visit {visits[0]} to {visits[1]}; "
            "it must move on"
        )
    prints = [cursor.get("data_fingerprint") for cursor in (before, after)]
    if prints[0] != prints[1]:
        raise CorruptError(
            f"train {order.iteration}: the data set changed from {prints[0]} to {prints[1]}"
        )


def _is_own_reference(order: Order, settings: Settings) -> bool:
    """Whether the reference is the policy itself, which has not been updated yet."""
    own = settings.reference.hf_checkpoint is None and not moves_reference(settings)
    # Behind a warm-up, or at the start: the policy is still what it began as.
    carried = order.input("checkpoint").content.get("carried_since") == 0
    return own and (order.iteration == 0 or carried)


def _reference_dir(order: Order, trainer: Trainer) -> Path | None:
    """The weights of a fixed reference, from the init stage."""
    if not uses_reference(trainer.settings):
        return None
    source = order.input("reference")
    folder = reference_folder(source)
    check_share(source, folder, trainer.settings, "train")
    return Path(source.path) / folder


def reference_folder(source: Input) -> str:
    """Where a commit has the reference's weights: a model of its own, or the first policy."""
    return "reference" if named(source, "reference/") else "weights"


def _first_gap(before: float | None, metrics: dict[str, float]) -> float | None:
    """What `logprob_gap_first` of the commit is: the first iteration's, handed on for ever."""
    from slurm_rl.train.gap import NAME

    if before is not None or NAME not in metrics:
        return before
    return float(f"{metrics[NAME]:.6g}")
