"""Whole optimizer steps against TRL 1.16.0's trainers, on a tiny Llama of random weights.

TRL's trainer is a black box here: it samples, scores, and takes one or two SGD steps of rate
`RATE` on its samples. From the same first weights, prompts, completions and rewards, ours must come
to the same weights: each sample is run alone and without padding, its log-probabilities through our
formulas, and the loss through our weights and denominators. In the second step the ratio is no
longer 1, and the clips are so narrow that most tokens meet one.

| ours | TRL | agree to | where conventions differ |
|---|---|---|---|
| `group_advantages` | `scale_rewards` "group", "none" | 1e-4 of the update's size | the deviation + 1e-4 there, + 1e-6 here |
| `rloo_advantages`, `policy_gradient_loss` | `RLOOTrainer`, first step | 1e-4 | its later steps clip the *product* of a sequence's ratios; we have no such loss |
| `ppo_clip_loss` | `loss_type` grpo, bnpo, dapo, dr_grpo; `delta` | 1e-4 | `delta` bounds the ratio of any sign of advantage, which is the dual clip if it is above the upper clip |
| `gspo_loss` | `importance_sampling_level` "sequence" | 1e-4 | none under a mean over sequences |
| `cispo_loss` | `loss_type` cispo | 1e-4 | `epsilon_high` is the bound itself there (ours: 1 + eps_clip_high), and there is no lower one |
| `kl_estimate` k3, with its importance ratio | `beta`, `use_bias_correction_kl` | 1e-4 | none |
| `kl_estimate` k1 as a reward | `RLOOTrainer`'s `beta` | 1e-4 | none |
| `token_weights` | grpo: sequence; bnpo, dapo, cispo: token; dr_grpo: constant | 1e-4 | TRL's bnpo counts a micro-batch's tokens; with one micro-batch it is ours |
| `topk_kl` with K = V | `GKDTrainer.generalized_jsd_loss` | 1e-5 | its beta is 0 for forward, 1 for reverse |
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gkd import GKDTrainer

from slurm_rl.algorithms.advantages import group_advantages, rloo_advantages
from slurm_rl.algorithms.aggregation import token_weights, weighted_sum
from slurm_rl.algorithms.distillation import topk_kl
from slurm_rl.algorithms.kl import kl_estimate
from slurm_rl.algorithms.losses import (
    cispo_loss,
    gspo_loss,
    policy_gradient_loss,
    ppo_clip_loss,
)
from slurm_rl.algorithms.numerics import importance_ratio

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_WORDS, MAX_LENGTH, TEMPERATURE = 24, 12, 0.7
# Two digits each: a special token is split off wherever it begins a word.
WORDS = [f"w{i:02d}" for i in range(NUM_WORDS)]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A model and a tokenizer on disk: no network is asked."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w03"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w00", eos_token="w01", pad_token="w02", unk_token="w03"
    ).save_pretrained(folder)
    return folder


@dataclass
class Seen:
    """What TRL's trainer sampled and scored, as its reward function saw it."""

    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def score(self, prompts, completion_ids, **others):
        rewards = [1000.0 * (sum(ids) % 7) / 7 + len(ids) for ids in completion_ids]
        self.prompts += [[WORDS.index(w) for w in p.split()] for p in prompts]
        self.completions += [list(ids) for ids in completion_ids]
        self.rewards += rewards
        return rewards


