"""The training step on a real model: what counts, what does not, and what stops it."""

import dataclasses
import importlib.util
import re

import layouts
import numpy as np
import pytest
import torch
import trains

from slurm_rl.errors import ConfigError, NumericsError
from slurm_rl.stages.train import run_train, train_iteration


@pytest.fixture
def trained(tmp_path, made_models, open_trainers):
    """`trained(samples, ...)`: metrics and parameters after one iteration on them."""

    def train(samples, **options):
        settings = trains.tiny_settings(tmp_path, **options)
        order = trains.train_order(tmp_path, made_models(settings), "a")
        trainer = open_trainers(order, settings)
        metrics = trainer.step(trains.work(samples))
        return metrics, [p.detach().clone() for p in trainer.model.parameters()]

    return train


def difference(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a[1], b[1], strict=True))


def test_the_first_ratio_is_one_and_the_rollouts_distance_is_reported(trained):
    samples = trains.made_up_samples(0)
    metrics, _ = trained(samples)
    assert metrics["train/first_ratio_diff_max"] == 0.0
    assert metrics["train/num_optimizer_steps"] == 2
    shifted = dataclasses.replace(samples, rollout_logprobs=samples.rollout_logprobs - 100)
    far, _ = trained(shifted)
    name = "train/train_rollout_logprob_abs_diff"
    assert 90 < far[name] < 110 and far[f"{name}_max"] >= far[name]
    assert metrics[name] < 10


def test_the_gap_is_over_tokens_of_the_served_weights(trained, made_models, tmp_path):
    """Against log-probs by transformers; tokens of older weights are far off, and do not count."""
    samples = trains.made_up_samples(0)
    samples = dataclasses.replace(samples, weights_version=np.full(16, 3, np.int32))
    versions = np.where(np.arange(len(samples.loss_mask)) % 3 == 0, 2, 3).astype(np.int32)
    off = np.where(versions == 2, 50.0, 0.0).astype(np.float32)
    samples = dataclasses.replace(
        samples, token_versions=versions, rollout_logprobs=samples.rollout_logprobs - off
    )
    metrics, _ = trained(samples)
    init = made_models(trains.tiny_settings(tmp_path))
    gaps = []
    for i in range(16):
        own, prompt = samples.response_slice(i), int(samples.prompt_lengths[i])
        tokens = samples.sample_tokens(i).tolist()
        logprobs = trains.transformers_logprobs(init.path, tokens, temperature=0.8)[prompt - 1 :]
        counted = (samples.loss_mask[own] != 0) & (versions[own] == 3)
        gaps += np.abs(logprobs - samples.rollout_logprobs[own])[counted].tolist()
    name = "train/train_rollout_logprob_abs_diff"
    assert metrics[name] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert metrics[f"{name}_max"] == pytest.approx(max(gaps), rel=1e-4)
    exact = np.quantile(gaps, 0.99, method="inverted_cdf")
    assert metrics[f"{name}_p99"] == pytest.approx(exact, rel=7e-3)


@pytest.mark.parametrize(
    ("train", "first", "said"),
    [
        ({"max_logprob_gap": 0.01}, None, "train.max_logprob_gap allows 0.01"),
        ({"max_logprob_gap_drift": 2.0}, 0.01, "times the run's first (0.01)"),
    ],
)
def test_too_large_a_gap_stops_before_the_optimizer(
    tmp_path, made_models, open_trainers, train, first, said
):
    settings = trains.tiny_settings(tmp_path, train=train)
    init = made_models(settings)
    init = dataclasses.replace(init, content=init.content | {"logprob_gap_first": first})
    order = trains.train_order(tmp_path, init, "a")
    trainer = open_trainers(order, settings)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NumericsError, match=re.escape(said)):
        train_iteration(trainer, order)
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert trainer.schedule_step == 0 and trainer.progress.iteration == 0


def test_the_first_gap_is_handed_on_from_commit_to_commit(tmp_path, made_models):
    """The second iteration's is another, but the first one is what counts."""
    settings = trains.tiny_settings(tmp_path)
    before, gaps = made_models(settings), []
    for i in range(2):
        order = trains.train_order(tmp_path, before, f"a-{i}")
        result = run_train(order, settings)
        gaps.append(result.metrics["train/train_rollout_logprob_abs_diff"])
        assert result.content["logprob_gap_first"] == pytest.approx(gaps[0], rel=1e-5)
        before = trains.trained(order, result)
    assert abs(gaps[1] / gaps[0] - 1) > 1e-3


