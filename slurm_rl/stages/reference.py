"""The reference stage: log-probabilities of a rollout under the policy and under its reference.

Computed once, for everybody who needs them: a KL penalty inside the reward is part of the critic's
targets and of the actor's advantages, and must be the same in both. Where the reference moves, this
stage keeps it, as files of its commit: taken over from the iteration before by hard links, or made
new from the policy's weights.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import moves_reference
from slurm_rl.rollout.samples import TENSORS_NAME, SampleBatch, read_samples
from slurm_rl.stages.rank import current_rank
from slurm_rl.stages.signals import write_signals
from slurm_rl.stages.train import reference_folder
from slurm_rl.stages.training import check_same, check_share, named
from slurm_rl.storage.carry import carry_files
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.digest import digest_entries
from slurm_rl.storage.durable import VISIBLE_S, list_files, seal_files, wait_for_size
from slurm_rl.types import FileEntry, Input, Order, Result

FOLDER = "reference"


def run_reference(order: Order, settings: Settings) -> Result:
    """Score the rollout by both; every rank runs it, rank 0's result holds the files.

    Raises CorruptError for inputs of different histories or damaged ones, ModelError, DataError.
    """
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        from slurm_rl.train.scorer import Scorer

    began = time.monotonic()
    folder, policy = Path(order.attempt_dir), order.input("weights")
    check_same(order, "the policy's version", policy.content["weights"]["version"], order.iteration)
    source, samples = order.input("reference"), read_rollout_samples(order)
    check_same(order, "the rollout's iteration", order.input("rollout").iteration, order.iteration)
    check_share(policy, "weights", settings, "reference")
    kept: list[FileEntry] = []
    name = reference_folder(source)
    with Scorer.open(settings, kind="reference", attempt_dir=folder) as scorer:
        proximal_R = scorer.logprobs(Path(policy.path) / "weights", samples)
        if moves_reference(settings):
            if current_rank(os.environ) == 0:
                kept = _move(order, settings, source)
            kept = scorer.tell(kept)
            for entry in kept:  # another node may see late what rank 0's wrote
                wait_for_size(folder / entry.path, entry.size_bytes, patience_s=VISIBLE_S)
            reference_R = scorer.logprobs(folder / FOLDER, samples)
        else:
            check_share(source, name, settings, "reference")
            reference_R = scorer.logprobs(Path(source.path) / name, samples)
    if current_rank(os.environ) != 0:
        return Result(files=[])
    signals = write_signals(folder, samples, {"proximal": proximal_R, "reference": reference_R})
    content = {"reference": {"digest": digest_entries(kept)}} if kept else {}
    return Result(
        files=sorted([*signals, *kept], key=lambda entry: entry.path),
        content=content,
        metrics={"perf/reference_time": time.monotonic() - began},
    )


def read_rollout_samples(order: Order) -> SampleBatch:
    """Every sample of the order's rollout, compared with its commit. Raises CorruptError."""
    source = order.input("rollout")
    names = [name for name in source.files if name.split("/")[-1] == TENSORS_NAME]
    check_inputs(source, names)
    return read_samples([source.files[name] for name in sorted(names)], with_routing=False)


def _move(order: Order, settings: Settings, before: Input) -> list[FileEntry]:
    """The reference of this iteration as files of this attempt.

    Every n-th iteration the policy's weights, by links; else the last reference, by links; with an
    average, new files.
    """
    folder, policy = Path(order.attempt_dir), order.input("weights")
    interval, decay = settings.reference.update_interval, settings.reference.ema
    is_first = before.kind == "init"
    if interval is not None:
        source = policy if order.iteration % interval == 0 and not is_first else before
        return _carry_as(source, folder)
    if is_first:
        return _carry_as(before, folder)
    assert decay is not None
    from slurm_rl.train.average import average_weights

    check_inputs(before, named(before, f"{FOLDER}/"))
    average_weights(
        Path(before.path) / FOLDER, Path(policy.path) / "weights", folder / FOLDER, decay=decay
    )
    names = [f"{FOLDER}/{name}" for name in list_files(folder / FOLDER)]
    return seal_files(folder, names)


def _carry_as(source: Input, folder: Path) -> list[FileEntry]:
    """The input's weights, as this attempt's reference."""
    name = reference_folder(source)
    return carry_files(source, named(source, f"{name}/"), folder, renamed=(name, FOLDER))
