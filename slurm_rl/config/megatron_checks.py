"""Rules between Megatron-core's settings of one role: what needs what, and what does nothing alone.

Pure. Each setting by itself is `passthrough.py`'s. What depends on the model is said when it is
built, and what depends on the packages of the job's machine by `train/packages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slurm_rl.config.megatron_limits import MEGATRON_TE_ONLY
from slurm_rl.config.passthrough import MEGATRON, megatron_sections
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.roles import role, role_megatron, updating_roles
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import is_megatron_stage, stage_kinds
from slurm_rl.config.train_schema import Update

Problems = Iterator[Problem]
Options = Mapping[str, Any]

_OUT = "take it out"
_FULL, _SELECTIVE = ("full",), ("selective",)
_FP8, _FP4 = ("e4m3", "hybrid"), ("e2m1",)
_DECAYS = ("linear", "cosine", "inverse-square-root", "WSD")
_ON = (True,)

#: Setting -> another one, and its values under which the setting does something.
_ONLY_WITH: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "recompute_method": ("recompute_granularity", _FULL),
    "recompute_num_layers": ("recompute_granularity", _FULL),
    "distribute_saved_activations": ("recompute_granularity", _FULL),
    "recompute_modules": ("recompute_granularity", _SELECTIVE),
    **dict.fromkeys(
        ("offload_modules", "min_offloaded_tensor_size"),
        ("fine_grained_activation_offloading", _ON),
    ),
    **dict.fromkeys(
        "cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights"
        " cpu_offloading_double_buffering".split(),
        ("cpu_offloading", _ON),
    ),
    **dict.fromkeys(
        "fp8_recipe fp8_param fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo"
        " fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention fp8_quantizer_factory"
        " first_last_layers_bf16 tp_only_amax_red".split(),
        ("fp8", _FP8),
    ),
    **dict.fromkeys("fp4_recipe fp4_param fp4_quantizer_factory".split(), ("fp4", _FP4)),
    **dict.fromkeys(
        ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        ("first_last_layers_bf16", _ON),
    ),
}
#: The same, of what updates a model.
_UPDATE_ONLY_WITH: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("min_lr", "decoupled_min_lr"), ("lr_decay_style", _DECAYS)),
    **dict.fromkeys(("lr_wsd_decay_iters", "lr_wsd_decay_style"), ("lr_decay_style", ("WSD",))),
    **dict.fromkeys(
        ("start_weight_decay", "end_weight_decay"), ("weight_decay_incr_style", _DECAYS[:2])
    ),
    **dict.fromkeys(
        "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec"
        " muon_num_ns_steps muon_tp_mode muon_extra_scale_factor".split(),
        ("optimizer", ("muon",)),
    ),
    **dict.fromkeys(
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload"
        " overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params".split(),
        ("optimizer_cpu_offload", _ON),
    ),
}
#: Of the model, what a pass without gradient has no use for.
_BACKWARD = (
    "recompute_granularity recompute_method recompute_num_layers recompute_modules"
    " distribute_saved_activations moe_layer_recompute fine_grained_activation_offloading"
    " offload_modules cpu_offloading"
).split()
_RECOMPUTED = "core_attn moe_act layernorm mla_up_proj mlp moe shared_experts".split()
_OFFLOADED = "core_attn attn_proj expert_fc1 moe_act attn_norm mlp_norm qkv_linear".split()


def check_megatron_roles(settings: Settings) -> Problems:
    """Everything that is wrong between Megatron's settings of each role."""
    updating = updating_roles(settings)
    for kind in stage_kinds(settings):
        if not is_megatron_stage(settings, kind):
            continue
        at, options = (kind, "megatron"), role_megatron(settings, kind)
        if kind in updating:
            yield from check_model_options(options, at)
            yield from check_update_options(updating[kind], at)
            continue
        yield from _check_untrained(role(settings, kind).megatron, at)
        # Of what the reference takes over from the policy, train.megatron's lines say it.
        inherited = settings.train.megatron if kind == "reference" else {}
        said = [(found.path, found.rule) for found in check_model_options(inherited, at)]
        for found in check_model_options(options, at):
            if (found.path, found.rule) not in said:
                yield found


def check_model_options(options: Options, at: Path) -> Problems:
    """Rules between settings of the model and of how it is computed."""
    for rule in _MODEL_RULES:
        yield from rule(options, at)


def check_update_options(section: Update, at: Path) -> Problems:
    """Rules between settings of the optimizer and its schedule."""
    yield from _check_only_with(section.megatron, at, _UPDATE_ONLY_WITH)
    yield from _check_optimizer(section.megatron, at)
    yield from _check_rate(section, at)
    yield from _check_weight_decay(section, at)


def _check_untrained(own: Options, at: Path) -> Problems:
    """What a role asks for that would train it."""
    for name, value in own.items():
        is_of_model = "model" in megatron_sections(name) and name not in _BACKWARD
        if not is_of_model and (name not in _BACKWARD or value != _default(name)):
            rule = f"has no effect: the {at[0]} is never trained"
            yield Problem((*at, name), rule, _OUT, value)


