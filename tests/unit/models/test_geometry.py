"""What a config.json is taken for, and what is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.errors import ModelError
from slurm_rl.models.families_table import FAMILIES
from slurm_rl.models.geometry import (
    MODEL_FIELDS,
    megatron_fields,
    parse_model_config,
    read_geometry,
)
from slurm_rl.models.tensors import list_rules

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
        ({"model_type": "gpt2"}, "gpt2.*supported are deepseek_v3, .*, llama, .*qwen3_moe"),
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


MOE = {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 5,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


def test_layers_without_experts():
    sparse = parse(model_type="qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], **MOE)
    assert [sparse.is_moe_layer(i) for i in range(6)] == [False, True, False, False, False, True]
    deepseek = parse(**DEEPSEEK)
    assert deepseek.moe.dense_layers == (0, 1)
    assert megatron_fields(deepseek)["moe_layer_freq"] == [0, 0, 1, 1, 1]
    assert not parse().is_moe_layer(0)


def test_what_softmax_router_makes_of_chosen_probabilities():
    """Megatron's default is a softmax over the chosen logits: those that sum to one."""
    for norm in (False, True):
        geometry = parse(model_type="qwen3_moe", norm_topk_prob=norm, **MOE)
        fields = megatron_fields(geometry)
        assert fields["moe_router_pre_softmax"] is not norm
        assert fields["moe_router_score_function"] == "softmax"
    assert megatron_fields(parse(model_type="mixtral"))["moe_router_pre_softmax"] is False


def test_a_deepseek():
    geometry = parse(**DEEPSEEK, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7})
    fields = megatron_fields(geometry)
    assert (fields["moe_shared_expert_intermediate_size"], fields["q_lora_rank"]) == (64, None)
    assert (fields["moe_router_num_groups"], fields["moe_router_group_topk"]) == (4, 2)
    assert (fields["qk_head_dim"], fields["qk_pos_emb_head_dim"]) == (8, 4)
    assert (fields["rope_type"], fields["rotary_scaling_factor"]) == ("yarn", 40.0)
    assert (fields["mscale"], fields["mscale_all_dim"]) == (1.0, 0.7)
    # transformers takes the two only together.
    alone = megatron_fields(parse(**DEEPSEEK, rope_scaling=YARN | {"mscale": 0.5}))
    assert (alone["mscale"], alone["mscale_all_dim"]) == (1.0, 0.0)
    # Megatron makes the softmax's scale of this factor, whether there is a YaRN or not.
    assert megatron_fields(parse(**DEEPSEEK))["rotary_scaling_factor"] == 1.0
    one_group = parse(**DEEPSEEK | {"n_group": 2})
    assert one_group.moe.num_groups is None


def test_both_names_of_the_number_of_experts():
    for key in ("num_experts", "num_local_experts"):
        config = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, key: 5}
        assert parse(**config).moe.num_experts == 5


