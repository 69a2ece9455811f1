"""Rules of mixtures of experts: who can serve them, and say which experts were chosen. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurm_rl.config.model_size import dense_layers, num_experts
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

_NAME = "use_rollout_routing_replay"
_AT: Path = ("rollout", _NAME)
_OFF = f"set rollout.{_NAME}: false"
#: SGLang's own name; the run sets it.
_SERVER_FLAG = "enable_return_routed_experts"
#: Server arguments under which SGLang 0.5.17 does not know the choice of every token -> why.
_SILENT = {
    "enable_hierarchical_cache": "a prefix that comes back from the host's cache has no ids",
    "speculative_algorithm": "its buffer of ids does not count the draft's tokens",
    "enable_eplb": "its ids are those of copies of experts",
    "enable_two_batch_overlap": "its second half writes its ids over those of the first",
}
#: Those that may have some values -> these, and why no other.
_SPOKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "pp_size": ((1,), "each server process knows the choices of its own layers alone"),
    "moe_runner_backend": (
        ("auto", "triton"),
        "in its kernels the choice of experts is not recorded",
    ),
}
#: Families whose router takes the largest logits; others choose by more than those.
_EMBEDDED = ("qwen2_moe", "qwen3_moe", "mixtral")
#: Families of which SGLang knows no layers without experts.
_SERVED_WITHOUT_DENSE = ("qwen2_moe", "qwen3_moe")
#: Ids are stored as uint8.
_MOST = 256


def check_routing(settings: Settings) -> Problems:
    """What cannot be together with the replay of the engine's routing."""
    rollout = settings.rollout
    places = [
        (("rollout", "sglang"), rollout.sglang),
        *((("rollout", "pools", name, "sglang"), p.sglang) for name, p in rollout.pools.items()),
    ]
    for at, options in places:
        if _SERVER_FLAG in options:
            rule = f"is set by the run itself, from rollout.{_NAME}"
            yield Problem((*at, _SERVER_FLAG), rule, "take it out", options[_SERVER_FLAG])
    if not rollout.use_rollout_routing_replay:
        return
    for at, options in places:
        for name, why in _SILENT.items():
            if options.get(name):
                rule = f"cannot be with {_NAME}: {why}"
                yield Problem((*at, name), rule, f"take it out, or {_OFF}", options[name])
        for name, (values, why) in _SPOKEN.items():
            if name in options and options[name] not in values:
                rule = f"cannot be with {_NAME}: {why}"
                yield Problem((*at, name), rule, f"take it out, or {_OFF}", options[name])
    yield from _check_others(settings)


def _check_others(settings: Settings) -> Problems:
    """Settings of other parts."""
    if settings.train.megatron.get("moe_router_fusion"):
        rule = f"cannot be with rollout.{_NAME}: its kernel chooses the experts by itself"
        place: Path = ("train", "megatron", "moe_router_fusion")
        yield Problem(place, rule, f"take it out, or {_OFF}", True)
    if settings.rollout.partial_rollout:
        rule = f"cannot be with {_NAME}: what was carried over has no ids"
        yield Problem(("rollout", "partial_rollout"), rule, f"set it to false, or {_OFF}", True)
    if settings.train.sft_iterations:
        rule = f"cannot be with rollout.{_NAME}: labels are no engine's answers"
        path: Path = ("train", "sft_iterations")
        yield Problem(path, rule, f"set it to 0, or {_OFF}", settings.train.sft_iterations)


def check_dense_layers(settings: Settings, config: Mapping[str, Any]) -> Problems:
    """SGLang 0.5.17 makes every layer of these families one with experts: it would read nothing
    for the others, and answer out of what lay in memory."""
    is_of_them = config.get("model_type") in _SERVED_WITHOUT_DENSE
    if settings.rollout.engine != "sglang" or not is_of_them:
        return
    dense = dense_layers(config, int(config.get("num_hidden_layers") or 0))
    if dense:
        rule = (
            f"cannot serve this model: layer {dense[0]} has no experts, and SGLang 0.5.17 gives "
            f"all layers of {config['model_type']} some, without a word"
        )
        fix = "take a model whose layers all have experts, or engine: embedded"
        yield Problem(("rollout", "engine"), rule, fix, "sglang")


def check_experts(settings: Settings, config: Mapping[str, Any]) -> Problems:
    """Whether the trained model, whose config.json says `config`, has experts to replay."""
    if not settings.rollout.use_rollout_routing_replay:
        return
    num, family = num_experts(config), config.get("model_type")
    if not num or "num_experts_per_tok" not in config:
        rule = f"has no effect: the model ({family}) is no mixture of experts by its config.json"
        yield Problem(_AT, rule, _OFF, True)
    elif num > _MOST:
        rule = f"takes at most {_MOST} experts, and the model has {num}"
        yield Problem(_AT, rule, _OFF, True)
    elif settings.rollout.engine == "embedded" and family not in _EMBEDDED:
        rule = f"needs a model of {', '.join(_EMBEDDED)} with engine: embedded, not {family}"
        yield Problem(_AT, rule, f"set engine: sglang, or {_OFF}", True)
