"""Paths in the configuration: which settings are paths, and what they are relative to.

Owns `$VAR` and `~`. It looks at no file: whether a path exists is for preflight.py.
`env`, `setup`, `args` and what passes through to other programs stay as they are written; so does
`rollout.stage_weights`, whose variables are the compute node's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path as File
from typing import Any

from slurm_rl.config.derive import PROCEDURAL
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.stages import STAGE_KINDS

_STAGES: tuple[Path, ...] = (*((kind,) for kind in STAGE_KINDS), ("eval", "*"))
#: How a path-like setting is read. `file`: always a path. `work`: a path, relative to the
#: working directory. `program`: a path if it has a slash, else a name in PATH. `image`: a
#: path if it starts like one, else a name that the runtime knows. `bind`: `src` or `src:dst`.
#: `data`: a path, unless it names a data set that is made. `*` is any index, and any name that
#: the user chose.
_KINDS: dict[Path, str] = {
    ("run", "dir"): "work",
    ("hf_checkpoint",): "file",
    ("critic", "hf_checkpoint"): "file",
    ("teacher", "hf_checkpoint"): "file",
    ("reference", "hf_checkpoint"): "file",
    ("code", "*"): "file",
    ("rollout", "prompt_data"): "data",
    ("rollout", "prompt_data", "*", "path"): "data",
    ("rollout", "sglang_python"): "program",
    ("score", "server", "hf_checkpoint"): "file",
    ("services", "*", "url_file"): "file",
    ("eval", "*", "prompt_data"): "data",
    ("host_python",): "program",
    ("env_file",): "file",
    ("sbatch_template",): "file",
    ("retention", "archive"): "file",
    ("container", "image"): "image",
    ("container", "bind", "*"): "bind",
    **{(*stage, "python"): "program" for stage in _STAGES},
    **{(*stage, "container", "image"): "image" for stage in _STAGES},
    **{(*stage, "container", "bind", "*"): "bind" for stage in _STAGES},
}
#: Sections whose keys are names that the user chose.
_NAMED = ("eval", "services")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expand_paths(
    data: Any, *, base: File, cwd: File, env: Mapping[str, str], at: Path = ()
) -> tuple[Any, list[Problem]]:
    """`data` with its path-like settings expanded and absolute; an unset variable is a problem.

    `base` is the folder that paths are relative to, `cwd` the one for `run.dir`.
    """
    if isinstance(data, dict):
        items = [(key, value, (*at, key)) for key, value in data.items()]
    elif isinstance(data, list):
        items = [(i, value, (*at, i)) for i, value in enumerate(data)]
    else:
        return _expand_leaf(data, at, base=base, cwd=cwd, env=env)
    result, problems = [], []
    for key, value, path in items:
        expanded, found = expand_paths(value, base=base, cwd=cwd, env=env, at=path)
        result.append((key, expanded))
        problems += found
    return (dict(result) if isinstance(data, dict) else [v for _, v in result]), problems


def expand_variables(text: str, env: Mapping[str, str]) -> str:
    """`text` with `$VAR`, `${VAR}` and a leading `~` replaced; KeyError names an unset one."""
    text = _VARIABLE.sub(lambda match: env[match[1] or match[2]], text)
    if text == "~" or text.startswith("~/"):
        return env["HOME"] + text[1:]
    return os.path.expanduser(text)


def _expand_leaf(
    value: Any, at: Path, *, base: File, cwd: File, env: Mapping[str, str]
) -> tuple[Any, list[Problem]]:
    kind = _KINDS.get(_pattern(at))
    if kind is None or not isinstance(value, str):
        return value, []
    if not value.strip():
        return value, [Problem(at, "is empty", "give it a path or take the line out", value)]
    try:
        text = expand_variables(value, env)
    except KeyError as error:
        name = error.args[0]
        rule = f"uses ${name}, which is not set"
        return value, [Problem(at, rule, f"export {name} or write the path out", value)]
    return _make_absolute(text, kind, cwd if kind == "work" else base), []


def _pattern(at: Path) -> Path:
    """A place as `_KINDS` has it."""
    is_named = len(at) > 1 and at[0] in _NAMED
    return tuple(
        "*" if isinstance(part, int) or (is_named and depth == 1) else part
        for depth, part in enumerate(at)
    )


def _make_absolute(text: str, kind: str, base: File) -> str:
    if kind == "bind":
        source, colon, rest = text.partition(":")
        return _join(base, source) + colon + rest
    if kind == "program" and "/" not in text:
        return text
    if kind == "data" and text.startswith(PROCEDURAL):
        return text
    if kind == "image" and not text.startswith(("./", "../", "/")):
        return text
    return _join(base, text)


def _join(base: File, text: str) -> str:
    # normpath, not resolve: a link on the login node may lead elsewhere on a compute node.
    return os.path.normpath(base / text)
