"""The settings of other programs, checked on the login node by name and type.

Owns which of Megatron-core's and SGLang's own names a person may set under
`train.megatron` and `rollout.sglang`, which are ours to set and why, and which of
Megatron's config classes takes a name. The tables come from tools/generate_tables.py;
neither program is imported.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Any

from slurm_rl.config.megatron_limits import (
    MEGATRON_IDLE,
    MEGATRON_ONLY,
    MEGATRON_RANGES,
    MOE_OWNED,
    Only,
    Range,
)
from slurm_rl.config.problems import Path, Problem, nearest

_TABLES = File(__file__).parent / "tables"

_MODEL = "comes from the model's own config.json"
_NOT_YET = "is of models that are not supported"

_MEGATRON_OWNED = {
    **dict.fromkeys(
        "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels"
        " normalization layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear"
        " add_qkv_bias gated_linear_unit glu_linear_offset activation_func qk_layernorm qk_l2_norm"
        " rotary_interleaved softmax_scale softmax_type window_size window_attn_skip_freq"
        " no_rope_freq mrope_section multi_latent_attention init_method"
        " output_layer_init_method embedding_init_method init_method_std"
        " embedding_init_method_std perform_initialization attention_output_gate".split(),
        _MODEL,
    ),
    **dict.fromkeys(MOE_OWNED, _MODEL),
    "deterministic_mode": "follows the top-level deterministic",
    "use_cpu_initialization": "follows the machine",
    "variable_seq_lengths": "is fixed by how samples are packed",
    **dict.fromkeys("overlap_p2p_comm batch_p2p_comm".split(), "follows the layout"),
    "lr_warmup_iters": "is train.lr_warmup_iters",
    "lr_decay_iters": "is train.lr_decay_iters",
    "global_batch_size": "is train.global_batch_size",
    "micro_batch_size": "is train.micro_batch_size",
    "train_iters": "follows num_rollout",
    "seed": "is the top-level seed",
    **dict.fromkeys("save load save_interval ckpt_format".split(), "is the run directory's affair"),
}
_MEGATRON_NOT_YET = ("mtp_", "mamba_", "dsa_", "linear_")
#: Names of Megatron's command line that its core calls otherwise.
_MEGATRON_RENAMED = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "use_flash_attn": "attention_backend",
    "recompute_activations": "recompute_granularity",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "learning_rate": "lr",
}

_COMMIT = "is what the commit names"
_SGLANG_OWNED = {
    "model_path": _COMMIT,
    "tokenizer_path": _COMMIT,
    "revision": _COMMIT,
    "load_format": _COMMIT,
    "weight_version": "is the version that the commit names",
    "served_model_name": "is not used",
    "host": "is chosen when the server starts",
    "port": "is a free port, bound when the server starts",
    **dict.fromkeys(
        "nccl_port dist_init_addr nnodes node_rank base_gpu_id".split(),
        "is chosen when the server starts",
    ),
    "random_seed": "derives from the top-level seed; each sample carries its own",
    **dict.fromkeys("skip_tokenizer_init is_embedding".split(), "is fixed by how we generate"),
    **dict.fromkeys(
        "api_key admin_api_key ssl_keyfile_password".split(), "is a secret: use env_file"
    ),
    "config": "would bring in settings that nobody checked: write them here",
}


@dataclass(frozen=True, slots=True)
class Table:
    """The names that one version of a program takes, and which of them are ours.

    ranges: what its numbers may be; idle: what has no effect here, and why.
    An entry: `{"types": ["int", "null"], "default": null, "choices": […], "sections": […]}`.
    """

    program: str
    file: str
    owned: Mapping[str, str]
    not_yet: tuple[str, ...] = ()
    only: Mapping[str, Only] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Name -> entry."""
        return _read_table(self.file)

    def owner(self, name: str) -> str | None:
        """Why a person may not set `name`; None if they may."""
        if name in self.owned:
            return self.owned[name]
        if name in self.only:
            return None
        return _NOT_YET if name.startswith(self.not_yet) and name in self.entries else None


MEGATRON = Table(
    "Megatron-core 0.16.1",
    "megatron-core-0.16.1.json",
    _MEGATRON_OWNED,
    _MEGATRON_NOT_YET,
    MEGATRON_ONLY,
    _MEGATRON_RENAMED,
    MEGATRON_RANGES,
    MEGATRON_IDLE,
)
SGLANG = Table("SGLang 0.5.17", "sglang-0.5.17.json", _SGLANG_OWNED)
#: Of a reward model or a judge, which says itself what it is.
SGLANG_SCORE = replace(
    SGLANG, owned={name: why for name, why in _SGLANG_OWNED.items() if name != "is_embedding"}
)


