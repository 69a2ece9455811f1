"""Rules that hold between settings. Pure: a function of `Settings`, no file is looked at.

A setting that cannot take effect is refused, as is a combination that would fail hours
later in a job. Each rule is one small generator; `check_settings` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path as File

from slurm_rl.config.derive import (
    STAGE_KINDS,
    containers_of,
    data_parallel_size,
    gpu_count,
    model_parallel_size,
    num_ranks,
    parse_instant,
    stage_container,
    stage_slurm,
)
from slurm_rl.config.job_checks import check_jobs
from slurm_rl.config.passthrough import check_megatron, check_sglang
from slurm_rl.config.problems import Path, Problem, nearest
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

#: Names that `rollout.rm_type` takes: those of slurm_rl/rollout/rewards.py (a test compares).
REWARD_NAMES = ("exact_match", "prefix_match", "f1", "gsm8k", "random")


def check_settings(settings: Settings) -> list[Problem]:
    """Everything that is wrong between the settings, in the order of the file's sections."""
    problems = [problem for rule in _FIRST_RULES for problem in rule(settings)]
    if problems:  # the rules below calculate with what these found wrong
        return problems
    return [problem for rule in _RULES for problem in rule(settings)]


def check_passthrough(settings: Settings) -> Problems:
    yield from check_megatron(settings.train.megatron)
    yield from check_sglang(settings.rollout.sglang)


def check_model(settings: Settings) -> Problems:
    given = [settings.hf_checkpoint, settings.init_model]
    if all(item is None for item in given):
        fix = "add it, or an init_model for a small random one"
        yield Problem(("hf_checkpoint",), "is missing", fix)
    elif all(item is not None for item in given):
        yield Problem(("init_model",), "is given beside hf_checkpoint", "keep one of the two")


def check_run(settings: Settings) -> Problems:
    path, value = ("run", "dir"), settings.run.dir
    if not File(value).is_absolute():
        yield Problem(path, "must be absolute here", "write it out", value)
    chain = settings.chain
    if chain.lease_s < 2 * chain.heartbeat_s:
        rule = f"is shorter than two heartbeats of {chain.heartbeat_s:g} s"
        yield Problem(("chain", "lease_s"), rule, "raise it", chain.lease_s)
    until = chain.budget.until
    try:
        parse_instant(until or "2030-01-31")
    except ValueError:
        where = ("chain", "budget", "until")
        yield Problem(where, "is not a time", "write it as 2030-01-31T18:00", until)
    if settings.launcher == "local":
        for at, container in containers_of(settings):
            if container.runtime == "pyxis":
                fix = "use apptainer or none with launcher: local"
                yield Problem((*at, "runtime"), "is a plugin of srun", fix, "pyxis")


def check_reward(settings: Settings) -> Problems:
    rollout = settings.rollout
    if rollout.rm_type is None and rollout.custom_rm_path is None:
        fix = "name a built-in reward, or your own as custom_rm_path"
        yield Problem(("rollout", "rm_type"), "is missing", fix)
    elif rollout.rm_type is not None and rollout.custom_rm_path is not None:
        fix = "keep one of the two"
        yield Problem(
            ("rollout", "custom_rm_path"), "is given beside rm_type", fix, rollout.custom_rm_path
        )
    if rollout.rm_type is not None and rollout.rm_type not in REWARD_NAMES:
        close = nearest(rollout.rm_type, REWARD_NAMES)
        fix = f"did you mean {close}?" if close else "choose one, or set custom_rm_path"
        rule = f"must be one of {', '.join(REWARD_NAMES)}"
        yield Problem(("rollout", "rm_type"), rule, fix, rollout.rm_type)
    if rollout.custom_rm_path is not None and "." not in rollout.custom_rm_path:
        fix = "write package.module.function"
        path = ("rollout", "custom_rm_path")
        yield Problem(path, "is not a dotted path", fix, rollout.custom_rm_path)


def check_rollout(settings: Settings) -> Problems:
    rollout = settings.rollout
    shards, path = rollout.shards, ("rollout", "shards")
    if shards > rollout.rollout_batch_size:
        rule = f"is more than rollout_batch_size = {rollout.rollout_batch_size}"
        yield Problem(path, rule, "lower it: a shard needs a prompt", shards)
    limit = settings.max_submit_jobs
    if limit is not None and shards > limit:
        rule = f"is more than max_submit_jobs = {limit}: the array could never be submitted"
        yield Problem(path, rule, "lower it", shards)
    if shards > settings.max_array_tasks:
        rule = f"is more than max_array_tasks = {settings.max_array_tasks}"
        yield Problem(path, rule, "lower it, or raise max_array_tasks if the site allows", shards)
    if rollout.rollout_top_k != -1 and rollout.rollout_top_k < 1:
        rule = "must be at least 1, or -1 for all tokens"
        yield Problem(("rollout", "rollout_top_k"), rule, "change it", rollout.rollout_top_k)
    if rollout.apply_chat_template_kwargs and not rollout.apply_chat_template:
        rule = "has no effect without apply_chat_template"
        fix = "set apply_chat_template: true"
        yield Problem(("rollout", "apply_chat_template_kwargs"), rule, fix)


