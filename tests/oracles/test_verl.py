"""Our formulas against verl 0.9.1's `core_algos` and `rollout_corr_helper`, in float32 on a CPU.

| ours | verl | agree to | where conventions differ |
|---|---|---|---|
| `group_advantages` | `compute_grpo_outcome_advantage` | 1e-5 | a group of one: verl hands its reward through, ours is 0; equal rewards: verl divides the mean's rounding by 1e-6, ours is exactly 0 |
| `rloo_advantages` | `compute_rloo_outcome_advantage` | 1e-5 | a group of one, as above |
| `reinforce_plus_plus` | `…_reinforce_plus_plus_…` | 1e-4 | under two trained tokens verl raises, ours does not divide |
| `reinforce_plus_plus_baseline` | `…_plus_plus_baseline_…` | 1e-4 | a group of one, as above |
| `gae`, `whiten` | `compute_gae_advantage_return` | 1e-4 | verl whitens in the same function and leaves numbers on masked tokens; ours are 0 there |
| `ppo_clip_loss` | `compute_policy_loss_vanilla` | 1e-5, gradients too | verl always has the dual clip (3 by default); ours only if asked |
| `gspo_loss` | `compute_policy_loss_gspo` | 1e-5, gradients too | the log-ratio is bounded at 10 from above; ours at ± 20 |
| `cispo_loss` | `compute_policy_loss_cispo` | 1e-5, gradients too | none |
| `policy_gradient_loss` | `compute_policy_loss_reinforce` | 1e-5, gradients too | none |
| `value_loss` | `compute_value_loss` | 1e-5, gradients too | none |
| `kl_estimate` | `kl_penalty` | 1e-5, gradients too | verl's k3 is our low_var_kl (bounded at 10); our k3 has no such bound |
| `token_weights` | `agg_loss` | 1e-5 | left to itself verl leaves samples without a trained token out of the denominator; ours counts them. Told `global_batch_size`, it agrees |
| `off_policy_correction` | `compute_rollout_correction_weights`, `compute_rollout_rejection_mask` | 1e-5 | verl's rejection bounds hold for rollout over trainer: [a, b] there is [1/b, 1/a] here; verl shrinks the response mask, and with it the denominator; where no weight is left verl divides by 0 |
"""

import math

import numpy as np
import pytest
import torch
from oracles.padded import CASES, MODERATE, Case
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

from slurm_rl.algorithms.advantages import group_advantages, rloo_advantages
from slurm_rl.algorithms.aggregation import token_weights, weighted_sum
from slurm_rl.algorithms.corrections import ImportanceRule, RejectionRule, off_policy_correction
from slurm_rl.algorithms.kl import kl_estimate
from slurm_rl.algorithms.losses import (
    cispo_loss,
    gspo_loss,
    policy_gradient_loss,
    ppo_clip_loss,
)
from slurm_rl.algorithms.token_advantages import (
    gae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
    whiten,
)
from slurm_rl.algorithms.value import value_loss

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
moderate_case = pytest.mark.parametrize("case", MODERATE.values(), ids=MODERATE)


def close(found, expected, *, within=1e-5):
    torch.testing.assert_close(found, expected, rtol=within, atol=within)


def rewards_of_tokens(case: Case) -> torch.Tensor:
    return token_rewards(case.rewards_B, lengths_B=case.lengths_B, mask_R=case.mask_R)


def whole(case: Case) -> torch.Tensor:
    """verl adds a sample's reward up from its tokens; a sample without any keeps none."""
    return torch.where(
        torch.tensor([bool(m.any()) for m in case.mask_R.split(case.lengths_B.tolist())]),
        case.rewards_B,
        0.0,
    )


@moderate_case
@pytest.mark.parametrize("divide_by_std", [True, False])
def test_grpo_and_dr_grpo(case, divide_by_std):
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        case.pad(rewards_of_tokens(case)),
        case.mask_BT,
        case.group_B.numpy(),
        norm_adv_by_std_in_grpo=divide_by_std,
    )
    ours = group_advantages(whole(case), group_index_B=case.group_B, divide_by_std=divide_by_std)
    # Equal rewards: what verl has is rounding, divided by 1e-6.
    within = 2e-2 if divide_by_std and len(set(case.rewards_B.tolist())) == 1 else 1e-5
    close(ours[case.owner_R] * case.mask_R, case.flat(theirs), within=within)


@moderate_case
def test_rloo(case):
    theirs, _ = core_algos.compute_rloo_outcome_advantage(
        case.pad(rewards_of_tokens(case)), case.mask_BT, case.group_B.numpy()
    )
    ours = rloo_advantages(whole(case), group_index_B=case.group_B)
    close(ours[case.owner_R] * case.mask_R, case.flat(theirs))


