"""Megatron's settings: ranges, what needs what, and what does nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.megatron_checks import (
    _ONLY_WITH,
    _UPDATE_ONLY_WITH,
    check_model_options,
    check_update_options,
)
from slurm_rl.config.megatron_limits import MEGATRON_IDLE, MEGATRON_RANGES, MEGATRON_TE_ONLY
from slurm_rl.config.passthrough import MEGATRON, check_megatron
from slurm_rl.config.schema import Settings
from slurm_rl.config.train_schema import Update
from slurm_rl.errors import ConfigError
from slurm_rl.train import cpu

Complaints = Callable[..., list[str]]
Load = Callable[..., Settings]

KL = {"train__use_kl_loss": True, "train__kl_loss_coef": 0.1}
TE = {"transformer_impl": "transformer_engine"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4}
RISING = {
    "weight_decay_incr_style": "linear",
    "start_weight_decay": 0.1,
    "end_weight_decay": 0.2,
}
#: A dense model's, in Megatron's words.
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 4}


def train_options(options: dict[str, Any]) -> dict[str, Any]:
    return {f"train__megatron__{name}": value for name, value in options.items()}


def numbers() -> set[str]:
    """Every number that a person may set, by Megatron's own table."""
    return {
        name
        for name, entry in MEGATRON.entries.items()
        if {"int", "float"} & set(entry["types"])
        and MEGATRON.owner(name) is None
        and name not in MEGATRON.only
    }


def test_every_number_has_a_range_or_does_nothing() -> None:
    assert numbers() <= set(MEGATRON_RANGES) | set(MEGATRON_IDLE)
    assert set(MEGATRON_RANGES) <= numbers()
    for name in (*MEGATRON_IDLE, *MEGATRON_TE_ONLY, *_ONLY_WITH, *_UPDATE_ONLY_WITH):
        assert name in MEGATRON.entries and MEGATRON.owner(name) is None, name


@pytest.mark.parametrize("name", sorted(MEGATRON_RANGES))
def test_defaults_are_in_their_range(name: str) -> None:
    default = MEGATRON.entries[name].get("default")
    assert not check_megatron({} if default is None else {name: default})
    (problem,) = check_megatron({name: -1})
    assert problem.path == ("train", "megatron", name) and problem.fix == "raise it"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"weight_decay": -1}, "train.megatron.weight_decay = -1 must be at least 0; raise it"),
        ({"adam_beta1": 1.5}, "train.megatron.adam_beta1 = 1.5 must be below 1; lower it"),
        ({"adam_beta2": 1.0}, "train.megatron.adam_beta2 = 1.0 must be below 1; lower it"),
        ({"clip_grad": -1.0}, "train.megatron.clip_grad = -1.0 must be at least 0; raise it"),
        ({"lr": -1e-6}, "train.megatron.lr = -1e-06 must be at least 0; raise it"),
        ({"adam_eps": 0.0}, "train.megatron.adam_eps = 0.0 must be above 0; raise it"),
        ({"optimizer_offload_fraction": 1.5}, "train.megatron.optimizer_offload_fraction = 1.5 must be at most 1; lower it"),
        ({"context_parallel_size": 0}, "train.megatron.context_parallel_size = 0 must be at least 1; raise it"),
        ({"sgd_momentum": 0.5}, "train.megatron.sgd_momentum = 0.5 has no effect: the optimizer is never SGD; take the line out"),
        ({"hysteresis": 3}, "train.megatron.hysteresis = 3 has no effect: it is of fp16's loss scale, and bf16 needs none; take the line out"),
        ({"delay_wgrad_compute": True}, "train.megatron.delay_wgrad_compute = true is not supported, only false is: it needs overlap_moe_expert_parallel_comm, whose schedule takes the model apart; take the line out"),
    ],
)  # fmt: skip
def test_a_number_out_of_its_range_is_one_line(
    complaints: Complaints, options: dict[str, Any], line: str
) -> None:
    assert complaints(**train_options(options)) == [line]


def test_ranges_hold_in_every_role(complaints: Complaints) -> None:
    wrong = {"megatron": {"lr": 1e-5, "clip_grad": -1.0}}
    found = complaints(
        **KL, train__advantage_estimator="gae", critic=wrong, reference={**wrong, "stage": True}
    )
    assert sorted(line.partition(" = ")[0] for line in found) == [
        "critic.megatron.clip_grad",
        "reference.megatron.clip_grad",
    ]


