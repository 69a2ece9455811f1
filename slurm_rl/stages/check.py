"""The check program: what a stage would meet, without its work. For `slurm-rl doctor --stage`.

It is started like the stage itself (same command, container, environment and ranks) and looks for
what costs a night: libraries, GPUs, the number of ranks, the way from node to node, an all-reduce
over all of them, and whether model and data can be read. Each rank leaves its findings, the more
so if one of them never ends, in `findings-<rank>.json`; nothing else is written, and there is
nothing that could be committed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurm_rl.config.derive import data_paths, gpu_count, model_folders, stage_slurm
from slurm_rl.config.roles import role_megatron, stage_ranks
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import is_megatron_stage
from slurm_rl.errors import SlurmRlError
from slurm_rl.models.layout import read_layout_sizes
from slurm_rl.rollout.rewards import find_rewards
from slurm_rl.rollout.sandbox.runner import describe, find_isolation, is_needed
from slurm_rl.rollout.server_process import ask_interpreter
from slurm_rl.rollout.services import ask_health, read_address
from slurm_rl.rollout.turns import tool_schemas
from slurm_rl.stages.rank import current_rank
from slurm_rl.storage.durable import write_hint
from slurm_rl.storage.probe import Finding
from slurm_rl.train.distributed import World, join, leave, reachable_address, read_world
from slurm_rl.train.packages import missing_packages
from slurm_rl.types import Order, Result

log = logging.getLogger(__name__)

#: Of an order's kind: `check.train`.
PREFIX = "check."
_REDUCE_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}
_NUM_REDUCES = 5
_SHM_BYTES = 1 << 30
_IMPORT_TIMEOUT_S = 180.0
#: Ranks import at different speeds; what takes longer than this fits no job of five minutes.
_RANKS_S = 150.0
_POLL_S = 0.1


def run_check(order: Order, settings: Settings) -> Result:
    """Look at everything; a check that fails is a finding, and the next one goes on."""
    kind = order.kind.removeprefix(PREFIX)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("imports", lambda: check_imports(settings, kind)),
        ("model", lambda: check_model(settings, order, kind)),
        ("data", lambda: check_data(settings, kind)),
        ("shared memory", check_memory),
        ("GPUs", lambda: check_gpus(settings, kind)),
        ("address", lambda: check_address(settings)),
        ("all-reduce", lambda: check_ranks(settings, kind, Path(order.attempt_dir))),
        ("services", lambda: check_services(settings, kind)),
    ]
    found: list[Finding] = []
    for name, check in checks:
        _write(order, found, next_check=name)
        try:
            found += check()
        except SlurmRlError as error:
            found.append(_bad(name, error.message, error.hint))
        except Exception as error:  # whatever it is, it is what the stage would meet
            log.exception("%s", name)
            found.append(_bad(name, f"{type(error).__name__}: {error}"))
    _write(order, found)
    return Result(files=[])


def check_imports(settings: Settings, kind: str) -> Iterator[Finding]:
    """The libraries that the stage imports, in the interpreter that it runs in."""
    is_served = _is_served(settings, kind)
    with_torch = ("torch", "megatron.core" if is_megatron_stage(settings, kind) else "transformers")
    names = ("transformers",) if is_served else with_torch
    for name in names:
        began = time.monotonic()
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken build raises anything
            fix = f"install it for {kind}.python, or in the stage's container"
            yield _bad(f"import {name}", f"{type(error).__name__}: {error}", fix)
            continue
        yield _ok(f"import {name}", f"{_version(name)} in {time.monotonic() - began:.1f} s")
    if is_megatron_stage(settings, kind):
        for needed in missing_packages(role_megatron(settings, kind)):
            wanted = f"megatron.{needed.setting}: {needed.value} needs it, and it is not installed"
            fix = f"install it for {kind}.python, or {needed.instead}"
            yield _bad(f"import {needed.package}", wanted, fix)
    if is_served:
        yield _check_sglang(settings)


def _is_served(settings: Settings, kind: str) -> bool:
    """Whether the stage's model runs in an SGLang server, not in its own processes."""
    if kind == "teacher":
        return not is_megatron_stage(settings, kind)
    return kind == "rollout" and settings.rollout.engine == "sglang"


