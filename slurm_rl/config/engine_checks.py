"""Rules about the rollout's engines: what cannot take effect, and what does not fit a node.

Owns how many GPUs one SGLang server asks for. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurm_rl.config.derive import gpu_count, stage_slurm
from slurm_rl.config.pools import settings_of_pool
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.rollout_schema import Rollout
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

#: What only SGLang servers take.
_SGLANG_ONLY = (
    "sglang",
    "sglang_python",
    "sglang_env",
    "replicas",
    "engine_nodes",
    "concurrency",
    "request_timeout_s",
    "server_start_timeout_s",
)
_SIZES = ("tp_size", "pp_size", "dp_size")


def check_engine(settings: Settings) -> Problems:
    """Everything that is wrong between the settings of the engine."""
    yield from _check_weights(settings)
    if settings.rollout.engine == "embedded":
        for name in _SGLANG_ONLY:
            if _is_set(settings.rollout, name):
                rule = "has no effect with engine: embedded"
                yield Problem(("rollout", name), rule, "take it out, or set engine: sglang")
        yield from _check_embedded_pools(settings)
        return
    if _is_set(settings.rollout, "embedded_threads"):
        rule, fix = "has no effect with engine: sglang", "take it out, or set engine: embedded"
        yield Problem(("rollout", "embedded_threads"), rule, fix, settings.rollout.embedded_threads)
    yield from _check_determinism(settings)
    if not settings.rollout.pools:
        yield from _check_sizes(settings, ("rollout",))
    for name in settings.rollout.pools:
        yield from _check_sizes(settings_of_pool(settings, name), ("rollout", "pools", name))


def _check_embedded_pools(settings: Settings) -> Problems:
    for name, pool in settings.rollout.pools.items():
        for key in ("replicas", "sglang"):
            if getattr(pool, key):
                rule = "has no effect with engine: embedded"
                at = ("rollout", "pools", name, key)
                yield Problem(at, rule, "take it out, or set engine: sglang")


def _check_sizes(settings: Settings, at: Path) -> Problems:
    """Whether the servers fit their jobs. at: of the rollout, or of the pool that `settings` are
    of."""
    options = settings.rollout.sglang
    wrong = [name for name in _SIZES if options.get(name, 1) < 1]
    for name in wrong:
        yield Problem((*at, "sglang", name), "must be at least 1", "raise it", options[name])
    if not wrong:
        yield from _check_nodes(settings, at)
        yield from _check_gpus(settings, at)


def _check_determinism(settings: Settings) -> Problems:
    options = settings.rollout.sglang
    if settings.deterministic and options.get("enable_deterministic_inference") is not True:
        # Not added silently: it costs speed, and it changes what SGLang computes.
        yield Problem(
            ("rollout", "sglang", "enable_deterministic_inference"),
            "must be true with deterministic: true",
            "add it, or set deterministic: false",
        )
    for name, pool in settings.rollout.pools.items():
        if settings.deterministic and pool.sglang:
            rule = "cannot be with deterministic: true: samples must not depend on their shard"
            fix = "set it for all in rollout.sglang, or set deterministic: false"
            yield Problem(("rollout", "pools", name, "sglang"), rule, fix)
    if options.get("enable_deterministic_inference"):
        for path, value in _min_ps(settings):
            if value:  # an assertion there: the first such request ends SGLang 0.5.17
                rule = "cannot be with enable_deterministic_inference"
                yield Problem(path, rule, "set it to 0, and use rollout_top_p", value)


def _min_ps(settings: Settings) -> Iterator[tuple[Path, float | None]]:
    """Each place where min-p may be set, and what it is there."""
    yield ("rollout", "rollout_min_p"), settings.rollout.rollout_min_p
    data = settings.rollout.prompt_data
    for i, data_set in enumerate([] if isinstance(data, str) else data):
        yield ("rollout", "prompt_data", i, "rollout_min_p"), data_set.rollout_min_p
    for name, evaluation in settings.eval.items():
        yield ("eval", name, "rollout_min_p"), evaluation.rollout_min_p


def gpus_per_server(options: Mapping[str, Any]) -> int:
    """GPUs of one SGLang server, on all its nodes: tp × pp, and × dp unless attention alone is
    data-parallel, which shares those of tp."""
    needed = options.get("tp_size", 1) * options.get("pp_size", 1)
    if not options.get("enable_dp_attention"):
        needed *= options.get("dp_size", 1)
    return int(needed)


def _check_weights(settings: Settings) -> Problems:
    rollout = settings.rollout
    path: Path = ("rollout", "stage_weights")
    if rollout.stage_weights is not None and not rollout.stage_weights.startswith(("/", "$")):
        fix = "write it as /dev/shm, or with a variable that the node sets, as $TMPDIR"
        yield Problem(path, "must be an absolute path", fix, rollout.stage_weights)
    if rollout.stage_weights is None and rollout.stage_weights_gb is not None:
        rule = "has no effect without stage_weights"
        fix = "name the node's folder as stage_weights, or take it out"
        yield Problem(("rollout", "stage_weights_gb"), rule, fix, rollout.stage_weights_gb)


def _check_nodes(settings: Settings, at: Path) -> Problems:
    """Rules of a server that spans nodes; those about its layout are SGLang's own."""
    rollout = settings.rollout
    nodes, path = rollout.engine_nodes, ("rollout", "engine_nodes")
    if nodes == 1:
        return
    if rollout.replicas > 1:
        rule = f"is given beside engine_nodes = {nodes}: one server takes all the nodes"
        yield Problem((*at, "replicas"), rule, "use shards instead", rollout.replicas)
    options = rollout.sglang
    size = options.get("tp_size", 1) * options.get("pp_size", 1)
    if size % nodes:
        rule = f"does not divide tp × pp = {size}"
        yield Problem(path, rule, "raise rollout.sglang.tp_size, or lower it", nodes)
    if options.get("dp_size", 1) > 1 and not options.get("enable_dp_attention"):
        rule = f"cannot be with engine_nodes = {nodes}, unless enable_dp_attention is set"
        fix = "use shards or replicas for copies of the model"
        yield Problem((*at, "sglang", "dp_size"), rule, fix, options["dp_size"])
    have = int(stage_slurm(settings, "rollout").get("nodes", 1))
    if settings.launcher == "slurm" and have != nodes:
        rule = f"is not the {have} node(s) of a rollout job"
        fix = f"set {'.'.join(map(str, at))}.slurm.nodes: {nodes}"
        yield Problem(path, rule, fix, nodes)


def _check_gpus(settings: Settings, at: Path) -> Problems:
    rollout = settings.rollout
    gpus = gpu_count(stage_slurm(settings, "rollout").get("gpus_per_node"))
    if settings.launcher != "slurm" or not gpus:
        return
    needed = gpus_per_server(rollout.sglang) // rollout.engine_nodes
    if needed > gpus:
        rule = f"needs {needed} GPUs (tp × pp × dp), but a node of the job has {gpus}"
        yield Problem((*at, "sglang"), rule, "lower tp_size or dp_size, or ask for more")
    elif needed * rollout.replicas > gpus:
        rule = f"of {needed} GPUs each do not fit on the {gpus} GPUs of a node"
        fix = "lower it, or ask for more GPUs"
        yield Problem((*at, "replicas"), rule, fix, rollout.replicas)


def _is_set(rollout: Rollout, name: str) -> bool:
    return bool(
        getattr(rollout, name) != Rollout.model_fields[name].get_default(call_default_factory=True)
    )
