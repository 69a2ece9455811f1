"""The probe of a train commit: what it says, and that it leaves no trace."""

import random

import numpy as np
import pytest
import torch
import trains

from slurm_rl.errors import NumericsError
from slurm_rl.stages.train import run_train, train_iteration
from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train.probe import LENGTH, probe_tokens


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_it_is_what_transformers_computes_from_the_exported_weights(tmp_path, made_models, family):
    settings = trains.tiny_settings(tmp_path, family=family)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    result = run_train(order, settings)
    probe = result.content["weights"]["probe"]
    assert len(probe["tokens"]) == LENGTH == len(probe["logprobs"]) + 1
    trains.assert_probe(order, result)
    # Of these weights: those that it began with give other numbers.
    start = trains.transformers_logprobs(made_models(settings).path, probe["tokens"])
    assert np.abs(np.array(probe["logprobs"]) - start).max() > 1e-3


def test_its_text_is_fixed_for_a_vocabulary_and_never_padding():
    tokens = probe_tokens(15, max_positions=128)
    assert tokens == probe_tokens(15, max_positions=4096)
    assert set(tokens) <= set(range(15)) and len(set(tokens)) > 10
    assert len(probe_tokens(15, max_positions=8)) == 8
    assert probe_tokens(1000, max_positions=128) != tokens


def test_it_disturbs_neither_random_state_nor_bytes(tmp_path, made_models, open_trainers):
    settings = trains.tiny_settings(tmp_path)
    init = made_models(settings)

    def draw(*_):
        torch.rand(1), np.random.rand(), random.gauss(0, 1)

    def train(name, *, num_probes):
        trainer = open_trainers(trains.train_order(tmp_path, init, name), settings)
        # Every forward pass draws: the state of the generators is part of the checkpoint.
        trainer.model.register_forward_hook(draw)
        entries = []
        for iteration in range(2):
            trainer.step(trains.work(trains.made_up_samples(iteration)))
            for _ in range(num_probes):
                trainer.probe()
            folder = tmp_path / f"{name}-{iteration}"
            folder.mkdir()
            entries.append(trainer.save(folder))
        assert trainer.model.training
        return entries

    assert train("with", num_probes=2) == train("without", num_probes=0)


def test_weights_that_are_not_finite_are_not_committed(tmp_path, made_models, open_trainers):
    settings = trains.tiny_settings(tmp_path)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    trainer = open_trainers(order, settings)
    real = trainer._engine.optimizer.step

    def step():
        taken = real()
        with torch.no_grad():
            next(trainer.model.parameters())[0] = float("nan")
        return taken

    trainer._engine.optimizer.step = step
    samples = trains.made_up_samples(0, num=8)
    order.inputs["rollout"] = trains.make_rollout(
        tmp_path, order.input("checkpoint").content["weights"], samples=samples, name="one-step"
    )
    with pytest.raises(NumericsError, match="after the last optimizer step"):
        train_iteration(trainer, order)
    assert not (tmp_path / "a" / "weights").exists()