def _default(name: str) -> Any:
    return MEGATRON.entries[name].get("default")


def _check_only_with(
    options: Options, at: Path, table: Mapping[str, tuple[str, tuple[Any, ...]]]
) -> Problems:
    for name, (other, values) in table.items():
        value = options.get(name, _default(name))
        if value != _default(name) and options.get(other, _default(other)) not in values:
            shown = " or ".join(str(v).lower() if v is True else v for v in values)
            rule = f"has no effect without {other}: {shown}"
            yield Problem((*at, name), rule, f"set that too, or {_OUT}", value)


def _check_alone(options: Options, at: Path) -> Problems:
    yield from _check_only_with(options, at, _ONLY_WITH)
    if options.get("transformer_impl", "local") == "local":
        for name in MEGATRON_TE_ONLY:
            if options.get(name):
                rule = "has no effect with transformer_impl: local"
                fix = f"{_OUT}, or use transformer_engine where it is installed"
                yield Problem((*at, name), rule, fix, options[name])


def _check_recompute(options: Options, at: Path) -> Problems:
    granularity = options.get("recompute_granularity")
    if granularity == "full":
        needed = {
            "recompute_method": "add it: uniform (every so many layers) or block (the first ones)",
            "recompute_num_layers": "add it, as 1: layers that are recomputed as one, or how many",
        }
        for name, fix in needed.items():
            if options.get(name) is None:
                rule = "is missing, and recompute_granularity: full needs it"
                yield Problem((*at, name), rule, fix)
        if options.get("moe_layer_recompute"):
            rule = "cannot be with recompute_granularity: full, which recomputes all"
            yield Problem((*at, "moe_layer_recompute"), rule, _OUT, True)
    elif granularity == "selective":
        yield from _check_modules(options, at, "recompute_modules", _RECOMPUTED)
    if options.get("distribute_saved_activations") and options.get("sequence_parallel"):
        rule = "cannot be with sequence_parallel, which distributes them already"
        yield Problem((*at, "distribute_saved_activations"), rule, _OUT, True)


def _check_modules(options: Options, at: Path, name: str, valid: list[str]) -> Problems:
    """A list of parts of the model, to be recomputed or moved to the host."""
    modules = options.get(name)
    if modules is None:
        return
    path = (*at, name)
    if not modules:
        yield Problem(path, "is empty", f"list some of {', '.join(valid)}", modules)
    for module in modules:
        if module not in valid:
            yield Problem(path, f"may list {', '.join(valid)}, not {module}", "mend it", modules)
    if "moe_act" in modules and not options.get("moe_grouped_gemm"):
        rule = "lists moe_act, which needs moe_grouped_gemm"
        yield Problem(path, rule, "set that too, or take moe_act out", modules)


def _check_offloading(options: Options, at: Path) -> Problems:
    name, modules = "fine_grained_activation_offloading", options.get("offload_modules")
    if options.get(name):
        if modules is None:
            rule = f"is missing, and {name} needs it"
            fix = f"list some of {', '.join(_OFFLOADED)}"
            yield Problem((*at, "offload_modules"), rule, fix)
        yield from _check_modules(options, at, "offload_modules", _OFFLOADED)
        if "attn_proj" in (modules or ()) and "core_attn" not in (modules or ()):
            rule = "lists attn_proj without core_attn, whose output that is"
            yield Problem((*at, "offload_modules"), rule, "list both", modules)
        if options.get("cpu_offloading"):
            yield Problem((*at, name), "cannot be with cpu_offloading", "keep one of the two", True)
    if options.get("cpu_offloading"):
        if options.get("recompute_granularity") is not None:
            rule = "cannot be with recompute_granularity"
            yield Problem((*at, "cpu_offloading"), rule, "keep one of the two", True)
        if int(options.get("pipeline_model_parallel_size") or 1) > 1:
            rule = "cannot be with pipeline_model_parallel_size above 1"
            yield Problem((*at, "cpu_offloading"), rule, _OUT, True)


def _check_precision(options: Options, at: Path) -> Problems:
    if options.get("fp8") and options.get("fp4"):
        yield Problem((*at, "fp4"), "is given beside fp8", "keep one of the two", options["fp4"])
    for kind in ("fp8", "fp4"):
        factory = f"{kind}_quantizer_factory"
        if options.get(f"{kind}_recipe") == "custom" and not options.get(factory):
            rule = f"is missing, and {kind}_recipe: custom needs it"
            yield Problem((*at, factory), rule, "add it: a dotted path")
    is_delayed = options.get("fp8_recipe", "delayed") == "delayed"
    if options.get("fp8") and options.get("first_last_layers_bf16") and is_delayed:
        rule = "cannot be with fp8_recipe: delayed"
        yield Problem((*at, "first_last_layers_bf16"), rule, "choose another recipe", True)


