"""Hugging Face → Megatron → Hugging Face: the same bytes, the same logits."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
import trains

from slurm_rl.train import cpu

MODELS = [(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)]


def hf_model(folder, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def forward(trainer, tokens):
    """Megatron's logits [b, s, V], without the padding of the vocabulary."""
    tokens = tokens.to(next(trainer.model.parameters()).device)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    with torch.no_grad(), cpu.stand_ins(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of Megatron's own calls
        return trainer.model(tokens, positions, None)[..., : trainer.geometry.vocab_size].cpu()


@pytest.fixture
def tokens():
    return torch.randint(0, 15, (3, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_same_logits_and_same_bytes(tmp_path, made_models, open_trainers, tokens, family, tied):
    settings = trains.tiny_settings(tmp_path, family=family, tied=tied)
    before = made_models(settings)
    source = Path(before.path) / "weights"
    trainer = open_trainers(trains.train_order(tmp_path, before, "a"), settings)

    with torch.no_grad():
        expected = hf_model(source)(tokens).logits
    found = forward(trainer, tokens)
    assert expected.std() > 0.5  # logits that say something
    assert (found - expected).abs().max() < 1e-4

    # Exported untrained, the weights are the file that they came from; so is everything else.
    exported = tmp_path / "exported"
    trainer.export(exported)
    assert {p.name for p in exported.iterdir()} == {p.name for p in source.iterdir()}
    for path in source.iterdir():
        assert (exported / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_files_survive_training_in_bfloat16(
    tmp_path, made_models, open_trainers, tokens, family
):
    settings = trains.tiny_settings(tmp_path, family=family, model={"dtype": "bfloat16"})
    before = made_models(settings)
    source = Path(before.path) / "weights" / "model.safetensors"
    trainer = open_trainers(trains.train_order(tmp_path, before, "a"), settings)
    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    trainer.export(tmp_path / "exported")
    assert (tmp_path / "exported/model.safetensors").read_bytes() == source.read_bytes()


def test_biases_and_norms_that_are_not_trivial_are_mapped_too(
    tmp_path, made_models, open_trainers, tokens
):
    """Fresh models have zero biases and unit norms, which would hide a wrong mapping."""
    for family in ("qwen2", "qwen3"):
        settings = trains.tiny_settings(tmp_path, family=family)
        before = made_models(settings)
        source = tmp_path / f"{family}-changed"
        shutil.copytree(Path(before.path) / "weights", source)
        model = hf_model(source)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += torch.randn(parameter.shape, generator=generator) * 0.3
            model.save_pretrained(source)
            expected = model(tokens).logits
        trainer = open_trainers(trains.train_order(tmp_path, before, f"{family}-a"), settings)
        trainer.load_weights(source)
        assert (forward(trainer, tokens) - expected).abs().max() < 1e-4
        trainer.export(tmp_path / f"{family}-exported")
        written = tmp_path / f"{family}-exported" / "model.safetensors"
        assert written.read_bytes() == (source / "model.safetensors").read_bytes()


def test_what_was_trained_loads_in_transformers_with_equal_logits(
    tmp_path, made_models, open_trainers, tokens
):
    from slurm_rl.stages.train import train_iteration

    settings = trains.tiny_settings(tmp_path, family="qwen3", tied=True)
    before = made_models(settings)
    order = trains.train_order(tmp_path, before, "a")
    trainer = open_trainers(order, settings)
    untrained = forward(trainer, tokens)
    train_iteration(trainer, order)
    found = forward(trainer, tokens)
    with torch.no_grad():
        expected = hf_model(tmp_path / "a" / "weights")(tokens).logits
    assert (found - untrained).abs().max() > 1e-3
    assert (found - expected).abs().max() < 1e-4


def test_log_probabilities_agree_with_transformers(tmp_path, made_models, open_trainers):
    """The trainer's log-probabilities of a rollout, at the rollout's temperature."""
    from slurm_rl.train.batch import pack_microbatch, rollout_weights

    settings = trains.tiny_settings(tmp_path)
    before = made_models(settings)
    trainer = open_trainers(trains.train_order(tmp_path, before, "a"), settings)
    samples = trains.made_up_samples(0, num=4)
    batch = pack_microbatch(
        samples,
        range(4),
        arrays_R={},
        weights_R=rollout_weights(samples, per_token=False),
        per_token=False,
    )
    (found,) = trainer.logprobs([batch.to(next(trainer.model.parameters()).device)])

    model, expected = hf_model(Path(before.path) / "weights"), []
    for i in range(4):
        tokens = torch.from_numpy(samples.sample_tokens(i)).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0] / 0.8
        logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        mask = torch.from_numpy(samples.loss_mask[samples.response_slice(i)]) != 0
        expected.append(logprobs[samples.prompt_lengths[i] - 1 :][mask])
    assert torch.allclose(found.cpu(), torch.cat(expected), atol=1e-5)
