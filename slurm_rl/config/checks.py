"""Rules that hold between settings. Pure: a function of `Settings`, no file is looked at.

A setting that cannot take effect is refused, as is a combination that would fail hours
later in a job. Each rule is one small generator; `check_settings` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path as File

from slurm_rl.config.data_checks import check_data
from slurm_rl.config.derive import containers_of, parse_instant, stage_container
from slurm_rl.config.engine_checks import check_engine
from slurm_rl.config.job_checks import check_jobs
from slurm_rl.config.passthrough import check_megatron, check_score_sglang, check_sglang
from slurm_rl.config.problems import Problem
from slurm_rl.config.reward_checks import check_rewards
from slurm_rl.config.rollout_checks import (
    check_batch,
    check_close,
    check_filter,
    check_passrates,
    check_sampling,
    check_shards,
)
from slurm_rl.config.routing_checks import check_routing
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import section_kinds, section_of
from slurm_rl.config.train_checks import check_training
from slurm_rl.config.train_schema import Forward
from slurm_rl.config.turn_checks import check_turns

Problems = Iterator[Problem]


def check_settings(settings: Settings) -> list[Problem]:
    """Everything that is wrong between the settings, in the order of the file's sections."""
    problems = [problem for rule in _FIRST_RULES for problem in rule(settings)]
    if problems:  # the rules below calculate with what these found wrong
        return problems
    return [problem for rule in _RULES for problem in rule(settings)]


def check_passthrough(settings: Settings) -> Problems:
    for kind in section_kinds(settings):
        section = settings.stage(kind)
        if isinstance(section, Forward):
            yield from check_megatron(section.megatron, (kind, "megatron"))
    if settings.teacher is not None:
        yield from check_score_sglang(settings.teacher.sglang, ("teacher", "sglang"))
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
    for kind in section_kinds(settings):
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
    check_routing,
    check_training,
    check_containers,
    check_turns,
)
