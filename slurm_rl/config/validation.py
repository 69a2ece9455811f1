"""Checks plain values against the schema, and says in our own words what does not fit.

Owns the translation of the schema library's errors; none of its words reach a person.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from slurm_rl.config.known_names import VALUES, explain_name
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
#: Names that differ between places where the same is meant.
_SYNONYMS = {"path": "prompt_data", "prompt_data": "path", "data_options": "options"}
#: More settings than that are not listed; the nearest few are.
_MAX_LISTED, _NUM_NEAREST = 12, 4


def validate_settings(data: dict[str, Any]) -> tuple[Settings | None, list[Problem]]:
    """The settings in `data`, or what is wrong with each value of it."""
    try:
        return Settings.model_validate(data), []
    except ValidationError as error:
        return None, _explain(error)


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


def _explain(error: ValidationError) -> list[Problem]:
    items = [(*_real_path(item["loc"]), item) for item in error.errors(include_url=False)]
    grouped: dict[Path, list[Mapping[str, Any]]] = {}
    for path, is_choice, item in items:
        # Of a value that is text or a list, what is wrong inside the list says more.
        is_looked_into = any(len(o) > len(path) and o[: len(path)] == path for o, _, _ in items)
        if not (is_choice and is_looked_into):
            grouped.setdefault(path, []).append(item)
    return [_explain_one(path, items) for path, items in grouped.items()]


def _real_path(location: Path) -> tuple[Path, bool]:
    """The place of an error as the user wrote it, and whether it is about one type of several.

    Where a value may be of several types, the library puts the one that it tried into the place.
    """
    path: Path = ()
    inside: Any = Settings
    is_choice = False
    for part in location:
        if part == "[key]":
            break
        is_choice = not is_choice and len(_members(inside)) > 1
        if not is_choice:
            path, inside = (*path, part), _type_under(inside, part)
    return path, is_choice


def _members(annotation: Any) -> list[Any]:
    """The types that a value may be of, None apart."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [] if annotation in (None, NoneType) else [annotation]


def _type_under(annotation: Any, part: str | int) -> Any:
    """What a value of that type holds under a name or a number; None: nothing that is known."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            if part in member.model_fields:
                return member.model_fields[str(part)].annotation
        elif get_origin(member) in (list, dict):
            is_list = get_origin(member) is list
            if is_list == isinstance(part, int):
                return get_args(member)[-1]
    return None


def _section_at(path: Path) -> type[BaseModel] | None:
    """The section that is meant at a place: at `eval.aime`, that of an evaluation."""
    inside: Any = Settings
    for part in path:
        inside = _type_under(inside, part)
    return section_of(inside)


def _explain_one(path: Path, items: list[Mapping[str, Any]]) -> Problem:
    kind, value = items[0]["type"], items[0].get("input")
    if kind == "missing":
        return Problem(path, "is missing", "add it")
    if kind == "extra_forbidden":
        return explain_unknown(path)
    wanted = list(dict.fromkeys(filter(None, (_wanted_type(item["type"]) for item in items))))
    if len(wanted) == len(items):
        fix = _type_fix(wanted, value, _section_at(path))
        return Problem(path, f"must be {' or '.join(wanted)}", fix, value)
    return Problem(path, *_explain_value(items[0]), value)


def _wanted_type(kind: str) -> str | None:
    if kind == "finite_number":
        return _TYPES[kind]
    if kind == "int_from_float":
        return _TYPES["int"]
    name, _, tail = kind.partition("_")
    return _TYPES.get(name) if tail in ("type", "attributes_type", "parsing") else None


def _type_fix(wanted: list[str], value: Any, section: type[BaseModel] | None) -> str:
    if value is None:
        return "give it a value or take the line out"
    if _TYPES["model"] in wanted and section is not None:
        needed = [name for name, info in section.model_fields.items() if info.is_required()]
        if needed:
            return f"write {', '.join(f'{name}: …' for name in needed)}"
    if "text" in wanted and isinstance(value, (int, float)):
        return f'put it in quotes: "{value}"'
    if isinstance(value, str) and value.replace(".", "", 1).lstrip("-").isdigit():
        return f"take the quotes off: {value}"
    if "true or false" in wanted:
        return "write true or false"
    if "a list" in wanted and isinstance(value, dict):
        return "make it the item of a list: begin it with -"
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
        choices = valid.split(", ")
        found = VALUES.get(str(item["input"]))
        found = found if found in choices else nearest(str(item["input"]), choices)
        return f"must be one of {valid}", f"did you mean {found}?" if found else "choose one"
    if kind == "string_pattern_mismatch":
        return _NAME_RULE, "change it"
    return "does not fit here", "see docs/configuration.md"


def explain_unknown(path: Path) -> Problem:
    """An unknown key: the nearest name beside it, or where that very name belongs."""
    name, above = str(path[-1]), path[:-1]
    section = _section_at(above)
    beside = [*(section.model_fields if section else ()), *["site"] * (not above)]
    return Problem(path, "is not a setting", _explain_name(name, above, beside))


def _explain_name(name: str, above: Path, beside: list[str]) -> str:
    known = explain_name(name)
    if known is not None and all(path[-1] != name for path in schema_paths()):
        return known
    for at, table in _PASSTHROUGH.items():
        if name in table.entries and at[: len(above)] == above:
            owner = None if name in table.only else table.owner(name)
            return f"it {owner}" if owner else f"did you mean {format_path(at)}.{name}?"
    meant = _find_meant(name, above, beside)
    if meant is not None:
        return f"did you mean {format_path(meant)}?"
    place = format_path(above) or "the file"
    if len(beside) <= _MAX_LISTED:
        return f"{place} takes {', '.join(beside)}"
    few = difflib.get_close_matches(name, beside, n=_NUM_NEAREST, cutoff=0.0)
    return (
        f"{place} takes {', '.join(few)} and {len(beside) - len(few)} more: docs/configuration.md"
    )


def _find_meant(name: str, above: Path, beside: list[str]) -> Path | None:
    """The setting that an unknown key most likely stands for."""
    everywhere = list(schema_paths())
    # In a place that the user named, as `eval.aime`, only names of `rollout` may be meant besides.
    is_named = bool(above) and above not in everywhere
    if is_named and _SYNONYMS.get(name) in beside:
        return (*above, _SYNONYMS[name])
    elsewhere = [p for p in everywhere if p[-1] == name and p != above[: len(p)]]
    if is_named:
        elsewhere = [p for p in elsewhere if p[:-1] == ("rollout",)]
    inside = [p for p in elsewhere if p[: len(above)] == above]
    if elsewhere:
        return (inside or elsewhere)[0]
    close = nearest(name, beside)
    return None if close is None else (*above, close)