def check_megatron(
    options: Mapping[str, Any], above: Path = ("train", "megatron")
) -> list[Problem]:
    """What is wrong with `train.megatron`, or with another role's."""
    return _check_options(options, MEGATRON, above)


def check_sglang(options: Mapping[str, Any], above: Path = ("rollout", "sglang")) -> list[Problem]:
    """What is wrong with `rollout.sglang`, or with a pool's."""
    return _check_options(options, SGLANG, above)


def check_score_sglang(
    options: Mapping[str, Any], above: Path = ("score", "server", "sglang")
) -> list[Problem]:
    """What is wrong with `score.server.sglang`, or with a teacher's."""
    return _check_options(options, SGLANG_SCORE, above)


def megatron_sections(name: str) -> tuple[str, ...]:
    """Which of `model`, `optimizer`, `ddp` and `scheduler` take `name`. KeyError if none."""
    return tuple(MEGATRON.entries[name]["sections"])


@functools.cache
def _read_table(file: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads((_TABLES / file).read_text())["entries"]
    return entries


def _check_options(options: Mapping[str, Any], table: Table, above: Path) -> list[Problem]:
    found = [_check_option(name, value, table, above) for name, value in options.items()]
    return [problem for problem in found if problem is not None]


def _check_option(name: str, value: Any, table: Table, above: Path) -> Problem | None:
    path = (*above, name)
    reason = table.owner(name)
    if reason is not None:
        return Problem(path, reason, "take the line out", value)
    entry = table.entries.get(name)
    if entry is None:
        return _unknown(name, table, path)
    if not any(_IS_TYPE[kind](value) for kind in entry["types"]):
        return _wrong_type(entry, table, path, value)
    limit = table.only.get(name)
    if limit is not None and value not in limit.values:
        rule = f"is not supported, only {limit.names} is: {limit.why}"
        return Problem(path, rule, "take the line out", value)
    if name in table.idle and value != entry.get("default"):
        return Problem(path, f"has no effect: {table.idle[name]}", "take the line out", value)
    range_ = table.ranges.get(name)
    outside = range_.complain(value) if range_ is not None and value is not None else None
    return Problem(path, *outside, value) if outside else _check_choice(entry, path, value)


def _check_choice(entry: Mapping[str, Any], path: Path, value: Any) -> Problem | None:
    choices = entry.get("choices")
    if choices and value is not None:
        members = value if isinstance(value, list) else [value]
        if not all(member in choices for member in members):
            close = nearest(str(value), [str(choice) for choice in choices])
            fix = f"did you mean {close}?" if close else "choose one"
            return Problem(path, f"must be one of {', '.join(map(str, choices))}", fix, value)
    return None


def _unknown(name: str, table: Table, path: Path) -> Problem:
    settable = [n for n in table.entries if table.owner(n) is None]
    renamed = dict(table.renamed)
    for current, entry in table.entries.items():
        renamed |= dict.fromkeys(entry.get("aliases", []), current)
    if name in renamed:
        owner = table.owner(renamed[name])
        fix = f"it {owner}" if owner else f"it is called {renamed[name]} there"
    else:
        close = nearest(name, settable)
        fix = f"did you mean {close}?" if close else "take the line out"
    return Problem(path, f"is not a setting of {table.program}", fix)


def _wrong_type(entry: Mapping[str, Any], table: Table, path: Path, value: Any) -> Problem:
    wanted = [_WORDS[kind] for kind in _WORDS if kind in entry["types"]]
    if not wanted:
        rule, fix = f"is of a type that only {table.program}'s code can make", "take the line out"
    else:
        rule, fix = f"must be {' or '.join(wanted)}", "change it"
        if isinstance(value, str) and "text" not in wanted:
            fix = "change it, and mind quotes"
    return Problem(path, rule, fix, value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_IS_TYPE: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": lambda v: _is_int(v) or (isinstance(v, float) and math.isfinite(v)),
    "str": lambda v: isinstance(v, str),
    "enum": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "list": lambda v: isinstance(v, list),
    "dict": lambda v: isinstance(v, dict),
    "null": lambda v: v is None,
    "opaque": lambda v: False,
}
_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "enum": "a name",
    "list": "a list",
    "dict": "a mapping",
}