def _check_sglang(settings: Settings) -> Finding:
    """SGLang may have an interpreter of its own; the server is started with that one."""
    python = settings.rollout.sglang_python or sys.executable
    own = {name: str(value) for name, value in settings.rollout.sglang_env.items()}
    code = "import sglang; print('SGLang', sglang.__version__)"
    said, is_good = ask_interpreter(
        python, code, environment={**os.environ, **own}, timeout_s=_IMPORT_TIMEOUT_S
    )
    if is_good:
        return _ok("import sglang", f"{said.rpartition('SGLang ')[2]} by {python}")
    fix = "set rollout.sglang_python or the rollout's container"
    return _bad("import sglang", f"{python}: {said}", fix)


def _version(name: str) -> str:
    package = {"megatron.core": "megatron-core"}.get(name, name)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def check_model(settings: Settings, order: Order, kind: str) -> Iterator[Finding]:
    """The stage's model's files, and committed inputs where there are some: read from the first
    byte to the last name, not through. The init stage reads every model of the run."""
    named = model_folders(settings)
    at = (kind, "hf_checkpoint") if (kind, "hf_checkpoint") in named else ("hf_checkpoint",)
    wanted = list(named) if kind == "init" else [at]
    folders = [Path(named[place]) for place in wanted if place in named]
    for folder in folders:
        files = sorted(folder.glob("*.safetensors"))
        if not (folder / "config.json").is_file() or not files:
            fix = "mount it: add it to the container's bind, or mend the path"
            yield _bad("model", f"{folder} has no config.json or no *.safetensors here", fix)
            continue
        size = sum(_touch(file) for file in files)
        yield _ok("model", f"{folder}: {len(files)} weight file(s), {size / 1e9:.2f} GB readable")
    if not folders:
        yield _ok("model", "made by the init stage; nothing to read")
    files = [Path(path) for entry in order.inputs.values() for path in entry.files.values()]
    for path in files:
        _touch(path)
    if files:
        yield _ok("inputs", f"{len(files)} committed files of {', '.join(order.inputs)} readable")


def _touch(path: Path) -> int:
    """Open, read the first and the last byte; the size. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.read(1)
        if size:
            file.seek(size - 1)
            file.read(1)
    return size


def check_data(settings: Settings, kind: str) -> Iterator[Finding]:
    """Prompts and the user's reward, where the stage uses them."""
    if kind != "rollout":
        return
    for path in map(Path, data_paths(settings)):
        if path.is_file():
            _touch(path)
        os.stat(path)
        yield _ok("data", f"{path} readable")
    yield _ok("reward", ", ".join(find_rewards(settings)))
    tools = tool_schemas(settings)  # finds them, the user's too
    if tools:
        yield _ok("tools", ", ".join(tool["function"]["name"] for tool in tools))


