"""Looks at the user's code without running it: is what the settings name there?

A folder of `code` is a package, imported by its own name. Reads the files of that package, and
judges only what it can be sure of: what a module may make while it is imported (`import *`,
`globals()`, `sys.modules`, a `__getattr__`) is taken to be there, and so is what an interpreter
has installed.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path as File

from slurm_rl.config.problems import Path, Problem, nearest
from slurm_rl.config.reward_checks import reward_sources
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

_NUM_LISTED = 6
#: Where a name that is meant is looked for.
_MAX_DEPTH, _MAX_FILES = 3, 100
#: By these a module may define names that its text does not show.
_HIDING = {"globals", "locals", "vars", "exec", "modules"}
#: What has a scope of its own, so that its names are not the module's.
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def check_code(settings: Settings, folders: Sequence[File]) -> Problems:
    """What the user's dotted paths name in `folders` and is not there."""
    packages = {folder.name: folder for folder in folders}
    for path, dotted in _dotted_paths(settings):
        first, *parts = dotted.split(".")
        if "/" in dotted or dotted.endswith(".py"):
            fix = "write FOLDER.MODULE.NAME, and the folder under `code`"
            yield Problem(path, "is a file, where a dotted path is meant", fix, dotted)
            continue
        if not parts or not all(parts):
            continue  # a built-in's name, or no dotted path: others say so
        if first in packages:
            yield from _check_path(path, dotted, packages[first])
        else:
            yield from _check_inside(path, dotted, folders)


def check_holds_run(folders: Sequence[File], run_dir: File) -> Problems:
    """A folder that a run lies in would be copied into the run, with all that the run holds."""
    run = os.path.realpath(run_dir)
    for i, folder in enumerate(folders):
        real = os.path.realpath(folder)
        if os.path.commonpath([real, run]) == real:
            rule = f"holds the run itself ({run_dir}), and would be copied into it"
            fix = "name the folder of your package alone, or move run.dir out of it"
            yield Problem(("code", i), rule, fix, str(folder))


def top_names(text: bytes) -> set[str] | None:
    """The names that a module's text defines at its top level; None if one cannot tell.

    >>> sorted(top_names(b"import a.b as c\\nif c:\\n    def d(): e = 1"))
    ['c', 'd']
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd in the user's text is his affair
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # perhaps a later Python's, and the stage has that
    names: set[str] = set()
    for node in ast.walk(tree):
        used = getattr(node, "id", None) or getattr(node, "attr", None)
        if used in _HIDING:
            return None
        if isinstance(node, ast.Global):
            names.update(node.names)
    _add_names(tree, names)
    return None if names & {"*", "__getattr__"} else names


def _add_names(parent: ast.AST, names: set[str]) -> None:
    """What the statements in `parent` define, those in an `if`, `try` or `with` included."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name is not None:
            names.add(node.name)
            _add_names(node, names)
        elif not isinstance(node, _SCOPES):
            _add_names(node, names)


def _dotted_paths(settings: Settings) -> Iterator[tuple[Path, str]]:
    """Every setting that names code by a dotted path, with its place."""
    rollout = settings.rollout
    named: list[tuple[Path, str | None]] = [
        ((*path, "custom_rm_path"), source.custom_rm_path)
        for path, source in reward_sources(settings)
    ]
    for name in ("custom_generate_function_path", "dynamic_sampling_filter_path", "environment"):
        named.append((("rollout", name), getattr(rollout, name)))
    for name in ("advantage", "loss", "reducer", "correction"):
        key = f"custom_{name}_path"
        named.append((("train", key), getattr(settings.train, key)))
    named += [(("rollout", "tools", i), tool) for i, tool in enumerate(rollout.tools)]
    yield from ((path, dotted) for path, dotted in named if dotted is not None)


def _check_path(path: Path, dotted: str, package: File) -> Problems:
    *modules, name = dotted.split(".")[1:]
    file = find_module(package, modules)
    if file is None:
        place = package.joinpath(*modules)
        # A folder without __init__.py is a package all the same, with nothing in it but modules.
        missing = f"{place}/__init__.py" if place.is_dir() else f"{place}.py"
        fix = _say_near(dotted, _paths_below(package, depth=len(modules)))
        yield Problem(path, f"names nothing: there is no {missing}", fix, dotted)
        return
    names = _read_names(file)
    if names is None or name in names:
        return
    above = dotted.rpartition(".")[0]
    public = sorted(f"{above}.{found}" for found in names if not found.startswith("_"))
    yield Problem(
        path, f"names nothing: {file} defines no {name}", _say_near(dotted, public), dotted
    )


def _check_inside(path: Path, dotted: str, folders: Sequence[File]) -> Problems:
    """A path that begins within a folder of `code`, which itself is the package."""
    first, *parts = dotted.split(".")
    for folder in folders:
        inside = folder / first
        if (inside / "__init__.py").is_file() or find_module(inside, parts[:-1]) is not None:
            rule = f"begins with no folder of `code`, which has the package `{folder.name}`"
            yield Problem(path, rule, f"list {inside} instead", dotted)
            return
        if len(parts) == 1 and (folder / f"{first}.py").is_file():
            rule = f"begins with no folder of `code`, which has the package `{folder.name}`"
            yield Problem(path, rule, f"did you mean {folder.name}.{dotted}?", dotted)
            return


def find_module(package: File, modules: Sequence[str]) -> File | None:
    """The file that Python would import for a module below a package; None if there is none."""
    place = package.joinpath(*modules)
    found = [place / "__init__.py"]
    if modules:
        found += [place.with_name(f"{place.name}.py"), *_compiled(place.parent, place.name)]
    return next((file for file in (*found, *_compiled(place, "__init__")) if file.is_file()), None)


def _compiled(folder: File, name: str) -> list[File]:
    return sorted(folder.glob(f"{name}.*so")) if folder.is_dir() else []


def _read_names(file: File) -> set[str] | None:
    if file.suffix != ".py":
        return None
    try:
        return top_names(file.read_bytes())
    except OSError:
        return None


def _paths_below(package: File, *, depth: int) -> list[str]:
    """The dotted path of every name in a package, for a path whose module is not there."""
    found = []
    patterns = [f"{'*/' * level}*.py" for level in range(min(max(depth, 1), _MAX_DEPTH))]
    files = [file for pattern in patterns for file in sorted(package.glob(pattern))]
    for file in files[:_MAX_FILES]:
        modules = file.relative_to(package).with_suffix("").parts
        modules = modules[:-1] if modules[-1] == "__init__" else modules
        names = _read_names(file) or set()
        found += [".".join((package.name, *modules, name)) for name in names if name[0] != "_"]
    return sorted(found)


def _say_near(dotted: str, candidates: Sequence[str]) -> str:
    """The likeliest of what is there; where none is near, what there is."""
    name = dotted.rpartition(".")[2]
    same = [path for path in candidates if path.rpartition(".")[2] == name]
    close = same[0] if len(same) == 1 else nearest(dotted, same or candidates)
    if close is not None:
        return f"did you mean {close}?"
    if not candidates:
        return "mend the path, or write it there"
    more = ", …" if len(candidates) > _NUM_LISTED else ""
    return f"there is {', '.join(candidates[:_NUM_LISTED])}{more}"
