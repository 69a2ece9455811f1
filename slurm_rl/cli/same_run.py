"""A second `submit` into a run: whether it means the same run, and what to type where it does not.

Owns the comparison of a configuration with a run that is there, and the question whether that run
has begun. It changes nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurm_rl.chain.observe import read_queue
from slurm_rl.config.changes import check_changes
from slurm_rl.config.load import LoadedConfig
from slurm_rl.errors import ConfigError
from slurm_rl.launch.build import OpenRun
from slurm_rl.launch.stage_settings import code_digest_of
from slurm_rl.storage.control import read_control
from slurm_rl.storage.intents import read_intents
from slurm_rl.storage.owner import check_owner
from slurm_rl.storage.snapshot import digest_code

#: Settings that an error names; of more it says how many.
_MOST = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting of a run that a configuration has otherwise."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path} was {self.old!r}, now {self.new!r}"

    @property
    def assignment(self) -> str:
        """What `slurm-rl set` takes, for a shell."""
        if self.path == "code":
            return shlex.quote(f"code={','.join(self.new)}")
        text = self.new if isinstance(self.new, str) else json.dumps(self.new)
        if isinstance(self.new, str) and yaml.safe_load(self.new) != self.new:
            text = json.dumps(self.new)  # it would be read as something else
        return shlex.quote(f"{self.path}={text}")

    @property
    def can_be_set(self) -> bool:
        """Whether `slurm-rl set` takes it."""
        if self.path == "code":
            return bool(self.new)
        try:
            check_changes([self.path], before={})
        except ConfigError:
            return False
        return True


def is_same(loaded: LoadedConfig, opened: OpenRun) -> bool:
    """Whether the run has these settings, and the code that lies there now."""
    return not find_changes(loaded, opened) and not _has_other_code(loaded, opened)


def check_same(loaded: LoadedConfig, opened: OpenRun) -> None:
    """Raises ConfigError, naming what differs and what to type, if another run is meant."""
    found = find_changes(loaded, opened)
    if not found:
        return
    root = opened.run.root
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    shown = "; ".join(str(difference) for difference in found[:_MOST]) + more
    fixed = [difference.path for difference in found if not difference.can_be_set]
    if fixed:
        are = "is" if len(fixed) == 1 else "are"
        hint = f"{', '.join(fixed[:_MOST])} {are} fixed when a run is made: choose another run.name"
    else:
        words = " ".join(difference.assignment for difference in found)
        hint = f"`slurm-rl set {root} {words}` changes the run"
    raise ConfigError(
        f"{loaded.path}: the run {root} has begun with other settings: {shown}",
        hint=f"{hint}, or `slurm-rl resume {root}` continues it as it is",
    )


def find_changes(loaded: LoadedConfig, opened: OpenRun) -> list[Difference]:
    """What the configuration has otherwise than the run has now.

    Where the user's code lies does not count: the run has what `submit` or `set code=…` took.
    """
    old = opened.settings.model_dump(mode="json")
    new = loaded.settings.model_dump(mode="json")
    found = list(_compare(old, new))
    if _has_other_code(loaded, opened):
        return found
    return [difference for difference in found if difference.path != "code"]


def _has_other_code(loaded: LoadedConfig, opened: OpenRun) -> bool:
    folders = [Path(path) for path in loaded.settings.code]
    holds = code_digest_of(opened.identity, read_control(opened.run), None)
    return digest_code(folders) != holds


def _compare(old: Any, new: Any, where: str = "") -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            path = f"{where}.{name}" if where else name
            yield from _compare(old.get(name), new.get(name), path)
    elif old != new:
        yield Difference(where, old, new)


def has_begun(opened: OpenRun) -> bool:
    """Whether a job of the run was ever accepted, or may have been: if in doubt, it was.

    A person who has paused it, or has it from somebody else, wants it as it is.
    """
    control = read_control(opened.run)
    check_owner(opened.run, opened.identity, control)
    if control.paused is not None or control.owner is not None:
        return True
    iterations = opened.run.root / "iterations"
    if any(_is_of_a_job(path.name) for path in iterations.rglob("*")):
        return True
    now, chain = opened.chain.clock(), opened.chain
    folders = {path.parent for path in iterations.rglob("submit.*")}
    intents = [intent for folder in folders for intent in read_intents(opened.run, folder)]
    # Whoever made the run a moment ago, or is submitting just now, is not done.
    if not intents and abs(now - opened.identity.created) < chain.spec.submit_deadline_s:
        return True
    for intent in intents:
        is_young = abs(now - intent.created) < chain.spec.submit_deadline_s
        if is_young and _may_live(intent.creator):
            return True
    queue = read_queue(chain.scheduler, chain.spec.short_id)
    return queue is None or bool(queue)


def _is_of_a_job(name: str) -> bool:
    """Whether a file was left by a job, or by the answer that one was accepted."""
    of_intent = name.startswith("submit.") and name.endswith((".id", ".seen"))
    return of_intent or name == "COMMIT" or name.startswith("claim.")


def _may_live(creator: str) -> bool:
    """Whether the process `host:id` may be at work, as far as can be told from here."""
    host, _, number = creator.rpartition(":")
    if host != socket.gethostname() or not number.isdecimal():
        return True
    return int(number) != os.getpid() and Path(f"/proc/{number}").exists()
