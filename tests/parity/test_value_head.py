"""A critic in Megatron gives transformers' values; its head is whole on every tensor rank."""

import family_models
import pytest
import torch

from slurm_rl.errors import CorruptError
from slurm_rl.stages.critic_model import make_critic
from slurm_rl.train.solo import alone

FAMILIES = ("llama-tied", "qwen3-moe", "glm4", "deepseek")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Critics of several families, with heads and biases that are not small."""
    root = tmp_path_factory.mktemp("critics")
    for name in FAMILIES:
        source = family_models.make_model(name, root / "models" / name)
        (root / name).mkdir()
        make_critic(source, root / name, seed=3)
        family_models.enlarge_head(root / name)
    return root


def transformers_values(folder):
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(family_models.make_tokens()).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_bytes(root, tmp_path, name):
    expected = transformers_values(root / name)
    assert expected.std() > 0.5
    with alone():
        from slurm_rl.train.export import export_weights, read_companions

        geometry, layout, model = family_models.build_from(root / name)
        found = family_models.forward(model, family_models.make_tokens())
        companions = read_companions(root / name)
        out = tmp_path / "out"
        export_weights(out, model=model, geometry=geometry, layout=layout, companions=companions)
    assert geometry.value_head and not geometry.tied
    assert found.shape == (3, 40, 1) and found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert {p.name for p in out.iterdir()} == {p.name for p in (root / name).iterdir()}
    for path in out.iterdir():
        assert path.read_bytes() == (root / name / path.name).read_bytes(), path.name


def test_values_and_gradients_do_not_depend_on_tensor_ranks(root):
    """Under sequence parallelism too: a gradient that was summed instead of cut would be twice."""
    models = ["llama-tied", "glm4"]
    family_models.run_ranks(family_models.value_gradients_in_ranks, root, models)
    for name in models:
        with alone():
            alone_now = family_models.value_gradients(root / name)
        assert alone_now["head"].abs().max() > 0.1
        for kind in ("plain", "sequence"):
            for rank in (0, 1):
                found = torch.load(root / f"{name}-{kind}-{rank}.pt")
                for part, tensor in alone_now.items():
                    error = (found[part] - tensor).abs().max()
                    assert error < 1e-4 * tensor.abs().max(), (name, kind, rank, part)


def test_a_checkpoint_of_a_language_model_is_not_taken_for_a_critics(root, tmp_path):
    """Megatron would give the head the first row of the logits' weights."""
    with alone():
        from slurm_rl.train.checkpoint import load_model, save_model

        saved = {"critic": root, "language": root / "models"}
        for name, folder in saved.items():
            (tmp_path / name).mkdir()
            _, _, model = family_models.build_from(folder / "glm4")
            save_model(tmp_path / name, model=model, facts={})
        _, _, critic = family_models.build_from(root / "glm4")
        before = critic.output_layer.weight.clone()
        critic.output_layer.weight.data.zero_()
        load_model(tmp_path / "critic", model=critic)
        assert torch.equal(critic.output_layer.weight, before)
        with pytest.raises(CorruptError) as error:
            load_model(tmp_path / "language", model=critic)
    assert "loaded (torch.Size([128, 32])) and expected ((1, 32))" in str(error.value)
    assert "output_layer.weight" in str(error.value) and "\n" not in str(error.value)