@given(
    lr=st.floats(-1, 1),
    betas=st.tuples(st.floats(-0.5, 1.5), st.floats(-0.5, 1.5)),
    eps=st.floats(-1, 1),
    decay=st.floats(-1, 1),
)
def test_what_is_taken_is_taken_by_torchs_adam(
    lr: float, betas: tuple[float, float], eps: float, decay: float
) -> None:
    options = {"lr": lr, "adam_eps": eps, "weight_decay": decay}
    options |= dict(zip(("adam_beta1", "adam_beta2"), betas, strict=True))
    try:
        torch.optim.AdamW(
            [torch.nn.Parameter(torch.zeros(1))], lr=lr, betas=betas, eps=eps, weight_decay=decay
        )
        is_taken = eps > 0  # 0 of it would divide by 0
    except ValueError:
        is_taken = False
    assert (not check_megatron(options)) == is_taken


@pytest.mark.parametrize(
    ("options", "values", "line"),
    [
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, {}, "train.megatron.recompute_method is missing, and recompute_granularity: full needs it; add it: uniform"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, {}, "train.megatron.recompute_num_layers is missing, and recompute_granularity: full needs it; add it, as 1"),
        ({"recompute_method": "block"}, {}, 'train.megatron.recompute_method = "block" has no effect without recompute_granularity: full; set that too, or take it out'),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, {}, "train.megatron.recompute_num_layers = 1 has no effect without recompute_granularity: full"),
        ({"recompute_granularity": "selective", "recompute_modules": []}, {}, "train.megatron.recompute_modules = [] is empty; list some of core_attn"),
        ({"recompute_granularity": "selective", "recompute_modules": ["att"]}, {}, 'train.megatron.recompute_modules = ["att"] may list core_attn'),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, {}, 'train.megatron.recompute_modules = ["moe_act"] lists moe_act, which needs moe_grouped_gemm'),
        ({**FULL, "moe_layer_recompute": True}, {}, "train.megatron.moe_layer_recompute = true cannot be with recompute_granularity: full, which recomputes all; take it out"),
        ({**FULL, "distribute_saved_activations": True, "sequence_parallel": True, "tensor_model_parallel_size": 2}, {"train__num_ranks": 2}, "train.megatron.distribute_saved_activations = true cannot be with sequence_parallel"),
        ({"fine_grained_activation_offloading": True}, {}, "train.megatron.offload_modules is missing, and fine_grained_activation_offloading needs it; list some of core_attn"),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]}, {}, 'train.megatron.offload_modules = ["attn_proj"] lists attn_proj without core_attn, whose output that is; list both'),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["x"]}, {}, 'train.megatron.offload_modules = ["x"] may list core_attn'),
        ({"offload_modules": ["core_attn"]}, {}, 'train.megatron.offload_modules = ["core_attn"] has no effect without fine_grained_activation_offloading: true'),
        ({**TE, "cpu_offloading": True, "recompute_granularity": "selective"}, {}, "train.megatron.cpu_offloading = true cannot be with recompute_granularity; keep one of the two"),
        ({**TE, "cpu_offloading": True, "pipeline_model_parallel_size": 2}, {"train__num_ranks": 2}, "train.megatron.cpu_offloading = true cannot be with pipeline_model_parallel_size above 1; take it out"),
        ({"moe_grouped_gemm": True}, {}, "train.megatron.moe_grouped_gemm = true has no effect with transformer_impl: local; take it out, or use transformer_engine where it is installed"),
        ({"fp8": "e4m3"}, {}, 'train.megatron.fp8 = "e4m3" has no effect with transformer_impl: local'),
        ({"fp8_param": True}, {}, "train.megatron.fp8_param = true has no effect without fp8: e4m3 or hybrid"),
        ({**TE, "fp8": "e4m3", "fp4": "e2m1"}, {}, 'train.megatron.fp4 = "e2m1" is given beside fp8; keep one of the two'),
        ({**TE, "fp8": "e4m3", "fp8_recipe": "custom"}, {}, "train.megatron.fp8_quantizer_factory is missing, and fp8_recipe: custom needs it"),
        ({**TE, "fp8": "e4m3", "first_last_layers_bf16": True}, {}, "train.megatron.first_last_layers_bf16 = true cannot be with fp8_recipe: delayed"),
        ({"microbatch_group_size_per_vp_stage": 2}, {}, "train.megatron.microbatch_group_size_per_vp_stage = 2 has no effect without virtual_pipeline_model_parallel_size above 1"),
        ({"microbatch_group_size_per_vp_stage": 1, "virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {"train__num_ranks": 2}, "train.megatron.microbatch_group_size_per_vp_stage = 1 is less than pipeline_model_parallel_size = 2; raise it"),
        ({"optimizer": "muon"}, {}, 'train.megatron.optimizer = "muon" cannot be with use_distributed_optimizer: Muon needs whole matrices, which that splits over the data-parallel ranks; set train.megatron.use_distributed_optimizer: false'),
        ({"muon_momentum": 0.5}, {}, "train.megatron.muon_momentum = 0.5 has no effect without optimizer: muon; set that too, or take it out"),
        ({"use_precision_aware_optimizer": True, "use_distributed_optimizer": False}, {}, "train.megatron.use_precision_aware_optimizer = true needs optimizer: adam and use_distributed_optimizer: true"),
        ({"optimizer_offload_fraction": 0.5}, {}, "train.megatron.optimizer_offload_fraction = 0.5 has no effect without optimizer_cpu_offload: true"),
        ({"min_lr": 1e-7}, {}, "train.megatron.min_lr = 1e-07 has no effect without lr_decay_style: linear or cosine or inverse-square-root or WSD"),
        ({"min_lr": 1.0, "lr_decay_style": "linear"}, {"train__lr_decay_iters": 9}, "train.megatron.min_lr = 1.0 is above lr = 1e-06; lower it"),
        ({"lr_warmup_init": 1e-7}, {}, "train.megatron.lr_warmup_init = 1e-07 has no effect without train.lr_warmup_iters; set that too, or take it out"),
        ({"lr_warmup_init": 1.0}, {"train__lr_warmup_iters": 3}, "train.megatron.lr_warmup_init = 1.0 is above lr = 1e-06; lower it"),
        ({"lr_wsd_decay_iters": 3}, {}, "train.megatron.lr_wsd_decay_iters = 3 has no effect without lr_decay_style: WSD"),
        ({"lr_decay_style": "WSD"}, {"train__lr_decay_iters": 9}, "train.megatron.lr_wsd_decay_iters is missing, and lr_decay_style: WSD needs it"),
        (WSD, {"train__lr_decay_iters": 9, "train__lr_warmup_iters": 6}, "train.megatron.lr_wsd_decay_iters = 4 is more than the 3 steps between warm-up and lr_decay_iters; lower it"),
        ({"start_weight_decay": 0.1}, {}, "train.megatron.start_weight_decay = 0.1 has no effect without weight_decay_incr_style: linear or cosine"),
        ({"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1}, {"train__lr_decay_iters": 9}, "train.megatron.end_weight_decay is missing, and weight_decay_incr_style: cosine needs it; add it"),
        ({**RISING, "end_weight_decay": 0.0}, {"train__lr_decay_iters": 9}, "train.megatron.start_weight_decay = 0.1 is above end_weight_decay = 0, and it can only rise; lower it"),
        (RISING, {}, "train.lr_decay_iters is missing, and weight_decay_incr_style: linear needs a horizon"),
        ({**RISING, "weight_decay": 0.0}, {"train__lr_decay_iters": 9}, "train.megatron.weight_decay = 0.0 has no effect beside start_weight_decay and end_weight_decay"),
    ],
)  # fmt: skip
def test_what_cannot_be_together_is_one_line(
    complaints: Complaints, options: dict[str, Any], values: dict[str, Any], line: str
) -> None:
    (found,) = complaints(**train_options(options), **values)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (FULL, {}),
        ({"recompute_granularity": "selective"}, {}),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}, {}),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, {}),
        ({**TE, "fp8": "hybrid", "fp8_recipe": "blockwise", "moe_grouped_gemm": True}, {}),
        ({"optimizer": "muon", "use_distributed_optimizer": False, "muon_num_ns_steps": 3}, {}),
        ({"lr_decay_style": "cosine", "min_lr": 1e-7}, {"train__lr_decay_iters": 9}),
        (WSD, {"train__lr_decay_iters": 9, "train__lr_warmup_iters": 5}),
        (RISING, {"train__lr_decay_iters": 9}),
        ({"lr_warmup_init": 1e-8}, {"train__lr_warmup_iters": 3}),
        ({"clip_grad": 0.0, "weight_decay": 0, "adam_beta1": 0.0, "sgd_momentum": 0.9}, {}),
        ({"decoupled_lr": 1e-5}, {}),
    ],
)
def test_what_goes_together_is_taken(
    load: Load, options: dict[str, Any], values: dict[str, Any]
) -> None:
    load(**train_options(options), **values)


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"lr": 0.1}, "reference.megatron.lr = 0.1 has no effect: the reference is never trained; take it out"),
        ({"weight_decay": 0.01}, "reference.megatron.weight_decay = 0.01 has no effect: the reference is never trained"),
        ({"lr_decay_style": "cosine"}, 'reference.megatron.lr_decay_style = "cosine" has no effect: the reference'),
        ({"overlap_grad_reduce": True}, "reference.megatron.overlap_grad_reduce = true has no effect"),
        ({"recompute_granularity": "selective"}, 'reference.megatron.recompute_granularity = "selective" has no effect'),
        ({"fp8": "e4m3"}, 'reference.megatron.fp8 = "e4m3" has no effect with transformer_impl: local'),
    ],
)  # fmt: skip
def test_what_would_train_a_reference_is_refused(
    complaints: Complaints, own: dict[str, Any], line: str
) -> None:
    (found,) = complaints(**KL, reference={"stage": True, "megatron": own})
    assert found.startswith(line)


