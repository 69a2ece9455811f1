"""Rules of the rollout: sampling, and which groups make a batch. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rl.config.data_checks import data_uses
from slurm_rl.config.derive import admission, data_sets, is_graded_later
from slurm_rl.config.pools import largest_array
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

#: The built-in of `dynamic_sampling_filter_path`; slurm_rl/rollout/filters.py has it too.
NONZERO_STD = "nonzero_std"


def check_shards(settings: Settings) -> Problems:
    rollout = settings.rollout
    shards, path = rollout.shards, ("rollout", "shards")
    total = sum(pool.shards for pool in rollout.pools.values())
    if rollout.pools and shards != total:
        rule = f"is not the sum of rollout.pools: {total}"
        yield Problem(path, rule, "take it out: it follows from the pools", shards)
    if shards > rollout.rollout_batch_size:
        rule = f"is more than rollout_batch_size = {rollout.rollout_batch_size}"
        yield Problem(path, rule, "lower it: a shard needs a prompt", shards)
    limit = settings.max_submit_jobs
    if limit is not None and largest_array(settings) > limit:
        rule = f"is more than max_submit_jobs = {limit}: the array could never be submitted"
        yield Problem(path, rule, "lower it", shards)
    if shards > settings.max_array_tasks:
        rule = f"is more than max_array_tasks = {settings.max_array_tasks}"
        yield Problem(path, rule, "lower it, or raise max_array_tasks if the site allows", shards)


def check_sampling(settings: Settings) -> Problems:
    rollout = settings.rollout
    if rollout.rollout_top_k != -1 and rollout.rollout_top_k < 1:
        rule = "must be at least 1, or -1 for all tokens"
        yield Problem(("rollout", "rollout_top_k"), rule, "change it", rollout.rollout_top_k)
    context, prompt = rollout.rollout_max_context_len, rollout.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        rule = f"leaves no room for an answer in rollout_max_context_len = {context}"
        yield Problem(("rollout", "rollout_max_prompt_len"), rule, "lower it", prompt)
    yield from _check_stops(settings)


def _check_stops(settings: Settings) -> Problems:
    """What ends a response is a text that is one, and a token that can be one."""
    places: list[tuple[Path, list[str] | None]] = [
        (("rollout",), settings.rollout.rollout_stop),
        *((use.own_at, use.own.rollout_stop) for use in data_uses(settings) if use.own_at),
    ]
    for place, stops in places:
        for i, text in enumerate(stops or ()):
            if not text:
                rule = "is empty: it would end every response at once"
                yield Problem((*place, "rollout_stop", i), rule, "take it out", text)
    for i, token in enumerate(settings.rollout.rollout_stop_token_ids):
        if token < 0:
            at = ("rollout", "rollout_stop_token_ids", i)
            yield Problem(at, "is no token: they count from 0", "take it out", token)


def check_batch(settings: Settings) -> Problems:
    """How many groups are under way, and when there are too few."""
    rollout = settings.rollout
    size, over, most = (
        rollout.rollout_batch_size,
        rollout.over_sampling_batch_size,
        rollout.max_groups,
    )
    if over is not None and over <= size:
        rule = f"is not more than rollout_batch_size = {size}"
        yield Problem(("rollout", "over_sampling_batch_size"), rule, "raise it, or leave it", over)
    least = max(size, over or 0)
    if most is not None and most < least:
        yield Problem(("rollout", "max_groups"), f"is less than {least}", "raise it", most)
    drops = rollout.dynamic_sampling_filter_path or rollout.on_reward_error == "drop"
    if rollout.on_exhausted == "train" and not drops:
        rule = "has no effect where no group is ever dropped"
        fix = "take it out, or set dynamic_sampling_filter_path or on_reward_error: drop"
        yield Problem(("rollout", "on_exhausted"), rule, fix, "train")


def check_filter(settings: Settings) -> Problems:
    """The dynamic filter needs a name that is one, several samples, and rewards."""
    rollout = settings.rollout
    name, at = rollout.dynamic_sampling_filter_path, ("rollout", "dynamic_sampling_filter_path")
    if name is None:
        return
    if name != NONZERO_STD and "." not in name:
        fix = f"write {NONZERO_STD}, or your own as package.module.function"
        yield Problem(at, "is neither a built-in filter nor a dotted path", fix, name)
    own = [part.n_samples_per_prompt for part in data_sets(settings)]
    sizes = [num or rollout.n_samples_per_prompt for num in own]
    if name == NONZERO_STD and 1 in sizes:
        rule = "drops every group of one sample: its rewards never differ"
        yield Problem(at, rule, "raise n_samples_per_prompt", name)
    if is_graded_later(settings):
        rule = "looks at rewards, which the score stage gives after the rollout"
        yield Problem(at, rule, "take it out, or score.enabled and score.server", name)


def check_passrates(settings: Settings) -> Problems:
    """A k of pass@k needs as many samples."""
    for name, part in settings.eval.items():
        for i, k in enumerate(part.pass_k):
            if k in part.pass_k[:i]:
                yield Problem(("eval", name, "pass_k", i), "is there twice", "take one out", k)
        num = part.n_samples_per_prompt or settings.rollout.n_samples_per_prompt
        largest = max(part.pass_k, default=0)
        if largest > num:
            rule = f"is more than the {num} samples of each prompt"
            fix = f"lower it, or raise eval.{name}.n_samples_per_prompt"
            yield Problem(("eval", name, "pass_k"), rule, fix, largest)


def check_close(settings: Settings) -> Problems:
    """What ends a rollout early needs admission by arrival, and is not deterministic."""
    rollout, how = settings.rollout, admission(settings)
    early = [
        (("rollout", "close_at"), rollout.close_at, rollout.close_at < 1),
        (("rollout", "close_after_s"), rollout.close_after_s, rollout.close_after_s is not None),
        (("rollout", "partial_rollout"), True, rollout.partial_rollout),
    ]
    for at, value, is_set in early:
        if not is_set:
            continue
        if settings.deterministic:
            rule = "depends on who is first, and the run is deterministic: true"
            yield Problem(at, rule, "take it out, or set deterministic: false", value)
        elif how == "cursor":
            rule = "has no meaning with admission: cursor, which waits for the first of the data"
            yield Problem(at, rule, "set admission: arrival", value)
    if settings.deterministic and how == "arrival":
        rule = "depends on who is first, and the run is deterministic: true"
        yield Problem(("rollout", "admission"), rule, "leave it out", "arrival")
    is_cut = rollout.close_at < 1 or rollout.close_after_s or rollout.over_sampling_batch_size
    if rollout.partial_rollout and not is_cut:
        rule = "has no effect where every answer is waited for"
        fix = "set over_sampling_batch_size, close_at or close_after_s"
        yield Problem(("rollout", "partial_rollout"), rule, fix, True)
    if rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout:
        at = ("rollout", "mask_offpolicy_in_partial_rollout")
        yield Problem(at, "has no effect without partial_rollout", "take it out", True)
