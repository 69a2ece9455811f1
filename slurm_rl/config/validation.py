"""Checks plain values against the schema, and says in our own words what does not fit.

Owns the translation of the schema library's errors; none of its words reach a person.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from slurm_rl.config.passthrough import MEGATRON, SGLANG
from slurm_rl.config.problems import Path, Problem, format_path, nearest
from slurm_rl.config.schema import Settings

_NAME_RULE = "must be letters, digits, - and _, at most 40, the first a letter or digit"
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping (key: value)",
    "model": "a section (key: value)",
}
#: Where the keys of other programs go, so that a misplaced one can be pointed there.
_PASSTHROUGH: Mapping[Path, Any] = {
    ("train", "megatron"): MEGATRON,
    ("rollout", "sglang"): SGLANG,
}


def validate_settings(data: dict[str, Any]) -> tuple[Settings | None, list[Problem]]:
    """The settings in `data`, or what is wrong with each value of it."""
    try:
        return Settings.model_validate(data), []
    except ValidationError as error:
        return None, _explain(error, data)


def schema_paths(model: type[BaseModel] = Settings, above: Path = ()) -> Iterator[Path]:
    """The path of every setting, sections included."""
    for name, info in model.model_fields.items():
        yield (*above, name)
        section = section_of(info.annotation)
        if section is not None:
            yield from schema_paths(section, (*above, name))


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one: of `Container | None`, Container."""
    for member in (annotation, *get_args(annotation)):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _explain(error: ValidationError, data: Any) -> list[Problem]:
    grouped: dict[Path, list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(_real_path(item, data), []).append(item)
    return [_explain_one(path, items) for path, items in grouped.items()]


def _real_path(item: Mapping[str, Any], data: Any) -> Path:
    """The place of an error without the union members that the library appends to it."""
    location: Path = item["loc"]
    if item["type"] == "missing":
        return location
    for depth, part in enumerate(location):
        if isinstance(data, Mapping) and part in data:
            data = data[str(part)]
        elif isinstance(data, Sequence) and not isinstance(data, str) and isinstance(part, int):
            data = data[part]
        else:
            return location[:depth]
    return location


def _explain_one(path: Path, items: list[Mapping[str, Any]]) -> Problem:
    kind, value = items[0]["type"], items[0].get("input")
    if kind == "missing":
        return Problem(path, "is missing", "add it")
    if kind == "extra_forbidden":
        return explain_unknown(path)
    wanted = list(dict.fromkeys(filter(None, (_wanted_type(item["type"]) for item in items))))
    if len(wanted) == len(items):
        return Problem(path, f"must be {' or '.join(wanted)}", _type_fix(wanted, value), value)
    return Problem(path, *_explain_value(items[0]), value)


def _wanted_type(kind: str) -> str | None:
    if kind == "finite_number":
        return _TYPES[kind]
    if kind == "int_from_float":
        return _TYPES["int"]
    name, _, tail = kind.partition("_")
    return _TYPES.get(name) if tail in ("type", "attributes_type", "parsing") else None


def _type_fix(wanted: list[str], value: Any) -> str:
    if value is None:
        return "give it a value or take the line out"
    if "text" in wanted and isinstance(value, (int, float)):
        return f'put it in quotes: "{value}"'
    if isinstance(value, str) and value.replace(".", "", 1).lstrip("-").isdigit():
        return f"take the quotes off: {value}"
    if "true or false" in wanted:
        return "write true or false"
    if "a list" in wanted:
        return f"write [{value}]" if isinstance(value, (str, int, float)) else "write [a, b]"
    return "change it"


def _explain_value(item: Mapping[str, Any]) -> tuple[str, str]:
    """(rule, fix) for a value of the right type that is out of its range."""
    kind, context = item["type"], item.get("ctx", {})
    bounds = {
        "greater_than": ("gt", "must be above", "raise it"),
        "greater_than_equal": ("ge", "must be at least", "raise it"),
        "less_than": ("lt", "must be below", "lower it"),
        "less_than_equal": ("le", "must be at most", "lower it"),
    }
    if kind in bounds:
        key, rule, fix = bounds[kind]
        return f"{rule} {context[key]:g}", fix
    if kind == "literal_error":
        valid = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        found = nearest(str(item["input"]), valid.split(", "))
        return f"must be one of {valid}", f"did you mean {found}?" if found else "choose one"
    if kind == "string_pattern_mismatch":
        return _NAME_RULE, "change it"
    return "does not fit here", "see docs/configuration.md"


def explain_unknown(path: Path) -> Problem:
    """An unknown key: the nearest name beside it, or where that very name belongs."""
    name, above = str(path[-1]), path[:-1]
    everywhere = list(schema_paths())
    beside = [str(p[-1]) for p in everywhere if p[:-1] == above] + ["site"] * (not above)
    for section, table in _PASSTHROUGH.items():
        if name in table.entries and section[: len(above)] == above:
            return Problem(path, "is not a setting", f"did you mean {format_path(section)}.{name}?")
    elsewhere = [p for p in everywhere if p[-1] == name]
    inside = [p for p in elsewhere if p[: len(above)] == above]
    close = nearest(name, beside)
    if elsewhere:
        fix = f"did you mean {format_path((inside or elsewhere)[0])}?"
    elif close is not None:
        fix = f"did you mean {format_path((*above, close))}?"
    else:
        fix = f"{format_path(above) or 'the file'} takes {', '.join(beside)}"
    return Problem(path, "is not a setting", fix)
