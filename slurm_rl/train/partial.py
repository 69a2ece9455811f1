"""Saves in the middle of a train stage, so that a kill costs some optimizer steps and not all.

Owns, in the attempt's directory, and only while the stage is at work:

    partial-0002/             after two optimizer steps of this iteration
      checkpoint/             model, optimizer, schedule, random state (`checkpoint.py`)
      before.safetensors      the rollout's log-probabilities from before the first step
    partial-0002.json         published last, by rank 0: what it was made from, files, reports

A later attempt at the same stage, from the same inputs, settings and ranks, goes on from the
newest one that is whole; its bytes in the end are those of a stage that was never killed. A partial
save is never committed: once the stage's own files are durable it is deleted. A crash midway leaves
a folder without its `.json`, which nobody reads.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from slurm_rl.storage.digest import digest_file
from slurm_rl.storage.durable import list_files, write_file
from slurm_rl.train.scopes import megatron_scope
from slurm_rl.train.sealing import seal_shares
from slurm_rl.types import FileEntry, canonical_json

log = logging.getLogger(__name__)

_BEFORE = "before.safetensors"
_NAME = re.compile(r"partial-(\d{4,})\.json")


@dataclass(frozen=True)
class StepState:
    """How far the optimizer steps of an iteration are, and what was computed before the first.

    proximal, reference: float32[R], of the rollout's response tokens in order, the same on every
    rank (of a critic: its values); no reference where none was computed here. reports: one for each
    step that is done.
    """

    proximal: torch.Tensor
    reference: torch.Tensor | None = None
    reports: list[dict[str, float]] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self.reports)


@dataclass(frozen=True, slots=True)
class Partial:
    """A whole partial save. `made_from` digests all that the rest of the stage depends on."""

    folder: str
    made_from: str
    num_ranks: int
    reports: list[dict[str, float]]
    files: list[FileEntry]

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / "checkpoint"


def find_partial(attempts: Iterable[str], *, made_from: str, num_ranks: int) -> Partial | None:
    """The partial save with the most steps among earlier attempts; None if none is of use.

    Only names and sizes are looked at; `read_state` compares digests.
    """
    found = [
        partial
        for attempt in attempts
        for path in sorted(Path(attempt).glob("partial-*.json"))
        if _NAME.fullmatch(path.name) and (partial := _read(path)) is not None
    ]
    fitting = [p for p in found if (p.made_from, p.num_ranks) == (made_from, num_ranks)]
    return max(fitting, key=lambda partial: len(partial.reports), default=None)


def agree_on(found: Partial | None) -> Partial | None:
    """Rank 0's choice, on every rank: another node may see the files later."""
    choice = [found]
    with megatron_scope():
        dist.broadcast_object_list(choice, src=0)
    return choice[0]


def save_state(
    attempt_dir: Path, state: StepState, *, rank: int, num_ranks: int, made_from: str
) -> None:
    """Finish the partial save whose `checkpoint/` was just written; every rank calls it.

    Then the one before it is deleted: its own is enough.
    """
    folder = attempt_dir / f"partial-{state.num_steps:04d}"
    if rank == 0:
        tensors = {"proximal": state.proximal, "reference": state.reference}
        given = {name: values for name, values in tensors.items() if values is not None}
        save_file(given, folder / _BEFORE)
    names = sorted({*list_files(folder), _BEFORE})
    entries = seal_shares(folder, names, rank=rank, num_ranks=num_ranks)
    if rank == 0:
        partial = Partial(str(folder), made_from, num_ranks, state.reports, entries)
        data = canonical_json(dataclasses.asdict(partial))
        write_file(folder.with_suffix(".json"), data)
        _delete_but(attempt_dir, folder.name)


def read_state(partial: Partial, *, rank: int) -> StepState | None:
    """This rank's state, once its share of the files was compared; None if one is damaged."""
    for entry in partial.files[rank :: partial.num_ranks]:
        path = Path(partial.folder) / entry.path
        try:
            matches = digest_file(path) == entry.digest
        except OSError:
            matches = False
        if not matches:
            log.warning("%s is damaged; the stage starts from its inputs", path)
            return None
    tensors = load_file(Path(partial.folder) / _BEFORE)
    return StepState(tensors["proximal"], tensors.get("reference"), list(partial.reports))


def delete_partials(attempt_dir: Path) -> None:
    """The stage's own files are durable: its partial saves are of no more use."""
    _delete_but(attempt_dir, "")


def _delete_but(attempt_dir: Path, kept: str) -> None:
    for path in sorted(attempt_dir.glob("partial-*.json")):
        if path.stem != kept:
            path.unlink(missing_ok=True)  # first: a folder without it is nothing
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)


def _read(path: Path) -> Partial | None:
    try:
        raw = json.loads(path.read_bytes())
        partial = Partial(**(raw | {"files": [FileEntry(**entry) for entry in raw["files"]]}))
        sizes = [(Path(partial.folder) / e.path).stat().st_size for e in partial.files]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return partial if sizes == [entry.size_bytes for entry in partial.files] else None