def run_trl(start: Path, trainer_class, config_class, *, rate, num_steps, folder, **options):
    """The weights after TRL's steps, and what it sampled."""
    seen = Seen()
    config = config_class(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=num_steps,
        max_steps=num_steps,
        max_completion_length=MAX_LENGTH,
        temperature=TEMPERATURE,
        learning_rate=rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=5,
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(start)
    trainer = trainer_class(
        model=model,
        reward_funcs=seen.score,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w04 w05 w06", "w07 w08 w09 w10 w11"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(start),
        optimizers=(torch.optim.SGD(model.parameters(), lr=rate), None),
    )
    trainer.train()
    assert len(seen.completions) == 8 and len({len(c) for c in seen.completions}) > 1
    return dict(trainer.model.named_parameters()), seen


def logprobs_of(model, seen: Seen) -> torch.Tensor:
    """float32[R]: each sample alone, without padding."""
    parts = []
    for prompt, completion in zip(seen.prompts, seen.completions, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        table = (logits / TEMPERATURE).log_softmax(-1)
        parts.append(table.gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(parts)


def run_ours(start: Path, seen: Seen, loss, *, rate, num_steps):
    """The weights after the same steps: `loss(logprobs, proximal, batch)` is the whole loss."""
    model = AutoModelForCausalLM.from_pretrained(start)
    batch = Batch(seen)
    proximal = logprobs_of(model, seen).detach()
    for _ in range(num_steps):
        model.zero_grad()
        loss(logprobs_of(model, seen), proximal, batch).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= rate * weight.grad
    return dict(model.named_parameters())


class Batch:
    def __init__(self, seen: Seen) -> None:
        self.lengths_B = torch.tensor([len(c) for c in seen.completions])
        self.group_B = torch.tensor([len(p) for p in seen.prompts])
        self.rewards_B = torch.tensor(seen.rewards)
        self.owner_R = torch.repeat_interleave(torch.arange(8), self.lengths_B)

    def advantages(self, *, divide_by_std):
        advantages_B = group_advantages(
            self.rewards_B, group_index_B=self.group_B, divide_by_std=divide_by_std
        )
        return advantages_B[self.owner_R]

    def aggregate(self, values_R, kind):
        weights = token_weights(
            torch.ones(len(values_R)),
            lengths_B=self.lengths_B,
            aggregation=kind,
            constant_length=MAX_LENGTH,
        )
        denominator = len(values_R) if kind == "token" else len(self.lengths_B)
        return weighted_sum(values_R, weights_N=weights) / denominator


def same_update(theirs, ours, start: Path, *, within=1e-4) -> None:
    """Compare two updates of the same weights, relative to the largest step of any weight."""
    before = dict(AutoModelForCausalLM.from_pretrained(start).named_parameters())
    assert theirs.keys() == ours.keys() == before.keys()
    size = max((theirs[name] - before[name]).abs().max().item() for name in before)
    assert size > 1e-3, "TRL's step moved nothing: this compares nothing"
    for name in before:
        gap = (theirs[name] - ours[name]).abs().max().item()
        assert gap <= within * size, f"{name}: {gap:.2e} of {size:.2e}"


def ppo(**clips):
    def loss(policy, proximal, advantages):
        return ppo_clip_loss(policy, proximal_logprobs_N=proximal, advantages_N=advantages, **clips)

    return loss


def cispo(policy, proximal, advantages):
    return cispo_loss(
        policy,
        proximal_logprobs_N=proximal,
        advantages_N=advantages,
        eps_clip=1.0,
        eps_clip_high=0.005,
    )


#: Options of TRL, our loss, our aggregation; clips narrow enough for the second step to meet them.
NARROW = {"epsilon": 0.01, "epsilon_high": 0.02}
ours_narrow = ppo(eps_clip=0.01, eps_clip_high=0.02)
GRPO = {
    "grpo": ({"loss_type": "grpo", **NARROW}, ours_narrow, "sequence"),
    "bnpo": ({"loss_type": "bnpo", **NARROW}, ours_narrow, "token"),
    "dapo": ({"loss_type": "dapo", **NARROW}, ours_narrow, "token"),
    "dr_grpo": ({"loss_type": "dr_grpo", **NARROW}, ours_narrow, "constant"),
    "dual clip": (
        {"loss_type": "grpo", "delta": 1.03, **NARROW},
        ppo(eps_clip=0.01, eps_clip_high=0.02, eps_clip_c=1.03),
        "sequence",
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.005}, cispo, "token"),
}


@pytest.mark.parametrize("name", GRPO)
def test_two_steps_of_grpo(start, tmp_path, name):
    options, formula, kind = GRPO[name]
    shares = []

    def loss(policy, proximal, batch):
        out = formula(policy, proximal, batch.advantages(divide_by_std=True))
        shares.append(out.clipped_N.mean().item())
        return batch.aggregate(out.loss_N, kind)

    steps = {"rate": 0.05, "num_steps": 2}
    theirs, seen = run_trl(
        start, GRPOTrainer, GRPOConfig, folder=tmp_path, beta=0.0, **steps, **options
    )
    ours = run_ours(start, seen, loss, **steps)
    same_update(theirs, ours, start)
    assert shares[0] == 0 and 0.1 < shares[1] < 0.9, "the second step is to meet the clip"


def test_two_steps_of_gspo(start, tmp_path):
    shares = []

    def loss(policy, proximal, batch):
        out = gspo_loss(
            policy,
            proximal_logprobs_N=proximal,
            advantages_N=batch.advantages(divide_by_std=True),
            sequence_N=batch.owner_R,
            num_sequences=8,
            eps_clip=0.1,
            eps_clip_high=0.05,
        )
        shares.append(out.clipped_N.mean().item())
        return batch.aggregate(out.loss_N, "sequence")

    steps = {"rate": 0.05, "num_steps": 2}
    theirs, seen = run_trl(
        start,
        GRPOTrainer,
        GRPOConfig,
        folder=tmp_path,
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=0.1,
        epsilon_high=0.05,
        **steps,
    )
    same_update(theirs, run_ours(start, seen, loss, **steps), start)
    assert shares[0] == 0 and 0.1 < shares[1] < 0.9


@pytest.mark.parametrize("unbiased", [False, True])
def test_two_steps_of_dr_grpos_advantages_with_a_reference(start, tmp_path, unbiased):
    # Rewards up to a thousand, so the KL's coefficient is as large.
    def loss(policy, proximal, batch):
        out = ppo(eps_clip=0.2)(policy, proximal, batch.advantages(divide_by_std=False))
        ratio = importance_ratio(policy, proximal_logprobs_N=proximal)
        # The reference is the first policy, as the proximal one is.
        kl = kl_estimate(
            policy,
            reference_logprobs_N=proximal,
            kind="k3",
            importance_ratio_N=ratio if unbiased else None,
        )
        return batch.aggregate(out.loss_N + 5000.0 * kl, "sequence")

    steps = {"rate": 2e-4, "num_steps": 2}
    theirs, seen = run_trl(
        start,
        GRPOTrainer,
        GRPOConfig,
        folder=tmp_path,
        beta=5000.0,
        loss_type="grpo",
        scale_rewards="none",
        use_bias_correction_kl=unbiased,
        **steps,
    )
    same_update(theirs, run_ours(start, seen, loss, **steps), start)


@pytest.mark.parametrize("beta", [0.0, 50.0])
def test_a_step_of_rloo(start, tmp_path, beta):
    def loss(policy, proximal, batch):
        # The first step: policy, proximal and reference are one, and the KL is 0.
        kl = kl_estimate(policy.detach(), reference_logprobs_N=proximal, kind="k1")
        kl_B = torch.zeros(8).index_add_(0, batch.owner_R, kl)
        advantages = rloo_advantages(batch.rewards_B - beta * kl_B, group_index_B=batch.group_B)
        out = policy_gradient_loss(
            policy, proximal_logprobs_N=proximal, advantages_N=advantages[batch.owner_R]
        )
        # A mean over samples of sums over tokens.
        return batch.aggregate(out.loss_N * MAX_LENGTH, "constant")

    steps = {"rate": 1e-5, "num_steps": 1}
    theirs, seen = run_trl(start, RLOOTrainer, RLOOConfig, folder=tmp_path, beta=beta, **steps)
    same_update(theirs, run_ours(start, seen, loss, **steps), start)


@pytest.mark.parametrize(("direction", "beta"), [("forward", 0), ("reverse", 1)])
def test_distillation_over_the_whole_vocabulary(direction, beta):
    student, teacher = torch.randn(2, 1, 6, 9, generator=torch.Generator().manual_seed(0))
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="none")
    ours = topk_kl(
        student[0].log_softmax(-1),
        teacher_logprobs_NK=teacher[0].log_softmax(-1),
        direction=direction,
    )
    torch.testing.assert_close(ours, theirs[0].sum(-1), rtol=1e-5, atol=1e-5)
