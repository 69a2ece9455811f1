"""A critic's first model: whose tensors it has, where its head is from, what is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slurm_rl.errors import ModelError
from slurm_rl.models.headers import INDEX
from slurm_rl.stages.critic_model import CriticHead, make_critic
from slurm_rl.train.weights import WeightsReader, read_layout

BASE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
KINDS = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4},
    "glm4": {"head_dim": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
}


def save_model(folder, kind="llama", *, task="CausalLM", **fields):
    import transformers

    config = transformers.AutoConfig.for_model(kind, **(BASE | KINDS[kind] | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    model.save_pretrained(folder)
    return folder


def critic_of(source, folder, seed=7):
    folder.mkdir()
    return make_critic(source, folder, seed=seed)


def load(folder):
    from transformers import AutoModelForTokenClassification

    found, notes = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and found.num_labels == 1
    return found.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_it_with_the_head_and_everything_of_the_source(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    source = save_model(tmp_path / "source", kind)
    head = critic_of(source, tmp_path / "critic")
    assert head == CriticHead("created", seed=7, std=1 / 17)
    found, before = load(tmp_path / "critic"), AutoModelForCausalLM.from_pretrained(source)
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        hidden = before.eval().model(tokens)[0]
        values = found(tokens).logits
        expected = hidden @ found.score.weight.T
    assert values.shape == (1, 10, 1) and found.score.bias.item() == 0
    assert torch.allclose(values, expected, atol=1e-6) and values.abs().max() > 0


def test_the_head_is_the_seeds_and_the_rest_is_linked(tmp_path):
    source = save_model(tmp_path / "elsewhere/source", tie_word_embeddings=True)
    (tmp_path / "run").mkdir()
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        critic_of(source, tmp_path / "run" / name, seed=seed)
    a, b, c = (
        {p.name: p.read_bytes() for p in (tmp_path / "run" / name).iterdir()} for name in "abc"
    )
    assert a == b and {name for name in a if a[name] != c[name]} == {
        "model-00002-of-00002.safetensors"
    }
    link = tmp_path / "run/a/model-00001-of-00002.safetensors"
    assert link.is_symlink() and link.readlink() == source / "model.safetensors"
    weight = load_file(tmp_path / "run/a/model-00002-of-00002.safetensors")["score.weight"]
    expected = np.random.default_rng(7).standard_normal((1, 16)) / 17
    assert torch.equal(weight, torch.from_numpy(expected).float())


def test_of_several_files_only_the_one_with_the_logits_is_written_again(tmp_path):
    source = tmp_path / "elsewhere/source"
    tensors = load_file(save_model(source) / "model.safetensors")
    (source / "model.safetensors").unlink()
    homes = dict.fromkeys(tensors, "x-1") | {"lm_head.weight": "x-2", "model.norm.weight": "x-2"}
    for file in ("x-1", "x-2"):
        own = {name: tensors[name] for name in tensors if homes[name] == file}
        save_file(own, source / f"{file}.safetensors", metadata={"format": "pt"})
    mapping = {name: f"{file}.safetensors" for name, file in homes.items()}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    critic_of(source, tmp_path / "critic")
    files = sorted(path.name for path in (tmp_path / "critic").glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [(tmp_path / "critic" / name).is_symlink() for name in files] == [True, False, False]
    layout = read_layout(tmp_path / "critic")
    with WeightsReader(tmp_path / "critic", layout) as reader:
        for name in set(tensors) - {"lm_head.weight"}:
            assert torch.equal(reader.read(name, None, 0, 0), tensors[name])
    index = json.loads((tmp_path / "critic" / INDEX).read_text())
    taken = sum(tensor.nbytes for name, tensor in tensors.items() if name != "lm_head.weight")
    assert index["metadata"]["total_size"] == taken + 4 * 17
    load(tmp_path / "critic")


@pytest.mark.parametrize("task", ["TokenClassification", "SequenceClassification"])
def test_a_head_that_is_there_is_kept(tmp_path, task):
    source = save_model(tmp_path / "source", task=task, num_labels=1)
    assert critic_of(source, tmp_path / "critic") == CriticHead("loaded")
    found, tensors = load(tmp_path / "critic"), load_file(source / "model.safetensors")
    assert torch.equal(found.score.weight, tensors["score.weight"])
    assert torch.equal(found.score.bias, tensors.get("score.bias", torch.zeros(1)))
    # A critic is a source too: the next run's may start from this one's.
    assert critic_of(tmp_path / "critic", tmp_path / "again") == CriticHead("loaded")
    assert torch.equal(load(tmp_path / "again").score.weight, found.score.weight)


@pytest.mark.parametrize("task", ["TokenClassification", "SequenceClassification"])
def test_a_head_of_another_shape_is_refused_with_both_shapes(tmp_path, task):
    source = save_model(tmp_path / "source", task=task, num_labels=3)
    with pytest.raises(ModelError, match=r"shape \[3, 16\], but a critic's is \[1, 16\]"):
        critic_of(source, tmp_path / "critic")


def test_what_a_critic_cannot_start_from(tmp_path):
    source = save_model(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for changes, said in (
        ({"architectures": ["LlamaForQuestionAnswering"]}, "cannot start from a LlamaForQuestion"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\..* is missing"),
    ):
        folder = tmp_path / f"critic-{said[:4]}"
        (source / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError, match=said):
            critic_of(source, folder)
    (source / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: there is no such file"):
        critic_of(source, tmp_path / "critic-x")


def test_a_config_that_names_no_class_gets_the_familys(tmp_path):
    source = save_model(tmp_path / "source", "qwen3_moe")
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]
    (source / "config.json").write_text(json.dumps(config))
    critic_of(source, tmp_path / "critic")
    written = json.loads((tmp_path / "critic/config.json").read_text())
    assert written["architectures"] == ["Qwen3MoeForTokenClassification"]
