"""What a stage program left in its attempt directory, read by the supervisor."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.errors import CorruptError
from slurm_rl.storage.durable import look_at_size, read_published
from slurm_rl.storage.fs import Fs
from slurm_rl.types import Result, parse_result

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a program failed, by its own word: `failure.json` of `slurm_rl.stages`.

    service: what is down, where the blame is an outage's.
    """

    blame: str
    error: str
    message: str
    place: str = ""
    node: str = ""
    service: str = ""


def await_result(
    folder: Path,
    *,
    fs: Fs,
    clock: Callable[[], float],
    patience_s: float,
    beat: Callable[[], object] = lambda: None,
) -> Generator[float, None, Result]:
    """The program's result, once it and every file that it names can be seen whole from here.

    Ranks on other nodes wrote them: a name or a size may show late. Yields sleeps; `beat` before
    each. Raises CorruptError naming what is missing or of another size after `patience_s`, or a
    result that cannot be parsed.
    """
    deadline = clock() + patience_s
    path = folder / "result.json"
    while (data := read_published(path, fs=fs)) is None:
        if clock() >= deadline:
            raise CorruptError(f"{path}: exit status 0, but no result")
        beat()
        yield _LOOK_S
    try:
        result = parse_result(data)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptError(f"{path}: exit status 0, but no result ({error})") from error
    for entry in result.files:
        path = folder / entry.path
        while (size := look_at_size(path, entry.size_bytes, fs=fs)) != entry.size_bytes:
            if clock() >= deadline:
                found = "missing" if size < 0 else f"{size} bytes"
                raise CorruptError(f"{path}: {found}, but {entry.size_bytes} bytes were written")
            beat()
            yield _LOOK_S
    return result


def read_failure(folder: Path, status: int | None, *, fs: Fs) -> Failure:
    """What a program that ended with `status` left word of in its attempt directory."""
    try:
        raw = json.loads(fs.read(folder / "failure.json"))
        message = str(raw["message"])
        hint = str(raw.get("hint", ""))
        message = f"{message}; {hint}" if hint else message
        words = (str(raw.get(name, "")) for name in ("place", "node", "service"))
        return Failure(str(raw["blame"]), str(raw["error"]), message, *words)
    except (OSError, ValueError, KeyError, TypeError):
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return Failure("system", "Exit", f"the program ended with {how}; see {folder}")
