"""Memory of the host that a save needs, looked at before an iteration is trained.

For a checkpoint that loads in any layout Megatron gathers the optimizer's state of a model-parallel
rank on its first data-parallel rank, in the host's memory: parameter and two moments in float32. A
process that is killed for it has wasted the iteration; one that says so at its start has not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_rl.errors import ConfigError

BYTES_PER_PARAMETER = 12
#: Control groups of a job, second version and first: the limit and what is used.
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_memory(cgroups: tuple[tuple[Path, Path], ...] = _CGROUPS) -> int:
    """Bytes that this process may still use: of the host, and within its control group."""
    import psutil  # type: ignore[import-untyped]

    free = [int(psutil.virtual_memory().available)]
    for limit, used in cgroups:
        try:
            free.append(int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):
            continue  # no such group, or no limit ("max")
    return max(0, min(free))


def gathered_bytes(model: Any, *, num_ranks: int, num_nodes: int) -> int:
    """What the ranks of one node that gather take at most together; 0 if nobody gathers.

    One rank of each tensor × pipeline place gathers, all of them perhaps on this node.
    """
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1:
        return 0
    places = parallel_state.get_tensor_model_parallel_world_size()
    places *= parallel_state.get_pipeline_model_parallel_world_size()
    here = min(places, -(-num_ranks // num_nodes))
    return here * BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())


def check_host_memory(need_bytes: int, *, free_bytes: int, kind: str) -> None:
    """ConfigError if a save needs more of this node than there is. kind: whose job it is."""
    if need_bytes > free_bytes:
        raise ConfigError(
            f"host memory: saving takes {need_bytes / 1e9:.1f} GB on this node, and "
            f"{free_bytes / 1e9:.1f} GB are left",
            hint=f"ask for more ({kind}.slurm.mem), or spread the model over more nodes",
        )
