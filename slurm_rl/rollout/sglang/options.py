"""What an SGLang server is told: its command line and its environment. Pure, but for a model's
config that is read.

Owns which arguments are ours, which follow from the settings where a person says nothing (the
sizes of CUDA graphs, from the concurrency), which GPUs each replica gets, and what the servers of
an engine over several nodes tell each other.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.config.engine_checks import gpus_per_server
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, ModelError
from slurm_rl.rollout.engine import Weights

#: Servers of one node are spoken to by nobody else.
HOST = "127.0.0.1"
#: Arguments that the engine sets; a config that sets them too would contradict it.
_OURS = frozenset(
    "model_path model host port weight_version served_model_name nnodes node_rank"
    " dist_init_addr".split()
)
#: Who sets one of these has decided about the CUDA graphs of decoding.
_GRAPH_ARGUMENTS = frozenset(
    "cuda_graph_max_bs_decode cuda_graph_bs_decode cuda_graph_config disable_cuda_graph"
    " disable_decode_cuda_graph cuda_graph_backend_decode cuda_graph_max_bs cuda_graph_bs".split()
)
_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """What the servers need to know beside their weights.

    arguments:   SGLang's own server arguments, as in `rollout.sglang`.
    environment: the whole environment of the server processes.
    log_path:    of the first server; the others' names have their number in them.
    concurrency: samples in flight to one server at once.
    replicas:    servers on this node.
    gpus:        what this node shows, as CUDA_VISIBLE_DEVICES names them; () on a CPU.
    routed:      the servers say which experts each token was sent to.
    num_nodes:   nodes over which the one server spans, and leader_host: where its first rank is.
    """

    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    log_path: Path
    python: str = sys.executable
    deterministic: bool = False
    random_seed: int = 0
    concurrency: int = 256
    replicas: int = 1
    gpus: tuple[str, ...] = ()
    routed: bool = False
    num_nodes: int = 1
    leader_host: str = HOST
    start_timeout_s: float = 900.0
    request_timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Place:
    """One server process's place in an engine over several nodes. address: `host:port`."""

    rank: int
    num_nodes: int
    address: str


def plan_options(
    settings: Settings,
    *,
    environment: Mapping[str, str],
    log_path: Path,
    random_seed: int,
    leader_host: str = HOST,
) -> SglangOptions:
    """The options that a run's settings mean, in the environment of this process."""
    rollout = settings.rollout
    own = {name: str(value) for name, value in rollout.sglang_env.items()}
    merged = {**environment, **own}
    return SglangOptions(
        arguments=rollout.sglang,
        environment=merged,
        log_path=log_path,
        python=rollout.sglang_python or sys.executable,
        deterministic=settings.deterministic,
        random_seed=random_seed,
        concurrency=rollout.concurrency,
        replicas=rollout.replicas,
        gpus=visible_gpus(merged),
        routed=rollout.use_rollout_routing_replay,
        num_nodes=rollout.engine_nodes,
        leader_host=leader_host,
        start_timeout_s=rollout.server_start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
    )


def visible_gpus(
    environment: Mapping[str, str], *, driver: Path = Path("/proc/driver/nvidia/gpus")
) -> tuple[str, ...]:
    """The GPUs that a program started with `environment` sees, by the names it may use for them."""
    named = environment.get(_GPUS)
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    try:
        return tuple(str(number) for number, _ in enumerate(driver.iterdir()))
    except OSError:
        return ()


def plan_environments(options: SglangOptions) -> list[dict[str, str]]:
    """The environment of each replica: each sees GPUs of its own, in their order.

    A single server sees what this process sees. ConfigError if there are too few.
    """
    replicas = options.replicas
    environments = [dict(options.environment) for _ in range(replicas)]
    if replicas == 1 or not options.gpus or is_on_cpu(options.arguments):
        return environments
    size = gpus_per_server(options.arguments)
    if size * replicas > len(options.gpus):
        raise ConfigError(
            f"rollout.replicas = {replicas}: {replicas} servers of {size} GPUs (tp × pp × dp) do"
            f" not fit on the {len(options.gpus)} GPUs that this node shows",
            hint="lower replicas or tp_size, or ask for more GPUs",
        )
    for i, environment in enumerate(environments):
        environment[_GPUS] = ",".join(options.gpus[i * size : (i + 1) * size])
    return environments


