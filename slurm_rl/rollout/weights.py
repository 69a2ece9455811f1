"""The weights that a stage serves: that they are those of the commit, and where they lie.

Owns three checks of one thing. Files: each is read and its digest compared with the commit's, once,
by whoever makes or reuses a copy on the node, else by the stage itself. Label: the engine's affair.
Probe: the log-probs of a fixed text, which the trainer computed when it exported the weights, must
be what the engine computes from what it has loaded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from slurm_rl.errors import CorruptError, EngineError
from slurm_rl.rollout.engine import Engine, Weights
from slurm_rl.rollout.staging import Copies, NoCopy
from slurm_rl.storage.damage import check_inputs
from slurm_rl.types import FileEntry, Input

log = logging.getLogger(__name__)

_FOLDER = "weights/"


@runtime_checkable
class Replicated(Protocol):
    """An engine of several servers, each of which may have loaded something else."""

    async def logprobs_of_each(self, tokens: Sequence[int]) -> list[list[float]]: ...


def describe_weights(source: Input, *, run_id: str) -> Weights:
    """The weights of a commit by its own words; nothing of them is read.

    Raises CorruptError if the commit holds none.
    """
    if f"{_FOLDER}config.json" not in source.files:
        raise CorruptError(f"{source.path}: the commit of {source.kind} holds no weights")
    facts = source.content["weights"]
    return Weights(
        path=Path(source.files[f"{_FOLDER}config.json"]).parent,
        version=facts["version"],
        digest=facts["digest"],
        label=f"{run_id}/v{facts['version']}/{facts['digest']}",
        probe=facts.get("probe"),
    )


def verify_weights(source: Input, *, run_id: str) -> Weights:
    """The weights of a commit, after every file of theirs was read and compared with it.

    Raises CorruptError naming the first file that is missing or differs, and StorageError for one
    that cannot be read.
    """
    weights = describe_weights(source, run_id=run_id)
    check_inputs(source, [entry.path for entry in weight_entries(source)])
    return weights


def weight_entries(source: Input) -> list[FileEntry]:
    """The files of the weights, as committed."""
    return [
        FileEntry(**entry) for entry in source.content["files"] if entry["path"].startswith(_FOLDER)
    ]


@contextmanager
def hold_weights(
    source: Input, *, run_id: str, folder: str | None = None, limit_gb: float | None = None
) -> Iterator[Weights]:
    """Verified weights for as long as they are needed: a copy on this node if `folder` names a
    place for it, else the committed files themselves. See `staging.Copies` for the copy.

    A node that has no room for one, or takes too long, serves the committed files, with a warning.
    Raises as `verify_weights`.
    """
    if folder is None:
        yield verify_weights(source, run_id=run_id)
        return
    weights = describe_weights(source, run_id=run_id)
    entries = weight_entries(source)
    limit_bytes = None if limit_gb is None else int(limit_gb * 1e9)
    copies = Copies(Path(folder), limit_bytes=limit_bytes)
    sources = {e.path.removeprefix(_FOLDER): Path(source.files[e.path]) for e in entries}
    local = [replace(entry, path=entry.path.removeprefix(_FOLDER)) for entry in entries]
    with ExitStack() as stack:
        try:
            path = stack.enter_context(copies.take(sources, local))
            weights = replace(weights, path=path)
        except NoCopy as error:
            log.warning("no copy of the weights here: %s; serves %s", error, weights.path)
            weights = verify_weights(source, run_id=run_id)
        yield weights


async def check_probe(engine: Engine, weights: Weights, *, tolerance: float) -> float | None:
    """The mean gap between the trainer's and the engine's log-probs of the probe; None without one.

    Of several servers each is asked, and the largest gap counts. Raises EngineError if it is above
    `tolerance`, CorruptError if the commit's probe makes no sense.
    """
    if weights.probe is None:
        return None
    tokens, expected = _read_probe(weights)
    if isinstance(engine, Replicated):
        each = await engine.logprobs_of_each(tokens)
    else:
        each = [await engine.logprobs(tokens)]
    gaps = [_mean_gap(found, expected, label=weights.label) for found in each]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    log.info("probe of %s: mean gap %.5f (at most %g)", weights.label, gaps[worst], tolerance)
    if gaps[worst] > tolerance:
        ours, theirs = (sum(values) / len(expected) for values in (each[worst], expected))
        raise EngineError(
            f"the engine does not serve {weights.label}: its log-probs of the probe are"
            f" {ours:.4f} on average, the trainer's were {theirs:.4f}; they differ by"
            f" {gaps[worst]:.4f} a token, and rollout.probe_tolerance = {tolerance:g}",
            hint="other weights were loaded, or the engine computes them otherwise: see its log",
        )
    return gaps[worst]


def _read_probe(weights: Weights) -> tuple[list[int], list[float]]:
    assert weights.probe is not None
    tokens, expected = weights.probe.get("tokens"), weights.probe.get("logprobs")
    if (
        not isinstance(tokens, list)
        or not isinstance(expected, list)
        or len(tokens) < 2
        or len(expected) != len(tokens) - 1
        or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in expected)
    ):
        raise CorruptError(f"{weights.label}: the commit's probe is not tokens and log-probs")
    return tokens, expected


def _mean_gap(found: Sequence[float], expected: Sequence[float], *, label: str) -> float:
    if len(found) != len(expected) or not all(map(math.isfinite, found)):
        raise EngineError(
            f"the engine gave {len(found)} log-probs of the probe of {label}, or some that are not"
            f" finite; {len(expected)} were expected"
        )
    return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(expected)
