"""The samples that a train stage works on: rollout and scores, compared with their commits.

Owns which samples are trained on, and with which rewards and versions. It refuses samples of other
weights, tokens that no setting allows, and samples without a reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_rl.config.schema import Settings
from slurm_rl.errors import CorruptError, DataError
from slurm_rl.rollout.samples import TENSORS_NAME, SampleBatch, read_samples
from slurm_rl.rollout.scores import SCORES_NAME, apply_scores, drop_ungraded, read_scores
from slurm_rl.storage.damage import check_inputs
from slurm_rl.types import Input, Order

_CHANGED_HINT = (
    "if the setting was changed after the rollout, make that again: `slurm-rl retry RUN -i N "
    "--stage rollout`"
)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples to train on, and how many groups the score stage gave up."""

    samples: SampleBatch
    num_dropped: int = 0

    def metrics(self) -> dict[str, float]:
        samples = self.samples
        return {
            "rollout/raw_reward": float(samples.rewards.mean()),
            "rollout/response_len": float(samples.response_lengths.mean()),
            "rollout/truncated_ratio": float(samples.truncated.mean()),
            "train/groups_dropped": float(self.num_dropped),
        }


def read_batch(order: Order, settings: Settings) -> Batch:
    """What the order's rollout and scores hold.

    Raises CorruptError (a file is not what was committed; a version, token or score that cannot
    be) and DataError (a sample has no reward, or no group is left).
    """
    is_replayed = order.kind == "train" and settings.rollout.use_rollout_routing_replay
    paths = _checked(order.input("rollout"), TENSORS_NAME)
    samples = read_samples(paths, with_routing=is_replayed)
    check_token_versions(samples, order, settings)
    num_dropped = 0
    if "score" in order.inputs:
        source = order.input("score")
        _check_parent(source, order)
        scored = apply_scores(samples, read_scores(_checked(source, SCORES_NAME)))
        samples, num_dropped = drop_ungraded(scored)
        if not len(samples):
            raise DataError(
                f"{order.kind} {order.iteration}: the score stage gave up all {num_dropped} groups",
                hint="mend the reward or its service, then `slurm-rl retry RUN -i "
                f"{order.iteration} --stage score`",
            )
    _check_rewards(samples, order)
    return Batch(samples, num_dropped)


def served_version(order: Order, settings: Settings) -> int:
    """The version that the rollout had to serve: the one that is trained, or `lag` before it."""
    return max(0, order.iteration - settings.chain.lag)


def check_token_versions(samples: SampleBatch, order: Order, settings: Settings) -> None:
    """CorruptError unless every sample is of the served weights, and every token of those or of
    earlier ones that a partial rollout may have brought along."""
    served, rollout = served_version(order, settings), settings.rollout
    versions = sorted(set(samples.weights_version.tolist()))
    if versions and versions != [served]:
        raise CorruptError(
            f"{order.kind} {order.iteration}: samples of weights versions {versions}, not {served}"
        )
    where = f"{order.kind} {order.iteration}: "
    newest = int(samples.token_versions.max(initial=served))
    if newest > served:
        raise CorruptError(f"{where}tokens of weights version {newest}, newer than {served}")
    older = samples.token_versions < served
    if older.any() and not rollout.partial_rollout:
        oldest = int(samples.token_versions.min())
        raise CorruptError(
            f"{where}tokens of weights version {oldest}, older than {served}, but "
            "rollout.partial_rollout = false allows none",
            hint=_CHANGED_HINT,
        )
    unmasked = int((older & (samples.loss_mask != 0)).sum())
    if unmasked and rollout.mask_offpolicy_in_partial_rollout:
        raise CorruptError(
            f"{where}{unmasked} tokens of earlier weights are not masked, but "
            "rollout.mask_offpolicy_in_partial_rollout = true",
            hint=_CHANGED_HINT,
        )


def _checked(source: Input, name: str) -> list[str]:
    """Paths of the input's files called `name`, each compared with its commit."""
    check_inputs(source, [path for path in source.files if path.split("/")[-1] == name])
    return source.named(name)


def _check_parent(source: Input, order: Order) -> None:
    rollout = order.input("rollout")
    scored = source.content.get("parents", {}).get("rollout")
    if scored != rollout.digest:
        raise CorruptError(
            f"{order.kind} {order.iteration}: the scores are of rollout {scored}, not "
            f"{rollout.digest}"
        )


def _check_rewards(samples: SampleBatch, order: Order) -> None:
    missing = np.flatnonzero(np.isnan(samples.rewards))
    if len(missing):
        first = missing[0]
        raise DataError(
            f"{order.kind} {order.iteration}: sample {samples.sample_index[first]} of group "
            f"{samples.group_index[first]} has no reward, and no score stage gave it one",
            hint="a reward returned NaN; or score.enabled was not set when the run was made",
        )