def plan_log_path(options: SglangOptions, replica: int) -> Path:
    """Where a replica's output goes: `sglang.log`, `sglang-1.log`, …"""
    path = options.log_path
    return path if replica == 0 else path.with_name(f"{path.stem}-{replica}{path.suffix}")


def plan_meeting(options: SglangOptions) -> Path:
    """The file by which the ranks of a server over several nodes meet."""
    return options.log_path.with_name("engine.json")


def plan_sizes(options: SglangOptions) -> dict[str, int]:
    """Sizes that follow from the concurrency, where the person set none of them.

    CUDA graphs are captured up to the samples that one worker may hold at once, since a larger
    batch runs at half the speed without one; and no worker runs more than that. On a CPU there
    are no graphs, and nothing is set.
    """
    arguments = options.arguments
    if is_on_cpu(arguments):
        return {}
    workers = int(arguments.get("dp_size", 1))
    share = math.ceil(options.concurrency / workers)
    sizes = {}
    if not _GRAPH_ARGUMENTS & arguments.keys():
        sizes["cuda_graph_max_bs_decode"] = share
    if "max_running_requests" not in arguments:
        # With attention split over workers SGLang divides by their number itself.
        per_worker = not arguments.get("enable_dp_attention")
        sizes["max_running_requests"] = share if per_worker else share * workers
    return sizes


def is_on_cpu(arguments: Mapping[str, Any]) -> bool:
    """Whether a server with `arguments` computes on the CPU."""
    return bool(arguments.get("device") == "cpu")


# long: one list of what is ours, in the order of the command line
def render_command(
    options: SglangOptions,
    weights: Weights,
    *,
    port: int,
    dtype: str | None,
    identity: str = "",
    replica: int = 0,
    place: Place | None = None,
) -> list[str]:
    """A server's command line. ConfigError for an argument that the engine sets itself.

    dtype: of the weights; what the user set wins. SGLang's own default would serve float32
    weights in half precision, and rollout and trainer log-probs would drift apart.
    identity: what the server tells of itself, so that another on its port is not taken for it.
    place: its rank among the server's nodes, if it spans several; all start the same command.
    """
    arguments = {name.replace("-", "_"): value for name, value in options.arguments.items()}
    if taken := sorted(_OURS & arguments.keys()):
        raise ConfigError(f"rollout.sglang.{taken[0]} is set by the run itself", hint="remove it")
    ours: dict[str, Any] = {
        "model_path": str(weights.path),
        "host": HOST,
        "port": port,
        "weight_version": weights.label,
        # Where samples carry no seed of their own, replicas must not draw the same.
        "random_seed": (options.random_seed + replica) % (1 << 31),
        **plan_sizes(options),
    }
    if place is not None:
        ours |= {
            "nnodes": place.num_nodes,
            "node_rank": place.rank,
            "dist_init_addr": place.address,
            # Every rank draws from the same stream.
            "random_seed": options.random_seed % (1 << 31),
        }
    if identity:
        ours["served_model_name"] = identity
    if dtype is not None:
        ours["dtype"] = dtype
    if options.deterministic:
        ours["enable_deterministic_inference"] = True
    if options.routed:
        ours["enable_return_routed_experts"] = True
    command = [options.python, "-m", "sglang.launch_server"]
    for name, value in (ours | arguments).items():
        command += render_argument(name, value)
    return command


def read_dtype(path: Path) -> str | None:
    """The dtype that a model's config names, as `--dtype` takes it; None if it names none.

    Raises ModelError for a config that SGLang cannot serve, before a server is started for it.
    """
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}/config.json cannot be read: {error}") from error
    if not config.get("architectures"):
        raise ModelError(
            f"{path}/config.json has no `architectures`, by which SGLang chooses the model class",
            hint='add it, for example "architectures": ["LlamaForCausalLM"]',
        )
    name = config.get("dtype") or config.get("torch_dtype")
    return name if name in ("float32", "float16", "bfloat16") else None


def render_argument(name: str, value: Any) -> list[str]:
    """One setting as arguments: true is a bare flag, false and null are left out, a list is
    the flag and its values, an object is JSON."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [flag, *(str(item) for item in value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
