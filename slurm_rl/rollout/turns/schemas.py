"""What a tool is called and takes, as JSON schema: for the chat template and for its calls.

A user's tool says so itself as `function.schema`, or its signature and docstring do. Pure.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from slurm_rl.errors import RewardError

_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_IS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def make_schema(
    name: str, description: str, properties: Mapping[str, Any], required: list[str]
) -> dict[str, Any]:
    """A tool as chat templates want it."""
    parameters = {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def read_schema(function: Callable[..., Any], *, field: str) -> dict[str, Any]:
    """The schema of a user's tool `function(args, **arguments)`; RewardError if it has none."""
    given = getattr(function, "schema", None)
    if given is None:
        return _from_signature(function, field=field)
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    parameters = inner.get("parameters") if isinstance(inner, Mapping) else None
    if inner is None or not isinstance(inner.get("name"), str):
        problem = "no name"
    elif not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        problem = 'no parameters of the type "object"'
    else:
        return {"type": "function", "function": dict(inner)}
    raise RewardError(
        f"{field}: the tool's schema has {problem}",
        hint='write {"name": …, "description": …, "parameters": {"type": "object", …}}',
    )


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with a call's arguments, for the model; "" if nothing is."""
    parameters = schema["function"]["parameters"]
    properties = parameters.get("properties", {})
    missing = [name for name in parameters.get("required", []) if name not in arguments]
    if missing:
        return f"the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            if parameters.get("additionalProperties", True) is False:
                return f"there is no argument {name!r}; there are {', '.join(properties) or 'none'}"
            continue
        problem = _check_value(properties[name], value)
        if problem:
            return f"the argument {name!r} {problem}"
    return ""


def _check_value(wanted: Any, value: Any) -> str:
    if not isinstance(wanted, Mapping):
        return ""
    if "enum" in wanted and value not in wanted["enum"]:
        return f"must be one of {', '.join(map(repr, wanted['enum']))}"
    kinds = wanted.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds and not any(_is_kind(kind, value) for kind in kinds):
        return f"must be of the type {' or '.join(kinds)}"
    return ""


def _is_kind(kind: str, value: Any) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return kind not in _IS or isinstance(value, _IS[kind])


def _from_signature(function: Callable[..., Any], *, field: str) -> dict[str, Any]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
        hints = typing.get_type_hints(function)
    except (TypeError, ValueError, NameError) as error:
        raise RewardError(
            f"{field}: the tool's signature cannot be read ({error})", hint="give it a .schema"
        ) from error
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise RewardError(f"{field}: a tool's first parameter is `args`", hint="add it")
    properties: dict[str, Any] = {}
    required = []
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise RewardError(
                f"{field}: what *{parameter.name} takes is not known", hint="give it a .schema"
            )
        properties[parameter.name] = _annotation_schema(hints.get(parameter.name, Any))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    text = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return make_schema(function.__name__, text, properties, required)


def _annotation_schema(hint: Any) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin in (Union, types.UnionType):
        kinds = [_annotation_schema(arg).get("type") for arg in get_args(hint)]
        return {"type": kinds} if all(isinstance(kind, str) for kind in kinds) else {}
    if hint is type(None):
        return {"type": "null"}
    plain = origin or hint
    if plain not in _TYPES:
        return {}
    inner = get_args(hint)
    if plain is list and inner:
        return {"type": "array", "items": _annotation_schema(inner[0])}
    return {"type": _TYPES[plain]}
