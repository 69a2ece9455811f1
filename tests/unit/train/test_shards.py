"""The table of weights: both directions are inverse, for every family and layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import ConfigError, ModelError
from slurm_rl.models.geometry import parse_model_config
from slurm_rl.models.layout import Layout
from slurm_rl.models.splits import check_split
from slurm_rl.models.tensors import check_tensors, list_rules
from slurm_rl.models.tensors import hf_shapes as named_by_the_table
from slurm_rl.train.shards import join_shards, read_shard
from slurm_rl.train.weights import read_layout

CONFIG = {
    "hidden_size": 12,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 70,
}


def geometry_of(family="llama", *, tied=False, heads=4, groups=2, head_dim=4, vocab=70, **others):
    shape = {
        "model_type": family,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return parse_model_config(CONFIG | shape | others, where="x")


def hf_shapes(g):
    """Names and shapes as transformers has them, written down independently of the table."""
    q, kv = g.num_heads * g.head_dim, g.num_groups * g.head_dim
    shapes = {"model.embed_tokens.weight": (g.vocab_size, 12), "model.norm.weight": (12,)}
    if not g.tied:
        shapes["lm_head.weight"] = (g.vocab_size, 12)
    for i in range(2):
        layer = {
            "input_layernorm.weight": (12,),
            "post_attention_layernorm.weight": (12,),
            "self_attn.q_proj.weight": (q, 12),
            "self_attn.k_proj.weight": (kv, 12),
            "self_attn.v_proj.weight": (kv, 12),
            "self_attn.o_proj.weight": (12, q),
            "mlp.gate_proj.weight": (24, 12),
            "mlp.up_proj.weight": (24, 12),
            "mlp.down_proj.weight": (12, 24),
        }
        if g.family == "qwen2":
            layer |= {f"self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
        if g.family == "qwen3":
            layer |= {f"self_attn.{x}_norm.weight": (g.head_dim,) for x in "qk"}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


#: What the other families' configs have besides; every width is divided by 4 tensor ranks.
OTHERS = {
    "qwen2_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "decoder_sparse_step": 2,
    },
    "mixtral": {"num_local_experts": 3},
    "glm4": {},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
    },
}


def transformers_shapes(family, folder):
    """Names and shapes of what transformers itself saves."""
    import transformers

    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **CONFIG | OTHERS[family] | special)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return read_layout(folder).shapes


def numbered(shapes):
    """Tensors in which every element of the model is another number."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        size = int(torch.tensor(shape).prod())
        tensors[name] = torch.arange(start, start + size).reshape(shape)
        start += size
    return tensors


def reader(tensors):
    def read(name, axis, start, stop):
        tensor = tensors[name]
        if axis is None:
            return tensor
        return tensor[start:stop] if axis == 0 else tensor[:, start:stop]

    return read


@settings(deadline=None, max_examples=60)
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    tied=st.booleans(),
    tp_size=st.sampled_from([1, 2, 4]),
    per_group=st.sampled_from([1, 3]),
    vocab=st.integers(3, 140),
)
def test_shards_join_to_what_they_were_cut_from(family, tied, tp_size, per_group, vocab):
    g = geometry_of(family, tied=tied, heads=4 * per_group, groups=4, vocab=vocab)
    tensors = numbered(hf_shapes(g))
    joined = {}
    for rule in list_rules(g):
        shards = [
            read_shard(rule, reader(tensors), geometry=g, tp_rank=rank, tp_size=tp_size)
            for rank in range(tp_size)
        ]
        assert len({shard.shape for shard in shards}) == 1
        joined |= join_shards(rule, shards, geometry=g)
    assert set(joined) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(joined[name], tensor), name


@pytest.mark.parametrize("family", OTHERS)
def test_every_tensor_that_transformers_saves_is_in_one_rule_and_survives(family, tmp_path):
    g = geometry_of(family, groups=4, **OTHERS[family])
    shapes = transformers_shapes(family, tmp_path)
    assert named_by_the_table(g) == shapes
    tensors = numbered(shapes)
    for tp_size in (1, 2, 4):
        joined = {}
        for rule in list_rules(g):
            shards = [
                read_shard(rule, reader(tensors), geometry=g, tp_rank=rank, tp_size=tp_size)
                for rank in range(tp_size)
            ]
            assert len({shard.shape for shard in shards}) == 1
            new = join_shards(rule, shards, geometry=g)
            assert not new.keys() & joined.keys()
            joined |= new
        for name, tensor in tensors.items():
            assert torch.equal(joined[name], tensor), (name, tp_size)


@pytest.mark.parametrize("family", ["llama", *OTHERS])
def test_every_parameter_has_one_name_in_each_of_megatrons_specs(family):
    """Experts and layers are numbered from 0 on each rank; no two rules meet there."""
    rules = list(list_rules(geometry_of(family, groups=4, **OTHERS.get(family, {}))))
    for spec in (0, -1):
        names = [rule.local_names(rule.layer, rule.expert)[spec] for rule in rules]
        assert len(set(names)) == len(names)
        assert not any("{e}" in name for name in names)
    rule = next((r for r in rules if r.expert == 2 and "linear_fc1" in r.megatron), None)
    if rule is not None:
        assert rule.local_names(5, 0) == (
            "decoder.layers.5.mlp.experts.local_experts.0.linear_fc1.weight",
            "decoder.layers.5.mlp.experts.linear_fc1.weight0",
        )


