"""What of its own environment a job hands on to the jobs and commands that it starts.

An inherited `SLURM_*` changes what a nested submission means, and a rank is not inherited.
"""

from __future__ import annotations

from collections.abc import Mapping

#: What a surrounding job, or a user's taste, would do to our calls and to the jobs they make.
_SCRUBBED = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "PMI")
#: A job's own GPUs are not those of the job that it submits.
_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "GPU_DEVICE_ORDINAL",
)
_KEPT = ("SLURM_CONF", "SLURM_RL_DEBUG", "SLURM_RL_VISIBLE_S")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def scrub_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment for what is started from here: Slurm's commands, and jobs.

    SLURM_CONF stays, which says where Slurm is, and so does our own switch.
    """
    inside = "SLURM_JOB_ID" in base
    dropped = (*_DEVICES, *_RANKS) if inside else ()
    return {
        name: value
        for name, value in base.items()
        if name in _KEPT or (not name.startswith(_SCRUBBED) and name not in dropped)
    }