def test_a_group_of_one_is_where_conventions_differ():
    rewards, mask, group = torch.tensor([[3.0]]), torch.ones(1, 1), np.array([0])
    for theirs, ours in (
        (core_algos.compute_grpo_outcome_advantage, group_advantages),
        (core_algos.compute_rloo_outcome_advantage, rloo_advantages),
    ):
        assert theirs(rewards.clone(), mask, group)[0].item() == pytest.approx(3.0)
        assert ours(rewards[0], group_index_B=torch.tensor([0])).item() == 0.0


@moderate_case
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(case, gamma):
    rewards = rewards_of_tokens(case)
    config = type("Config", (), {"gamma": gamma})
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        case.pad(rewards), case.mask_BT, config
    )
    ours = reinforce_plus_plus(rewards, lengths_B=case.lengths_B, mask_R=case.mask_R, gamma=gamma)
    close(ours, case.flat(theirs), within=1e-4)


@moderate_case
def test_reinforce_plus_plus_baseline(case):
    theirs, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        case.pad(rewards_of_tokens(case)), case.mask_BT, case.group_B.numpy()
    )
    ours = reinforce_plus_plus_baseline(
        whole(case), group_index_B=case.group_B, lengths_B=case.lengths_B, mask_R=case.mask_R
    )
    close(ours, case.flat(theirs), within=1e-4)


@moderate_case
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0)])
def test_gae_and_whitening(case, gamma, lambd):
    rewards = case.advantages_R * case.mask_R
    theirs, their_returns = core_algos.compute_gae_advantage_return(
        case.pad(rewards), case.pad(case.values_R), case.mask_BT, gamma, lambd
    )
    advantages, returns = gae(
        rewards,
        values_R=case.values_R,
        lengths_B=case.lengths_B,
        mask_R=case.mask_R,
        gamma=gamma,
        lambd=lambd,
    )
    close(returns, case.flat(their_returns) * case.mask_R, within=1e-4)
    whitened = whiten(advantages, mask_R=case.mask_R)
    close(whitened, case.flat(theirs) * case.mask_R, within=1e-4)


def test_whitening_one_token_is_where_conventions_differ():
    with pytest.raises(ValueError, match="mask is one"):
        core_algos.verl_F.masked_whiten(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]))
    assert whiten(torch.ones(2), mask_R=torch.tensor([1, 0])).tolist() == [0.0, 0.0]


def config(case: Case, **options) -> ActorConfig:
    out = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2, **options
    )
    out.global_batch_info["global_batch_size"] = len(case.lengths_B)
    out.global_batch_info["batch_num_tokens"] = max(int(case.mask_R.sum()), 1)
    out.global_batch_info["loss_scale_factor"] = 7
    return out


#: Their name of an aggregation, ours, and whether the denominator counts tokens.
AGGREGATIONS = {
    "token-mean": ("token", True),
    "seq-mean-token-mean": ("sequence", False),
    "seq-mean-token-sum-norm": ("constant", False),
}
every_aggregation = pytest.mark.parametrize("mode", AGGREGATIONS)


def aggregate(case: Case, values_R: torch.Tensor, mode: str) -> torch.Tensor:
    kind, counts_tokens = AGGREGATIONS[mode]
    weights = token_weights(
        case.mask_R, lengths_B=case.lengths_B, aggregation=kind, constant_length=7
    )
    denominator = max(int(case.mask_R.sum()), 1) if counts_tokens else len(case.lengths_B)
    return weighted_sum(values_R, weights_N=weights) / denominator


def both_ways(case: Case, ours, theirs, mode: str, *, extra_R=None):
    """Compare two losses as (value, gradient) of one policy; returns ours and their metrics."""
    mine, other = (case.policy_R.clone().requires_grad_() for _ in range(2))
    out = ours(mine)
    loss = aggregate(case, out.loss_N if extra_R is None else out.loss_N * extra_R, mode)
    loss.backward()
    their_loss, metrics = theirs(case.pad(other))
    their_loss.backward()
    close(loss, their_loss)
    close(mine.grad, other.grad)
    return out, metrics


def share(values_R: torch.Tensor, case: Case) -> float:
    return values_R[case.trained].float().mean().item()


@every_case
@every_aggregation
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.28, 3.0), (0.1, 0.5, 1.2)])
def test_ppo_with_clip_higher_and_dual_clip(case, mode, low, high, dual):
    options = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}

    def theirs(policy):
        return core_algos.compute_policy_loss_vanilla(
            case.pad(case.proximal_R),
            policy,
            case.pad(case.advantages_R),
            case.mask_BT,
            mode,
            config(case, **options),
        )

    def ours(policy):
        return ppo_clip_loss(
            policy,
            proximal_logprobs_N=case.proximal_R,
            advantages_N=case.advantages_R,
            eps_clip=low,
            eps_clip_high=high,
            eps_clip_c=dual,
        )

    out, metrics = both_ways(case, ours, theirs, mode)
    clipped = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
    assert share(out.clipped_N, case) == pytest.approx(clipped, abs=1e-5)


