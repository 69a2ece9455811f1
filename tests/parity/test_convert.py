"""Models from form to form: there and back again, the same bytes."""

import json

import family_models
import pytest
import torch
from safetensors.torch import load_file

from slurm_rl.errors import CorruptError, ModelError
from slurm_rl.models.headers import INDEX
from slurm_rl.stages.critic_model import make_critic
from slurm_rl.train.convert import hf_to_megatron, megatron_to_hf, rewrite_weights
from slurm_rl.train.weights import WeightsReader, read_layout

FAMILIES = ("qwen3", "qwen3-moe", "glm4", "deepseek", "critic")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES[:-1]:
        family_models.make_model(name, root / name)
    (root / "critic").mkdir()
    make_critic(root / "qwen3", root / "critic", seed=1)
    return root


def tensors_of(folder):
    layout = read_layout(folder)
    with WeightsReader(folder, layout) as reader:
        return {name: reader.read(name, None, 0, 0) for name in layout.shapes}


@pytest.mark.parametrize("name", FAMILIES)
def test_to_megatron_and_back(root, tmp_path, name):
    hf_to_megatron(root / name, tmp_path / "megatron")
    assert {".metadata", "metadata.json", "common.pt", "config.json"} <= {
        path.name for path in (tmp_path / "megatron").iterdir()
    }
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", like=tmp_path / "megatron")
    found, expected = tensors_of(tmp_path / "back"), tensors_of(root / name)
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    if name != "critic":  # whose files are laid out otherwise
        for path in (root / name).iterdir():
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name


def test_files_of_another_size_and_back(root, tmp_path):
    source = root / "deepseek"
    rewrite_weights(source, tmp_path / "cut", file_size_bytes=20_000)
    cut = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert len(cut) > 5 and cut[0] == f"model-00001-of-{len(cut):05d}.safetensors"
    assert all((tmp_path / "cut" / name).stat().st_size < 30_000 for name in cut)
    rewrite_weights(tmp_path / "cut", tmp_path / "whole", file_size_bytes=10**9)
    for path in source.iterdir():
        assert (tmp_path / "whole" / path.name).read_bytes() == path.read_bytes(), path.name
    tokens = family_models.make_tokens()
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        a, b = (
            AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(tokens).logits
            for f in (source, tmp_path / "cut")
        )
    assert torch.equal(a, b)


def test_another_dtype_is_said_in_the_config_and_routers_biases_stay_exact(root, tmp_path):
    rewrite_weights(root / "deepseek", tmp_path / "half", dtype="bfloat16")
    found = load_file(tmp_path / "half/model.safetensors")
    before = load_file(root / "deepseek/model.safetensors")
    for name, tensor in before.items():
        is_bias = name.endswith("e_score_correction_bias")
        assert found[name].dtype == (torch.float32 if is_bias else torch.bfloat16)
        assert torch.equal(found[name], tensor.to(found[name].dtype))
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    # The same from Megatron's form.
    hf_to_megatron(root / "deepseek", tmp_path / "megatron")
    like = {"like": tmp_path / "megatron", "dtype": "bfloat16"}
    megatron_to_hf(tmp_path / "megatron", tmp_path / "other", **like)
    for path in (tmp_path / "half").iterdir():
        assert (tmp_path / "other" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_config_of_transformers_4_keeps_its_key(root, tmp_path):
    source = tmp_path / "source"
    rewrite_weights(root / "qwen3", source, file_size_bytes=10**9)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    rewrite_weights(source, tmp_path / "half", dtype="float16")
    written = json.loads((tmp_path / "half/config.json").read_text())
    assert written["torch_dtype"] == "float16" and "dtype" not in written


def test_a_checkpoint_of_another_model_is_refused(root, tmp_path):
    hf_to_megatron(root / "qwen3", tmp_path / "megatron")
    with pytest.raises(CorruptError, match="cannot be read"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "a", like=root / "glm4")
    with pytest.raises(CorruptError, match="output_layer"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "b", like=root / "critic")
    (tmp_path / "megatron/config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: there is no such file"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "c", like=tmp_path / "megatron")


def test_a_checkpoint_of_a_train_stage(tmp_path, made_models, open_trainers):
    """With an optimizer and more beside the weights: what comes out is what the stage exported."""
    import trains

    from slurm_rl.stages.train import train_iteration

    settings = trains.tiny_settings(tmp_path, family="qwen3", tied=True)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    train_iteration(open_trainers(order, settings), order)
    open_trainers.close()
    megatron_to_hf(tmp_path / "a/checkpoint", tmp_path / "out", like=tmp_path / "a/weights")
    assert not (tmp_path / "out" / INDEX).exists()
    for path in (tmp_path / "a/weights").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
