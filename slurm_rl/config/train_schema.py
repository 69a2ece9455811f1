"""What trains and what serves training: the actor (`train`), critic, reference and teacher.

Names of algorithms and their settings follow slime; `megatron:` holds Megatron-core's own names.
`schema.py` has the whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slurm_rl.config.sections import Fraction, Positive, Section, Stage

NotNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Above1 = Annotated[float, Field(gt=1)]
Level = Literal["token", "sequence", "geometric"]


class Forward(Stage):
    """A stage that runs a model by Megatron-core."""

    num_ranks: Positive | None = Field(
        None, description="Processes of the stage's job; default: nodes × gpus_per_node, or 1."
    )
    micro_batch_size: Positive = Field(8, description="Samples in one forward pass.")
    max_tokens_per_gpu: Positive | None = Field(
        None,
        description="Pack samples into passes of at most so many tokens a rank (a longer sample has"
        " one of its own), balanced over the ranks; unset: padded passes of `micro_batch_size`.",
    )
    fused_kernels: bool | None = Field(
        None,
        description="On a GPU with Triton: log-probs, norms, SwiGLU and rotary embedding as one"
        " kernel each; false: PyTorch's operations. Unset: true; of the reference, the policy's.",
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="Megatron-core's own names: layout, optimizer (lr, …), model, DDP.",
    )


class Update(Forward):
    """A stage that updates a model: what the actor's and the critic's have in common."""

    global_batch_size: Positive | None = Field(
        None, description="Samples in one optimizer step; or set `minibatches`."
    )
    minibatches: Positive | None = Field(
        None,
        description="Optimizer steps of one pass over the rollout, of equal numbers of samples.",
    )
    epochs: Positive = Field(
        1, description="Passes over the rollout; from the second on in an order drawn by the seed."
    )
    log_probs_max_tokens_per_gpu: Positive | None = Field(
        None,
        description="The same budget for passes without gradient; `max_tokens_per_gpu` if unset.",
    )
    lr_decay_iters: Positive | None = Field(
        None, description="Horizon of the LR schedule in optimizer steps, fixed when a run is made."
    )
    lr_warmup_iters: Annotated[int, Field(ge=0)] = Field(
        0, description="Optimizer steps over which the learning rate rises."
    )
    save_steps: Positive | None = Field(
        None,
        description="Optimizer steps between saves inside a stage; unset: a stage that is"
        " killed starts again from its inputs.",
    )
    loss_aggregation: Literal["sequence", "token", "group", "constant"] = Field(
        "sequence",
        description="Mean over samples of means over tokens (GRPO), over all tokens (DAPO), over"
        " groups of means over tokens, or sums over tokens by a constant (Dr. GRPO).",
    )
    loss_constant_length: Positive | None = Field(
        None, description="The constant of `loss_aggregation: constant`, in tokens."
    )


class Rejection(Section):
    """Which samples (or tokens) are not trained on, since the engine's policy was another one."""

    level: Level = Field(
        "geometric", description="Ratio of a token, of a sample, or its mean in logarithms."
    )
    low: NotNegative = Field(0.0, description="Smallest ratio of trainer to engine that is kept.")
    high: Above0 = Field(description="Largest ratio that is kept.")


