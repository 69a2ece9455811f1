"""What a config.json is taken for, and what is refused by name."""

import pytest

from slurm_rl.errors import ModelError
from slurm_rl.train.geometry import parse_model_config, read_geometry

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def parse(**changes):
    config = {k: v for k, v in (LLAMA | changes).items() if v is not ...}
    return parse_model_config(config, where="config.json")


def test_a_plain_llama():
    geometry = parse()
    assert (geometry.head_dim, geometry.num_groups, geometry.tied) == (8, 2, False)
    assert not geometry.qkv_bias and not geometry.qk_norm


def test_families_differ_where_they_differ():
    assert parse(model_type="qwen2").qkv_bias
    qwen3 = parse(model_type="qwen3")
    assert qwen3.qk_norm and qwen3.head_dim == 128
    assert parse(model_type="qwen3", head_dim=16).head_dim == 16


def test_without_groups_every_head_is_one():
    assert parse(num_key_value_heads=...).num_groups == 8


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}],
)
def test_rope_theta_of_both_transformers_versions(rope):
    assert parse(**rope).rope_theta == 5e5
    assert parse(**rope).rope_factor is None


def test_llama3_rope_scaling():
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert parse(rope_scaling=rope).rope_factor == 32.0
    with pytest.raises(ModelError, match="high_freq_factor"):
        parse(rope_scaling=rope | {"high_freq_factor": 8.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "gpt2.*supported are llama, qwen2, qwen3"),
        ({"model_type": ...}, "None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*only hidden_act = 'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": ...}, "hidden_size is missing"),
    ],
)
def test_what_the_trainer_would_get_wrong_is_refused(changes, said):
    with pytest.raises(ModelError, match=said):
        parse(**changes)


def test_a_config_that_cannot_be_read_names_its_file(tmp_path):
    with pytest.raises(ModelError, match=r"config.json: there is no such file"):
        read_geometry(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: not JSON"):
        read_geometry(tmp_path)


def test_the_padded_vocabulary_is_the_same_for_every_usual_layout():
    geometry = parse()
    assert [geometry.padded_vocab(tp) for tp in (1, 2, 4, 8)] == [128] * 4
    assert geometry.padded_vocab(3) == 192
