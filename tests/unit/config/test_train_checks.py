"""Rules of what trains: what cannot take effect is refused, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_rl.config.roles import (
    data_parallel_size,
    global_batch_size,
    num_ranks,
    role_megatron,
    stage_ranks,
)
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest, shaping_settings
from slurm_rl.config.stages import stage_kinds

Complaints = Callable[..., list[str]]
Load = Callable[..., Settings]

CRITIC = {"megatron": {"lr": 1e-5}}
PPO = {"train__advantage_estimator": "gae", "critic": CRITIC}
KL = {"train__use_kl_loss": True, "train__kl_loss_coef": 0.1}
TEACHER = {"hf_checkpoint": "/models/t"}
OUT = "take it out"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"train__global_batch_size": None}, "train.global_batch_size is missing; add it, as 32 for one optimizer step an iteration; or set minibatches"),
        ({"train__minibatches": 2}, "train.minibatches = 2 is given beside global_batch_size, which says the same; keep one of the two"),
        ({"train__global_batch_size": None, "train__minibatches": 3}, "train.minibatches = 3 does not divide the 32 samples of an iteration (rollout_batch_size 8 × n_samples_per_prompt 4); use a divisor, as 32"),
        ({"train__log_probs_max_tokens_per_gpu": 9}, "train.log_probs_max_tokens_per_gpu = 9 has no effect without max_tokens_per_gpu, which packs samples; set that too, or take it out"),
        ({"train__loss_aggregation": "constant"}, "train.loss_constant_length is missing, and loss_aggregation: constant needs it; add it: tokens that a sample's sum is divided by, as the longest response"),
        ({"train__loss_constant_length": 9}, "train.loss_constant_length = 9 has no effect without loss_aggregation: constant; take it out"),
        ({"train__loss_aggregation": "group", "train__megatron__calculate_per_token_loss": True}, "train.megatron.calculate_per_token_loss = true is given beside loss_aggregation: group; take it out"),
        ({"rollout__n_samples_per_prompt": 1, "train__global_batch_size": 8, "train__advantage_estimator": "rloo"}, "rollout.n_samples_per_prompt = 1 gives rloo nothing to compare: every advantage would be 0; use at least 2"),
        ({"train__advantage_estimator": "rloo", "train__normalize_advantages_std": False}, f"train.normalize_advantages_std = false has no effect with advantage_estimator: rloo; {OUT}"),
        ({"train__gamma": 0.9}, f"train.gamma = 0.9 has no effect with advantage_estimator: grpo; {OUT}"),
        ({"train__advantage_estimator": "reinforce_plus_plus", "train__lambd": 0.9}, f"train.lambd = 0.9 has no effect with advantage_estimator: reinforce_plus_plus; {OUT}"),
        ({"train__advantage_estimator": "reinforce_plus_plus", "train__normalize_advantages": True}, f"train.normalize_advantages = true has no effect with advantage_estimator: reinforce_plus_plus, which whitens by itself; {OUT}"),
        ({"train__advantage_estimator": "gae"}, 'train.advantage_estimator = "gae" needs a critic; add a critic section (docs/training.md), or choose another estimator'),
        ({"critic": CRITIC}, "critic has no effect with advantage_estimator: grpo; set train.advantage_estimator: gae, or take the section out"),
        ({**PPO, "critic": {}}, "critic.megatron.lr is missing; add the learning rate, as 1.0e-6"),
        ({**PPO, "critic": {**CRITIC, "warmup_iterations": 3}}, "critic.warmup_iterations = 3 leaves the actor none of num_rollout = 3 iterations; lower it"),
        ({**PPO, "critic": {**CRITIC, "num_ranks": 2, "global_batch_size": 1}}, "critic.global_batch_size = 1 does not divide by the 2 data-parallel ranks; use a multiple"),
        ({"train__policy_loss": "pg", "train__eps_clip": 0.1}, f"train.eps_clip = 0.1 has no effect with policy_loss: pg, which clips nothing; {OUT}"),
        ({"train__policy_loss": "gspo", "train__eps_clip_c": 3.0}, f"train.eps_clip_c = 3.0 has no effect with policy_loss: gspo; {OUT}"),
        ({"train__eps_clip": 1.5}, "train.eps_clip = 1.5 must be at most 1; lower it"),
        ({"train__custom_loss_path": "a.b.c", "train__policy_loss": "gspo"}, f'train.policy_loss = "gspo" has no effect beside custom_loss_path; {OUT}'),
        ({"train__use_unbiased_kl": True}, "train.use_unbiased_kl = true has no effect without use_kl_loss; set use_kl_loss: true, or take it out"),
        ({"train__kl_reward_type": "k3"}, f'train.kl_reward_type = "k3" has no effect without kl_coef; {OUT}'),
        ({"reference": {"ema": 0.9}}, "reference.ema = 0.9 has no effect: nothing is measured against a reference; set train.use_kl_loss or train.kl_coef, or take it out"),
        ({**KL, "reference": {"ema": 0.9, "update_interval": 2}}, "reference.ema = 0.9 is given beside update_interval; keep one of the two"),
        ({**KL, "reference": {"num_ranks": 2}}, "reference.num_ranks = 2 has no effect: the reference's log-probs come from the train job; set reference.stage: true"),
        ({"train__tis_clip": 3.0}, "train.tis_clip = 3.0 has no effect without use_tis; set use_tis: true, or take it out"),
        ({"train__use_tis": True, "train__tis_clip_low": 2.0}, "train.tis_clip_low = 2.0 is not below tis_clip = 2; lower it"),
        ({"train__rejection": {"low": 1.2, "high": 1.1}}, "train.rejection.low = 1.2 is not below high = 1.1; lower it"),
        ({"train__custom_correction_path": "a.b.c", "train__use_tis": True}, f"train.use_tis = true has no effect beside custom_correction_path; {OUT}"),
        ({"teacher": {**TEACHER, "sglang": {"tp_size": 1}}}, f'teacher.sglang = {{"tp_size": 1}} has no effect with backend: megatron; {OUT}'),
        ({"teacher": {**TEACHER, "kl_direction": "forward"}}, 'teacher.kl_direction = "forward" has no effect without top_logprobs_num: a sampled token knows the reverse KL alone; set top_logprobs_num'),
        ({"teacher": {**TEACHER, "backend": "sglang"}, "rollout__rollout_temperature": 0.8}, 'teacher.backend = "sglang" computes log-probs at temperature 1, but the rollout\'s is 0.8; use backend: megatron, or rollout.rollout_temperature: 1.0'),
        ({"train__sft_iterations": 3, "rollout__label_key": "a"}, "train.sft_iterations = 3 leaves nothing to sample of num_rollout = 3 iterations; lower it"),
        ({"train__sft_iterations": 1}, "train.sft_iterations = 1 needs answers, but the data set data has no label_key; set rollout.label_key"),
        ({**PPO, "train__sft_iterations": 1, "rollout__label_key": "a"}, "train.sft_iterations = 1 cannot be with a critic, which has nothing to say of labels; tune in a run of its own, and start from its weights"),
        ({"train__max_tokens_per_gpu": 64, "train__micro_batch_size": 4}, f"train.micro_batch_size = 4 has no effect beside max_tokens_per_gpu; {OUT}"),
        ({"train__custom_reducer_path": "a.b.c", "train__loss_aggregation": "token"}, f'train.loss_aggregation = "token" has no effect beside custom_reducer_path; {OUT}'),
        ({"train__custom_advantage_path": "a.b.c", "train__advantage_estimator": "rloo"}, f'train.advantage_estimator = "rloo" has no effect beside custom_advantage_path; {OUT}'),
        ({"teacher": {**TEACHER, "concurrency": 3}}, f"teacher.concurrency = 3 has no effect with backend: megatron; {OUT}"),
        ({**PPO, "teacher": {**TEACHER, "use_rewards": False}}, "teacher.use_rewards = false leaves nothing for the critic to do: no reward counts; take critic out, with advantage_estimator: grpo"),
        ({"teacher": {**TEACHER, "backend": "sglang", "slurm": {"nodes": 2}}}, "teacher.slurm.nodes = 2 is more than the one node that serves a teacher; set it to 1"),
        ({**PPO, "critic": {**CRITIC, "num_ranks": 2}, "chain__pack": "iteration"}, "critic.num_ranks = 2 is not train's 1, and chain.pack: iteration runs both in one job; use the same, or chain.pack: stage"),
        ({"train__save_steps": 2}, f"train.save_steps = 2 has no effect: an iteration has 2 optimizer steps, and then commits; lower it, or {OUT}"),
        ({"train__global_batch_size": 32, "train__save_steps": 1}, f"train.save_steps = 1 has no effect: an iteration has 1 optimizer steps, and then commits; {OUT}"),
        ({**PPO, "critic": {**CRITIC, "minibatches": 4, "epochs": 2, "save_steps": 8}}, "critic.save_steps = 8 has no effect: an iteration has 8 optimizer steps"),
        ({**KL, "reference": {"update_interval": 3}}, f"reference.update_interval = 3 is not below num_rollout = 3: the reference would never move; lower it, or {OUT}"),
        ({"train__rejection": {"high": 0.5}}, "train.rejection.high = 0.5 is below 1, the ratio of a sample that is on policy; raise it"),
        ({"train__rejection": {"low": 1.1, "high": 2.0}}, "train.rejection.low = 1.1 is above 1, the ratio of a sample that is on policy; lower it"),
        ({"train__use_tis": True, "train__tis_clip": 0.5}, "train.tis_clip = 0.5 is below 1, the ratio of a sample that is on policy; raise it"),
        ({"train__use_tis": True, "train__tis_clip_low": 1.5}, "train.tis_clip_low = 1.5 is above 1, the ratio of a sample that is on policy; lower it"),
        ({**PPO, "critic": {"megatron": {"lr": 1e-5, "zq": 1}}}, "critic.megatron.zq is not a setting of Megatron-core"),
    ],
)  # fmt: skip
def test_what_cannot_take_effect_is_refused(
    complaints: Complaints, values: dict[str, Any], line: str
) -> None:
    found = complaints(**values)
    assert any(told.startswith(line) for told in found), found


@pytest.mark.parametrize(
    "values",
    [
        PPO,
        {**PPO, "rollout__n_samples_per_prompt": 1, "train__global_batch_size": 8},
        {**PPO, "train__kl_coef": 0.1, "train__gamma": 0.99, "train__lambd": 0.95},
        {**KL, "reference": {"stage": True, "num_ranks": 2}, "train__num_ranks": 2},
        {**KL, "reference": {"update_interval": 2}},
        {"train__global_batch_size": None, "train__minibatches": 4, "train__epochs": 2},
        {"train__policy_loss": "cispo", "train__eps_clip": 1.5},
        {"train__use_tis": True, "train__tis_mode": "mask", "train__tis_clip_low": 0.5},
        {"train__rejection": {"level": "sequence", "low": 0.5, "high": 2.0}},
        {"teacher": {**TEACHER, "top_logprobs_num": 8, "kl_direction": "forward"}},
        {"teacher": {**TEACHER, "backend": "sglang", "sglang": {"tp_size": 1}}},
        {"teacher": {**TEACHER, "use_rewards": False}, "rollout__n_samples_per_prompt": 1, "train__global_batch_size": 8},
        {"train__save_steps": 1},
        {"train__epochs": 2, "train__save_steps": 3},
        {"train__rejection": {"low": 1.0, "high": 1.5}},
        {"train__rejection": {"low": 0.5, "high": 1.0}},
        {"train__max_tokens_per_gpu": 4096, "train__log_probs_max_tokens_per_gpu": 8192},
    ],
)  # fmt: skip
def test_what_goes_together_is_taken(load: Load, values: dict[str, Any]) -> None:
    settings = load(**values)
    again = Settings.model_validate_json(settings.model_dump_json())
    assert again == settings and settings_digest(again) == settings_digest(settings)


def test_roles_have_their_own_ranks_and_layouts(load: Load) -> None:
    settings = load(
        **PPO,
        **KL,
        train__num_ranks=4,
        train__megatron__tensor_model_parallel_size=2,
        critic__num_ranks=2,
        critic__global_batch_size=8,
        reference__stage=True,
        teacher={**TEACHER, "backend": "sglang"},
    )
    kinds = ("train", "critic", "reference")
    assert [num_ranks(settings, kind) for kind in kinds] == [4, 2, 4]
    assert [data_parallel_size(settings, kind) for kind in kinds] == [2, 2, 2]
    assert [global_batch_size(settings, kind) for kind in ("train", "critic")] == [16, 8]
    assert role_megatron(settings, "reference")["tensor_model_parallel_size"] == 2
    assert stage_ranks(settings, "teacher") == 1
    kinds = ("init", "rollout", "reference", "teacher", "critic", "train", "tick")
    assert stage_kinds(settings) == kinds


def test_the_digest_of_a_run_without_is_what_it_was_before_these_settings_came(
    load: Load,
) -> None:
    shaping = shaping_settings(load())
    assert set(shaping) == {
        "seed", "deterministic", "lag", "init_model", "rollout", "train"
    }  # fmt: skip
    assert set(shaping["train"]) == {
        "advantage_estimator", "normalize_advantages_std", "eps_clip", "eps_clip_high",
        "use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coef", "global_batch_size",
        "micro_batch_size", "lr_decay_iters", "lr_warmup_iters", "megatron", "num_ranks",
    }  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"train__epochs": 2},
        {"train__policy_loss": "cispo"},
        PPO,
        {**PPO, "critic": {**CRITIC, "value_clip": None}},
        KL,
        {**KL, "reference": {"ema": 0.9}},
        {"teacher": TEACHER},
        {"teacher": {**TEACHER, "coef": 0.5}},
    ],
)
def test_what_shapes_numbers_is_in_the_digest(load: Load, values: dict[str, Any]) -> None:
    assert settings_digest(load(**values)) != settings_digest(load())