def check_memory() -> Iterator[Finding]:
    """/dev/shm, through which ranks of one node talk; containers make it small."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield _warn("shared memory", "there is no /dev/shm", "mount one: NCCL and loaders use it")
        return
    free = shutil.disk_usage(shm).free
    if free < _SHM_BYTES:
        fix = "give the container a larger one"
        yield _warn("shared memory", f"/dev/shm has {free / 1e9:.2f} GB", fix)
    else:
        yield _ok("shared memory", f"/dev/shm has {free / 1e9:.0f} GB")


def check_gpus(settings: Settings, kind: str) -> Iterator[Finding]:
    """The GPUs that torch sees on this node, against those that were asked for."""
    asked = gpu_count(stage_slurm(settings, kind).get("gpus_per_node"))
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.launcher == "slurm" and asked and seen != asked:
        fix = "look at the driver, the container's --nv and gpu_request"
        yield _bad("GPUs", f"torch sees {seen}, and gpus_per_node = {asked}", fix)
    elif seen:
        yield _ok("GPUs", f"{seen} x {torch.cuda.get_device_name(0)}")
    else:
        yield _ok("GPUs", "none, and none asked for")


def check_address(settings: Settings) -> Iterator[Finding]:
    """The address under which other nodes reach this one. Raises ConfigError as training does."""
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
    address = reachable_address(settings, num_nodes=nodes)
    yield _ok("address", f"{address}, {nodes} node(s)")


def check_ranks(settings: Settings, kind: str, folder: Path) -> Iterator[Finding]:
    """The number of ranks, and a sum over all of them by the groups that training makes."""
    expected = stage_ranks(settings, kind)
    world = read_world(os.environ, expected=expected)
    yield _ok("ranks", f"{world.size} on {world.num_nodes} node(s), as configured")
    if not is_megatron_stage(settings, kind):
        yield _ok("all-reduce", "one process; SGLang starts its own ranks on the node")
        return
    unfit = await_ranks(folder, num_expected=expected, patience_s=_RANKS_S)
    if unfit:
        # Joining would have the others wait for minutes, and say less.
        yield _bad("all-reduce", f"not tried: {unfit}", "mend that first")
        return
    megatron = role_megatron(settings, kind)
    join(
        world,
        attempt_dir=folder,
        settings=settings,
        layout=read_layout_sizes(megatron),
    )
    try:
        yield _reduce(world)
    finally:
        leave()


def await_ranks(folder: Path, *, num_expected: int, patience_s: float) -> str:
    """Wait until every rank has come as far as the all-reduce; empty, or why it cannot be tried."""
    deadline = time.monotonic() + patience_s
    reports: dict[int, dict[str, Any]] = {}
    while True:
        for rank in range(num_expected):
            report = _read(folder, rank)
            if report is not None and report["at"] in ("all-reduce", "services", ""):
                reports[rank] = report
        for rank, report in sorted(reports.items()):
            bad = [f["name"] for f in report["findings"] if f["level"] == "bad"]
            fatal = [name for name in bad if name == "address" or name.startswith("import ")]
            if fatal:
                return f"rank {rank} on {report['host']} failed at {', '.join(fatal)}"
        if len(reports) == num_expected:
            return ""
        if time.monotonic() > deadline:
            missing = [str(rank) for rank in range(num_expected) if rank not in reports]
            return f"rank(s) {', '.join(missing)} did not come within {patience_s:.0f} s"
        os.listdir(folder)  # refreshes a stale directory on NFS
        time.sleep(_POLL_S)


def _read(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / f"findings-{rank}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found


def _reduce(world: World) -> Finding:
    """Sum the ranks' numbers, exactly; then time a large sum."""
    import torch
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    number = torch.tensor([float(world.rank + 1)], device=device)
    dist.all_reduce(number)
    expected = world.size * (world.size + 1) / 2
    if number.item() != expected:
        return _bad("all-reduce", f"the sum over ranks is {number.item()}, not {expected}")
    block = torch.ones(_REDUCE_BYTES[device] // 4, device=device)
    dist.all_reduce(block)
    _wait(device)
    began = time.monotonic()
    for _ in range(_NUM_REDUCES):
        dist.all_reduce(block)
    _wait(device)
    each_s = (time.monotonic() - began) / _NUM_REDUCES
    rate = _REDUCE_BYTES[device] / each_s / 1e9
    how = f"{dist.get_backend()} over {world.size} rank(s)"
    return _ok("all-reduce", f"{how}: right, {rate:.1f} GB/s of {_REDUCE_BYTES[device] >> 20} MiB")


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def check_services(settings: Settings, kind: str) -> Iterator[Finding]:
    """What rewards ask and need: services outside the run, and a place for a model's code."""
    if kind not in ("rollout", "init"):
        return
    for name, service in settings.services.items():
        where = read_address(service) or f"nothing in {service.url_file}"
        if ask_health(service):
            yield _ok(f"service {name}", f"{where} is healthy")
        elif service.on_down == "defer":
            yield _warn(f"service {name}", f"{where}{service.health} gives no 200", "start it")
        else:
            yield _bad(f"service {name}", f"{where}{service.health} gives no 200", "start it")
    if not settings.services:
        yield _ok("services", "none configured")
    if is_needed(settings):
        yield _judge_sandbox(settings)


def _judge_sandbox(settings: Settings) -> Finding:
    isolation = find_isolation()
    found = f"a model's code runs {describe(isolation)}"
    if isolation.isolated:
        return _ok("sandbox", found)
    fix = "allow user namespaces where the stage runs"
    if settings.rollout.sandbox.require == "isolated":
        return _bad("sandbox", found, f"{fix}, or rollout.sandbox.require: best_effort")
    return _warn("sandbox", found, fix)


def _ok(name: str, found: str) -> Finding:
    return Finding("ok", name, found, area="stage")


def _warn(name: str, found: str, fix: str = "") -> Finding:
    return Finding("warn", name, found, fix, area="stage")


def _bad(name: str, found: str, fix: str = "") -> Finding:
    return Finding("bad", name, found, fix, area="stage")


def _write(order: Order, found: list[Finding], *, next_check: str = "") -> None:
    """Say what is known so far, and what is looked at now: that may never end."""
    rank = current_rank(os.environ)
    value: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "at": next_check,
        "findings": [entry.as_json() for entry in found],
    }
    path = Path(order.attempt_dir) / f"findings-{rank}.json"
    write_hint(path, json.dumps(value).encode())