def test_a_teacher_is_not_trained_either(complaints: Complaints) -> None:
    (found,) = complaints(teacher={"hf_checkpoint": "/m", "megatron": {"clip_grad": 1.0}})
    assert found.startswith("teacher.megatron.clip_grad = 1.0 has no effect: the teacher is never")


def test_a_reference_takes_over_what_its_policy_has(load: Load, complaints: Complaints) -> None:
    stage = {"stage": True, "megatron": {"bf16": True, "context_parallel_size": 1}}
    load(**KL, **train_options({**FULL, "clip_grad": 0.5}), reference=stage)
    # What is wrong in the policy's section is said once, there.
    (found,) = complaints(**KL, **train_options({"fp8": "e4m3"}), reference={"stage": True})
    assert found.startswith("train.megatron.fp8")


# -- against Megatron-core itself

#: Settings that have to do with each other, with some of their values.
GROUPS: list[dict[str, list[Any]]] = [
    {
        "recompute_granularity": [None, "full", "selective"],
        "recompute_method": [None, "uniform", "block"],
        "recompute_num_layers": [None, 1],
        "recompute_modules": [None, ["core_attn"], ["mlp", "layernorm"], ["moe_act"], ["x"]],
        "distribute_saved_activations": [False, True],
        "moe_layer_recompute": [False, True],
    },
    {
        "fine_grained_activation_offloading": [False, True],
        "offload_modules": [None, [], ["core_attn"], ["attn_proj"], ["core_attn", "x"]],
        "cpu_offloading": [False, True],
        "cpu_offloading_num_layers": [0, 1],
        "recompute_granularity": [None, "selective"],
        "pipeline_model_parallel_size": [1, 2],
        "transformer_impl": ["local", "transformer_engine"],
    },
    {
        "fp8": [None, "e4m3", "hybrid"],
        "fp8_param": [False, True],
        "fp8_recipe": ["delayed", "tensorwise", "custom"],
        "first_last_layers_bf16": [False, True],
        "fp4": [None, "e2m1"],
        "fp4_param": [False, True],
        "transformer_impl": ["local", "transformer_engine"],
    },
    {
        "delay_wgrad_compute": [False, True],
        "ep_overlap_early_attn_memory_release": [False, True],
        "defer_embedding_wgrad_compute": [False, True],
    },
]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: next(iter(group)))
@pytest.mark.filterwarnings("ignore")
def test_what_is_taken_is_taken_by_megatrons_config(group: dict[str, list[Any]]) -> None:
    with cpu.megatron_imports():
        from megatron.core.transformer.transformer_config import TransformerConfig
    at, num_taken = ("train", "megatron"), 0
    for values in itertools.product(*group.values()):
        options = dict(zip(group, values, strict=True))
        if check_megatron(options) or list(check_model_options(options, at)):
            continue
        num_taken += 1
        TransformerConfig(**SHAPE, pipeline_dtype=torch.float32, **options)
    assert num_taken > 0


