"""Pools: shards of a rollout that ask Slurm for different things. Pure.

Each pool is an array of its own: a partition, a GPU type, a fallback. Whatever is asked of Slurm is
asked for a kind of *job* (`rollout-spot`); a stage's kind (`rollout`) says what is done there.
"""

from __future__ import annotations

from typing import Any

from slurm_rl.config.schema import POOL_PREFIX, Settings
from slurm_rl.config.stages import stage_kinds


def job_kinds(settings: Settings) -> tuple[str, ...]:
    """The kinds of jobs that the run has: of its stages, but for a rollout in pools one of each.

    Whatever is asked of Slurm is asked for one of these.
    """
    pools = tuple(f"{POOL_PREFIX}{name}" for name in sorted(settings.rollout.pools))
    found: list[str] = []
    for kind in stage_kinds(settings):
        found += pools if kind == "rollout" and pools else [kind]
    return tuple(found)


def pool_shards(settings: Settings) -> dict[str, range]:
    """Pool -> its shards; empty where the rollout has no pools.

    By name, one behind the other: the order of keys does not outlive a trip through JSON.
    """
    found: dict[str, range] = {}
    for name, pool in sorted(settings.rollout.pools.items()):
        start = sum(map(len, found.values()))
        found[name] = range(start, start + pool.shards)
    return found


def largest_array(settings: Settings) -> int:
    """Shards of the largest array: of the rollout's only one, or of its largest pool."""
    return max(
        (len(part) for part in pool_shards(settings).values()), default=settings.rollout.shards
    )


def job_kind(settings: Settings, kind: str, shard: int) -> str:
    """The kind of the job in which a stage's shard is worked on."""
    if kind != "rollout":
        return kind
    pools = pool_shards(settings).items()
    return next((f"{POOL_PREFIX}{name}" for name, shards in pools if shard in shards), kind)


def settings_of_pool(settings: Settings, name: str) -> Settings:
    """The settings as the shards of a pool have them: a rollout of this pool alone."""
    rollout, pool = settings.rollout, settings.rollout.pools[name]
    # What is unset is null after a trip through JSON, and leaves the rollout's own as it is.
    slurm = {key: value for key, value in pool.slurm if value is not None}
    own: dict[str, Any] = {
        "pools": {},
        "shards": pool.shards,
        "slurm": rollout.slurm.model_copy(update=slurm),
        "sglang": {**rollout.sglang, **pool.sglang},
        "replicas": pool.replicas or rollout.replicas,
    }
    return settings.model_copy(update={"rollout": rollout.model_copy(update=own)})


def settings_of_shard(settings: Settings, kind: str, shard: int) -> Settings:
    """The settings as a stage's shard has them."""
    kind = job_kind(settings, kind, shard)
    is_pool = kind.startswith(POOL_PREFIX)
    return settings_of_pool(settings, kind.removeprefix(POOL_PREFIX)) if is_pool else settings
