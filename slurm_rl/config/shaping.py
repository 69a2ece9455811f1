"""Which settings shape numbers, and their digest: what a commit says that it was made with.

Settings of machines and directories, of retries and of watching are left out: they may differ
between two runs that are equal.
"""

from __future__ import annotations

from typing import Any

from slurm_rl.config.derive import data_sets
from slurm_rl.config.roles import num_ranks, stage_ranks
from slurm_rl.config.schema import EVAL_PREFIX, Settings
from slurm_rl.config.stages import stage_kinds
from slurm_rl.storage.digest import digest_value

#: Settings of a stage that say where and how it runs, not which numbers come out.
_NOT_SHAPING = {"slurm", "container", "python", "env", "deadline_s"}

_NOT_SHAPING_ROLLOUT = _NOT_SHAPING | {
    "shards",
    "pools",
    "array_throttle",
    "prompt_data",  # the cursor carries the data's own fingerprint
    "data_options",
    "concurrency",
    "replicas",
    "engine_nodes",
    "reward_timeout_s",
    "generate_timeout_s",
    "reward_retries",
    "reward_workers",
    "rm_url",
    "probe_tolerance",
    "stage_weights",
    "stage_weights_gb",
    "sglang_python",
    "sglang_env",
    "server_start_timeout_s",
    "request_timeout_s",
}

_NOT_SHAPING_EVAL = _NOT_SHAPING | {"interval", "before_training", "prompt_data"}

_NOT_SHAPING_TRAIN = _NOT_SHAPING | {
    "num_ranks",
    "check_first_ratio",
    "save_steps",
    "max_logprob_gap",
    "max_logprob_gap_drift",
    "check_first_kl",
}

#: Settings of the train stage that its digest has always had, whatever their values.
_FIRST_NAMES = frozenset(
    "advantage_estimator normalize_advantages_std eps_clip eps_clip_high use_kl_loss kl_loss_coef"
    " kl_loss_type entropy_coef global_batch_size micro_batch_size lr_decay_iters lr_warmup_iters"
    " megatron".split()
)


def shaping_settings(settings: Settings) -> dict[str, Any]:
    """The settings that shape numbers, free of what belongs to a machine or a directory.

    Two runs with equal ones make equal numbers from equal inputs. Files are left out: the
    model, the data and the user's code have digests of their own. `num_rollout` is left
    out so that a run may be extended.
    """
    rollout = settings.rollout.model_dump(exclude=_NOT_SHAPING_ROLLOUT)
    if not settings.rollout.use_rollout_routing_replay:  # as below
        del rollout["use_rollout_routing_replay"]
    rollout["sglang"] = _without_folders(rollout["sglang"])
    # What a data set sets for itself; its place and its rows have a digest of their own.
    pools = {name: pool.sglang for name, pool in settings.rollout.pools.items() if pool.sglang}
    if pools:  # as below: digests of runs without stay as they are
        rollout["pools"] = _without_folders(pools)
    rollout["data_sets"] = [part.model_dump(exclude={"path"}) for part in data_sets(settings)]
    train = _shaping_role(settings.train)
    model = settings.init_model
    # Only where there is one: the digests of runs without stay as they are.
    server = settings.score.server
    scores = {} if server is None else {"score": _without_folders(server.model_dump())}
    others = {
        kind: settings.stage(kind)
        for kind in ("reference", "teacher", "critic")
        if kind in stage_kinds(settings)
    }
    roles: dict[str, Any] = {
        kind: {**_shaping_role(section), "num_ranks": stage_ranks(settings, kind)}
        for kind, section in others.items()
    }
    return {
        "seed": settings.seed,
        "deterministic": settings.deterministic,
        "lag": settings.chain.lag,
        "init_model": None if model is None else model.model_dump(),
        "rollout": rollout,
        "train": {**train, "num_ranks": num_ranks(settings)},
        **scores,
        **roles,
    }


def _shaping_role(section: Any) -> dict[str, Any]:
    """What of a role's section shapes numbers. What came later counts where it is set, so that the
    digests of earlier runs stay as they are."""
    dumped = _without_folders(section.model_dump(exclude=_NOT_SHAPING_TRAIN))
    fields = type(section).model_fields
    return {
        name: value
        for name, value in dumped.items()
        if name in _FIRST_NAMES or value != fields[name].default
    }


def settings_digest(settings: Settings, kind: str = "") -> str:
    """Digest of `shaping_settings`; for an evaluation with what it asks for itself."""
    shaping = shaping_settings(settings)
    if kind.startswith(EVAL_PREFIX):
        own = settings.eval[kind.removeprefix(EVAL_PREFIX)].model_dump(exclude=_NOT_SHAPING_EVAL)
        shaping["eval"] = _without_folders(own)
    return digest_value(shaping)


def _without_folders(value: Any) -> Any:
    """`value` with each absolute path in it cut down to its last name."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith("/"):
        return value.rstrip("/").rsplit("/", 1)[-1]
    return value
