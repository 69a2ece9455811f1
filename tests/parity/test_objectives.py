"""Whole steps of each objective, written down once more on transformers and torch's own AdamW.

Two epochs of one step: in the second the policy has moved, so that ratios, clips and KLs are not
trivial. Compared: the mean loss of both steps, and the weights in the end.
"""

import dataclasses

import numpy as np
import pytest
import torch
import trains
from safetensors.torch import load_file

from slurm_rl.errors import NumericsError
from slurm_rl.stages.train import run_train

SIGNED = np.array([1.0, -1.0, 0.5, -0.5] * 4, np.float32)
LR = 2e-3


def sample_logprobs(model, samples, temperature=0.8):
    """Log-probs and entropies of each sample's response tokens."""
    found = []
    for i in range(len(samples.rewards)):
        tokens = torch.from_numpy(samples.sample_tokens(i)).long()
        start = int(samples.prompt_lengths[i])
        every = (model(tokens[None]).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
        logprobs = every.gather(1, tokens[start:, None])[:, 0]
        found.append((logprobs, -(every.exp() * every).sum(-1)))
    return found


def masks_of(samples):
    return [
        torch.from_numpy(samples.loss_mask[samples.response_slice(i)]).float() for i in range(16)
    ]


def ppo(new, old, advantage, mask, low=0.001, high=0.002):
    ratio = (new - old).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def dual(new, old, advantage, mask):
    loss = ppo(new, old, advantage, mask)
    return torch.minimum(loss, torch.tensor(-advantage * 1.0005)) if advantage < 0 else loss


def gspo(new, old, advantage, mask):
    mean = ((new - old) * mask).sum() / mask.sum().clamp(min=1)
    ratio = mean.exp().expand(len(mask))
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.999, 1.002))


def cispo(new, old, advantage, mask):
    return -advantage * (new - old).exp().clamp(0.999, 1.002).detach() * new


def pg(new, old, advantage, mask):
    return -advantage * new


def by_sequence(losses, masks):
    return (
        sum((x * m).sum() / m.sum().clamp(min=1) for x, m in zip(losses, masks, strict=True)) / 16
    )


def by_token(losses, masks):
    total = sum((x * m).sum() for x, m in zip(losses, masks, strict=True))
    return total / sum(m.sum() for m in masks)


def by_group(losses, masks):
    means = []
    for g in range(4):
        own = slice(4 * g, 4 * g + 4)
        means.append(by_token(losses[own], masks[own]))
    return sum(means) / 4


def by_constant(losses, masks):
    return sum((x * m).sum() for x, m in zip(losses, masks, strict=True)) / 7 / 16


CLIP = {"eps_clip": 0.001, "eps_clip_high": 0.002}
CASES = {
    "ppo": (CLIP, ppo, by_sequence),
    "dual clip": (CLIP | {"eps_clip_c": 1.0005}, dual, by_sequence),
    "gspo": (CLIP | {"policy_loss": "gspo"}, gspo, by_sequence),
    "cispo by token": (
        CLIP | {"policy_loss": "cispo", "loss_aggregation": "token"}, cispo, by_token,
    ),
    "pg by group": ({"policy_loss": "pg", "loss_aggregation": "group"}, pg, by_group),
    "dr grpo": (
        CLIP | {"loss_aggregation": "constant", "loss_constant_length": 7}, ppo, by_constant,
    ),
}  # fmt: skip


