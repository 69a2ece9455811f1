"""The shape of a job: whether an allocation made for one stage can run another."""

from __future__ import annotations

from slurm_rl.config.derive import gpu_count, gpu_type, stage_slurm, stage_time_s
from slurm_rl.config.roles import num_ranks
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import is_megatron_stage

_NO_LIMIT_S = 10**9


def job_shape(settings: Settings, kind: str) -> dict[str, int | str]:
    """What a stage's job asks for: amounts as numbers, the rest as text."""
    options = stage_slurm(settings, kind)
    shape: dict[str, int | str] = {
        "nodes": int(options.get("nodes", 1)),
        "ntasks": int(options.get("nodes", 1)) * int(options.get("ntasks_per_node", 1)),
        "cpus_per_task": int(options.get("cpus_per_task", 1)),
        "gpus_per_node": gpu_count(options.get("gpus_per_node")) or 0,
    }
    if is_megatron_stage(settings, kind):
        shape["ntasks"] = num_ranks(settings, kind)
    # A stage must not start in a job that ends too early for it.
    shape["time_s"] = stage_time_s(settings, kind) or _NO_LIMIT_S
    gpus = gpu_type(options.get("gpus_per_node"))
    if gpus:
        shape["gpu_type"] = gpus
    for name in ("constraint", "mem", "gres", "gpus", "partition"):
        if name in options:
            shape[name] = str(options[name])
    return shape


def fits(settings: Settings, *, have: str, need: str) -> bool:
    """Whether a job of stage kind `have` can run stage kind `need`.

    Amounts may be larger than needed; anything else must be the same. Locally all fit.
    """
    if have == need or settings.launcher == "local":
        return True
    ours, theirs = job_shape(settings, have), job_shape(settings, need)
    for name, wanted in theirs.items():
        got = ours.get(name)
        if isinstance(wanted, int) and isinstance(got, int):
            if got < wanted:
                return False
        elif name != "partition" and got != wanted:
            return False
    return True