def test_a_critic_has_a_head_and_no_logits():
    for tied in (False, True):
        g = geometry_of(
            tied=tied, architectures=["LlamaForTokenClassification"], id2label={"0": "x"}
        )
        assert g.value_head and not g.tied
        names = set(named_by_the_table(g))
        assert {"score.weight", "score.bias"} <= names and "lm_head.weight" not in names


def test_gate_and_up_of_one_tensor_are_cut_by_halves():
    """Rank 1 of 2 has the second half of the gate and of the up projection, not the up's alone."""
    g = geometry_of("glm4", groups=4)
    rule = next(r for r in list_rules(g) if "linear_fc1" in r.megatron)
    tensor = torch.arange(48).reshape(48, 1).expand(48, 12)
    shard = read_shard(rule, reader({rule.hf[0]: tensor}), geometry=g, tp_rank=1, tp_size=2)
    assert shard[:, 0].tolist() == [*range(12, 24), *range(36, 48)]


def test_queries_keys_and_values_lie_group_by_group():
    g = geometry_of(heads=4, groups=2, head_dim=4)
    tensors = numbered(hf_shapes(g))
    rule = next(r for r in list_rules(g) if "linear_qkv" in r.megatron)
    fused = read_shard(rule, reader(tensors), geometry=g, tp_rank=0, tp_size=1)
    q, k, v = (tensors[name] for name in rule.hf)
    # Two groups of two heads each: rows of 2 × 4 queries, 4 keys, 4 values, twice.
    by_hand = [q[0:8], k[0:4], v[0:4], q[8:16], k[4:8], v[4:8]]
    assert torch.equal(fused, torch.cat(by_hand))


def test_padding_rows_are_zero_and_are_cut_off():
    g = geometry_of(vocab=70)
    rule = next(list_rules(g))
    read = reader({"model.embed_tokens.weight": torch.ones(70, 12)})
    shards = [read_shard(rule, read, geometry=g, tp_rank=r, tp_size=4) for r in range(4)]
    assert [int(shard.sum()) // 12 for shard in shards] == [32, 32, 6, 0]
    assert join_shards(rule, shards, geometry=g)[rule.hf[0]].shape == (70, 12)


@pytest.mark.parametrize(
    ("family", "layout", "said"),
    [
        ("llama", Layout(tensor=4), "tensor_model_parallel_size = 4.*num_key_value_heads = 2"),
        ("llama", Layout(pipeline=3), "pipeline_model_parallel_size = 3.*num_hidden_layers = 2"),
        ("llama", Layout(pipeline=2, chunks=2), "virtual_pipeline.* = 2 × .* = 4 does not"),
        ("llama", Layout(experts=2), "expert_model_parallel_size = 2 has no effect"),
        ("qwen2_moe", Layout(experts=2), "expert_model_parallel_size = 2.*number of experts = 3"),
        ("mixtral", Layout(expert_tensor=5), "expert_tensor_parallel_size = 5.*= 24"),
        ("deepseek_v3", Layout(tensor=16), "tensor_model_parallel_size = 16"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(family, layout, said):
    g = geometry_of(family, **OTHERS.get(family, {}))
    with pytest.raises(ConfigError, match=said):
        check_split(g, layout, sequence_parallel=True)


def test_tokens_would_reach_their_experts_twice():
    g = geometry_of("mixtral", **OTHERS["mixtral"])
    check_split(g, Layout(tensor=2), sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size = 2 is without sequence_"):
        check_split(g, Layout(tensor=2), sequence_parallel=False)
    check_split(geometry_of(), Layout(tensor=2), sequence_parallel=False)


def test_latents_must_be_divided_too():
    g = geometry_of("deepseek_v3", **OTHERS["deepseek_v3"] | {"kv_lora_rank": 13})
    with pytest.raises(ConfigError, match=r"kv_lora_rank \+ qk_rope_head_dim = 17"):
        check_split(g, Layout(tensor=2), sequence_parallel=True)


def test_missing_and_foreign_tensors_are_named(tmp_path):
    g = geometry_of(tied=True)
    shapes = hf_shapes(g)
    check_tensors(g, folder=tmp_path, shapes=shapes)
    # A copy of tied embeddings is harmless; anything else is not.
    check_tensors(g, folder=tmp_path, shapes=shapes | {"lm_head.weight": (70, 12)})
    less = {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match=r"model.norm.weight is missing"):
        check_tensors(g, folder=tmp_path, shapes=less)
    with pytest.raises(ModelError, match=r"score.weight is not part of such a model"):
        check_tensors(g, folder=tmp_path, shapes=shapes | {"score.weight": (1, 12)})


def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path):
    g = geometry_of()
    shapes = hf_shapes(g)
    check_tensors(g, folder=tmp_path, shapes=shapes)
    shapes["model.norm.weight"] = (13,)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[13\].* it \[12\]"):
        check_tensors(g, folder=tmp_path, shapes=shapes)


def test_a_layer_for_several_tokens_is_named(tmp_path):
    g = geometry_of("glm4_moe", **OTHERS["glm4_moe"])
    shapes = named_by_the_table(g) | {"model.layers.2.eh_proj.weight": (12, 24)}
    with pytest.raises(ModelError, match=r"model\.layers\.2\.\* are of a layer for multi-token"):
        check_tensors(g, folder=tmp_path, shapes=shapes)
