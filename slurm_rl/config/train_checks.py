"""Rules between the settings of what trains: batches, algorithm, reference, critic, teacher. Pure.

A setting that cannot take effect is refused: somebody who sets it believes that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slurm_rl.config.derive import data_overrides, stage_slurm
from slurm_rl.config.megatron_checks import check_megatron_roles
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.roles import (
    data_parallel_size,
    global_batch_size,
    model_parallel_size,
    num_ranks,
    role_megatron,
    samples_per_iteration,
    updating_roles,
)
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import (
    is_megatron_stage,
    needs_reference_stage,
    stage_kinds,
    uses_reference,
)
from slurm_rl.config.train_schema import Forward, Reference, Teacher, Train, Update
from slurm_rl.models.layout import read_layout_sizes

Problems = Iterator[Problem]

#: Estimators that compare the samples of one prompt.
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")


def check_training(settings: Settings) -> Problems:
    """Everything that is wrong between the settings of what trains."""
    for rule in _RULES:
        yield from rule(settings)


def check_batches(settings: Settings) -> Problems:
    """Numbers of samples: of an iteration, of an optimizer step, of a group."""
    for kind in updating_roles(settings):
        section = settings.stage(kind)
        assert isinstance(section, Update)
        yield from _check_steps(settings, kind, section)
        yield from _check_budgets(kind, section)
    samples, train = settings.rollout.n_samples_per_prompt, settings.train
    compares = train.advantage_estimator in GROUP_ESTIMATORS and train.custom_advantage_path is None
    distils_alone = settings.teacher is not None and not settings.teacher.use_rewards
    if samples == 1 and compares and not distils_alone:
        rule = f"gives {train.advantage_estimator} nothing to compare: every advantage would be 0"
        yield Problem(("rollout", "n_samples_per_prompt"), rule, "use at least 2", 1)


def _check_steps(settings: Settings, kind: str, section: Update) -> Problems:
    samples, rollout = samples_per_iteration(settings), settings.rollout
    size, parts = section.global_batch_size, section.minibatches
    if size is not None and parts is not None:
        rule = "is given beside global_batch_size, which says the same"
        yield Problem((kind, "minibatches"), rule, "keep one of the two", parts)
        return
    if size is None and parts is None and kind == "train":
        fix = f"add it, as {samples} for one optimizer step an iteration; or set minibatches"
        yield Problem((kind, "global_batch_size"), "is missing", fix)
        return
    name, number = ("minibatches", parts) if size is None else ("global_batch_size", size)
    if number is not None and samples % number:
        rule = (
            f"does not divide the {samples} samples of an iteration"
            f" (rollout_batch_size {rollout.rollout_batch_size}"
            f" × n_samples_per_prompt {rollout.n_samples_per_prompt})"
        )
        yield Problem((kind, name), rule, f"use a divisor, as {samples}", number)


def _check_budgets(kind: str, section: Update) -> Problems:
    if section.log_probs_max_tokens_per_gpu is not None and section.max_tokens_per_gpu is None:
        yield Problem(
            (kind, "log_probs_max_tokens_per_gpu"),
            "has no effect without max_tokens_per_gpu, which packs samples",
            "set that too, or take it out",
            section.log_probs_max_tokens_per_gpu,
        )
    is_constant = section.loss_aggregation == "constant"
    per_token = section.megatron.get("calculate_per_token_loss")
    if is_constant and section.loss_constant_length is None:
        fix = "add it: tokens that a sample's sum is divided by, as the longest response"
        rule = "is missing, and loss_aggregation: constant needs it"
        yield Problem((kind, "loss_constant_length"), rule, fix)
    elif section.loss_constant_length is not None and not is_constant:
        rule = "has no effect without loss_aggregation: constant"
        at: Path = (kind, "loss_constant_length")
        yield Problem(at, rule, "take it out", section.loss_constant_length)
    if per_token is not None and section.loss_aggregation != "sequence":
        at = (kind, "megatron", "calculate_per_token_loss")
        rule = f"is given beside loss_aggregation: {section.loss_aggregation}"
        yield Problem(at, rule, "take it out", per_token)


def check_advantages(settings: Settings) -> Problems:
    train = settings.train
    kind: str = train.advantage_estimator
    if train.custom_advantage_path is not None:
        kind = "custom_advantage_path"
        names = ["advantage_estimator", "normalize_advantages_std"]
        yield from _ignored(train, names, "has no effect beside custom_advantage_path")
    else:
        if kind != "grpo":
            names = ["normalize_advantages_std"]
            yield from _ignored(train, names, f"has no effect with advantage_estimator: {kind}")
        if kind not in ("reinforce_plus_plus", "gae"):
            yield from _ignored(train, ["gamma"], f"has no effect with advantage_estimator: {kind}")
        if kind != "gae":
            yield from _ignored(train, ["lambd"], f"has no effect with advantage_estimator: {kind}")
        if kind.startswith("reinforce"):
            rule = f"has no effect with advantage_estimator: {kind}, which whitens by itself"
            yield from _ignored(train, ["normalize_advantages"], rule)
    if kind == "gae" and settings.critic is None:
        fix = "add a critic section (docs/training.md), or choose another estimator"
        yield Problem(("train", "advantage_estimator"), "needs a critic", fix, kind)
    if settings.critic is not None and kind not in ("gae", "custom_advantage_path"):
        fix = "set train.advantage_estimator: gae, or take the section out"
        yield Problem(("critic",), f"has no effect with advantage_estimator: {kind}", fix)


def check_policy_loss(settings: Settings) -> Problems:
    train = settings.train
    if train.custom_reducer_path is not None:
        rule = "has no effect beside custom_reducer_path"
        yield from _ignored(train, ["loss_aggregation", "loss_constant_length"], rule)
        per_token = train.megatron.get("calculate_per_token_loss")
        if per_token is not None:
            at: Path = ("train", "megatron", "calculate_per_token_loss")
            yield Problem(at, rule, "take it out", per_token)
    if train.custom_loss_path is not None:
        yield from _ignored(train, ["policy_loss"], "has no effect beside custom_loss_path")
    elif train.policy_loss == "pg":
        names = ["eps_clip", "eps_clip_high", "eps_clip_c"]
        yield from _ignored(train, names, "has no effect with policy_loss: pg, which clips nothing")
    elif train.policy_loss != "ppo":
        rule = f"has no effect with policy_loss: {train.policy_loss}"
        yield from _ignored(train, ["eps_clip_c"], rule)
    if train.policy_loss != "cispo" and train.eps_clip > 1:
        yield Problem(("train", "eps_clip"), "must be at most 1", "lower it", train.eps_clip)


def check_kl(settings: Settings) -> Problems:
    train = settings.train
    if train.use_kl_loss and train.kl_loss_coef == 0:
        fix = "raise kl_loss_coef, or set use_kl_loss: false"
        yield Problem(("train", "use_kl_loss"), "has no effect with kl_loss_coef = 0", fix, True)
    if not train.use_kl_loss:
        fix, rule = "set use_kl_loss: true, or take it out", "has no effect without use_kl_loss"
        yield from _ignored(train, ["kl_loss_coef", "kl_loss_type", "use_unbiased_kl"], rule, fix)
    if train.kl_coef == 0:
        yield from _ignored(train, ["kl_reward_type"], "has no effect without kl_coef")


def check_reference(settings: Settings) -> Problems:
    reference = settings.reference
    if not uses_reference(settings):
        for name in ("hf_checkpoint", "update_interval", "ema", "stage"):
            value = getattr(reference, name)
            if value != Reference.model_fields[name].default:
                rule = "has no effect: nothing is measured against a reference"
                fix = "set train.use_kl_loss or train.kl_coef, or take it out"
                yield Problem(("reference", name), rule, fix, value)
    elif not needs_reference_stage(settings):
        for name in ("num_ranks", "max_tokens_per_gpu", "megatron"):
            value = getattr(reference, name)
            if value:
                rule = "has no effect: the reference's log-probs come from the train job"
                yield Problem(("reference", name), rule, "set reference.stage: true", value)
    if reference.update_interval is not None and reference.ema is not None:
        rule = "is given beside update_interval"
        yield Problem(("reference", "ema"), rule, "keep one of the two", reference.ema)
    interval, number = reference.update_interval, settings.num_rollout
    if uses_reference(settings) and interval is not None and interval >= number:
        rule = f"is not below num_rollout = {number}: the reference would never move"
        yield Problem(("reference", "update_interval"), rule, "lower it, or take it out", interval)


def check_correction(settings: Settings) -> Problems:
    train = settings.train
    names = ["tis_level", "tis_mode", "tis_clip", "tis_clip_low"]
    if train.custom_correction_path is not None:
        names = ["use_tis", *names, "rejection"]
        yield from _ignored(train, names, "has no effect beside custom_correction_path")
        return
    if not train.use_tis:
        fix = "set use_tis: true, or take it out"
        yield from _ignored(train, names, "has no effect without use_tis", fix)
    elif train.tis_clip_low >= train.tis_clip:
        rule = f"is not below tis_clip = {train.tis_clip:g}"
        yield Problem(("train", "tis_clip_low"), rule, "lower it", train.tis_clip_low)
    if train.use_tis:
        at: Path = ("train",)
        yield from _check_keeps_one(at, tis_clip_low=train.tis_clip_low, tis_clip=train.tis_clip)
    if train.rejection is not None:
        at, low, high = ("train", "rejection"), train.rejection.low, train.rejection.high
        if low >= high:
            yield Problem((*at, "low"), f"is not below high = {high:g}", "lower it", low)
        yield from _check_keeps_one(at, low=low, high=high)


def _check_keeps_one(at: Path, **bounds: float) -> Problems:
    """Bounds of a ratio, the lower one first: what is on policy, at 1, must be within."""
    (low_name, low), (high_name, high) = bounds.items()
    if low > 1:
        rule = "is above 1, the ratio of a sample that is on policy"
        yield Problem((*at, low_name), rule, "lower it", low)
    if high < 1:
        rule = "is below 1, the ratio of a sample that is on policy"
        yield Problem((*at, high_name), rule, "raise it", high)


def check_supervised(settings: Settings) -> Problems:
    number, at = settings.train.sft_iterations, ("train", "sft_iterations")
    if number == 0:
        return
    if number >= settings.num_rollout:
        rule = f"leaves nothing to sample of num_rollout = {settings.num_rollout} iterations"
        yield Problem(at, rule, "lower it", number)
    for name in ("critic", "teacher"):
        if getattr(settings, name) is not None:
            rule = f"cannot be with a {name}, which has nothing to say of labels"
            yield Problem(at, rule, "tune in a run of its own, and start from its weights", number)
    unlabelled = [
        name
        for name, own in data_overrides(settings).items()
        if (own.label_key or settings.rollout.label_key) is None
    ]
    if unlabelled:
        rule = f"needs answers, but the data set {unlabelled[0]} has no label_key"
        yield Problem(at, rule, "set rollout.label_key", number)


def check_critic(settings: Settings) -> Problems:
    critic = settings.critic
    if critic is not None and critic.warmup_iterations >= settings.num_rollout:
        rule = f"leaves the actor none of num_rollout = {settings.num_rollout} iterations"
        at: Path = ("critic", "warmup_iterations")
        yield Problem(at, rule, "lower it", critic.warmup_iterations)


def check_teacher(settings: Settings) -> Problems:
    teacher = settings.teacher
    if teacher is None:
        return
    other = {"megatron": ["sglang"], "sglang": ["megatron", "num_ranks", "max_tokens_per_gpu"]}
    for name in other[teacher.backend]:
        value = getattr(teacher, name)
        if value:
            rule = f"has no effect with backend: {teacher.backend}"
            yield Problem(("teacher", name), rule, "take it out", value)
    if teacher.backend == "megatron" and teacher.concurrency != _field(Teacher, "concurrency"):
        rule = "has no effect with backend: megatron"
        yield Problem(("teacher", "concurrency"), rule, "take it out", teacher.concurrency)
    if not teacher.use_rewards and settings.critic is not None:
        fix = "take critic out, with advantage_estimator: grpo"
        rule = "leaves nothing for the critic to do: no reward counts"
        yield Problem(("teacher", "use_rewards"), rule, fix, False)
    nodes = int(stage_slurm(settings, "teacher").get("nodes") or 1)
    if teacher.backend == "sglang" and nodes > 1:
        rule = "is more than the one node that serves a teacher"
        yield Problem(("teacher", "slurm", "nodes"), rule, "set it to 1", nodes)
    temperature = settings.rollout.rollout_temperature
    if teacher.backend == "sglang" and temperature != 1.0:
        rule = f"computes log-probs at temperature 1, but the rollout's is {temperature:g}"
        fix = "use backend: megatron, or rollout.rollout_temperature: 1.0"
        yield Problem(("teacher", "backend"), rule, fix, "sglang")
    if teacher.top_logprobs_num is None and teacher.kl_direction != "reverse":
        rule = "has no effect without top_logprobs_num: a sampled token knows the reverse KL alone"
        yield Problem(
            ("teacher", "kl_direction"), rule, "set top_logprobs_num", teacher.kl_direction
        )


def check_saves(settings: Settings) -> Problems:
    """Saves inside a stage: its last step's is the commit."""
    for kind, section in updating_roles(settings).items():
        samples, size = samples_per_iteration(settings), global_batch_size(settings, kind)
        steps, every = section.epochs * -(-samples // size), section.save_steps
        if every is not None and every >= steps:
            rule = f"has no effect: an iteration has {steps} optimizer steps, and then commits"
            fix = "lower it, or take it out" if steps > 1 else "take it out"
            yield Problem((kind, "save_steps"), rule, fix, every)


def check_passes(settings: Settings) -> Problems:
    """What cuts a stage's passes: samples, or tokens."""
    kinds = [kind for kind in stage_kinds(settings) if is_megatron_stage(settings, kind)]
    for kind in kinds:
        section = settings.stage(kind)
        assert isinstance(section, Forward)
        default = _field(Forward, "micro_batch_size")
        if section.max_tokens_per_gpu is not None and section.micro_batch_size != default:
            rule = "has no effect beside max_tokens_per_gpu"
            path: Path = (kind, "micro_batch_size")
            yield Problem(path, rule, "take it out", section.micro_batch_size)
    ranks = {kind: num_ranks(settings, kind) for kind in kinds}
    for kind, number in ranks.items():
        if settings.chain.pack == "iteration" and number != ranks["train"]:
            rule = (
                f"is not train's {ranks['train']}, and chain.pack: iteration runs both in one job"
            )
            yield Problem((kind, "num_ranks"), rule, "use the same, or chain.pack: stage", number)


def check_layout(settings: Settings) -> Problems:
    for kind in stage_kinds(settings):
        if is_megatron_stage(settings, kind):
            yield from _check_role_layout(settings, kind)


def _check_role_layout(settings: Settings, kind: str) -> Problems:
    options, at = role_megatron(settings, kind), (kind, "megatron")
    ranks, product = num_ranks(settings, kind), model_parallel_size(settings, kind)
    if ranks % product:
        rule = f"lays the model out over {product} ranks (tensor × pipeline × context)"
        fix = f"the {kind} job has {ranks}: make that a multiple, or lower a size"
        yield Problem(at, rule, fix)
    elif kind in updating_roles(settings):
        size, copies = global_batch_size(settings, kind), data_parallel_size(settings, kind)
        if size % copies:
            rule = f"does not divide by the {copies} data-parallel ranks"
            yield Problem((kind, "global_batch_size"), rule, "use a multiple", size)
    layout = read_layout_sizes(options)
    if ranks % layout.expert_size:
        rule = (
            f"lays the experts out over {layout.expert_size} ranks"
            " (expert tensor × expert × pipeline)"
        )
        fix = f"the {kind} job has {ranks}: make that a multiple, or lower a size"
        yield Problem(at, rule, fix)
    if options.get("sequence_parallel") and layout.tensor == 1:
        rule = "has no effect with tensor_model_parallel_size = 1"
        yield Problem((*at, "sequence_parallel"), rule, "take it out", True)
    if layout.chunks > 1 and layout.pipeline == 1:
        name = "virtual_pipeline_model_parallel_size"
        rule = "has no effect with pipeline_model_parallel_size = 1"
        yield Problem((*at, name), rule, "take it out", layout.chunks)


def _field(section: type[Forward], name: str) -> Any:
    """What a setting is by default."""
    return section.model_fields[name].default


def _ignored(
    section: Train, names: list[str], rule: str, fix: str = "take it out"
) -> Iterator[Problem]:
    """A problem for each setting that is not what it is by default."""
    for name in names:
        value: Any = getattr(section, name)
        if value != Train.model_fields[name].default:
            yield Problem(("train", name), rule, fix, value)


_RULES: tuple[Callable[[Settings], Problems], ...] = (
    check_batches,
    check_advantages,
    check_policy_loss,
    check_kl,
    check_reference,
    check_correction,
    check_supervised,
    check_critic,
    check_teacher,
    check_saves,
    check_megatron_roles,
    check_passes,
    check_layout,
)