class Train(Update):
    """The update of the policy."""

    sft_iterations: Annotated[int, Field(ge=0)] = Field(
        0,
        description="First iterations in which nothing is sampled: the policy is fine-tuned on the"
        " labels of the prompts (a warm start).",
    )
    # -- advantages
    advantage_estimator: Literal[
        "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
    ] = Field("grpo", description="How rewards become advantages; `gae` needs a critic.")
    normalize_advantages_std: bool = Field(
        True, description="GRPO's division by the group's std; false: Dr. GRPO's advantage."
    )
    normalize_advantages: bool = Field(
        False, description="Whiten advantages over all trained tokens of the rollout."
    )
    gamma: Fraction = Field(1.0, description="Discount of later rewards, a token.")
    lambd: Fraction = Field(1.0, description="GAE's λ.")
    custom_advantage_path: str | None = Field(
        None, description="Your own estimator, FOLDER.MODULE.FUNCTION (docs/training.md)."
    )
    # -- policy loss
    policy_loss: Literal["ppo", "gspo", "cispo", "pg"] = Field(
        "ppo", description="PPO's clip, GSPO's sequence ratio, CISPO, or the plain policy gradient."
    )
    eps_clip: NotNegative = Field(0.2, description="Clip of the probability ratio.")
    eps_clip_high: NotNegative | None = Field(None, description="Upper clip; `eps_clip` if unset.")
    eps_clip_c: Above1 | None = Field(
        None, description="Dual clip: bound of the ratio where the advantage is negative."
    )
    custom_loss_path: str | None = Field(
        None, description="Your own policy loss, FOLDER.MODULE.FUNCTION (docs/training.md)."
    )
    custom_reducer_path: str | None = Field(
        None, description="Your own token weights in place of `loss_aggregation`'s."
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    # -- KL to the reference
    use_kl_loss: bool = Field(
        False, description="Add a KL term towards the reference model to the loss."
    )
    kl_loss_coef: NotNegative = Field(0.0, description="Weight of the KL term of the loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k3", description="Estimator of the KL term of the loss."
    )
    use_unbiased_kl: bool = Field(
        False, description="Weigh the KL term of the loss by the policy's ratio, with its gradient."
    )
    kl_coef: NotNegative = Field(
        0.0, description="Weight of a KL penalty inside the reward, token by token."
    )
    kl_reward_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k1", description="Estimator of the KL penalty inside the reward."
    )
    # -- off-policy correction
    use_tis: bool = Field(
        False, description="Weigh by the ratio of the trainer's to the engine's probability."
    )
    tis_level: Level = Field("token", description="Ratio of a token, a sample, or its mean.")
    tis_mode: Literal["truncate", "mask"] = Field(
        "truncate", description="Beyond the bounds the weight is the bound, or 0."
    )
    tis_clip: Above0 = Field(2.0, description="Upper bound of the weight.")
    tis_clip_low: NotNegative = Field(0.0, description="Lower bound of the weight.")
    rejection: Rejection | None = Field(
        None, description="Leave out what the engine's policy was too far from."
    )
    custom_correction_path: str | None = Field(
        None, description="Your own off-policy correction (docs/training.md)."
    )
    # -- guards
    check_first_ratio: Above0 = Field(
        1e-4, description="Largest |ratio - 1| accepted before the first optimizer step."
    )
    check_first_kl: Above0 = Field(
        1e-4,
        description="Largest |KL to the reference| accepted in iteration 0, where the reference is"
        " the model itself.",
    )
    max_logprob_gap: Above0 | None = Field(
        None, description="Largest mean |trainer - rollout log-prob|; above it the run halts."
    )
    max_logprob_gap_drift: Above1 | None = Field(
        None, description="Largest factor between this gap and that of the first iteration."
    )


class Critic(Update):
    """The value model of PPO: it advances with the actor, with a checkpoint of its own."""

    hf_checkpoint: str | None = Field(
        None, description="Model directory that the critic starts from; unset: the actor's."
    )
    value_clip: Above0 | None = Field(
        0.2, description="Clip of a value's move in one iteration; null: none."
    )
    warmup_iterations: Annotated[int, Field(ge=0)] = Field(
        0, description="First iterations in which the critic is trained and the actor is not."
    )


class Reference(Forward):
    """The policy that KL is measured against; and the stage that computes its log-probs."""

    hf_checkpoint: str | None = Field(
        None, description="Model directory; unset: the model that the run starts from."
    )
    update_interval: Positive | None = Field(
        None, description="Take the policy's weights as the reference every n iterations."
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Move the reference to ema × itself + (1 − ema) × policy each iteration."
    )
    stage: bool = Field(
        False,
        description="Compute its log-probs in a stage of its own, not in the train job; always so"
        " with a KL penalty in the reward and with a reference that moves.",
    )


class Teacher(Forward):
    """On-policy distillation: a model that scores what the policy wrote."""

    hf_checkpoint: str = Field(description="The teacher's model directory.")
    backend: Literal["megatron", "sglang"] = Field(
        "megatron", description="What computes its log-probs; SGLang serves a model of any family."
    )
    coef: Above0 = Field(
        1.0, description="Weight of −(student − teacher log-prob) in each token's advantage."
    )
    use_rewards: bool = Field(
        True, description="Add it to the advantages of the task's rewards; false: distil alone."
    )
    top_logprobs_num: Positive | None = Field(
        None,
        description="Distil by the KL over the teacher's k likeliest tokens, as a term of the loss;"
        " unset: by the sampled token.",
    )
    kl_direction: Literal["forward", "reverse"] = Field(
        "reverse",
        description="KL(teacher‖student) or KL(student‖teacher), with `top_logprobs_num`.",
    )
    sglang: dict[str, Any] = Field(
        default_factory=dict, description="SGLang's own arguments (`backend: sglang`)."
    )
    concurrency: Positive = Field(64, description="Samples that are scored at once (SGLang).")
