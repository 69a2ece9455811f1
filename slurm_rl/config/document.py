"""YAML text to plain values, with the line of each.

Owns how we read YAML: the 1.2 rules for plain words, since those of 1.1 surprise people.
`1e-5` is a number, `20:00:00` and `no` are text, a key is always text, a key given twice
is refused. It knows nothing of the settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from slurm_rl.config.problems import Path, format_path
from slurm_rl.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"


@dataclass(frozen=True, slots=True)
class Document:
    """One parsed text. `lines` gives the line (from 1) of each key and list item."""

    label: str
    data: Any
    lines: dict[Path, int] = field(default_factory=dict)


_CONSTRUCT: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": lambda text: int(text, 16) if text[:2] == "0x" else int(text),
    "float": float,
    "bool": lambda text: text.lower() == "true",
    "null": lambda text: None,
}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain words of YAML 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (SafeLoader's own shape)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


def parse_document(text: str, *, label: str) -> Document:
    """The values in `text`; `label` names it in errors (a file, or `--set a=b`).

    Raises ConfigError for text that is not YAML, for a key given twice, for a tag.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark else label
        reason = (error.problem or error.context or "cannot be parsed").split("\n")[0]
        raise ConfigError(
            f"{where}: not readable as YAML: {reason}", hint="mend the text there"
        ) from error
    except yaml.YAMLError as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"{label}: not readable as YAML: {reason}") from error
    lines: dict[Path, int] = {}
    if root is None:
        return Document(label, None)
    return Document(label, _Builder(loader, label, lines).build(root, (), frozenset()), lines)


@dataclass(slots=True)
class _Builder:
    loader: _Loader
    label: str
    lines: dict[Path, int]

    def build(self, node: yaml.Node, path: Path, above: frozenset[int]) -> Any:
        """The value of `node`; `above` holds the ids of the nodes that it lies in."""
        if id(node) in above:
            self._refuse(node, f"{format_path(path)} contains itself", "take the alias out")
        above |= {id(node)}
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path, above)
        if isinstance(node, yaml.SequenceNode):
            return [self._child(item, (*path, i), above) for i, item in enumerate(node.value)]
        return self._build_scalar(node, path)

    def _child(self, node: yaml.Node, path: Path, above: frozenset[int]) -> Any:
        self.lines[path] = node.start_mark.line + 1
        return self.build(node, path, above)

    def _build_mapping(
        self, node: yaml.MappingNode, path: Path, above: frozenset[int]
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                self._merge(value, path, above, result)
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, f"a key of {format_path(path) or 'the file'} is not text", "")
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in own:
                what = f"{format_path((*path, name))} is given twice (first in line {own[name]})"
                self._refuse(key, what, "keep one")
            own[name] = line
            result[name] = self.build(value, (*path, name), above)
            self.lines[(*path, name)] = line
        return result

    def _merge(
        self, value: yaml.Node, path: Path, above: frozenset[int], result: dict[str, Any]
    ) -> None:
        """`<<: *defaults`: what is there already wins, as do the keys beside it."""
        for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(source, yaml.MappingNode):
                self._refuse(source, "<< takes a mapping", "point it at one")
            for name, inherited in self.build(source, path, above).items():
                result.setdefault(name, inherited)

    def _build_scalar(self, node: yaml.Node, path: Path) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if kind not in _CONSTRUCT:
            self._refuse(node, f"{format_path(path)} has the tag {node.tag}", "write a plain value")
        try:
            return _CONSTRUCT[kind](node.value)
        except ValueError:
            self._refuse(node, f"{format_path(path)} is not a value of {node.tag}", "mend it")

    def _refuse(self, node: yaml.Node, what: str, fix: str) -> NoReturn:
        raise ConfigError(f"{self.label}:{node.start_mark.line + 1}: {what}", hint=fix)
