"""The stages that run a model by Megatron-core: their ranks, layouts and batches. Pure."""

from __future__ import annotations

from typing import Any

from slurm_rl.config.derive import gpu_count, stage_slurm
from slurm_rl.config.schema import EVAL_PREFIX, Settings
from slurm_rl.config.stages import is_megatron_stage
from slurm_rl.config.train_schema import Forward, Update

#: Sizes whose product is the number of ranks that hold one copy of a model.
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)


def role(settings: Settings, kind: str) -> Forward:
    """The section of a stage that runs a model by Megatron-core."""
    section = settings.stage(kind)
    assert isinstance(section, Forward), kind
    return section


def updating_roles(settings: Settings) -> dict[str, Update]:
    """The stages that train a model, by kind: `train`, and `critic` if there is one.

    A critic that does not say how its rollout is cut into steps takes the policy's.
    """
    found: dict[str, Update] = {"train": settings.train}
    critic = settings.critic
    if critic is not None:
        names = ("global_batch_size", "minibatches")
        if all(getattr(critic, name) is None for name in names):
            same = {name: getattr(settings.train, name) for name in names}
            critic = critic.model_copy(update=same)
        found["critic"] = critic
    return found


def role_megatron(settings: Settings, kind: str) -> dict[str, Any]:
    """Megatron-core's options of a stage. The reference is laid out as the policy is, and by its
    own options over those; every other role stands by itself."""
    own = role(settings, kind).megatron
    return {**settings.train.megatron, **own} if kind == "reference" else own


def fuses_kernels(settings: Settings, kind: str) -> bool:
    """Whether such a stage may use fused kernels: the reference computes as the policy does."""
    own = role(settings, kind).fused_kernels
    if own is None and kind == "reference":
        own = settings.train.fused_kernels
    return own is not False


def num_ranks(settings: Settings, kind: str = "train") -> int:
    """Processes of such a stage's job: `num_ranks`, or nodes × gpus_per_node under Slurm, or 1.

    The reference stage has as many as the train stage, if it does not say how many.
    """
    own = role(settings, kind).num_ranks
    if own is None and kind == "reference" and not role(settings, kind).megatron:
        own = settings.train.num_ranks
    if own is not None:
        return own
    options = stage_slurm(settings, kind)
    gpus = gpu_count(options.get("gpus_per_node"))
    if settings.launcher == "local" or not gpus:
        return 1
    return int(options.get("nodes", 1)) * gpus


def stage_ranks(settings: Settings, kind: str) -> int:
    """Processes of a stage's program: Megatron's ranks, a server's nodes, or 1."""
    if is_megatron_stage(settings, kind):
        return num_ranks(settings, kind)
    is_eval = kind.startswith(EVAL_PREFIX)
    is_served = (kind == "rollout" or is_eval) and settings.rollout.engine == "sglang"
    return settings.rollout.engine_nodes if is_served else 1


def samples_per_iteration(settings: Settings) -> int:
    """Samples that a rollout is to have: prompts × samples of each."""
    return settings.rollout.rollout_batch_size * settings.rollout.n_samples_per_prompt


def global_batch_size(settings: Settings, kind: str = "train") -> int:
    """Samples of one optimizer step of a whole rollout."""
    own = updating_roles(settings)[kind]
    if own.global_batch_size is not None:
        return own.global_batch_size
    return -(-samples_per_iteration(settings) // (own.minibatches or 1))


def model_parallel_size(settings: Settings, kind: str = "train") -> int:
    """Ranks that hold one copy of the model: tensor × pipeline × context."""
    options, product = role_megatron(settings, kind), 1
    for name in LAYOUT:
        product *= int(options.get(name) or 1)
    return product


def data_parallel_size(settings: Settings, kind: str = "train") -> int:
    """Copies of the model in a stage's job."""
    return num_ranks(settings, kind) // model_parallel_size(settings, kind)
