"""How the ranks of a train job find each other.

Owns: rank and world size from the environment, asserted against what the configuration
expects; the rendezvous; Megatron's process groups. Rank 0 binds a free port below the
ephemeral range *first* and only then publishes `host:port` in a file in the attempt
directory, so the port cannot be taken in between, and two attempts never meet. There is no
silent fallback: a rank that cannot find the others is an error, never a world of one.

    rendezvous   one line, `address:port`, in the attempt directory
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, SlurmRlError
from slurm_rl.models.layout import Layout, check_ranks
from slurm_rl.storage.durable import write_hint

log = logging.getLogger(__name__)

RENDEZVOUS = "rendezvous"
#: Ports from here to the ephemeral range are tried; the kernel gives none of them away.
LOWEST_PORT = 20000
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
MEETING_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 3600.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks of its job. `local_rank` picks the GPU."""

    rank: int
    size: int
    local_rank: int
    num_nodes: int = 1


def read_world(environment: Mapping[str, str], *, expected: int) -> World:
    """Rank and size from RANK, WORLD_SIZE, LOCAL_RANK (local launcher), else from srun's.

    Raises ConfigError if the size is not `expected`, or if several ranks are expected and
    the environment does not say which one this is.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in environment and expected > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        if names[1] not in environment:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    elif expected == 1:
        return World(rank=0, size=1, local_rank=0)
    else:
        raise ConfigError(
            f"{expected} ranks are expected, but neither RANK and WORLD_SIZE nor srun's "
            "SLURM_PROCID are in the environment",
            hint="start the stage through the launcher, one process a rank",
        )
    rank, size = int(environment[names[0]]), int(environment[names[1]])
    if size != expected:
        raise ConfigError(
            f"{names[1]} = {size}, but the configuration makes {expected} ranks",
            hint="train.num_ranks must be the number of tasks of the train job",
        )
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    return World(rank, size, int(environment.get(names[2], rank)), int(nodes))


def join(world: World, *, attempt_dir: Path, settings: Settings, layout: Layout) -> None:
    """Make the process groups: torch's and Megatron's. NCCL where CUDA is, else gloo.

    Raises ConfigError if the layout does not divide the ranks, SlurmRlError if the ranks do
    not meet within MEETING_TIMEOUT_S.
    """
    import torch
    from megatron.core import parallel_state

    check_ranks(layout, num_ranks=world.size)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    _choose_interface(world, settings)
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        store=_meet(world, attempt_dir=attempt_dir, settings=settings),
        rank=world.rank,
        world_size=world.size,
        # A rank may have much to write while the others wait; one that hangs, the stage's deadline
        # ends.
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
    )
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.experts,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=cuda and world.size > 1,
    )


def leave() -> None:
    """Take the process groups down, so that another trainer can be built in this process."""
    import torch
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _meet(world: World, *, attempt_dir: Path, settings: Settings) -> Any:
    from torch._C._distributed_c10d import HashStore, TCPStore

    if world.size == 1:
        return HashStore()
    path = attempt_dir / RENDEZVOUS
    timeout = datetime.timedelta(seconds=MEETING_TIMEOUT_S)
    if world.rank == 0:
        address = reachable_address(settings, num_nodes=world.num_nodes)
        listener = bind_free_port()
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            world.size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        write_hint(path, f"{address}:{port}\n".encode())
        return store
    address, port = _await_rendezvous(path)
    try:
        return TCPStore(address, port, world.size, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise SlurmRlError(
            f"rank {world.rank} cannot reach rank 0 at {address}:{port}",
            hint="set network_interface or hostname_suffix to what the nodes reach each other by",
        ) from error


def _await_rendezvous(path: Path) -> tuple[str, int]:
    deadline = time.monotonic() + MEETING_TIMEOUT_S
    while time.monotonic() < deadline:
        if path.exists():
            address, port = path.read_text().strip().rsplit(":", 1)
            return address, int(port)
        os.listdir(path.parent)  # refreshes a stale directory on NFS
        time.sleep(_POLL_S)
    raise SlurmRlError(
        f"{path}: rank 0 did not publish its address within {MEETING_TIMEOUT_S:g} s",
        hint="see the log of rank 0",
    )


def bind_free_port() -> socket.socket:
    """A listening socket on a free port below the ephemeral range, on every interface."""
    lowest_ephemeral = 32768
    if _RANGE_FILE.exists():
        lowest_ephemeral = int(_RANGE_FILE.read_text().split()[0])
    ports = range(min(LOWEST_PORT, max(1024, lowest_ephemeral - 1000)), lowest_ephemeral)
    # The order matters to nothing but collisions with other jobs on the node.
    start = secrets.randbelow(len(ports))
    for port in [*ports[start:], *ports[:start]]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind(("", port))
            listener.listen(socket.SOMAXCONN)
            return listener
        except OSError:
            listener.close()
    raise SlurmRlError(f"no free port in {ports.start}-{ports.stop - 1} on this node")


def reachable_address(settings: Settings, *, num_nodes: int) -> str:
    """The address of this node that the other ranks can reach.

    `network_interface` decides, else the host's name with `hostname_suffix`; ranks of one
    node meet on 127.0.0.1. Raises ConfigError for an interface without an address, or if
    the name of one of several nodes leads to the node itself (127.x).
    """
    if settings.network_interface:
        return interface_address(settings.network_interface)
    if num_nodes == 1:
        return "127.0.0.1"
    name = socket.gethostname() + settings.hostname_suffix
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"this node's name {name!r} does not resolve", hint="set network_interface"
        ) from error
    if address.startswith("127."):
        raise ConfigError(
            f"this node's name {name!r} resolves to {address}, which other nodes cannot reach",
            hint="set network_interface (ib0, eth0, …) or hostname_suffix",
        )
    return address


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface; ConfigError naming those that have one."""
    import psutil  # type: ignore[import-untyped]

    found = {
        interface: entry.address
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    if name not in found:
        raise ConfigError(
            f"network_interface = {name!r} has no IPv4 address on {socket.gethostname()}",
            hint=f"there are {', '.join(sorted(found))}",
        )
    return found[name]


def _choose_interface(world: World, settings: Settings) -> None:
    interface = settings.network_interface or ("lo" if world.num_nodes == 1 else None)
    if interface:
        # gloo asks the host's name otherwise, which may lead nowhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if settings.network_interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", settings.network_interface)
