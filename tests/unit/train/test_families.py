"""The table of weights: both directions are inverse, for every family and layout."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import ConfigError, ModelError
from slurm_rl.train.families import (
    check_layout,
    check_tensors,
    join_shards,
    list_rules,
    read_shard,
)
from slurm_rl.train.geometry import parse_model_config
from slurm_rl.train.weights import WeightsLayout


def geometry_of(family="llama", *, tied=False, heads=4, groups=2, head_dim=4, vocab=70):
    config = {
        "model_type": family,
        "hidden_size": 12,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return parse_model_config(config, where="x")


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
    ("tp", "pp", "said"),
    [(4, 1, "tensor_model_parallel_size = 4.*num_key_value_heads = 2"), (1, 3, "pipeline.*= 2")],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(tp, pp, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(geometry_of(), tp_size=tp, pp_size=pp)


def test_missing_and_foreign_tensors_are_named(tmp_path):
    g = geometry_of(tied=True)
    names = set(hf_shapes(g))
    layout = WeightsLayout({}, dict.fromkeys(names, torch.float32), {}, {}, None)
    check_tensors(g, folder=tmp_path, layout=layout)

    def with_names(changed):
        return dataclasses.replace(layout, dtypes=dict.fromkeys(changed, torch.float32))

    # A copy of tied embeddings is harmless; anything else is not.
    check_tensors(g, folder=tmp_path, layout=with_names(names | {"lm_head.weight"}))
    with pytest.raises(ModelError, match=r"model.norm.weight is missing"):
        check_tensors(g, folder=tmp_path, layout=with_names(names - {"model.norm.weight"}))
    with pytest.raises(ModelError, match=r"score.weight is not part of such a model"):
        check_tensors(g, folder=tmp_path, layout=with_names(names | {"score.weight"}))