def run_schedule(section: Update) -> list[dict[str, Any]] | None:
    """Megatron's rate and weight decay after each of 20 steps; None if the rules refuse it."""
    if list(check_update_options(section, ("train", "megatron"))):
        return None
    with cpu.megatron_imports():
        from slurm_rl.train.optimizer import build_scheduler
        from slurm_rl.train.options import split_megatron
    optimizer = _Optimizer(_Config(section.megatron))
    scheduler = build_scheduler(optimizer, section, split_megatron(section.megatron))
    found = []
    for _ in range(20):
        scheduler.step(1)
        found.append(dict(optimizer.param_groups[0]))
    return found


@given(
    options=st.fixed_dictionaries(
        {"lr": st.sampled_from([1e-3, 1e-2])},
        optional={
            "min_lr": st.sampled_from([0.0, 1e-4, 5e-3]),
            "lr_warmup_init": st.sampled_from([0.0, 1e-4, 5e-3]),
            "lr_decay_style": st.sampled_from(
                ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
            ),
        },
    ),
    warmup=st.integers(0, 8),
    horizon=st.none() | st.integers(1, 12),
    last=st.integers(1, 12),
)
def test_a_rate_that_is_taken_stays_within_what_is_named(
    options: dict[str, Any], warmup: int, horizon: int | None, last: int
) -> None:
    is_wsd = options.get("lr_decay_style") == "WSD"
    options = options | ({"lr_wsd_decay_iters": last} if is_wsd else {})
    found = run_schedule(Update(megatron=options, lr_warmup_iters=warmup, lr_decay_iters=horizon))
    if found is None:
        return
    low, high = options.get("min_lr", 0.0), options["lr"]
    rates = [group["lr"] for group in found]
    assert all(options.get("lr_warmup_init", 0.0) <= rate <= high for rate in rates[:warmup])
    assert all(low <= rate <= high for rate in rates[warmup:])


