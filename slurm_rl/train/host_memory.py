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
_ROOT = Path("/sys/fs/cgroup")


def free_memory(*, root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process may still use: of the host, and within every control group that it is
    in. What the kernel holds of files it gives back, and counts as free."""
    import psutil  # type: ignore[import-untyped]

    free = [int(psutil.virtual_memory().available)]
    for folder in _groups(root, own):
        limit = _read_number(folder / "memory.max")
        used = _read_number(folder / "memory.current")
        if limit is None or used is None:  # the first version's names
            limit = _read_number(folder / "memory.limit_in_bytes")
            used = _read_number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(limit - used + _read_cache(folder / "memory.stat"))
    return max(0, min(free))


def _groups(root: Path, own: Path) -> list[Path]:
    """The folders of the process's memory groups, innermost first, up to the root."""
    found = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        place = top / path.lstrip("/")
        found += [place, *(parent for parent in place.parents if parent.is_relative_to(top))]
    return found


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such file, or no limit ("max")


def _read_cache(path: Path) -> int:
    try:
        pairs = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(pairs.get(name, 0)) for name in ("active_file", "inactive_file"))


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
