from __future__ import annotations

import dataclasses

import pytest

from slurm_rl.config.passthrough import (
    MEGATRON,
    SGLANG,
    check_megatron,
    check_sglang,
    megatron_sections,
)
from slurm_rl.config.problems import Problem


def render(problems: list[Problem]) -> list[str]:
    return [problem.render({(): "f"}).removeprefix("f: ") for problem in problems]


def test_real_settings_pass() -> None:
    assert not check_megatron(
        {
            "lr": 1e-6,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "bf16": True,
            "recompute_granularity": "full",
            "recompute_method": None,
            "attention_backend": "flash",
            "hidden_dropout": 0.0,
            "lr_decay_style": "cosine",
            "weight_decay": 0,
            "clip_grad": 1.0,
        }
    )
    assert not check_sglang(
        {
            "tp_size": 2,
            "mem_fraction_static": 0.8,
            "device": "cpu",
            "attention_backend": "torch_native",
            "cuda_graph_bs_decode": [1, 2],
            "disable_cuda_graph": True,
            "enable_deterministic_inference": True,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
        }
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tensor_model_parallel_sise": 2}, "train.megatron.tensor_model_parallel_sise is not a setting of Megatron-core 0.16.1; did you mean tensor_model_parallel_size?"),
        ({"accumulate_allreduce_grads_in_fp32": True}, "train.megatron.accumulate_allreduce_grads_in_fp32 is not a setting of Megatron-core 0.16.1; it is called grad_reduce_in_fp32 there"),
        ({"lr": "1e-6"}, 'train.megatron.lr = "1e-6" must be a number; change it, and mind quotes'),
        ({"lr": float("nan")}, "train.megatron.lr = NaN must be a number; change it"),
        ({"bf16": 1}, "train.megatron.bf16 = 1 must be true or false; change it"),
        ({"tensor_model_parallel_size": True}, "train.megatron.tensor_model_parallel_size = true must be a whole number; change it"),
        ({"num_layers": 4}, "train.megatron.num_layers = 4 comes from the model's own config.json; take the line out"),
        ({"lr_warmup_iters": 4}, "train.megatron.lr_warmup_iters = 4 is train.lr_warmup_iters; take the line out"),
        ({"params_dtype": "bf16"}, "train.megatron.params_dtype = \"bf16\" is of a type that only Megatron-core 0.16.1's code can make; take the line out"),
        ({"moe_router_topk": 2}, "train.megatron.moe_router_topk = 2 comes from the model's own config.json; take the line out"),
        ({"hidden_dropout": 0.1}, "train.megatron.hidden_dropout = 0.1 is not supported, only 0.0 is: the same tokens must get the same log-probs twice; take the line out"),
        ({"optimizer": "sgd"}, 'train.megatron.optimizer = "sgd" is not supported, only "adam" or "muon" is: checkpoints do not hold another one\'s state; take the line out'),
        ({"mtp_num_layers": 1}, "train.megatron.mtp_num_layers = 1 is of models that are not supported; take the line out"),
        ({"lr_decay_style": "cosin"}, 'train.megatron.lr_decay_style = "cosin" must be one of constant, linear, cosine, inverse-square-root, WSD; did you mean cosine?'),
        ({"attention_backend": "flsh"}, 'train.megatron.attention_backend = "flsh" must be one of flash, fused, unfused, local, auto; did you mean flash?'),
    ],
)  # fmt: skip
def test_wrong_megatron_settings(options: dict[str, object], line: str) -> None:
    assert render(check_megatron(options)) == [line]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mem_fraction_statc": 0.8}, "rollout.sglang.mem_fraction_statc is not a setting of SGLang 0.5.17; did you mean mem_fraction_static?"),
        ({"tensor_parallel_size": 2}, "rollout.sglang.tensor_parallel_size is not a setting of SGLang 0.5.17; it is called tp_size there"),
        ({"cuda_graph_max_bs": 2}, "rollout.sglang.cuda_graph_max_bs is not a setting of SGLang 0.5.17; it is called cuda_graph_max_bs_decode there"),
        ({"port": 30000}, "rollout.sglang.port = 30000 is a free port, bound when the server starts; take the line out"),
        ({"model": "/m"}, "rollout.sglang.model is not a setting of SGLang 0.5.17; it is what the commit names"),
        ({"random_seed": 1}, "rollout.sglang.random_seed = 1 derives from the top-level seed; each sample carries its own; take the line out"),
        ({"tp_size": "2"}, 'rollout.sglang.tp_size = "2" must be a whole number; change it, and mind quotes'),
        ({"load_format": "dummy"}, 'rollout.sglang.load_format = "dummy" is what the commit names; take the line out'),
    ],
)  # fmt: skip
def test_wrong_sglang_settings(options: dict[str, object], line: str) -> None:
    assert render(check_sglang(options)) == [line]


def test_a_shared_name_goes_to_every_class_that_has_it() -> None:
    assert set(megatron_sections("bf16")) == {"model", "optimizer"}
    assert megatron_sections("lr_decay_style") == ("scheduler",)


def test_what_is_owned_under_its_own_name_exists_or_is_explained() -> None:
    for name in MEGATRON.only:
        assert name in MEGATRON.entries, name
    assert len(SGLANG.entries) > 400
    assert all(not name.startswith("_") for name in MEGATRON.entries)


@pytest.mark.slow
def test_the_megatron_table_is_that_of_the_installed_version() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    kinds = {
        "model": TransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }
    for section, kind in kinds.items():
        ours = {name for name in MEGATRON.entries if section in megatron_sections(name)}
        theirs = {f.name for f in dataclasses.fields(kind) if not f.name.startswith("_")}
        assert ours == theirs
