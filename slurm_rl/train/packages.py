"""The packages that Megatron's settings need, of which the trainer itself needs none.

Owns the table, and the words for what Megatron-core refuses without any. They are looked for where
the stage runs: a login node may have others. Nothing is imported.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Needed:
    """A package that `setting` needs if it has `value`.

    Example: `Needed("optimizer", "muon", "emerging_optimizers", "use adam")`.
    """

    setting: str
    value: Any
    package: str
    instead: str


_OUT = "leave the setting out"
_TE = "transformer_engine"
_OFFLOADED = "optimizer_cpu_offload"
_DISPATCH = "use moe_token_dispatcher_type: alltoall"

NEEDED = (
    Needed("transformer_impl", "transformer_engine", _TE, _OUT),
    Needed("optimizer", "muon", "emerging_optimizers", "use adam"),
    Needed("use_precision_aware_optimizer", True, _TE, _OUT),
    Needed("moe_permute_fusion", True, _TE, _OUT),
    Needed("symmetric_ar_type", "two_shot", _TE, _OUT),
    Needed("symmetric_ar_type", "one_shot", _TE, _OUT),
    Needed("symmetric_ar_type", "multimem_all_reduce", _TE, _OUT),
    Needed("moe_enable_deepep", True, "deep_ep", _DISPATCH),
    Needed("moe_token_dispatcher_type", "flex", "deep_ep", _DISPATCH),
)


def missing_packages(options: Mapping[str, Any]) -> Iterator[Needed]:
    """What these settings of a role need and this interpreter does not have."""
    for needed in NEEDED:
        if needed.setting == "use_precision_aware_optimizer" and options.get(_OFFLOADED):
            continue  # then the host's optimizer is taken
        if options.get(needed.setting) == needed.value and not is_installed(needed.package):
            yield needed


def is_installed(package: str) -> bool:
    """Whether the interpreter finds a package, which may be broken all the same."""
    return importlib.util.find_spec(package) is not None


def refusal(error: BaseException) -> ConfigError:
    """Of what Megatron-core refuses: with its words, or else with the rule that it asserts."""
    words = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if not words and frames:
        rule = " ".join((frames[-1].line or "").split()).removeprefix("assert ")
        words = f"it must be that {rule}" if rule else ""
    return ConfigError(
        f"train.megatron: Megatron-core refuses it: {words or type(error).__name__}",
    )
