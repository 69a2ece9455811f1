"""What an attempt is told: inputs, settings, code, and what earlier attempts left.

An order is written once, durably, in the attempt's directory, before its program starts. The inputs
are leased first, so that nothing deletes them while they are read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rl.chain.observe import read_current
from slurm_rl.errors import CorruptError
from slurm_rl.launch.stage_settings import StageSettings
from slurm_rl.storage.claims import attempt_dir
from slurm_rl.storage.commits import read_commit, resolve_input
from slurm_rl.storage.durable import write_file
from slurm_rl.types import Input, Order, Slot, dump_record, parse_order

if TYPE_CHECKING:
    from slurm_rl.launch.attempt import Attempt


@dataclass(frozen=True)
class Prepared:
    """The order at `path`, and what the attempt's commit will say of it.

    parents: role -> digest of the input. code: names the snapshot of the user's code.
    """

    path: Path
    parents: dict[str, str] = field(default_factory=dict)
    settings_digest: str = ""
    code: str = ""


def prepare_order(attempt: Attempt) -> Prepared:
    """Write the order of an attempt. Raises CorruptError for inputs or code that are damaged."""
    slot, supervisor = attempt.slot, attempt.supervisor
    inputs, versions = _resolve_inputs(attempt)
    parents = _digests_of(inputs)
    settings = _freeze(attempt, supervisor.settle(attempt.control, slot.stage))
    order = Order(
        run_dir=str(attempt.run_dir.root),
        run_id=supervisor.run_id,
        kind=slot.kind,
        iteration=slot.iteration,
        timeline=slot.timeline,
        attempt_dir=str(attempt.folder),
        settings_path=settings.path,
        code_dir=settings.code_dir,
        inputs=inputs,
        shard=slot.shard or 0,
        num_shards=supervisor.chain.graph.node(slot.kind).num_shards,
        earlier_attempts=_earlier_with_same_inputs(attempt, parents),
        versions=versions if settings.same_versions else {},
    )
    path = attempt.folder / "order.json"
    write_file(path, dump_record(order), fs=attempt.run_dir.fs)
    code = Path(settings.code_dir).name
    return Prepared(path, parents, settings.digest, code)


def _resolve_inputs(attempt: Attempt) -> tuple[dict[str, Input], dict[str, str]]:
    """The inputs by role, and the libraries that stages of this kind ran with before."""
    run, chain, control = attempt.run_dir, attempt.supervisor.chain, attempt.control
    inputs: dict[str, Input] = {}
    versions: dict[str, str] = {}
    refs = chain.graph.parents(attempt.slot.stage)
    attempt.lease.take(attempt.slot, refs, control)
    for role, ref in refs.items():
        commit = read_current(run, chain.graph, control, ref)
        if commit is None:
            raise CorruptError(f"{ref}: its commit is gone")
        place = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
        inputs[role] = resolve_input(run, role, ref, place, commit)
        if ref.kind == attempt.slot.kind:
            versions |= commit.provenance.get("versions", {})
    return inputs, versions


def _freeze(attempt: Attempt, settings: StageSettings) -> StageSettings:
    """Shards of a stage share the settings of the first that committed; code may be mended."""
    run, slot = attempt.run_dir, attempt.slot
    num_shards = attempt.supervisor.chain.graph.node(slot.kind).num_shards
    for shard in range(num_shards) if slot.shard is not None else ():
        other = dataclasses.replace(slot, shard=shard)
        commit = read_commit(run, other)
        if commit is not None:
            path = run.slot_dir(other) / str(commit.provenance["attempt"]) / "order.json"
            order = parse_order(run.fs.read(path))
            digest = str(commit.content["settings"])
            return dataclasses.replace(settings, path=order.settings_path, digest=digest)
    return settings


def _earlier_with_same_inputs(attempt: Attempt, parents: dict[str, str]) -> list[str]:
    """Directories of earlier attempts that were made from the same inputs."""
    found = []
    for claim in attempt.earlier:
        folder = attempt_dir(attempt.run_dir, attempt.slot, claim)
        try:
            order = parse_order(attempt.run_dir.fs.read(folder / "order.json"))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # it never got as far as its order
        if _digests_of(order.inputs) == parents:
            found.append(str(folder))
    return found


def _digests_of(inputs: dict[str, Input]) -> dict[str, str]:
    return {role: entry.digest for role, entry in inputs.items()}
