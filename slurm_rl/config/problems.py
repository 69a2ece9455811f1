"""What is wrong with a configuration, as one line for a person.

Owns the wording. A line names the file, the path, the value, the rule and the fix:
`a.yaml:7: rollout.shards = 0 must be above 0; raise it`. It decides nothing and reads
nothing.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_rl.errors import ConfigError

#: A place in the configuration: `("rollout", "slurm", "time")`.
Path = tuple[str | int, ...]

#: A place -> where it was written: `configs/a.yaml:12`, `--set seed=3`.
Origins = Mapping[Path, str]

_MISSING = object()
#: Characters of a value that are shown; a path must not be cut.
_LONGEST_VALUE = 60
_LONGEST_TEXT = 500


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `value` is left out where there is none to show.

    Example: `Problem(("seed",), "must be a whole number", "write 3", value="3")`.
    """

    path: Path
    rule: str
    fix: str = ""
    value: Any = _MISSING

    def render(self, origins: Origins) -> str:
        """The line for a person; `origins` must hold the empty path, the file itself."""
        text = format_path(self.path)
        if self.value is not _MISSING:
            text += f" = {format_value(self.value)}"
        line = f"{find_origin(origins, self.path)}: {text} {self.rule}"
        return f"{line}; {self.fix}" if self.fix else line


def format_path(path: Path) -> str:
    """`("code", 0)` as `code[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def format_value(value: Any) -> str:
    """A value as one would write it, cut short if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    longest = _LONGEST_TEXT if isinstance(value, str) else _LONGEST_VALUE
    return text if len(text) <= longest else text[: longest - 1] + "…"


def find_origin(origins: Origins, path: Path) -> str:
    """Where `path`, or what it lies in, was written."""
    while path not in origins:
        path = path[:-1]
    return origins[path]


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` was most likely meant to be, if any is near."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return found[0] if found else None


def raise_problems(problems: Iterable[Problem], origins: Origins) -> None:
    """Raise one `ConfigError` with a line for each problem; nothing if there is none."""
    lines = list(dict.fromkeys(problem.render(origins) for problem in problems))
    if lines:
        raise ConfigError("\n".join(lines))