def reference_run(folder, samples, advantages, surrogate, aggregate, *, extra=None):
    """Losses of two steps, and the weights after them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/weights", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.0)
    masks = masks_of(samples)
    with torch.no_grad():
        old = [logprobs for logprobs, _ in sample_logprobs(model, samples)]
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        tokens = []
        for i, (new, entropy) in enumerate(sample_logprobs(model, samples)):
            loss = surrogate(new, old[i], float(advantages[i]), masks[i])
            tokens.append((loss if extra is None else extra(i, loss, new, old[i])) - 0.01 * entropy)
        loss = aggregate(tokens, masks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def run(tmp_path, made_models, samples, *, reference=False, **train):
    settings = trains.tiny_settings(
        tmp_path,
        train={"global_batch_size": 16, "epochs": 2, "normalize_advantages_std": False} | train,
        megatron={"lr": LR, "weight_decay": 0.0, "clip_grad": 1.0, "adam_eps": 1e-8},
    )
    init = made_models(settings)
    order = trains.train_order(tmp_path, init, "train", reference=init if reference else None)
    order.inputs["rollout"] = trains.make_rollout(
        tmp_path, init.content["weights"], samples=samples, name="rollout"
    )
    return init, order, run_train(order, settings)


def assert_same(order, result, losses, weights, *, atol=2e-5):
    assert result.metrics["train/loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-4, "the second step sees nothing new"
    ours = load_file(f"{order.attempt_dir}/weights/model.safetensors")
    for name, value in weights.items():
        assert torch.allclose(ours[name], value, atol=atol), name


@pytest.mark.parametrize("case", CASES)
def test_two_steps_are_those_of_another_implementation(tmp_path, made_models, case):
    train, surrogate, aggregate = CASES[case]
    samples = dataclasses.replace(trains.made_up_samples(0), rewards=SIGNED)
    init, order, result = run(tmp_path, made_models, samples, **train)
    losses, weights = reference_run(init.path, samples, SIGNED, surrogate, aggregate)
    assert_same(order, result, losses, weights)
    assert result.metrics["train/num_optimizer_steps"] == 2


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_kl_loss_to_the_reference(tmp_path, made_models, unbiased):
    """k2, whose value and gradient are 0 before the first step and are not before the second."""
    samples = dataclasses.replace(trains.made_up_samples(0), rewards=SIGNED)
    train = {"use_kl_loss": True, "kl_loss_coef": 5.0, "kl_loss_type": "k2"}
    init, order, result = run(
        tmp_path, made_models, samples, reference=True, **CLIP, **train, use_unbiased_kl=unbiased
    )

    def extra(i, loss, new, old):
        ratio = (new - old).exp() if unbiased else 1.0
        return loss + 5.0 * ratio * 0.5 * (new - old) ** 2

    losses, weights = reference_run(init.path, samples, SIGNED, ppo, by_sequence, extra=extra)
    assert_same(order, result, losses, weights)
    assert abs(result.metrics["train/first_kl"]) < 1e-6


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_truncated_weight_and_a_rejected_sample(tmp_path, made_models, level):
    """The engine's log-probs are off by up to half a nat; one sample by more than is kept."""
    made = trains.made_up_samples(0)
    g = np.random.default_rng(0)
    settings = trains.tiny_settings(tmp_path)
    init = made_models(settings)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{init.path}/weights", dtype=torch.float32)
    with torch.no_grad():
        exact = torch.cat([x for x, _ in sample_logprobs(model, made)]).numpy()
    away = g.uniform(-0.5, 0.5, len(exact)).astype(np.float32)
    away[made.response_slice(3)] = 3.0
    samples = dataclasses.replace(made, rewards=SIGNED, rollout_logprobs=exact - away)
    _, order, result = run(
        tmp_path, made_models, samples, **CLIP,
        use_tis=True, tis_level=level, tis_clip=1.3, tis_clip_low=0.8,
        rejection={"level": "geometric", "low": 0.1, "high": 5.0},
    )  # fmt: skip
    masks = masks_of(samples)

    def extra(i, loss, new, old):
        d = torch.from_numpy(away[samples.response_slice(i)])
        mean = float((d * masks[i]).sum() / masks[i].sum().clamp(min=1))
        ratio = d.exp() if level == "token" else (d * masks[i]).sum().exp().expand(len(d))
        kept = 0.1 <= np.exp(mean) <= 5.0
        assert kept == (i != 3) or masks[i].sum() == 0
        return loss * ratio.clamp(0.8, 1.3) * kept

    losses, weights = reference_run(init.path, samples, SIGNED, ppo, by_sequence, extra=extra)
    assert_same(order, result, losses, weights)
    assert 0 < result.metrics["train/rejected_frac"] < 0.2
    assert 0 < result.metrics["train/tis_clipfrac"] < 1


def test_later_epochs_are_in_an_order_of_their_own_and_the_same_again(tmp_path, made_models):
    samples = dataclasses.replace(trains.made_up_samples(0), rewards=SIGNED)
    found = [
        run(tmp_path / name, made_models, samples, global_batch_size=4, epochs=epochs)[2]
        for name, epochs in (("a", 2), ("b", 2), ("c", 1))
    ]
    assert found[0].files == found[1].files
    assert found[0].metrics["train/num_optimizer_steps"] == 8
    assert found[2].metrics["train/num_optimizer_steps"] == 4


@pytest.mark.parametrize("apart", [0.0, 0.05])
def test_the_first_kl_is_of_the_pair_that_one_stage_computed(
    tmp_path, made_models, open_trainers, apart
):
    """Passes that were cut otherwise may give other numbers, in bfloat16; the same to both."""
    settings = trains.tiny_settings(tmp_path, train={"check_first_kl": 1e-3})
    order = trains.train_order(tmp_path, made_models(settings), "a")
    samples = trains.made_up_samples(0)
    stage_R = torch.full((len(samples.loss_mask),), -2.0)
    trainer = open_trainers(order, settings)
    from slurm_rl.train.returns import Signals
    from slurm_rl.train.step import Work

    signals = Signals(proximal=stage_R, reference=stage_R - apart)
    work = Work(samples, signals=signals, is_first=True)
    if apart:
        with pytest.raises(NumericsError, match=r"KL to the reference is 0\.05, but"):
            trainer.step(work)
    else:
        assert trainer.step(work)["train/first_kl"] == 0.0
