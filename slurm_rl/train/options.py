"""`train.megatron` split into what Megatron takes it for; and what it may not set.

The names are Megatron-core's own: fields of TransformerConfig (layout included),
OptimizerConfig and DistributedDataParallelConfig, plus the learning-rate schedule's names of
Megatron's command line. A key goes to *every* part that has a field of that name (`bf16`,
`use_distributed_optimizer`). The names and types were checked on the login node; here are
the rules that need the model or the library.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from slurm_rl.config.megatron_limits import MEGATRON_ONLY, MEGATRON_TE_ONLY
from slurm_rl.errors import ConfigError
from slurm_rl.models.geometry import MODEL_FIELDS
from slurm_rl.models.layout import Layout, read_layout_sizes
from slurm_rl.train.packages import missing_packages

#: Arguments of OptimizerParamScheduler that are fields of no config class.
SCHEDULE_KEYS = (
    "lr_decay_style",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """`train.megatron`, each key where it belongs.

    per_token: the user's `calculate_per_token_loss`; Megatron's own flag is always on, with
    weights and denominators of ours (`algorithms/losses.py`). fused: the role's `fused_kernels`.
    """

    layout: Layout = field(default_factory=Layout)
    bf16: bool | None = None
    per_token: bool = False
    fused: bool = True
    transformer: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)


def split_megatron(
    options: dict[str, Any], *, above: str = "train", trains: bool = True, fused: bool = True
) -> MegatronOptions:
    """Sort `train.megatron`, or that of the role `above`, by destination. Imports Megatron-core's
    config classes.

    trains: whether there is an optimizer, which needs a rate. Raises ConfigError naming the key:
    unknown, owned by the model, unsupported here, of a package that is not here, or `lr` missing.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    _refuse(options, above, trains=trains)
    parts: dict[str, dict[str, Any]] = {}
    for name, kind in (
        ("transformer", TransformerConfig),
        ("optimizer", OptimizerConfig),
        ("ddp", DistributedDataParallelConfig),
    ):
        known = {f.name for f in dataclasses.fields(kind)}
        parts[name] = {key: value for key, value in options.items() if key in known}
    schedule = {key: value for key, value in options.items() if key in SCHEDULE_KEYS}
    placed = {key for part in (*parts.values(), schedule) for key in part}
    for key in sorted(set(options) - placed):
        raise ConfigError(f"{above}.megatron.{key} is not a name that Megatron-core knows")
    per_token = bool(parts["transformer"].pop("calculate_per_token_loss", False))
    return MegatronOptions(
        layout=read_layout_sizes(options),
        bf16=options.get("bf16"),
        per_token=per_token,
        fused=fused,
        schedule=schedule,
        **parts,
    )


def _refuse(options: dict[str, Any], above: str, *, trains: bool) -> None:
    for key in MODEL_FIELDS:
        if key in options:
            raise ConfigError(
                f"{above}.megatron.{key} cannot be set: the model's config.json decides it",
                hint="remove it",
            )
    for key, limit in MEGATRON_ONLY.items():
        if key in options and options[key] not in limit.values:
            raise ConfigError(
                f"{above}.megatron.{key} = {options[key]!r} is not supported, only "
                f"{limit.names} is: {limit.why}",
                hint="remove it",
            )
    if options.get("transformer_impl", "local") == "local":
        for key in MEGATRON_TE_ONLY:
            if options.get(key):
                raise ConfigError(
                    f"{above}.megatron.{key} = {options[key]!r} has no effect with "
                    "transformer_impl: local",
                    hint="remove it, or use TransformerEngine's modules",
                )
    for needed in missing_packages(options):
        raise ConfigError(
            f"{above}.megatron.{needed.setting} = {needed.value} needs the package "
            f"{needed.package}, which is not in the environment of the stage",
            hint=f"install it there, or {needed.instead}",
        )
    if trains and options.get("lr") is None:
        raise ConfigError(f"{above}.megatron.lr is missing", hint="for example lr: 1.0e-6")
