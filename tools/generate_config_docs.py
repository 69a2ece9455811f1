"""Write docs/configuration.md from the schema: every key, its type, default and meaning.

python tools/generate_config_docs.py            a test fails while the page is out of date
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slurm_rl.config import schema
from slurm_rl.config.derive import DEFAULT_SIGNAL_S
from slurm_rl.config.load import SITE_KEYS
from slurm_rl.config.passthrough import MEGATRON, SGLANG, Table
from slurm_rl.config.validation import section_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

INTRO = f"""\
# Configuration

Written by `python tools/generate_config_docs.py` from `slurm_rl/config/schema.py`; change that.

A run is one YAML file. What wins: defaults < the site file < the run's file < `--set a.b=c`.
Sections merge key by key; a list or a plain value replaces what was there, and `--set eval={{}}`
(or `eval=null`) takes out all entries.

- `1e-5` is a number, `20:00:00` and `no` are text; `true` and `false` alone are booleans. Nothing
  is converted silently: `"3"` is no number. Unknown keys and keys given twice are refused.
- `site: ./site.yaml`, a path beside the file, brings in what every run on a cluster shares:
  {", ".join(f"`{key}`" for key in SITE_KEYS)}.
- `$VAR`, `${{VAR}}` and `~` are expanded in settings that are paths, when the file is read; a
  variable that is not set is an error. Relative paths are relative to the file that holds them,
  those of `--set` and `run.dir` to the working directory. `env`, `setup`, `args`, `train.megatron`
  and `rollout.sglang` stay as they are written.
- `slurm:` at the top holds defaults for every stage; a stage's own `slurm:` wins option by option.
  Any other option of sbatch may be added under its own name, with underscores; `true` is a bare
  flag. An option that is not set is left out. `signal_s` is {DEFAULT_SIGNAL_S} if unset.
- A stage's `env` wins name by name over the top-level `env`; a stage's `container` replaces the
  top-level one as a whole.
- `tick` jobs are one core without a GPU: they take partition, account, qos and the like from the
  top-level `slurm`, but not its size.
- `deterministic: true` with SGLang needs `rollout.sglang.enable_deterministic_inference: true`
  beside it. It is not added for you: it costs speed and changes what SGLang computes.
- `lr_decay_style` is `constant` unless you set it; any other needs `train.lr_decay_iters`.

`slurm-rl validate` checks the rules between settings, and whether models, data and images exist.
"""


def render_page() -> str:
    """The whole page."""
    parts = [INTRO, *_render_section("The file", schema.Settings, ""), _render_passthrough()]
    return "\n".join(parts)


def _render_section(title: str, model: type[BaseModel], above: str) -> Iterator[str]:
    text = (model.__doc__ or "").strip().split("\n")[0]
    yield f"## {title}\n\n{text}\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |"
    for name, info in model.model_fields.items():
        cells = [f"`{above}{name}`", _type(info.annotation), _default(info), _meaning(info)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for name, section in _own_sections(model):
        yield from _render_section(f"`{above}{name}`", section, f"{above}{name}.")


def _own_sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Sections described on their own: those that repeat in every stage once, at the top."""
    shared = (schema.Slurm, schema.Container)
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        if section is None or (model is not schema.Settings and section in shared):
            continue
        if section is schema.Stage and name != "tick":
            continue
        yield name, section


def _meaning(info: FieldInfo) -> str:
    return (info.description or "").replace("|", "\\|")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value is None:
        return ""
    return f"`{json.dumps(value)}`"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(item) for item in arguments if item is not type(None))
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {int: "whole number", float: "number", str: "text", bool: "true/false"}
    return names.get(annotation, "any")


def _render_passthrough() -> str:
    return "\n".join(
        [
            "## What passes through",
            "",
            "`train.megatron` and `rollout.sglang` hold those programs' own names. Names, types and"
            " choices are checked against the versions named here; these are not yours to set:",
            "",
            *_render_owned("train.megatron", MEGATRON),
            *_render_owned("rollout.sglang", SGLANG),
        ]
    )


def _render_owned(title: str, table: Table) -> Iterator[str]:
    yield f"### `{title}`: {table.program}\n"
    by_reason: dict[str, list[str]] = {}
    for name, reason in table.owned.items():
        by_reason.setdefault(reason, []).append(name)
    for name, limit in table.only.items():
        by_reason.setdefault(f"only {limit.names}: {limit.why}", []).append(name)
    if table.not_yet:
        by_reason["of models that are not supported"] = [f"{prefix}*" for prefix in table.not_yet]
    yield "| names | why |\n| --- | --- |"
    for reason, names in by_reason.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {reason} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(render_page())
    print(f"{PAGE}: written")