def test_samples_of_one_conversation_count_as_one_by_hand(trained):
    """Two samples of each group are one conversation: 12 in all, one denominator each."""
    samples = trains.made_up_samples(0)
    mask = samples.loss_mask.copy()
    for i in (0, 2, 5):
        mask[samples.response_slice(i)] = 0
    samples = dataclasses.replace(
        samples, loss_mask=mask, rollout_index=np.tile(np.array([0, 0, 1, 2]), 4)
    )
    counts = np.array([mask[samples.response_slice(i)].sum() for i in range(16)])
    loss, total = 0.0, 0.0
    for group in range(4):
        own = samples.rewards[4 * group : 4 * group + 4].astype(np.float64)
        rewards = np.array([own[:2].mean(), own[2], own[3]])
        trained_tokens = counts[4 * group : 4 * group + 4]
        tokens = np.array([trained_tokens[:2].sum(), trained_tokens[2], trained_tokens[3]])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        loss -= (advantages * (tokens > 0)).sum() / 12
        total -= (advantages * tokens).sum() / counts.sum()
    assert abs(loss) > 0.005 and abs(total - loss) > 0.005
    train = {"global_batch_size": 12, "entropy_coef": 0.0}
    for per_token, expected in ((False, loss), (True, total)):
        metrics, _ = trained(samples, train=train, megatron={"calculate_per_token_loss": per_token})
        assert metrics["train/num_optimizer_steps"] == 1
        assert metrics["train/pg_loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
def test_split_into_micro_batches_it_is_the_same_step(trained, per_token):
    samples = trains.made_up_samples(0)
    megatron = {"calculate_per_token_loss": per_token}
    whole = trained(samples, train={"micro_batch_size": 8}, megatron=megatron)
    parts = trained(samples, train={"micro_batch_size": 1}, megatron=megatron)
    for name in ("train/loss", "train/pg_loss", "train/grad_norm"):
        assert whole[0][name] == pytest.approx(parts[0][name], abs=1e-5, rel=1e-5), name
    assert difference(whole, parts) < 1e-4


def test_the_two_aggregations_differ(trained):
    samples = trains.made_up_samples(0)
    by_sample = trained(samples)
    by_token = trained(samples, megatron={"calculate_per_token_loss": True})
    assert difference(by_sample, by_token) > 1e-5


@pytest.fixture
def uneven_samples():
    """Two samples are masked throughout, so that the weighted advantages do not cancel."""
    samples = trains.made_up_samples(0)
    mask = samples.loss_mask.copy()
    for i in (0, 5):
        mask[samples.response_slice(i)] = 0
    return dataclasses.replace(samples, loss_mask=mask)


def advantages_of(samples):
    groups = samples.rewards.reshape(4, 4)
    centred = groups - groups.mean(1, keepdims=True)
    return (centred / (groups.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()


def test_the_aggregation_by_hand(trained, uneven_samples):
    """One step over all samples: ratio 1, so the loss is a weighted mean of -advantage."""
    samples, train = uneven_samples, {"global_batch_size": 16, "entropy_coef": 0.0}
    advantages = advantages_of(samples)
    counts = np.array([samples.loss_mask[samples.response_slice(i)].sum() for i in range(16)])
    by_sample = -(advantages * (counts > 0)).sum() / 16
    by_token = -(advantages * counts).sum() / counts.sum()
    assert abs(by_sample) > 0.005 and abs(by_token - by_sample) > 0.005
    metrics, _ = trained(samples, train=train)
    assert metrics["train/pg_loss"] == pytest.approx(by_sample, abs=1e-5)
    metrics, _ = trained(samples, train=train, megatron={"calculate_per_token_loss": True})
    assert metrics["train/pg_loss"] == pytest.approx(by_token, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_gradient_is_that_of_transformers_and_autograd(
    trained, made_models, tmp_path, uneven_samples, family
):
    """The same loss, written down once more on another implementation of the model."""
    from transformers import AutoModelForCausalLM

    samples = uneven_samples
    options = {"family": family, "tied": True, "train": {"global_batch_size": 16}}
    metrics, _ = trained(samples, **options)
    init = made_models(trains.tiny_settings(tmp_path, **options))
    model = AutoModelForCausalLM.from_pretrained(f"{init.path}/weights", dtype=torch.float32)
    loss = torch.zeros(())
    for i, advantage in enumerate(advantages_of(samples)):
        tokens = torch.from_numpy(samples.sample_tokens(i)).long()
        mask = torch.from_numpy(samples.loss_mask[samples.response_slice(i)]).float()
        all_logprobs = (model(tokens[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        all_logprobs = all_logprobs[samples.prompt_lengths[i] - 1 :]
        targets = tokens[samples.prompt_lengths[i] :]
        logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        per_token = -float(advantage) * (logprobs - logprobs.detach()).exp() - 0.01 * entropy
        loss = loss + (per_token * mask).sum() / mask.sum().clamp(min=1) / 16
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_masked_token_contributes_nothing(trained):
    samples = trains.made_up_samples(0)
    mask = samples.loss_mask.copy()
    last = int(samples.response_lengths[0]) - 1
    mask[last] = 0
    samples = dataclasses.replace(samples, loss_mask=mask)
    # The last token of a response is no other token's context: it may be anything.
    tokens, logprobs = samples.tokens.copy(), samples.rollout_logprobs.copy()
    end = int(samples.prompt_lengths[0] + samples.response_lengths[0])
    tokens[end - 1] = (tokens[end - 1] + 1) % len(trains.CHARACTERS)
    logprobs[last] = -50.0
    other = dataclasses.replace(samples, tokens=tokens, rollout_logprobs=logprobs)
    first, second = trained(samples), trained(other)
    for name in first[0].keys() | second[0].keys():
        if not name.startswith("perf/"):  # seconds, and what is made of them
            assert first[0][name] == second[0][name], name
    assert difference(first, second) == 0.0


def test_equal_rewards_without_other_terms_move_nothing(trained):
    samples = trains.made_up_samples(0)
    equal = dataclasses.replace(samples, rewards=np.ones(16, np.float32))
    plain = {"train": {"entropy_coef": 0.0}, "megatron": {"weight_decay": 0.0}}
    metrics, parameters = trained(equal, **plain)
    assert metrics["train/grad_norm"] == 0.0
    moved = trained(samples, **plain)
    assert difference((metrics, parameters), moved) > 1e-4


def test_everything_masked_is_no_division_by_zero(trained):
    samples = trains.made_up_samples(0)
    masked = dataclasses.replace(samples, loss_mask=np.zeros_like(samples.loss_mask))
    for per_token in (False, True):
        metrics, _ = trained(masked, megatron={"calculate_per_token_loss": per_token})
        assert metrics["train/loss"] == 0.0 and metrics["train/grad_norm"] == 0.0


def test_training_raises_the_probability_of_what_was_rewarded(tmp_path, made_models, open_trainers):
    """Ten iterations on one rollout: the rewarded answers become likelier, the others not."""
    settings = trains.tiny_settings(
        tmp_path, train={"entropy_coef": 0.0, "global_batch_size": 16}, megatron={"lr": 5e-3}
    )
    trainer = open_trainers(trains.train_order(tmp_path, made_models(settings), "a"), settings)
    samples = trains.made_up_samples(0)
    rewards = np.tile(np.array([1, 0, 0, 0], np.float32), 4)
    samples = dataclasses.replace(samples, rewards=rewards)

    def mean_logprobs():
        from slurm_rl.train.batch import pack_microbatch, rollout_weights
        from slurm_rl.train.returns import spread

        batch = pack_microbatch(
            samples,
            range(16),
            arrays_R={"rewards": spread(torch.from_numpy(rewards), samples)},
            weights_R=rollout_weights(samples, per_token=False),
            per_token=False,
        )
        batch = batch.to(next(trainer.model.parameters()).device)
        (logprobs,) = trainer.logprobs([batch])
        good = batch.arrays["rewards"] > 0
        return logprobs[good].mean().item(), logprobs[~good].mean().item()

    before = mean_logprobs()
    for _ in range(10):
        trainer.step(trains.work(samples))
    after = mean_logprobs()
    assert after[0] > before[0] + 0.3
    assert after[1] < before[1]


def poisoned(trainer):
    with torch.no_grad():
        next(trainer.model.parameters())[0] = float("nan")


def test_a_loss_that_is_not_finite_stops_before_the_optimizer(tmp_path, made_models, open_trainers):
    settings = trains.tiny_settings(tmp_path)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    trainer = open_trainers(order, settings)
    poisoned(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NumericsError, match="the loss is nan at optimizer step 1; the optimizer"):
        train_iteration(trainer, order)
    for p, kept in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(torch.nan_to_num(p), torch.nan_to_num(kept))
    assert trainer.schedule_step == 0 and trainer.progress.iteration == 0


def test_a_gradient_that_is_not_finite_stops_before_the_optimizer(
    tmp_path, made_models, open_trainers
):
    settings = trains.tiny_settings(tmp_path)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    trainer = open_trainers(order, settings)
    parameter = trainer.model.decoder.final_layernorm.weight
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NumericsError, match=r"the gradient's norm is (nan|inf) at optimizer"):
        train_iteration(trainer, order)
    assert trainer.schedule_step == 0


def test_a_model_that_differs_from_itself_is_stopped_with_both_numbers(
    tmp_path, made_models, open_trainers
):
    settings = trains.tiny_settings(tmp_path)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    trainer = open_trainers(order, settings)
    noise = torch.Generator().manual_seed(0)

    def disturb(module, inputs, output):
        change = 0.01 * torch.randn(output[0].shape, generator=noise)
        return output[0] + change.to(output[0].device), output[1]

    trainer.model.output_layer.register_forward_hook(disturb)
    with pytest.raises(NumericsError, match=r"\|ratio - 1\| is 0\.\d+, .* allows 0\.0001"):
        train_iteration(trainer, order)
    assert trainer.schedule_step == 0


def test_the_rate_follows_its_own_horizon(tmp_path, made_models, open_trainers):
    settings = trains.tiny_settings(
        tmp_path,
        train={"lr_decay_iters": 4, "lr_warmup_iters": 1, "global_batch_size": 4},
        megatron={"lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "linear"},
    )
    order = trains.train_order(tmp_path, made_models(settings), "a")
    trainer = open_trainers(order, settings)
    assert trainer.lr == 0.0  # Megatron's warm-up starts at lr_warmup_init
    trainer.step(trains.work(trains.made_up_samples(0, num=4)))
    assert trainer.lr == pytest.approx(1e-3)
    trainer.step(trains.work(trains.made_up_samples(0, num=4)))
    assert trainer.lr == pytest.approx(1e-4 + 9e-4 * 2 / 3)
    trainer.step(trains.work(trains.made_up_samples(0, num=16)))
    assert trainer.lr == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("train", "megatron", "said"),
    [
        ({}, {"lr_decay_style": "cosine"}, "needs train.lr_decay_iters"),
        ({"lr_decay_iters": 2, "lr_warmup_iters": 2}, {}, "not shorter than"),
        ({}, {"min_lr": 1.0}, "0 <= min_lr <= lr"),
        ({}, {"tensor_model_parallel_size": 2}, "1 ranks cannot be split into"),
        ({}, {"recompute_granularity": "nonsense"}, "Megatron-core refuses it"),
    ],
)
def test_settings_that_do_not_work_are_one_line(
    tmp_path, made_models, open_trainers, train, megatron, said
):
    settings = trains.tiny_settings(tmp_path, train=train, megatron=megatron)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    with pytest.raises(ConfigError, match=said) as error:
        open_trainers(order, settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("package", "megatron", "said"),
    [
        (
            "transformer_engine",
            {"transformer_impl": "transformer_engine"},
            "transformer_impl = transformer_engine needs the package transformer_engine, which is not in",
        ),
        (
            "emerging_optimizers",
            {"optimizer": "muon"},
            "optimizer = muon needs the package emerging_optimizers",
        ),
    ],
)
def test_a_package_that_is_not_there_is_named(
    tmp_path, made_models, open_trainers, package, megatron, said
):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    settings = trains.tiny_settings(tmp_path, megatron=megatron)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    with pytest.raises(ConfigError, match=said):
        open_trainers(order, settings)


def test_experts_over_tensor_ranks_need_sequence_parallelism():
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        from slurm_rl.models.geometry import parse_model_config
        from slurm_rl.train.model import model_config
        from slurm_rl.train.options import split_megatron
    shape = {"model_type": "qwen3_moe", "vocab_size": 15, **trains.TINY, **layouts.MOE}
    geometry = parse_model_config(shape, where="config.json")
    options = {"lr": 1.0, "tensor_model_parallel_size": 2}
    with pytest.raises(ConfigError, match="= 2 is without sequence_parallel: tensor ranks"):
        model_config(geometry, split_megatron(options), deterministic=True)
    split = split_megatron(options | {"sequence_parallel": True})
    with cpu.megatron_imports():  # without Megatron's warnings of its own defaults
        assert model_config(geometry, split, deterministic=True).sequence_parallel


def test_recomputation_gives_the_same_step(trained):
    samples = trains.made_up_samples(0)
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    again = trained(samples, megatron=full | {"recompute_num_layers": 1})
    assert difference(trained(samples), again) < 1e-6


def test_torch_is_left_as_it_was(trained):
    before = {name: getattr(torch, name) for name in ("arange", "zeros", "compile")}
    methods = torch.Tensor.cuda, torch.Tensor.type
    trained(trains.made_up_samples(0))
    assert before == {name: getattr(torch, name) for name in before}
    assert methods == (torch.Tensor.cuda, torch.Tensor.type)
    assert torch.zeros(1).type() == "torch.FloatTensor"