def _check_interleaving(options: Options, at: Path) -> Problems:
    is_interleaved = int(options.get("virtual_pipeline_model_parallel_size") or 1) > 1
    group, flush = "microbatch_group_size_per_vp_stage", "overlap_p2p_comm_warmup_flush"
    for name in (group, flush):
        if options.get(name) and not is_interleaved:
            rule = "has no effect without virtual_pipeline_model_parallel_size above 1"
            yield Problem((*at, name), rule, f"set that too, or {_OUT}", options[name])
    size, ranks = options.get(group), int(options.get("pipeline_model_parallel_size") or 1)
    if is_interleaved and size is not None and size < ranks:
        rule = f"is less than pipeline_model_parallel_size = {ranks}"
        yield Problem((*at, group), rule, "raise it", size)


def _check_optimizer(options: Options, at: Path) -> Problems:
    is_muon = options.get("optimizer") == "muon"
    is_split = options.get("use_distributed_optimizer", True)  # the trainer's default
    if is_muon and is_split:
        rule = "cannot be with use_distributed_optimizer: Muon needs whole matrices, which that "
        rule += "splits over the data-parallel ranks"
        fix = f"set {'.'.join(map(str, at))}.use_distributed_optimizer: false"
        yield Problem((*at, "optimizer"), rule, fix, "muon")
    if options.get("use_precision_aware_optimizer") and (is_muon or not is_split):
        rule = "needs optimizer: adam and use_distributed_optimizer: true"
        yield Problem((*at, "use_precision_aware_optimizer"), rule, _OUT, True)


def _check_rate(section: Update, at: Path) -> Problems:
    """The learning rate, its warm-up and its decay."""
    options, kind = section.megatron, at[0]
    style, horizon = options.get("lr_decay_style", "constant"), section.lr_decay_iters
    warmup, lr = section.lr_warmup_iters, options.get("lr")
    if lr is None:
        yield Problem((*at, "lr"), "is missing", "add the learning rate, as 1.0e-6")
    if style != "constant" and horizon is None:
        rule = f"is missing, and lr_decay_style: {style} needs a horizon"
        fix = "add it: optimizer steps until min_lr, kept when the run is extended"
        yield Problem((kind, "lr_decay_iters"), rule, fix)
    if horizon is not None and warmup >= horizon:
        rule = f"is not below lr_decay_iters = {horizon}"
        yield Problem((kind, "lr_warmup_iters"), rule, "lower it", warmup)
    for name, top in (
        ("min_lr", "lr"),
        ("lr_warmup_init", "lr"),
        ("decoupled_min_lr", "decoupled_lr"),
    ):
        value, most = options.get(name), options.get(top)
        if value is not None and most is not None and value > most:
            yield Problem((*at, name), f"is above {top} = {most:g}", "lower it", value)
    if options.get("lr_warmup_init") and warmup == 0:
        rule = f"has no effect without {kind}.lr_warmup_iters"
        yield Problem(
            (*at, "lr_warmup_init"), rule, f"set that too, or {_OUT}", options["lr_warmup_init"]
        )
    yield from _check_last_decay(section, at)


def _check_last_decay(section: Update, at: Path) -> Problems:
    """WSD: warm-up, a stable rate, and a decay in the last steps before the horizon."""
    if section.megatron.get("lr_decay_style") != "WSD":
        return
    last, horizon = section.megatron.get("lr_wsd_decay_iters"), section.lr_decay_iters
    path, left = (*at, "lr_wsd_decay_iters"), (horizon or 0) - section.lr_warmup_iters
    if last is None:
        rule = "is missing, and lr_decay_style: WSD needs it"
        yield Problem(path, rule, "add it: optimizer steps of the decay, the horizon's last ones")
    elif horizon is not None and last > left:
        rule = f"is more than the {left} steps between warm-up and lr_decay_iters"
        yield Problem(path, rule, "lower it", last)


def _check_weight_decay(section: Update, at: Path) -> Problems:
    """A weight decay that rises from one value to another until the horizon."""
    options = section.megatron
    style = options.get("weight_decay_incr_style", "constant")
    if style == "constant":
        return
    rises = f"weight_decay_incr_style: {style}"
    ends = {name: options.get(name) for name in ("start_weight_decay", "end_weight_decay")}
    for name, value in ends.items():
        if value is None:
            yield Problem((*at, name), f"is missing, and {rises} needs it", "add it")
    start, end = ends.values()
    if start is not None and end is not None:
        if start > end:
            rule = f"is above end_weight_decay = {end:g}, and it can only rise"
            yield Problem((*at, "start_weight_decay"), rule, "lower it", start)
        if "weight_decay" in options:
            rule = "has no effect beside start_weight_decay and end_weight_decay"
            yield Problem((*at, "weight_decay"), rule, _OUT, options["weight_decay"])
    if section.lr_decay_iters is None:
        rule = f"is missing, and {rises} needs a horizon"
        fix = "add it: optimizer steps until end_weight_decay"
        yield Problem((at[0], "lr_decay_iters"), rule, fix)


_MODEL_RULES: tuple[Callable[[Options, Path], Problems], ...] = (
    _check_alone,
    _check_recompute,
    _check_offloading,
    _check_precision,
    _check_interleaving,
)