def test_a_glm():
    geometry = parse(model_type="glm4")
    assert geometry.qkv_bias and geometry.post_norms and geometry.rotary_interleaved
    assert (geometry.rotary_percent, geometry.head_dim) == (0.5, 128)
    assert not parse(model_type="glm4", attention_bias=False).qkv_bias
    rope = {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    assert parse(model_type="glm4", rope_parameters=rope).rotary_percent == 0.25


def test_a_glm_with_experts_norms_queries_where_it_says_so():
    plain = parse(model_type="glm4_moe")
    assert not plain.qk_norm and not plain.qkv_bias and plain.rotary_percent == 0.5
    assert (plain.moe.dense_layers, plain.moe.scaling_factor) == ((0,), 1.0)
    full = parse(model_type="glm4_moe", use_qk_norm=True, attention_bias=True)
    assert full.qk_norm and full.qkv_bias


def test_a_file_that_leaves_out_keys_means_its_class_s_defaults():
    from transformers import AutoConfig

    for kind in ("mixtral", "glm4", "glm4_moe", "qwen3"):
        full = AutoConfig.for_model(kind, **{k: v for k, v in LLAMA.items() if k != "model_type"})
        said = parse_model_config(full.to_dict(), where="x")
        unsaid = parse(model_type=kind)
        for name in ("rope_theta", "norm_epsilon", "head_dim", "qkv_bias", "rotary_percent"):
            assert getattr(said, name) == getattr(unsaid, name), (kind, name)


CRITIC = {"architectures": ["LlamaForTokenClassification"]}


def test_a_value_head_has_one_label():
    assert parse(**CRITIC, id2label={"0": "LABEL_0"}).value_head
    assert parse(**CRITIC, num_labels=1).value_head
    assert not parse(architectures=["LlamaForCausalLM"]).value_head
    for labels in ({"id2label": {"0": "a", "1": "b"}}, {"num_labels": 3}, {}):
        with pytest.raises(ModelError, match=r"has \d labels; a value head has one"):
            parse(**CRITIC, **labels)


def test_every_field_that_a_model_decides_is_known_to_megatron():
    from slurm_rl.train.cpu import megatron_imports

    with megatron_imports():
        from megatron.core.transformer.transformer_config import MLATransformerConfig
    known = set(MLATransformerConfig.__dataclass_fields__)
    assert set(MODEL_FIELDS) <= known
    for geometry in (parse(), parse(**DEEPSEEK), parse(model_type="qwen3_moe", **MOE)):
        assert set(megatron_fields(geometry)) <= set(MODEL_FIELDS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral", "sliding_window": 4096}, "sliding_window = 4096"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok = 1 with"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave = False"),
        (DEEPSEEK | {"topk_group": 1}, "topk_group = 1 with num_experts_per_tok = 4"),
        (DEEPSEEK | {"norm_topk_prob": False}, "norm_topk_prob = False"),
        (DEEPSEEK | {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK | {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim, but no"),
        (DEEPSEEK | {"rope_scaling": YARN | {"truncate": False}}, "'yarn' with truncate"),
        (DEEPSEEK | {"rope_scaling": {"type": "yarn"}}, "'yarn' has no factor"),
        (DEEPSEEK | {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope scaling 'llama3'"),
    ],
)
def test_what_other_families_would_get_wrong_is_refused(changes, said):
    with pytest.raises(ModelError, match=said):
        parse(**changes)


@pytest.mark.parametrize("text", ["[]", '"a"', "3"])
def test_a_config_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json: not an object, but a "):
        read_geometry(tmp_path)


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_a_size_that_is_no_number_is_named(name):
    with pytest.raises(ModelError, match=f"{name} = 'three' is no whole number"):
        parse_model_config(LLAMA | {name: "three"}, where="x")


SPARSE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": -64}, "hidden_size = -64 is no whole number of at least 1"),
        ({"hidden_size": 64.5}, r"hidden_size = 64.5 is no whole"),
        ({"hidden_size": "64"}, "hidden_size = '64' is no whole"),
        ({"vocab_size": True}, "vocab_size = True is no whole"),
        ({"num_hidden_layers": None}, "num_hidden_layers = null is no whole"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is no whole"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0 is no number above 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 8 is no multiple of num_key_value_"),
        ({"hidden_size": 60}, "hidden_size = 60 is no multiple of num_attention_heads = 8, and"),
        ({"head_dim": 15}, "15 numbers of each head are rotated"),
        ({"model_type": "glm4", "head_dim": 2}, "1 numbers of each head are rotated"),
        (SPARSE | {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 is more than the 4 experts"),
        ({"dtype": "int3"}, "dtype = 'int3' is not supported; only float64, float32"),
        (SPARSE | {"num_experts": 0}, "num_experts = 0 is no whole"),
    ],
)
def test_sizes_that_no_decoder_has_are_refused(changes, said):
    with pytest.raises(ModelError, match=said):
        parse(**changes)


def test_sizes_that_only_look_odd_are_accepted():
    assert parse(hidden_size=60, head_dim=16).head_dim == 16
    assert parse(head_dim=None).head_dim == 8
    assert parse(**SPARSE).moe.top_k == 2


KINDS = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=2)
VALUES = st.recursive(KINDS, lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(), v))
#: Every key that some family's config is asked for.
ASKED = sorted(
    {*LLAMA, *DEEPSEEK, *MOE, *YARN}
    | {key for family in FAMILIES.values() for key in (*family.defaults, *family.must_be)}
    | {"architectures", "id2label", "num_labels", "layer_types", "rope_parameters", "dtype"}
    | {"torch_dtype", "mlp_only_layers", "decoder_sparse_step", "max_position_embeddings"}
)


@given(
    st.sampled_from([{}, {"model_type": "glm4"}, SPARSE, DEEPSEEK]),
    st.dictionaries(st.sampled_from(ASKED), VALUES, min_size=1, max_size=2),
)
def test_whatever_stands_in_a_config_is_a_shape_or_one_line(base, changes):
    try:
        geometry = parse_model_config(LLAMA | base | changes, where="x")
    except ModelError as error:
        assert str(error).startswith("x: ") and "\n" not in str(error)
    else:
        assert geometry.head_dim >= 1 and geometry.num_heads % geometry.num_groups == 0
        assert list(list_rules(geometry))