def check_engine(settings: Settings) -> Problems:
    rollout = settings.rollout
    if rollout.engine == "embedded":
        for name in ("sglang", "sglang_python", "sglang_env"):
            if getattr(rollout, name):
                rule = "has no effect with engine: embedded"
                yield Problem(("rollout", name), rule, "take it out, or set engine: sglang")
        return
    options = rollout.sglang
    if settings.deterministic and options.get("enable_deterministic_inference") is not True:
        # Not added silently: it costs speed, and it changes what SGLang computes.
        yield Problem(
            ("rollout", "sglang", "enable_deterministic_inference"),
            "must be true with deterministic: true",
            "add it, or set deterministic: false",
        )
    needed = options.get("tp_size", 1) * options.get("pp_size", 1)
    if not options.get("enable_dp_attention"):
        needed *= options.get("dp_size", 1)
    gpus = gpu_count(stage_slurm(settings, "rollout").get("gpus_per_node"))
    if settings.launcher == "slurm" and gpus and needed > gpus:
        rule = f"needs {needed} GPUs (tp × pp × dp), but a node of the job has {gpus}"
        yield Problem(("rollout", "sglang"), rule, "lower tp_size or dp_size, or ask for more")


def check_batches(settings: Settings) -> Problems:
    rollout, train = settings.rollout, settings.train
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    path: Path = ("train", "global_batch_size")
    if samples % train.global_batch_size:
        rule = (
            f"does not divide the {samples} samples of an iteration"
            f" (rollout_batch_size {rollout.rollout_batch_size}"
            f" × n_samples_per_prompt {rollout.n_samples_per_prompt})"
        )
        yield Problem(path, rule, f"use a divisor, as {samples}", train.global_batch_size)
    if rollout.n_samples_per_prompt == 1:
        rule = "gives grpo nothing to compare: every advantage would be 0"
        yield Problem(("rollout", "n_samples_per_prompt"), rule, "use at least 2", 1)


def check_loss(settings: Settings) -> Problems:
    train = settings.train
    if train.use_kl_loss and train.kl_loss_coef == 0:
        fix = "raise kl_loss_coef, or set use_kl_loss: false"
        yield Problem(("train", "use_kl_loss"), "has no effect with kl_loss_coef = 0", fix, True)
    if train.kl_loss_coef > 0 and not train.use_kl_loss:
        fix = "set use_kl_loss: true, or take it out"
        rule = "has no effect without use_kl_loss"
        yield Problem(("train", "kl_loss_coef"), rule, fix, train.kl_loss_coef)


def check_schedule(settings: Settings) -> Problems:
    train, options = settings.train, settings.train.megatron
    at: Path = ("train", "megatron")
    rate = options.get("lr")
    if rate is None:
        yield Problem((*at, "lr"), "is missing", "add the learning rate, as 1.0e-6")
    elif rate <= 0:
        yield Problem((*at, "lr"), "must be above 0", "raise it", rate)
    style = options.get("lr_decay_style", "constant")
    horizon = train.lr_decay_iters
    if style != "constant" and horizon is None:
        rule = f"is missing, and lr_decay_style: {style} needs a horizon"
        fix = "add it: optimizer steps until min_lr, kept when the run is extended"
        yield Problem(("train", "lr_decay_iters"), rule, fix)
    if horizon is not None and train.lr_warmup_iters >= horizon:
        rule = f"is not below lr_decay_iters = {horizon}"
        yield Problem(("train", "lr_warmup_iters"), rule, "lower it", train.lr_warmup_iters)


def check_layout(settings: Settings) -> Problems:
    options = settings.train.megatron
    at: Path = ("train", "megatron")
    names = [f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline")]
    wrong = [n for n in (*names, "context_parallel_size") if options.get(n, 1) < 1]
    for name in wrong:
        yield Problem((*at, name), "must be at least 1", "raise it", options[name])
    if wrong:
        return
    ranks, product = num_ranks(settings), model_parallel_size(settings)
    if ranks % product:
        rule = f"lays the model out over {product} ranks (tensor × pipeline × context)"
        fix = f"the train job has {ranks}: make that a multiple, or lower a size"
        yield Problem(at, rule, fix)
    elif settings.train.global_batch_size % data_parallel_size(settings):
        rule = f"does not divide by the {data_parallel_size(settings)} data-parallel ranks"
        path = ("train", "global_batch_size")
        yield Problem(path, rule, "use a multiple", settings.train.global_batch_size)
    if options.get("sequence_parallel") and options.get("tensor_model_parallel_size", 1) == 1:
        rule = "has no effect with tensor_model_parallel_size = 1"
        yield Problem((*at, "sequence_parallel"), rule, "take it out", True)


def check_containers(settings: Settings) -> Problems:
    for at, container in containers_of(settings):
        if container.runtime != "none" and container.image is None:
            rule = f"is missing, and runtime: {container.runtime} needs one"
            yield Problem((*at, "image"), rule, "add it")
        if container.runtime == "none":
            for name in ("image", "bind", "args", "writable"):
                if getattr(container, name):
                    rule = "has no effect with runtime: none"
                    fix = f"set {'.'.join(map(str, at))}.runtime: apptainer or pyxis"
                    yield Problem((*at, name), rule, fix, getattr(container, name))
    for kind in STAGE_KINDS:
        python = settings.stage(kind).python
        if python is not None and stage_container(settings, kind).runtime != "none":
            rule = "has no effect in a container"
            yield Problem((kind, "python"), rule, "set container.python instead", python)


_FIRST_RULES: tuple[Callable[[Settings], Problems], ...] = (check_jobs, check_passthrough)
_RULES: tuple[Callable[[Settings], Problems], ...] = (
    check_model,
    check_run,
    check_reward,
    check_rollout,
    check_engine,
    check_batches,
    check_loss,
    check_schedule,
    check_layout,
    check_containers,
)