@pytest.mark.parametrize("style", ["exponential", "linear", "cosine"])
def test_a_last_decay_that_is_taken_begins_where_the_rate_was(style: str) -> None:
    num_taken = 0
    for warmup, horizon, last in itertools.product(range(5), range(1, 12), range(1, 13)):
        options = {**WSD, "lr": 1.0, "lr_wsd_decay_iters": last, "lr_wsd_decay_style": style}
        found = run_schedule(
            Update(megatron=options, lr_warmup_iters=warmup, lr_decay_iters=horizon)
        )
        if found is None:
            continue
        num_taken += 1
        rates = [1.0, *(group["lr"] for group in found[max(warmup - 1, 0) :])]
        # None of the three falls faster than by that much a step: no jump after the warm-up.
        assert max(a - b for a, b in itertools.pairwise(rates)) <= 1.6 / last + 1e-9
    assert num_taken > 0


def test_a_weight_decay_that_is_taken_rises_from_start_to_end() -> None:
    num_taken = 0
    ends = [None, 0.0, 0.1, 0.2]
    for style, start, end, horizon in itertools.product(
        ["constant", "linear", "cosine"], ends, ends, [None, 6]
    ):
        given_ends = {"start_weight_decay": start, "end_weight_decay": end}
        options = {"lr": 1.0, "weight_decay_incr_style": style} | given_ends
        found = run_schedule(Update(megatron=options, lr_decay_iters=horizon))
        if found is None:
            continue
        num_taken += 1
        decays = [group["weight_decay"] for group in found]
        assert decays == sorted(decays)
        if style == "constant":
            assert set(decays) == {0.01}  # the optimizer's own
        else:
            assert start is not None and end is not None and horizon is not None
            assert start <= decays[0] and decays[-1] == end
            assert start == end or start < decays[2] < end
    assert num_taken > 0


class _Config:
    def __init__(self, options: dict[str, Any]) -> None:
        self.lr = options["lr"]
        self.min_lr = options.get("min_lr", 0.0)
        self.weight_decay = options.get("weight_decay", 0.01)


class _Optimizer:
    """What a scheduler sees of Megatron's optimizer."""

    def __init__(self, config: _Config) -> None:
        self.config = config
        self.chained_optimizers = [self]
        self.param_groups: list[dict[str, Any]] = [{}]


def test_the_trainer_refuses_by_the_same_lists() -> None:
    with cpu.megatron_imports():
        from slurm_rl.train.options import split_megatron
    for name in MEGATRON_TE_ONLY:
        with pytest.raises(ConfigError, match=f"{name} = .* has no effect with"):
            split_megatron({"lr": 1.0, name: True})