def test_without_a_dual_clip_is_where_conventions_differ():
    # Ratio e² = 7.39 and a negative advantage: ours costs 7.39, verl's no more than 3.
    one = torch.tensor([2.0])
    ours = ppo_clip_loss(
        one, proximal_logprobs_N=torch.zeros(1), advantages_N=-torch.ones(1), eps_clip=0.2
    )
    config_ = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    theirs, _ = core_algos.compute_policy_loss_vanilla(
        torch.zeros(1, 1), one[None], -torch.ones(1, 1), torch.ones(1, 1), "token-mean", config_
    )
    assert (ours.loss_N.item(), theirs.item()) == pytest.approx((math.exp(2), 3.0))


@moderate_case
@every_aggregation
def test_gspo(case, mode):
    # Sequence ratios are near 1 only if the policies are: a hundredth of the distance.
    near = case.proximal_R + 0.01 * (case.policy_R - case.proximal_R)
    options = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}

    def ours(policy):
        # Masked tokens are left out before a loss sees them: here, put back with a ratio of 1.
        trained = case.trained
        inner = gspo_loss(
            policy[trained],
            proximal_logprobs_N=near[trained],
            advantages_N=case.advantages_R[trained],
            sequence_N=case.owner_R[trained],
            num_sequences=len(case.lengths_B),
            eps_clip=3e-4,
            eps_clip_high=4e-4,
        )
        spread = [torch.zeros(len(policy)).masked_scatter(trained, x) for x in inner]
        return type(inner)(*spread)

    def theirs(policy):
        return core_algos.compute_policy_loss_gspo(
            case.pad(near),
            policy,
            case.pad(case.advantages_R),
            case.mask_BT,
            mode,
            config(case, **options),
        )

    out, metrics = both_ways(case, ours, theirs, mode)
    assert share(out.clipped_N, case) == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-5)


@every_case
@every_aggregation
def test_cispo(case, mode):
    def ours(policy):
        return cispo_loss(
            policy,
            proximal_logprobs_N=case.proximal_R,
            advantages_N=case.advantages_R,
            eps_clip=0.2,
            eps_clip_high=0.3,
        )

    def theirs(policy):
        return core_algos.compute_policy_loss_cispo(
            case.pad(case.proximal_R),
            policy,
            case.pad(case.advantages_R),
            case.mask_BT,
            mode,
            config(case, clip_ratio_low=0.2, clip_ratio_high=0.3),
        )

    out, metrics = both_ways(case, ours, theirs, mode)
    assert share(out.clipped_N, case) == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-5)


@every_case
@every_aggregation
def test_policy_gradient_with_truncated_weights(case, mode):
    weights, _ = compute_rollout_correction_weights(
        case.pad(case.proximal_R - case.other_R), case.mask_BT, "token", 2.0
    )
    correction = off_policy_correction(
        case.proximal_R,
        rollout_logprobs_N=case.other_R,
        sequence_N=case.owner_R,
        num_sequences=len(case.lengths_B),
        importance=ImportanceRule("token", outside="truncate", low=0.0, high=2.0),
    )

    def ours(policy):
        return policy_gradient_loss(
            policy, proximal_logprobs_N=case.proximal_R, advantages_N=case.advantages_R
        )

    def theirs(policy):
        return core_algos.compute_policy_loss_reinforce(
            case.pad(case.other_R),
            policy,
            case.pad(case.advantages_R),
            case.mask_BT,
            mode,
            config(case),
            weights,
        )

    both_ways(case, ours, theirs, mode, extra_R=correction.weights_N)


@moderate_case
@every_aggregation
def test_value_loss(case, mode):
    mine, other = (case.values_R.clone().requires_grad_() for _ in range(2))
    out = value_loss(
        mine,
        proximal_values_N=case.other_R,
        returns_N=case.advantages_R,
        eps_clip=0.5,
    )
    loss = aggregate(case, out.loss_N, mode)
    theirs, clipped = core_algos.compute_value_loss(
        case.pad(other),
        case.pad(case.advantages_R),
        case.pad(case.other_R),
        case.mask_BT,
        0.5,
        mode,
        **config(case).global_batch_info,
    )
    loss.backward()
    theirs.backward()
    close(loss, theirs)
    close(mine.grad, other.grad)
    assert share(out.clipped_N, case) == pytest.approx(clipped.item(), abs=1e-5)


