"""The critic: its values, its updates, and all the ways in which it must not lose itself."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import trains
from safetensors.torch import load_file, save_file

from slurm_rl.config.schema import Settings
from slurm_rl.errors import CorruptError, ModelError
from slurm_rl.stages.critic import critic_iteration, run_critic
from slurm_rl.stages.init import run_init
from slurm_rl.stages.signals import SIGNALS_NAME
from slurm_rl.stages.train import run_train
from slurm_rl.stages.training import open_role


def ppo_settings(folder, *, critic=None, train=None, **more):
    settings = trains.tiny_settings(
        folder,
        train={"advantage_estimator": "gae", "gamma": 0.9, "lambd": 0.8} | (train or {}),
        **more,
    )
    value = settings.model_dump()
    value["critic"] = {"micro_batch_size": 3, "megatron": {"lr": 1e-2}} | (critic or {})
    return Settings.model_validate(value)


def init_of(root, settings, name="init"):
    """The init commit, with a critic."""
    order = trains.make_order(root, "init", 0, {}, name)
    result = run_init(order, settings)
    return trains.as_input("checkpoint", 0, "init", Path(order.attempt_dir), result)


def critic_order(root, before, iteration, name, *, rollout=None):
    """An order for the critic that goes on from `before`, in an iteration of the first policy."""
    weights = {"version": iteration, "digest": "xxh3:policy"}
    given = rollout or trains.make_rollout(root, weights)
    inputs = {"rollout": given, "checkpoint": dataclasses.replace(before, role="checkpoint")}
    return trains.make_order(root, "critic", iteration, inputs, name)


def done(order, result):
    files = result.content | {"parents": {"rollout": order.input("rollout").digest}}
    found = dataclasses.replace(result, content=files)
    return trains.as_input("critic", order.iteration, "critic", Path(order.attempt_dir), found)


@pytest.fixture
def open_critics():
    opened = []

    def close():
        while opened:
            opened.pop().close()

    def open_one(order, settings):
        close()
        opened.append(open_role(order, settings, "critic"))
        return opened[-1]

    open_one.close = close
    yield open_one
    close()


def expected_values(folder, samples):
    """Values before each trained token by transformers, 0 where masked."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    parts = []
    with torch.no_grad():
        for i in range(len(samples.rewards)):
            tokens = torch.from_numpy(samples.sample_tokens(i)).long()
            values = model(tokens[None]).logits[0, :, 0]
            parts.append(values[samples.prompt_lengths[i] - 1 : -1])
    return torch.cat(parts) * torch.from_numpy(samples.loss_mask)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_values_and_loss_are_those_of_transformers(tmp_path, open_critics, family):
    """Values, returns by hand, the first step's loss, and the gradient by autograd."""
    settings = ppo_settings(
        tmp_path, family=family, tied=True, critic={"global_batch_size": 16, "value_clip": None}
    )
    init = init_of(tmp_path, settings)
    order = critic_order(tmp_path, init, 0, "critic-0")
    trainer = open_critics(order, settings)
    samples = trains.made_up_samples(0)
    values_R = trainer.values(samples)
    expected_R = expected_values(f"{init.path}/critic", samples)
    assert float(expected_R.abs().max()) > 0.01
    assert torch.allclose(values_R, expected_R, atol=1e-5)

    metrics = critic_iteration(trainer, order).metrics
    loss, away, counts = 0.0, [], []
    for i in range(16):
        place = samples.response_slice(i)
        trained = np.flatnonzero(samples.loss_mask[place])
        values = expected_R[place].numpy().astype(np.float64)[trained]
        advantage, nxt, target = 0.0, 0.0, np.zeros(len(trained))
        for t in reversed(range(len(trained))):
            reward = float(samples.rewards[i]) if t == len(trained) - 1 else 0.0
            delta = reward + 0.9 * nxt - values[t]
            advantage, nxt = delta + 0.9 * 0.8 * advantage, values[t]
            target[t] = advantage + values[t]
        counts.append(len(trained))
        away.append(((values - target) ** 2).sum() / max(len(trained), 1))
    loss = 0.5 * sum(away) / 16
    assert metrics["train/critic-value_loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["train/critic-first_ratio_diff_max"] < 1e-6


def test_a_chain_gives_the_bytes_of_one_process(tmp_path, open_critics):
    """A critic that forgot its optimizer, its schedule or its random state would differ."""
    settings = ppo_settings(
        tmp_path, critic={"epochs": 2, "lr_decay_iters": 20, "lr_warmup_iters": 2,
                          "megatron": {"lr": 1e-2, "lr_decay_style": "cosine"}}
    )  # fmt: skip
    init = init_of(tmp_path, settings)
    one, many, trainer, before = [], [], None, init
    for i in range(3):
        order = critic_order(tmp_path, before, i, f"one-{i}")
        trainer = trainer or open_critics(order, settings)
        one.append(critic_iteration(trainer, order))
        before = done(order, one[-1])
    open_critics.close()
    before = init
    for i in range(3):
        order = critic_order(tmp_path, before, i, f"many-{i}")
        many.append(run_critic(order, settings))
        before = done(order, many[-1])
    for a, b in zip(one, many, strict=True):
        assert trains.facts(a) == trains.facts(b)
    assert [result.content["optimizer_steps"] for result in many] == [4, 8, 12]
    assert len({result.content["critic"]["digest"] for result in many}) == 3


def test_a_dropped_optimizer_state_is_seen(tmp_path, open_critics):
    settings = ppo_settings(tmp_path)
    init = init_of(tmp_path, settings)
    first = critic_order(tmp_path, init, 0, "first")
    before = done(first, run_critic(first, settings))
    whole = run_critic(critic_order(tmp_path, before, 1, "whole"), settings)
    trainer = open_critics(critic_order(tmp_path, before, 1, "broken"), settings)
    for inner in trainer._engine.optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    value.zero_()
    broken = critic_iteration(trainer, critic_order(tmp_path, before, 1, "broken"))
    assert broken.content["critic"]["digest"] != whole.content["critic"]["digest"]


def test_it_learns_the_returns(tmp_path, open_critics):
    from slurm_rl.train.returns import Signals
    from slurm_rl.train.step import Work

    settings = ppo_settings(
        tmp_path, critic={"epochs": 40, "global_batch_size": 16, "value_clip": None}
    )
    order = critic_order(tmp_path, init_of(tmp_path, settings), 0, "critic")
    trainer = open_critics(order, settings)
    samples = trains.made_up_samples(0)
    mask_R = torch.from_numpy(samples.loss_mask) != 0
    values_R = trainer.values(samples)
    wanted_R = torch.sin(torch.from_numpy(np.repeat(np.arange(16), samples.response_lengths)))
    wanted_R = wanted_R.float()
    before = float((values_R - wanted_R)[mask_R].square().mean())
    trainer.step_critic(Work(samples, signals=Signals(values=values_R)), wanted_R)
    after = float((trainer.values(samples) - wanted_R)[mask_R].square().mean())
    assert after < before / 4


def test_the_head_that_is_drawn_depends_on_the_seed_alone(tmp_path):
    settings = ppo_settings(tmp_path)
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        value = settings.model_copy(update={"seed": seed})
        digests.append(init_of(tmp_path, value, name).content["critic"]["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_weights_without_a_checkpoint_are_no_state(tmp_path):
    """A head, or an optimizer, that were made anew in the middle of a run would go unnoticed."""
    settings = ppo_settings(tmp_path)
    first = critic_order(tmp_path, init_of(tmp_path, settings), 0, "first")
    before = done(first, run_critic(first, settings))
    bare = {name: path for name, path in before.files.items() if not name.startswith("checkpoint/")}
    broken = dataclasses.replace(before, files=bare)
    with pytest.raises(CorruptError, match="holds no checkpoint; the optimizer's state is gone"):
        run_critic(critic_order(tmp_path, broken, 1, "second"), settings)


def test_a_head_of_another_shape_is_refused_with_both_shapes(tmp_path):
    settings = ppo_settings(tmp_path)
    init = init_of(tmp_path, settings)
    model = tmp_path / "with-a-head"
    shutil.copytree(f"{init.path}/critic", model)
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        if "score.weight" in tensors:
            tensors["score.weight"] = torch.zeros(3, trains.TINY["hidden_size"])
            tensors["score.bias"] = torch.zeros(3)
            path.unlink()
            save_file(tensors, path, metadata={"format": "pt"})
    other = ppo_settings(tmp_path, critic={"hf_checkpoint": str(model)})
    with pytest.raises(ModelError, match=r"has shape \[3, 32\], but a critic's is \[1, 32\]"):
        init_of(tmp_path, other, "other")


def test_a_checkpoint_of_another_model_does_not_become_this_one(tmp_path):
    """The critic's directory with the policy's checkpoint in it: saved to one place."""
    settings = ppo_settings(tmp_path)
    init = init_of(tmp_path, settings)
    first = critic_order(tmp_path, init, 0, "first")
    before = done(first, run_critic(first, settings))
    values = Path(first.attempt_dir) / SIGNALS_NAME
    assert values.is_file()
    order = trains.train_order(tmp_path, init, "policy")
    order.inputs["critic"] = dataclasses.replace(before, role="critic")
    policy = trains.trained(order, run_train(order, settings))
    mixed = dataclasses.replace(
        before,
        path=policy.path,
        files=policy.files,
        content=before.content | {"files": policy.content["files"]},
    )
    with pytest.raises((CorruptError, ModelError)):
        run_critic(critic_order(tmp_path, mixed, 1, "second"), settings)


def test_values_of_another_rollout_never_reach_the_policy(tmp_path):
    settings = ppo_settings(tmp_path)
    init = init_of(tmp_path, settings)
    first = critic_order(tmp_path, init, 0, "first")
    made = dataclasses.replace(done(first, run_critic(first, settings)), role="critic")
    order = trains.train_order(tmp_path, init, "policy")
    order.inputs["critic"] = dataclasses.replace(
        made, content=made.content | {"parents": {"rollout": "xxh3:another"}}
    )
    with pytest.raises(CorruptError, match="scored another rollout"):
        run_train(order, settings)
    stale = trains.make_rollout(
        tmp_path, {"version": 1, "digest": "xxh3:policy"}, samples=trains.made_up_samples(1)
    )
    wrong = trains.train_order(tmp_path, init, "wrong")
    wrong.inputs["critic"] = made
    wrong.inputs["rollout"] = dataclasses.replace(stale, iteration=0)
    wrong.inputs["rollout"].content["weights"] = init.content["weights"]
    with pytest.raises(CorruptError):
        run_train(wrong, settings)


def test_a_critic_out_of_step_is_refused(tmp_path):
    """The critic of iteration 0 is asked to go on with iteration 2."""
    settings = ppo_settings(tmp_path)
    first = critic_order(tmp_path, init_of(tmp_path, settings), 0, "first")
    before = done(first, run_critic(first, settings))
    with pytest.raises(CorruptError, match="iteration is 1, but 2 was committed"):
        run_critic(critic_order(tmp_path, before, 2, "third"), settings)


def test_what_the_exported_critic_says(tmp_path):
    settings = ppo_settings(tmp_path)
    first = critic_order(tmp_path, init_of(tmp_path, settings), 0, "first")
    run_critic(first, settings)
    config = json.loads((Path(first.attempt_dir) / "weights" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]
    values = expected_values(f"{first.attempt_dir}/weights", trains.made_up_samples(0))
    assert torch.isfinite(values).all() and float(values.abs().max()) > 0
