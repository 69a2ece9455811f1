from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.config.validation import schema_paths, section_of

Tool = Callable[[str], ModuleType]


def test_the_page_on_configuration_is_up_to_date(tool: Tool) -> None:
    generator = tool("generate_config_docs")
    assert generator.PAGE.read_text() == generator.render_page(), (
        "run python tools/generate_config_docs.py"
    )


def test_every_setting_is_described() -> None:
    for path in schema_paths():
        model = Settings
        for part in path[:-1]:
            model = section_of(model.model_fields[str(part)].annotation)  # type: ignore[assignment]
        assert model.model_fields[str(path[-1])].description, path


def test_the_megatron_table_is_up_to_date(tool: Tool) -> None:
    pytest.importorskip("megatron.core")
    generator = tool("generate_tables")
    version, entries = generator.read_megatron()
    stored = json.loads((generator.TABLES / f"megatron-core-{version}.json").read_text())
    assert stored["entries"] == entries


def test_annotations_become_types(tool: Tool) -> None:
    text = """
CHOICES = ["a", "b"]
class C:
    one: Optional[int] = None
    two: Annotated[str, Arg(choices=CHOICES, aliases=["--old-two"])] = "a"
    three: Literal["x", "y"] = field(default="x")
    four: Callable[[int], int] = None
    five: "int | float" = 1
    six: Literal[None, "z"] = None
    seven: List[str]
    eight: Mode = Mode.fast
    _private: int = 0
    nine: Union[Literal["a"], int] = 1
"""
    fields = tool("generate_tables").Source(text, {"Mode": ["fast", "slow"]}).fields("C")
    assert fields == {
        "one": {"types": ["int", "null"], "default": None},
        "two": {"types": ["str"], "choices": ["a", "b"], "aliases": ["old_two"], "default": "a"},
        "three": {"types": ["str"], "choices": ["x", "y"], "default": "x"},
        "four": {"types": ["opaque"], "default": None},
        "five": {"types": ["float", "int"], "default": 1},
        "six": {"types": ["null", "str"], "choices": ["z"], "default": None},
        "seven": {"types": ["list"]},
        "eight": {"types": ["enum"], "choices": ["fast", "slow"], "default": "fast"},
        "nine": {"types": ["int", "str"], "default": 1},
    }