@every_case
@pytest.mark.parametrize(
    ("ours", "theirs"), [("k1", "k1"), ("k2", "k2"), ("low_var_kl", "low_var_kl")]
)
def test_kl(case, ours, theirs):
    mine, other = (case.policy_R.clone().requires_grad_() for _ in range(2))
    found = kl_estimate(mine, reference_logprobs_N=case.other_R, kind=ours)
    expected = core_algos.kl_penalty(other, case.other_R, theirs)
    found.sum().backward()
    expected.sum().backward()
    close(found, expected)
    close(mine.grad, other.grad)


def test_k3_is_where_conventions_differ():
    # d = -3: e³ - 1 - 3 = 16.09, and verl's is held at 10.
    d = torch.tensor([-3.0])
    ours = kl_estimate(d, reference_logprobs_N=torch.zeros(1), kind="k3").item()
    theirs = core_algos.kl_penalty(d, torch.zeros(1), "k3").item()
    assert (ours, theirs) == pytest.approx((math.exp(3) - 4, 10.0))


@moderate_case
@every_aggregation
def test_aggregation(case, mode):
    theirs = core_algos.agg_loss(
        case.pad(case.advantages_R), case.mask_BT, mode, **config(case).global_batch_info
    )
    close(aggregate(case, case.advantages_R, mode), theirs)


def test_a_sample_without_trained_tokens_is_where_conventions_differ():
    values, mask = torch.tensor([[4.0], [9.0]]), torch.tensor([[1.0], [0.0]])
    assert core_algos.agg_loss(values, mask, "seq-mean-token-mean").item() == pytest.approx(4.0)
    weights = token_weights(mask.flatten(), lengths_B=torch.tensor([1, 1]))
    assert weighted_sum(values.flatten(), weights_N=weights).item() / 2 == 2.0


@every_case
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("threshold", "rule"),
    [(1.2, ("truncate", 0.0, 1.2)), ("0.8_1.3", ("mask", 0.8, 1.3))],
    ids=["truncate", "mask"],
)
def test_importance_weights(case, level, threshold, rule):
    trained = case.trained
    outside, low, high = rule
    found = off_policy_correction(
        case.proximal_R[trained],
        rollout_logprobs_N=case.other_R[trained],
        sequence_N=case.owner_R[trained],
        num_sequences=len(case.lengths_B),
        importance=ImportanceRule(level, outside=outside, low=low, high=high),
    )
    arguments = case.pad(case.proximal_R - case.other_R), case.mask_BT, level, threshold
    if found.weight_sum == 0:
        # Its effective sample size divides by the weights.
        with pytest.raises(ZeroDivisionError):
            compute_rollout_correction_weights(*arguments)
        return
    theirs, metrics = compute_rollout_correction_weights(*arguments)
    close(found.weights_N, case.flat(theirs)[trained])
    if outside == "mask":
        rejected = found.num_rejected.item() / int(trained.sum())
        assert rejected == pytest.approx(metrics["rollout_is_oob_ratio"], abs=1e-5)


@moderate_case
@pytest.mark.parametrize(
    ("level", "theirs"),
    [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")],
)
def test_rejection(case, level, theirs):
    # Their bounds are for the rollout over the trainer: ours are their inverses, exchanged.
    expected, _ = compute_rollout_rejection_mask(
        case.pad(case.proximal_R - case.other_R), case.mask_BT, theirs, "0.8_1.5"
    )
    trained = case.trained
    found = off_policy_correction(
        case.proximal_R[trained],
        rollout_logprobs_N=case.other_R[trained],
        sequence_N=case.owner_R[trained],
        num_sequences=len(case.lengths_B),
        rejection=RejectionRule(level, low=1 / 1.5, high=1 / 0.8),
    )
    assert found.kept_N.tolist() == (case.flat(expected)[trained] != 0).tolist()


def test_a_rejected_sample_is_where_denominators_differ():
    # Losses 4 and 9, the second rejected: verl's mean is over what is left.
    log_ratio = torch.tensor([[0.0], [3.0]])
    mask, _ = compute_rollout_rejection_mask(log_ratio, torch.ones(2, 1), "token_k1", "0.5_2.0")
    values = torch.tensor([[4.0], [9.0]])
    assert core_algos.agg_loss(values, mask, "token-mean").item() == 4.0
    found = off_policy_correction(
        log_ratio.flatten(),
        rollout_logprobs_N=torch.zeros(2),
        sequence_N=torch.arange(2),
        num_sequences=2,
        rejection=RejectionRule("token", low=0.5, high=2.0),
    )
    assert weighted_sum(values.flatten(), weights_N=found.weights_N).item() / 2 == 2.0
