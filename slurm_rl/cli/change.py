"""set: other settings or user code for a run that is under way, recorded with where they begin."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

from slurm_rl.chain.advance import look
from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.chain.slots import is_at_work, slots_of
from slurm_rl.chain.view import View
from slurm_rl.cli.runs import find_own_run
from slurm_rl.cli.terminal import say
from slurm_rl.config.changes import apply_changes, check_changes
from slurm_rl.config.code_preflight import check_code, check_holds_run
from slurm_rl.config.load import change_settings
from slurm_rl.config.preflight import check_files
from slurm_rl.config.problems import raise_problems
from slurm_rl.config.schema import EVAL_PREFIX, Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.config.stages import stage_kinds
from slurm_rl.errors import ConfigError, NothingDone
from slurm_rl.launch.build import OpenRun
from slurm_rl.launch.partitions import check_partitions
from slurm_rl.launch.stage_settings import code_digest_of, parse_settings
from slurm_rl.storage.commits import has_commit
from slurm_rl.storage.control import Change, Control, write_change
from slurm_rl.storage.owner import current_user
from slurm_rl.storage.snapshot import snapshot_code
from slurm_rl.types import StageRef


def change_run(path: Path, assignments: list[str]) -> None:
    """Change settings (`a.b=c`) or adopt code (`code=FOLDER[,FOLDER…]`) from now on.

    What shapes numbers holds from the first stage that nobody works on or has committed; what
    belongs to jobs holds for every job submitted from now on. Raises ConfigError for a setting
    that a run cannot change, NothingDone if nothing would be other than it is.
    """
    opened = find_own_run(path)
    for word in assignments:
        if word.partition("=")[0] == "code" and not all(word.partition("=")[2].split(",")):
            raise ConfigError(f"{word}: names no folder", hint="write code=FOLDER")
    view = look(opened.chain)
    control = view.control
    folders = [a.partition("=")[2] for a in assignments if a.partition("=")[0] == "code"]
    others = [a for a in assignments if a.partition("=")[0] != "code"]
    code = _find_code(opened, folders[-1]) if folders else _code_of(opened, control)
    first = find_untouched(opened, view)
    values, shapes = _plan_values(opened, control, others, code, first)
    code_digest = _take_code(opened, control, code) if folders else None
    if not values and code_digest is None:
        raise NothingDone(f"{opened.run.root}: that is how it is already")
    by = f"{current_user()}@{socket.gethostname()}"
    change = Change(first.iteration, first.kind, values, code_digest, by)
    changed = dataclasses.replace(control, changes=(*control.changes, change))
    parse_settings(opened.identity, changed)  # what cannot be read again is not written
    write_change(opened.run, change)
    told = [f"{name} = {value!r}" for name, value in values.items()]
    told += ["the code"] if code_digest is not None else []
    since = f"from {first} on" if shapes or folders else "for jobs from now on"
    say(f"{opened.run.root}: {', '.join(told)}: {since}")


def find_untouched(opened: OpenRun, view: View) -> StageRef:
    """The first stage that is not committed, nor at work: a change before it would change history.

    An attempt that runs keeps what it began with.
    """
    graph, control = opened.chain.graph, view.control
    iteration = find_head(opened.run, graph, control)
    while iteration < graph.num_iterations:
        for node in graph.stages(iteration):
            ref = StageRef(iteration, node.kind)
            if not _is_begun(opened, view, ref):
                return ref
        iteration += 1
    return StageRef(iteration, graph.nodes[0].kind)


def _is_begun(opened: OpenRun, view: View, ref: StageRef) -> bool:
    """Whether the stage has its commit, or somebody may be at work on it."""
    if read_current(opened.run, opened.chain.graph, view.control, ref) is not None:
        return True
    return any(
        not has_commit(opened.run, slot) and is_at_work(opened.run, slot, view.queue)
        for slot in slots_of(opened.chain.graph, view.control, ref)
    )


def _plan_values(
    opened: OpenRun,
    control: Control,
    assignments: list[str],
    code: list[Path],
    first: StageRef,
) -> tuple[dict[str, Any], bool]:
    """The values that differ from those that hold, and whether they shape numbers.

    first: the stage from which they would hold: an earlier change may hold from a later one on.
    code: the folders of the user's code that hold then, which must have what the settings name.
    """
    if not assignments:
        raise_problems(check_code(opened.settings, code), {(): str(opened.run.root)})
        return {}, False
    earlier = [change.values for change in control.changes]
    before = apply_changes(opened.identity.settings, earlier)
    # First of all: of what is fixed nothing else needs to be said.
    check_changes([word.partition("=")[0] for word in assignments], before=before)
    settings, values = change_settings(before, assignments)
    check_changes(values, before=before)
    if settings.num_rollout < opened.settings.num_rollout:
        told = f"num_rollout = {settings.num_rollout} is less than {opened.settings.num_rollout}"
        raise ConfigError(told, hint="a run can be made longer; to end it now, `slurm-rl cancel`")
    problems = list(check_files(settings, code=code))
    if any("slurm" in name.split(".") for name in values):
        problems += check_partitions(settings)
    raise_problems(problems, {(): str(opened.run.root)})
    held = _settings_since(opened, control, first)
    if all(settings == other for other in held):
        return {}, False
    _check_same_stages(opened, settings)
    return values, {settings_digest(other) for other in held} != {settings_digest(settings)}


def _check_same_stages(opened: OpenRun, settings: Settings) -> None:
    """ConfigError if the run would have other stages: its graph is fixed."""
    before, kinds = (set(stage_kinds(s)) for s in (opened.settings, settings))
    changed = sorted(kind for kind in before ^ kinds if not kind.startswith(EVAL_PREFIX))
    if changed:
        kind = changed[0]
        what = f"need a {kind} stage" if kind in kinds else f"need no {kind} stage any more"
        raise ConfigError(
            f"{opened.run.root}: with that its iterations would {what}, which is fixed when a run"
            " is made",
            hint="start another run with the other values (run.name)",
        )


def _settings_since(opened: OpenRun, control: Control, first: StageRef) -> list[Settings]:
    """All that holds at some stage from `first` on: earlier changes may begin behind it."""
    later = [StageRef(change.iteration, change.stage) for change in control.changes]
    places = [first, *(ref for ref in later if ref.position > first.position)]
    found = [parse_settings(opened.identity, control, at=ref) for ref in places]
    return [*found, opened.settings]


def _find_code(opened: OpenRun, text: str) -> list[Path]:
    """The folders that `code=` names. ConfigError for one that the run lies in."""
    folders = [Path(os.path.abspath(os.path.expanduser(part))) for part in text.split(",")]
    raise_problems(check_holds_run(folders, opened.run.root), {(): f"code={text}"})
    return folders


def _code_of(opened: OpenRun, control: Control) -> list[Path]:
    """The folders of the user's code that holds: those of the snapshot."""
    digest = code_digest_of(opened.identity, control, None)
    snapshot = opened.run.code_dir(digest)
    return sorted(snapshot.iterdir()) if digest and snapshot.is_dir() else []


def _take_code(opened: OpenRun, control: Control, folders: list[Path]) -> str | None:
    """Digest of a new snapshot of the folders; None if it is the one that holds."""
    digest = snapshot_code(opened.run, folders)
    return None if digest == code_digest_of(opened.identity, control, None) else digest
