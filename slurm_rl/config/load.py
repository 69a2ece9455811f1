"""Reads a configuration: defaults < site file < file < `--set`; one clear line per error.

Owns reading and merging. It checks what can be known without looking at any other file;
whether models, data and images are there is for preflight.py. It imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from slurm_rl.config.checks import check_settings
from slurm_rl.config.document import Document, parse_document
from slurm_rl.config.paths import expand_paths, expand_variables
from slurm_rl.config.problems import Path, Problem, nearest, raise_problems
from slurm_rl.config.schema import Settings
from slurm_rl.config.validation import validate_settings
from slurm_rl.errors import ConfigError

#: What a site file may hold: what every run on a cluster shares.
SITE_KEYS = (
    "run slurm tick init chain launcher submit_from gpu_request host_python setup container env"
    " env_file network_interface hostname_suffix purge_days max_submit_jobs max_array_tasks"
    " sbatch_template"
).split()


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration as it was written and as it is meant.

    `text` is the file's own text, for `config.yaml` in the run directory; `origins` says
    where each value was written, for errors that are found later.
    """

    path: File
    text: str
    settings: Settings
    overrides: tuple[str, ...] = ()
    site_path: File | None = None
    site_text: str = ""
    origins: dict[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source of values, with its paths made absolute."""

    data: dict[str, Any]
    origins: dict[Path, str]
    problems: list[Problem]


def load_settings(path: File | str, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a configuration file. Raises ConfigError, a line for each problem."""
    return load_config(path, overrides).settings


def load_config(path: File | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """A configuration with its site file and `overrides` (`a.b=c`) merged in.

    Raises ConfigError, a line for each problem.
    """
    file, cwd = File(path), File.cwd()
    text, document = _read_document(file)
    sets = [_parse_override(item) for item in overrides]
    site_path = _find_site(file, document, sets, cwd)
    layers, site_text = [], ""
    if site_path is not None:
        site_text, site = _read_document(site_path, named_by=f"`site` of {path}")
        _check_site_keys(site)
        layers.append(_make_layer(site, _absolute(site_path).parent, cwd))
    layers.append(_make_layer(document, _absolute(file).parent, cwd))
    layers += [_make_layer(item, cwd, cwd) for item in sets]
    settings, origins = _settle(layers, str(path))
    return LoadedConfig(file, text, settings, tuple(overrides), site_path, site_text, origins)


def change_settings(
    data: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[Settings, dict[str, Any]]:
    """A run's settings with `overrides` (`a.b=c`) merged in, and the overrides by dotted path.

    data: settings as `run.json` holds them. Raises ConfigError, a line for each problem.
    """
    cwd = File.cwd()
    run = _Layer(dict(data), {(): "run.json"}, [])
    layers = [_make_layer(_parse_override(item), cwd, cwd) for item in overrides]
    settings, _ = _settle([run, *layers], "run.json")
    values = {".".join(path): value for layer in layers for path, value in _leaves(layer.data, ())}
    return settings, values


def _settle(layers: Sequence[_Layer], label: str) -> tuple[Settings, dict[Path, str]]:
    """The settings that layers come to, and where each was written. Raises ConfigError."""
    data, origins = _merge_layers(layers, label)
    raise_problems((p for layer in layers for p in layer.problems), origins)
    settings, problems = validate_settings(data)
    if settings is not None:
        problems = check_settings(settings)
    raise_problems(problems, origins)
    assert settings is not None
    return settings, origins


def _leaves(data: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _absolute(file: File) -> File:
    return File(os.path.abspath(file))


def _read_document(file: File, *, named_by: str = "") -> tuple[str, Document]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = f"check {named_by or 'the path, or write one with `slurm-rl init`'}"
        raise ConfigError(f"{file}: there is no such file", hint=hint) from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: is a directory", hint="name the file in it") from None
    except UnicodeDecodeError as error:
        message = f"{file}: byte {error.start} is not UTF-8"
        raise ConfigError(message, hint="save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    document = parse_document(text, label=str(file))
    if document.data is None:
        raise ConfigError(f"{file}: is empty", hint="write one with `slurm-rl init`")
    if not isinstance(document.data, dict):
        raise ConfigError(f"{file}: must be a mapping (key: value)", hint="see configs/")
    return text, document


def _parse_override(item: str) -> Document:
    """`a.b=c` as a document of its own: {"a": {"b": c}}."""
    label = f"--set {item}"
    name, equals, text = item.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{label}: is not name=value", hint="write --set rollout.shards=4")
    value: Any = parse_document(text, label=label).data
    for part in reversed(parts):
        value = {part: value}
    return Document(label, value)


def _find_site(file: File, document: Document, sets: Sequence[Document], cwd: File) -> File | None:
    """The site file that `site:` names; the last one to name it wins."""
    found = None
    for source, base in ((document, file.parent), *((item, cwd) for item in sets)):
        value = source.data.get("site")
        if value is None:
            continue
        if not isinstance(value, str):
            problem = Problem(("site",), "must be text", "write a path", value)
            raise_problems([problem], _layer_origins(source))
        try:
            found = base / expand_variables(value, os.environ)
        except KeyError as error:
            rule = f"uses ${error.args[0]}, which is not set"
            fix = f"export {error.args[0]} or write the path out"
            raise_problems([Problem(("site",), rule, fix, value)], _layer_origins(source))
    return found


def _check_site_keys(site: Document) -> None:
    problems = []
    for key in site.data:
        if key in SITE_KEYS:
            continue
        if key in Settings.model_fields:
            rule, fix = "belongs to a run, not to a site", "move it to the run's file"
        else:
            close = nearest(key, SITE_KEYS)
            rule = "is not a setting of a site file"
            fix = f"did you mean {close}?" if close else f"it takes {', '.join(SITE_KEYS)}"
        problems.append(Problem((key,), rule, fix))
    raise_problems(problems, _layer_origins(site))


def _layer_origins(document: Document) -> dict[Path, str]:
    lines = {path: f"{document.label}:{line}" for path, line in document.lines.items()}
    return {(): document.label, **lines}


def _make_layer(document: Document, base: File, cwd: File) -> _Layer:
    data = {key: value for key, value in document.data.items() if key != "site"}
    expanded, problems = expand_paths(data, base=base, cwd=cwd, env=os.environ)
    return _Layer(expanded, _layer_origins(document), problems)


def _merge_layers(layers: Sequence[_Layer], label: str) -> tuple[dict[str, Any], dict[Path, str]]:
    """Later layers win, key by key; a list, a plain value or a `--set x={}` replaces what was
    there."""
    data: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for layer in layers:
        _merge_into(data, layer.data, (), origins, layer.origins)
    return data, {**origins, (): label}


def _merge_into(
    target: dict[str, Any],
    source: Mapping[str, Any],
    at: Path,
    origins: dict[Path, str],
    source_origins: Mapping[Path, str],
) -> None:
    for key, value in source.items():
        path = (*at, key)
        origin = source_origins.get(path, source_origins[()])
        if isinstance(value, dict):
            # `--set eval={}` says that there is none, and would say nothing else.
            is_emptied = not value and origin.startswith("--set")
            if is_emptied or not isinstance(target.get(key), dict):
                _forget(origins, path)
                target[key] = {}
            # What a section lacks is to be added in the run's file, not in a `--set`.
            if path not in origins or not origin.startswith("--set"):
                origins[path] = origin
            _merge_into(target[key], value, path, origins, source_origins)
        else:
            _forget(origins, path)
            target[key] = value
            origins[path] = origin
            if isinstance(value, list):
                items = {p: o for p, o in source_origins.items() if p[: len(path)] == path}
                origins.update(items)


def _forget(origins: dict[Path, str], path: Path) -> None:
    for known in [p for p in origins if p[: len(path)] == path]:
        del origins[known]
