"""Looks at the user's code without running it: is what the settings name there?

A folder of `code` is a package, imported by its own name. Reads the files of that package, and
judges only what it can be sure of: what a module may make while it is imported (`import *`,
`globals()`, `sys.modules`, a `__getattr__`) is taken to be there, and so is what an interpreter
has installed. What a text says of a name is `code_shape.py`'s.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File

from slurm_rl.config.code_shape import Definitions, say_unfit, top_definitions
from slurm_rl.config.derive import stage_env
from slurm_rl.config.problems import Path, Problem, nearest
from slurm_rl.config.reward_checks import reward_sources
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

_NUM_LISTED = 6
#: Where a name that is meant is looked for.
_MAX_DEPTH, _MAX_FILES = 3, 100
#: What the train stage calls its parts of the user's with, by position (docs/training.md).
HOOKS: Mapping[str, tuple[str, ...]] = {
    "custom_advantage_path": ("episodes", "train"),
    "custom_loss_path": ("tokens", "train"),
    "custom_reducer_path": ("mask", "lengths", "group_index", "train"),
    "custom_correction_path": (
        "trainer_logprobs",
        "rollout_logprobs",
        "sample_index",
        "num_samples",
        "train",
    ),
}
#: A folder with one of these may be installed wherever the stage runs.
_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


def check_code(settings: Settings, folders: Sequence[File]) -> Problems:
    """What the user's dotted paths name in `folders` and is not there."""
    for path, dotted in _dotted_paths(settings):
        first, *parts = dotted.split(".")
        if "/" in dotted or dotted.endswith(".py"):
            fix = "write FOLDER.MODULE.NAME, and the folder under `code`"
            yield Problem(path, "is a file, where a dotted path is meant", fix, dotted)
            continue
        if not parts and path[0] == "train":
            yield Problem(path, "has no module", "write FOLDER.MODULE.FUNCTION", dotted)
        if not all(part and part == part.strip() for part in (first, *parts)):
            yield Problem(path, "is no dotted path", "write FOLDER.MODULE.NAME", dotted)
        elif parts:  # else it is a built-in's name, or others say so
            yield from _check_dotted(settings, path, dotted, folders)


def check_holds_run(folders: Sequence[File], run_dir: File) -> Problems:
    """A folder that a run lies in would be copied into the run, with all that the run holds."""
    run = os.path.realpath(run_dir)
    for i, folder in enumerate(folders):
        real = os.path.realpath(folder)
        if os.path.commonpath([real, run]) == real:
            rule = f"holds the run itself ({run_dir}), and would be copied into it"
            fix = "name the folder of your package alone, or move run.dir out of it"
            yield Problem(("code", i), rule, fix, str(folder))


def _check_dotted(settings: Settings, path: Path, dotted: str, folders: Sequence[File]) -> Problems:
    packages = {folder.name: folder for folder in folders}
    package = packages.get(dotted.partition(".")[0])
    if package is not None:
        yield from _check_path(path, dotted, package)
        return
    problem = next(_check_inside(path, dotted, folders), None)
    if problem is None:
        problem = _check_beside(settings, path, dotted, folders)
    if problem is not None:
        yield problem


def _dotted_paths(settings: Settings) -> Iterator[tuple[Path, str]]:
    """Every setting that names code by a dotted path, with its place."""
    rollout = settings.rollout
    named: list[tuple[Path, str | None]] = [
        ((*path, "custom_rm_path"), source.custom_rm_path)
        for path, source in reward_sources(settings)
    ]
    for name in ("custom_generate_function_path", "dynamic_sampling_filter_path", "environment"):
        named.append((("rollout", name), getattr(rollout, name)))
    named += [(("train", name), getattr(settings.train, name)) for name in HOOKS]
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
    if names is None:
        return
    if name in names:
        unfit = say_unfit(names[name], called_with=HOOKS.get(str(path[-1])))
        if unfit is not None:
            line = getattr(names[name][-1], "lineno", 1)
            yield Problem(path, f"{unfit}: {file}:{line}", _say_fix(path), dotted)
        return
    above = dotted.rpartition(".")[0]
    public = sorted(f"{above}.{found}" for found in names if not found.startswith("_"))
    yield Problem(
        path, f"names nothing: {file} defines no {name}", _say_near(dotted, public), dotted
    )


def _say_fix(path: Path) -> str:
    own = path[-1] in HOOKS
    return "docs/training.md says what it is called with" if own else "name a function"


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


def _check_beside(
    settings: Settings, path: Path, dotted: str, folders: Sequence[File]
) -> Problem | None:
    """Code that lies here, beside what a person sees, and that no job would find."""
    first, *modules, name = dotted.split(".")
    for above in dict.fromkeys((File.cwd(), *(folder.absolute().parent for folder in folders))):
        file = find_module(above / first, modules)
        if file is None or _may_be_found(settings, first, above):
            continue
        names = _read_names(file)
        if names is None or name in names:
            rule = f"names {file}, which no folder of `code` brings to the job"
            return Problem(path, rule, f"add {above / first} to `code`", dotted)
    return None


def _may_be_found(settings: Settings, first: str, above: File) -> bool:
    """Whether a job may import the package all the same: it is installed, or on a search path."""
    paths = [stage_env(settings, kind).get("PYTHONPATH") for kind in ("train", "rollout")]
    if any(paths) or any(
        (up / name).exists() for up in (above, above.parent) for name in _PROJECT_FILES
    ):
        return True
    if str(above) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        return True
    elsewhere = [entry for entry in sys.path if entry and File(entry) != above]
    return importlib.machinery.PathFinder.find_spec(first, elsewhere) is not None


def find_module(package: File, modules: Sequence[str]) -> File | None:
    """The file that Python would import for a module below a package; None if there is none."""
    place = package.joinpath(*modules)
    found = [place / "__init__.py"]
    if modules:
        found += [place.with_name(f"{place.name}.py"), *_compiled(place.parent, place.name)]
    return next((file for file in (*found, *_compiled(place, "__init__")) if file.is_file()), None)


def _compiled(folder: File, name: str) -> list[File]:
    return sorted(folder.glob(f"{name}.*so")) if folder.is_dir() else []


def _read_names(file: File) -> Definitions | None:
    if file.suffix != ".py":
        return None
    try:
        return top_definitions(file.read_bytes())
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
        names = _read_names(file) or {}
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
