"""Write the name/type tables of what passes through to Megatron-core and SGLang.

Owns: slurm_rl/config/tables/*.json. It reads the sources of both as text and imports
neither, so that it runs on any machine:

    pip download --no-deps sglang==0.5.17 -d /tmp/wheels
    python tools/generate_tables.py --megatron --sglang-wheel /tmp/wheels/sglang-0.5.17-*.whl

Megatron-core is taken from where it is installed. One entry:
`"lr": {"sections": ["optimizer"], "types": ["float", "null"], "default": null}`.
A type that YAML cannot write (a callable, a dtype, a process group) is `opaque`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import re
import zipfile
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parent.parent / "slurm_rl" / "config" / "tables"

#: Section -> (file below megatron/core, class). The first of a section is its base class.
MEGATRON_CLASSES = {
    "model": [
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ],
    "optimizer": [("optimizer/optimizer_config.py", "OptimizerConfig")],
    "ddp": [
        ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ],
}
MEGATRON_ENUMS = "transformer/enums.py"

#: The learning-rate schedule has no config class in megatron-core: these are the names of
#: Megatron's own command line, for the arguments of `OptimizerParamScheduler`.
SCHEDULER: dict[str, dict[str, Any]] = {
    "lr_decay_style": {
        "types": ["str"],
        "choices": ["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        "default": "constant",
    },
    "lr_warmup_init": {"types": ["float"], "default": 0.0},
    "lr_wsd_decay_style": {
        "types": ["str"],
        "choices": ["exponential", "linear", "cosine", "minus_sqrt"],
        "default": "exponential",
    },
    "lr_wsd_decay_iters": {"types": ["int", "null"], "default": None},
    "start_weight_decay": {"types": ["float", "null"], "default": None},
    "end_weight_decay": {"types": ["float", "null"], "default": None},
    "weight_decay_incr_style": {
        "types": ["str"],
        "choices": ["constant", "linear", "cosine"],
        "default": "constant",
    },
}

PLAIN = {"int", "float", "str", "bool", "list", "dict"}
ALIASES = {
    "List": "list",
    "Tuple": "list",
    "tuple": "list",
    "Sequence": "list",
    "Dict": "dict",
    "Mapping": "dict",
    "None": "null",
    "NoneType": "null",
}


class Source:
    """One module's text: its dataclass fields, enums and literal constants."""

    def __init__(self, text: str, enums: dict[str, list[str]] | None = None) -> None:
        self.tree = ast.parse(text)
        self.enums = dict(enums or {})
        self.constants: dict[str, ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.constants[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if node.value is not None:
                    self.constants[node.target.id] = node.value

    def class_named(self, name: str) -> ast.ClassDef:
        return next(n for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name == name)

    def fields(self, class_name: str) -> dict[str, dict[str, Any]]:
        """Every annotated field of a dataclass, in its order."""
        found = {}
        for node in self.class_named(class_name).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if _name(node.annotation) != "ClassVar" and node.target.id[0] != "_":
                    found[node.target.id] = self.entry(node)
        return found

    def entry(self, node: ast.AnnAssign) -> dict[str, Any]:
        types, choices, aliases = self.describe(node.annotation)
        entry: dict[str, Any] = {"types": sorted(types)}
        if choices:
            entry["choices"] = choices
        if aliases:
            entry["aliases"] = aliases
        known, default = self.default(node.value)
        if known:
            entry["default"] = default
        return entry

    def describe(self, node: ast.expr) -> tuple[set[str], list[Any], list[str]]:
        """(types, choices, aliases) of an annotation."""
        if isinstance(node, ast.Constant):
            return self._describe_constant(node)
        if isinstance(node, ast.BinOp):
            return self._union([node.left, node.right])
        name = _name(node)
        if not isinstance(node, ast.Subscript):
            if name in self.enums:
                return {"enum"}, self.enums[name], []
            name = ALIASES.get(name, name)
            return ({name} if name in PLAIN else {"opaque"}), [], []
        arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in ("A", "Annotated"):
            types, choices, _ = self.describe(arguments[0])
            choices, aliases = self._arg(arguments[1:], choices)
            return types, choices, aliases
        if name == "Optional":
            types, choices, aliases = self.describe(arguments[0])
            return types | {"null"}, choices, aliases
        if name == "Union":
            return self._union(arguments)
        if name == "Literal":
            values = [ast.literal_eval(value) for value in arguments]
            names = {type(value).__name__ for value in values}
            return {ALIASES.get(n, n) for n in names}, [v for v in values if v is not None], []
        name = ALIASES.get(name, name)
        return ({name} if name in PLAIN else {"opaque"}), [], []

    def _describe_constant(self, node: ast.Constant) -> tuple[set[str], list[Any], list[str]]:
        if node.value is None:
            return {"null"}, [], []
        if isinstance(node.value, str):  # an annotation in quotes
            return self.describe(ast.parse(node.value, mode="eval").body)
        return {"opaque"}, [], []

    def _union(self, members: list[ast.expr]) -> tuple[set[str], list[Any], list[str]]:
        described = [self.describe(member) for member in members]
        types = set().union(*(types for types, _, _ in described))
        closed = [choices for kinds, choices, _ in described if kinds != {"null"}]
        # `Literal[..] | int`: the choices bind only if every member has some.
        choices = [value for values in closed for value in values] if all(closed) else []
        return types, choices, []

    def _arg(self, metadata: list[ast.expr], choices: list[Any]) -> tuple[list[Any], list[str]]:
        """Choices and aliases from `Arg(...)`. A parser of its own accepts what it likes."""
        aliases: list[str] = []
        for call in metadata:
            if not (isinstance(call, ast.Call) and _name(call.func) == "Arg"):
                continue
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            known, values = self.default(keywords.get("choices"))
            if known and isinstance(values, list) and "type_parser" not in keywords:
                choices = values
            known, names = self.default(keywords.get("aliases"))
            if known and isinstance(names, list):
                aliases = [n.removeprefix("--").replace("-", "_") for n in names]
        return choices, aliases

    def default(self, node: ast.expr | None) -> tuple[bool, Any]:
        """(True, value) of a literal default, a constant's name or `field(default=…)`."""
        if node is None:
            return False, None
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.default(self.constants[node.id])
        if isinstance(node, ast.Attribute) and _name(node.value) in self.enums:
            return True, node.attr
        if isinstance(node, ast.Call) and _name(node.func) == "field":
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            return self.default(keywords.get("default"))
        try:
            value = ast.literal_eval(node)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError):
            return False, None
        return True, list(value) if isinstance(value, tuple) else value


def _name(node: ast.expr) -> str:
    """The last name of `a.b.C` or of `C[...]`."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def read_enums(text: str) -> dict[str, list[str]]:
    """Enum class -> its members' names."""
    enums = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and any("Enum" in _name(b) for b in node.bases):
            enums[node.name] = [
                target.id
                for line in node.body
                if isinstance(line, ast.Assign)
                for target in line.targets
                if isinstance(target, ast.Name)
            ]
    return enums


def read_megatron() -> tuple[str, dict[str, dict[str, Any]]]:
    """(version, table) of the installed megatron-core."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise SystemExit("megatron-core is not installed")
    root = Path(spec.origin).parent
    enums = read_enums((root / MEGATRON_ENUMS).read_text())
    table: dict[str, dict[str, Any]] = {}
    for section, classes in MEGATRON_CLASSES.items():
        for file, class_name in classes:
            fields = Source((root / file).read_text(), enums).fields(class_name)
            for key, entry in fields.items():
                sections = table.get(key, {}).get("sections", [])
                kept = table.get(key, entry)
                table[key] = {**kept, "sections": sorted({*sections, section})}
    for key, entry in SCHEDULER.items():
        table[key] = {**entry, "sections": ["scheduler"]}
    return importlib.metadata.version("megatron-core"), table


def read_sglang(wheel: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """(version, table) of a wheel of SGLang."""
    version = re.match(r"sglang-([^-]+)-", wheel.name)
    if version is None:
        raise SystemExit(f"{wheel}: not a wheel of sglang")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("sglang/srt/server_args.py").decode()
    source = Source(text)
    table = source.fields("ServerArgs")
    for old, new in renamed_flags(source.class_named("ServerArgs")).items():
        if old not in table and new in table:
            table[new].setdefault("aliases", []).append(old)
    return version[1], table


def renamed_flags(server_args: ast.ClassDef) -> dict[str, str]:
    """Old name -> field, from `add_argument("--old", dest="field", ...)`."""
    found = {}
    for call in ast.walk(server_args):
        if isinstance(call, ast.Call) and _name(call.func) == "add_argument":
            names = [a.value for a in call.args if isinstance(a, ast.Constant)]
            keywords = {k.arg: k.value for k in call.keywords}
            target = keywords.get("dest", keywords.get("new_flag"))
            if names and isinstance(target, ast.Constant):
                old = str(names[0]).removeprefix("--").replace("-", "_")
                found[old] = str(target.value).removeprefix("--").replace("-", "_")
    return found


def write_table(package: str, version: str, entries: dict[str, dict[str, Any]]) -> None:
    path = TABLES / f"{package}-{version}.json"
    lines = [f"{json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries)]
    head = f'{{"package": "{package}", "version": "{version}", "entries": {{\n'
    path.parent.mkdir(exist_ok=True)
    path.write_text(head + ",\n".join(lines) + "\n}}\n")
    opaque = sum("opaque" in entry["types"] for entry in entries.values())
    print(f"{path}: {len(entries)} names, {opaque} with a type that YAML cannot write")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron", action="store_true", help="from the installed package")
    parser.add_argument("--sglang-wheel", type=Path)
    arguments = parser.parse_args()
    if arguments.megatron:
        write_table("megatron-core", *read_megatron())
    if arguments.sglang_wheel:
        write_table("sglang", *read_sglang(arguments.sglang_wheel))


if __name__ == "__main__":
    main()
