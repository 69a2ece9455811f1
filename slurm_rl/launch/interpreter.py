"""A stage's interpreter that cannot run the stage's program: what it lacks, and who names it.

Owns the words. On one machine a path that leads nowhere, or a Python without slurm_rl, is the same
at every try: it is the user's to mend, and no attempt more is spent on it. Among many nodes it may
be one that lacks a mount: it is tried once more, elsewhere, and then the run halts.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurm_rl.config.derive import containers_of, stage_container
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import section_of, stands_in
from slurm_rl.errors import ConfigError
from slurm_rl.types import parse_order

#: The end of a log, where Python says what it could not import.
_TAIL_BYTES = 4096
#: Of `python -m` for a module that is not there, and of an import that fails in the program's first
#: lines. Whatever fails later leaves a failure.json.
_NO_MODULE = re.compile(
    r"Error while finding module specification for 'slurm_rl\.stages' \((?P<why>.*)\)$"
    r"|: (?P<none>No module named '?slurm_rl[.\w]*'?.*)$"
    r"|^(?P<error>(?:ModuleNotFoundError|ImportError): .*)$"
)
#: What the system says of a script whose own interpreter is not there, or of another machine's.
_NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
_HINT = "name an interpreter that is there on every node and has slurm_rl installed"


def check_interpreter(settings: Settings, kind: str, env: Mapping[str, str]) -> None:
    """ConfigError if the stage's interpreter is none on this machine. One that is inside of a
    container cannot be seen from here."""
    name, value = _find_setting(settings, kind)
    if stage_container(settings, kind).runtime != "none" or value is None:
        return
    if shutil.which(value, path=env.get("PATH", os.defpath)) is not None:
        return
    rule = "is not executable" if Path(value).is_file() else "is no program on this node"
    raise _unable(settings, name, f"{name} = {value} {rule}")


def refuse_interpreter(settings: Settings, kind: str, error: OSError) -> None:
    """ConfigError if the system could not start the stage's interpreter, though it is there."""
    name, value = _find_setting(settings, kind)
    if error.errno in _NO_PROGRAM and value is not None and error.filename == value:
        raise _unable(settings, name, f"{name} = {value} cannot be started: {error.strerror}")


def explain_exit(folder: Path) -> ConfigError | None:
    """Of an attempt whose program left no word: that its interpreter could not import slurm_rl."""
    why = _find_import_error(sorted(folder.glob("rank-*.log")))
    if why is None:
        return None
    try:
        order = parse_order((folder / "order.json").read_bytes())
        settings = Settings.model_validate_json(Path(order.settings_path).read_bytes())
    except (OSError, ValueError, TypeError, KeyError):
        return None  # it was written for the program; the exit status is still told
    name, value = _find_setting(settings, order.kind)
    said = f"{name} = {value}" if value else f"{name} is not set, and slurm-rl's own interpreter"
    return _unable(settings, name, f"{said} cannot import slurm_rl: {why}")


class InterpreterError(ConfigError):
    """An interpreter that cannot run a stage. place: the setting that names it."""

    place = ""


def _unable(settings: Settings, name: str, words: str) -> InterpreterError:
    error = InterpreterError(words, hint=_HINT)
    error.place = name
    if settings.launcher == "slurm":
        error.blame = "repeat"
    return error


def _find_import_error(logs: Iterable[Path]) -> str | None:
    for log in logs:
        try:
            with open(log, "rb") as file:
                file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        found = next((m for line in lines[-1:] if (m := _NO_MODULE.search(line))), None)
        if found is not None:
            return next(text for text in found.groups() if text)
    return None


def _find_setting(settings: Settings, kind: str) -> tuple[str, str | None]:
    """The setting that names a stage's interpreter, and its value; that of the stage if none is."""
    container = stage_container(settings, kind)
    if container.runtime != "none":
        place = next(path for path, other in containers_of(settings) if other is container)
        return ".".join([*place, "python"]), container.python
    own = ".".join([*section_of(kind), "python"])
    named = [(own, settings.stage(kind).python)]
    other = stands_in(settings, kind)
    if other is not None:
        named.append((f"{other}.python", settings.stage(other).python))
    return next(
        ((name, value) for name, value in (*named, ("host_python", settings.host_python)) if value),
        (own, None),
    )
