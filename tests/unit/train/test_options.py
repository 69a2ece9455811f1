"""`train.megatron`: each key goes where Megatron has it, or is refused by name."""

import pytest

from slurm_rl.errors import ConfigError
from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train.options import split_megatron

from slurm_rl.config.passthrough import MEGATRON
from slurm_rl.models.geometry import MODEL_FIELDS
from slurm_rl.models.layout import Layout


def test_keys_go_where_megatron_has_them():
    options = split_megatron(
        {
            "lr": 1e-5,
            "min_lr": 1e-6,
            "clip_grad": 0.5,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "overlap_grad_reduce": True,
            "lr_decay_style": "cosine",
            "recompute_granularity": "full",
        }
    )
    assert options.layout == Layout(tensor=2)
    assert options.optimizer == {"lr": 1e-5, "min_lr": 1e-6, "clip_grad": 0.5}
    assert options.ddp == {"overlap_grad_reduce": True}
    assert options.schedule == {"lr_decay_style": "cosine"}
    assert options.transformer == {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute_granularity": "full",
    }


def test_a_key_of_several_parts_goes_to_all():
    options = split_megatron({"lr": 1.0, "bf16": True, "use_distributed_optimizer": False})
    assert options.bf16 is True
    assert options.transformer["bf16"] and options.optimizer["bf16"]
    assert options.ddp == {"use_distributed_optimizer": False}
    assert options.optimizer["use_distributed_optimizer"] is False


def test_the_token_loss_is_ours_to_compute():
    options = split_megatron({"lr": 1.0, "calculate_per_token_loss": True})
    assert options.per_token and options.transformer == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "train.megatron.lr is missing"),
        ({"lr": 1.0, "learning_rate": 2.0}, "learning_rate is not a name"),
        ({"lr": 1.0, "hidden_size": 64}, "hidden_size cannot be set"),
        ({"lr": 1.0, "moe_router_topk": 2}, "moe_router_topk cannot be set"),
        ({"lr": 1.0, "hidden_dropout": 0.1}, "hidden_dropout = 0.1 .*, only 0.0 is: the same tok"),
        ({"lr": 1.0, "fp16": True}, "fp16 = True .* skips optimizer steps"),
        ({"lr": 1.0, "moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff = 0.1 .* reward"),
        ({"lr": 1.0, "cp_comm_type": "a2a"}, "cp_comm_type = 'a2a' has no effect"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(ConfigError, match=said):
        split_megatron(options)


def test_the_layout_is_read_from_megatrons_names():
    options = split_megatron(
        {
            "lr": 1.0,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 3,
        }
    )
    layout = Layout(pipeline=2, context=2, experts=4, expert_tensor=1, chunks=3)
    assert options.layout == layout
    assert (layout.model_size, layout.expert_size) == (4, 8)


def test_a_roles_own_section_is_named():
    with pytest.raises(ConfigError, match=r"^critic.megatron.lr is missing"):
        split_megatron({}, above="critic")


def test_what_the_model_decides_is_refused_on_the_login_node_too():
    for name in MODEL_FIELDS:
        assert name not in MEGATRON.entries or MEGATRON.owner(name) is not None, name
