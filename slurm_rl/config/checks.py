"""Rules that hold between settings. Pure: a function of `Settings`, no file is looked at.

A setting that cannot take effect is refused, as is a combination that would fail hours
later in a job. Each rule is one small generator; `check_settings` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path as File

from slurm_rl.config.data_checks import check_data
from slurm_rl.config.derive import (
    STAGE_KINDS,
    containers_of,
    data_parallel_size,
    eval_kinds,
    model_parallel_size,
    num_ranks,
    parse_instant,
    section_of,
    stage_container,
)
from slurm_rl.config.engine_checks import check_engine
from slurm_rl.config.job_checks import check_jobs
from slurm_rl.config.passthrough import check_megatron, check_score_sglang, check_sglang
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.reward_checks import check_rewards
from slurm_rl.config.rollout_checks import (
    check_batch,
    check_close,
    check_filter,
    check_passrates,
    check_sampling,
    check_shards,
)
from slurm_rl.config.schema import Settings
from slurm_rl.config.turn_checks import check_turns

Problems = Iterator[Problem]


def check_settings(settings: Settings) -> list[Problem]:
    """Everything that is wrong between the settings, in the order of the file's sections."""
    problems = [problem for rule in _FIRST_RULES for problem in rule(settings)]
    if problems:  # the rules below calculate with what these found wrong
        return problems
    return [problem for rule in _RULES for problem in rule(settings)]


def check_passthrough(settings: Settings) -> Problems:
    yield from check_megatron(settings.train.megatron)
    yield from check_sglang(settings.rollout.sglang)
    for name, pool in settings.rollout.pools.items():
        yield from check_sglang(pool.sglang, ("rollout", "pools", name, "sglang"))
    if settings.score.server is not None:
        yield from check_score_sglang(settings.score.server.sglang)


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
    for kind in (*STAGE_KINDS, *eval_kinds(settings)):
        python = settings.stage(kind).python
        if python is not None and stage_container(settings, kind).runtime != "none":
            rule = "has no effect in a container"
            yield Problem(
                (*section_of(kind), "python"), rule, "set container.python instead", python
            )


_FIRST_RULES: tuple[Callable[[Settings], Problems], ...] = (check_jobs, check_passthrough)
_RULES: tuple[Callable[[Settings], Problems], ...] = (
    check_model,
    check_run,
    check_rewards,
    check_shards,
    check_sampling,
    check_batch,
    check_filter,
    check_close,
    check_passrates,
    check_data,
    check_engine,
    check_batches,
    check_loss,
    check_schedule,
    check_layout,
    check_containers,
    check_turns,
)
