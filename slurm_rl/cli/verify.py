"""verify and path: what is committed, whether it is whole, and where it lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from slurm_rl.chain.evals import read_evals
from slurm_rl.chain.observe import find_head, read_current, was_unasked
from slurm_rl.cli.runs import check_iteration, find_run
from slurm_rl.cli.terminal import format_bytes, say
from slurm_rl.errors import CorruptError, NoRunError, NothingDone, PrunedError
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.commits import file_path, find_damage, find_stage_commit
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.tombstones import explain_pruned, is_pruned, read_pruned
from slurm_rl.types import Commit, Slot, StageRef

#: What `slurm-rl path` can name, and the stage that makes it.
_OUTPUTS = {
    "weights": "train",
    "checkpoint": "train",
    "samples": "rollout",
    "critic": "critic",
}
#: Where in an attempt's directory it lies, if not under its own name.
_FOLDERS = {"critic": "weights"}


def verify_run(path: Path, *, iteration: int | None) -> None:
    """Re-read every committed file, and write none. Raises CorruptError naming all damage."""
    opened = find_run(path)
    control = read_control(opened.run)
    # What is evaluated of the last weights has their number.
    of: Literal["iteration", "version"] = "version" if opened.chain.graph.evals else "iteration"
    check_iteration(opened.chain.graph, iteration, of=of)
    iterations = [iteration] if iteration is not None else range(_last_iteration(opened) + 1)
    damage: list[str] = []
    num_commits = size_bytes = num_pruned = 0
    for i in iterations:
        for ref in _stages_of(opened, control, i):
            found, size = _verify_stage(opened, control, ref, damage)
            slot = Slot(i, ref.kind, control.timeline_of(ref))
            was_pruned = found and is_pruned(opened.run, slot)
            num_commits, num_pruned = num_commits + found, num_pruned + was_pruned
            size_bytes += 0 if was_pruned else size
    if damage:
        shown = "\n  ".join(damage)
        raise CorruptError(f"{opened.run.root}: {len(damage)} damaged:\n  {shown}")
    pruned = f"; the files of {num_pruned} were pruned by retention" if num_pruned else ""
    size_text = format_bytes(size_bytes)
    say(f"{opened.run.root}: {num_commits} commits, {size_text}, all as committed{pruned}")


def _last_iteration(opened: OpenRun) -> int:
    """The last one that has a folder. The first that is not complete may lie far before: of a
    COMMIT that is gone, what was made from it tells."""
    names = opened.run.fs.list(opened.run.root / "iterations")
    found = [int(name) for name in names if name.isdecimal()]
    return min(max(found, default=0), opened.chain.graph.num_iterations)


def _stages_of(opened: OpenRun, control: Control, iteration: int) -> list[StageRef]:
    """Stages of an iteration, and evaluations of the weights that it starts from."""
    graph = opened.chain.graph
    is_one = iteration < graph.num_iterations
    stages = [StageRef(iteration, node.kind) for node in graph.stages(iteration) if is_one]
    evals = read_evals(opened.run, graph, control, head=iteration)
    return [*stages, *evals.wanted(iteration, iteration)]


def _verify_stage(
    opened: OpenRun, control: Control, ref: StageRef, damage: list[str]
) -> tuple[int, int]:
    """(1 if there is a commit, bytes it names); appends what is wrong to `damage`."""
    try:
        commit, is_assembled = _read_whole(opened, control, ref)
        if commit is None:
            return 0, 0
        if not is_assembled:
            say(f"{ref}: all its shards are committed, not assembled yet; its next reader does it")
        damage += _find_orphaned(opened, control, ref, commit)
    except CorruptError as error:
        damage.append(str(error))
        return 1, 0
    slot = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
    damage += find_damage(opened.run, slot, commit)
    return 1, sum(entry.size_bytes for entry in commit.files)


def _find_orphaned(
    opened: OpenRun, control: Control, ref: StageRef, commit: Commit
) -> Iterator[str]:
    """What the commit was made from and is not there as it was. Retention deletes files and leaves
    every COMMIT, and a rewind sets aside all that follows: so each parent must be there."""
    for role, parent in opened.chain.graph.parents(ref).items():
        current, _ = _read_whole(opened, control, parent)
        if current is None:
            yield f"{ref}: its {role} was made by {parent}, whose COMMIT is gone"
        elif was_unasked(commit, role, parent):
            continue
        elif commit.parents.get(role) != current.digest:
            yield f"{ref}: its {role} is not the current commit of {parent}"


def _read_whole(opened: OpenRun, control: Control, ref: StageRef) -> tuple[Commit | None, bool]:
    """The commit of a whole stage on its current timeline, and whether it is published as such."""
    stage = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
    num_shards = opened.chain.graph.node(ref.kind).num_shards
    return find_stage_commit(opened.run, stage, num_shards=num_shards)


def print_path(path: Path, what: str, *, iteration: int | None) -> None:
    """Print one path and nothing else, for use in a shell."""
    opened = find_run(path)
    if what == "run":
        say(str(opened.run.root))
        return
    control = read_control(opened.run)
    say(str(find_output(opened, control, what, iteration)))


def find_output(opened: OpenRun, control: Control, what: str, iteration: int | None = None) -> Path:
    """Where the committed `what` of an iteration lies; the newest if None."""
    if what not in _OUTPUTS:
        raise NoRunError(f"{what!r} is not one of {', '.join([*_OUTPUTS, 'run'])}")
    graph = opened.chain.graph
    check_iteration(graph, iteration)
    if iteration is None:
        iteration = min(find_head(opened.run, graph, control), graph.num_iterations - 1)
        candidates = [iteration, iteration - 1]
    else:
        candidates = [iteration]
    if _OUTPUTS[what] not in [node.kind for node in graph.stages(0)]:
        raise NoRunError(f"{opened.run.root}: a run without a {_OUTPUTS[what]} stage has no {what}")
    for i in candidates:
        ref = StageRef(i, _OUTPUTS[what])
        commit = read_current(opened.run, graph, control, ref) if i >= 0 else None
        if commit is not None:
            slot = Slot(i, ref.kind, control.timeline_of(ref))
            pruned = read_pruned(opened.run, slot)
            if pruned is not None:
                raise PrunedError(f"{ref}: {explain_pruned(opened.run, slot, pruned)}")
            found = file_path(opened.run, slot, commit, commit.files[0].path).parent
            if what != "samples":
                found = opened.run.slot_dir(slot) / str(commit.provenance["attempt"])
                found = found / _FOLDERS.get(what, what)
            if not found.is_dir():
                raise CorruptError(f"{found}: committed, but gone", hint="see `slurm-rl verify`")
            return found
    raise NothingDone(f"{opened.run.root}: no {what} are committed yet")
