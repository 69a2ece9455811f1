"""Starting stage programs for real: ranks as subprocesses, or under `srun`, in a container or not.

The program needs no Slurm binaries: it reads its order and writes its result in the attempt
directory. Secrets from `env_file` travel in the environment alone: not in arguments, not in files.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.config.derive import (
    data_paths,
    model_folders,
    stage_container,
    stage_env,
    stage_python,
    stage_slurm,
)
from slurm_rl.config.pools import settings_of_shard
from slurm_rl.config.roles import stage_ranks
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError
from slurm_rl.launch.containers import render_payload_command, render_payload_env
from slurm_rl.launch.interpreter import check_interpreter, refuse_interpreter
from slurm_rl.types import parse_order

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


#: How long srun may take until its first rank has a log.
STEP_START_S = 300.0


@dataclass
class LocalPayload:
    """The ranks of one program as child processes of the supervisor, each in its own group."""

    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[object] = field(default_factory=list)
    first_log: Path | None = None
    began: float = field(default_factory=time.monotonic)

    def poll(self) -> int | None:
        """None while any rank runs; the first failure ends the others."""
        codes = [rank.poll() for rank in self.ranks]
        late = time.monotonic() - self.began > STEP_START_S
        if late and None in codes and self.first_log is not None and not self.first_log.exists():
            self.kill()  # after a crash of the controller srun may wait for a step that is gone
        failed = [code for code in codes if code]
        if failed and None in codes:
            self.kill()
            return None
        if None in codes:
            return None
        return failed[0] if failed else 0

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                try:
                    os.killpg(rank.pid, number)
                except ProcessLookupError:
                    continue


@dataclass(frozen=True)
class LocalRunner:
    """One child process per rank; the same environment names as torchrun's."""

    settings: Settings

    def start(self, order_path: Path, *, kind: str) -> LocalPayload:
        world = stage_ranks(self.settings, kind)
        attempt = order_path.parent
        argv = stage_command(self.settings, order_path, kind=kind)
        base = stage_environment(self.settings, kind, os.environ)
        check_interpreter(self.settings, kind, base)
        payload = LocalPayload()
        for rank in range(world):
            env = base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            log = open(attempt / f"rank-{rank}.log", "ab")  # noqa: SIM115 (lives with the child)
            payload.logs.append(log)
            try:
                payload.ranks.append(_spawn(argv, env, log.fileno()))
            except OSError as error:
                payload.kill()
                refuse_interpreter(self.settings, kind, error)
                raise
        return payload


@dataclass(frozen=True)
class SrunRunner:
    """One `srun` step for all ranks of the program."""

    settings: Settings

    def start(self, order_path: Path, *, kind: str) -> LocalPayload:
        attempt = order_path.parent
        world = stage_ranks(self.settings, kind)
        shard = parse_order(order_path.read_bytes()).shard
        options = stage_slurm(settings_of_shard(self.settings, kind, shard), kind)
        argv = ["srun", "--kill-on-bad-exit=1", f"--ntasks={world}", "--open-mode=append"]
        argv += [f"--output={attempt}/rank-%t.log", "--unbuffered"]
        if world == 1:
            argv.append("--nodes=1")
        elif kind == "rollout":  # a server's nodes: a process on each
            argv += [f"--nodes={world}", "--ntasks-per-node=1"]
        # Since 22.05 srun no longer takes --cpus-per-task from the job.
        if "cpus_per_task" in options:
            argv.append(f"--cpus-per-task={options['cpus_per_task']}")
        argv += stage_command(self.settings, order_path, kind=kind)
        env = stage_environment(self.settings, kind, os.environ)
        check_interpreter(self.settings, kind, env)
        env["WORLD_SIZE"] = str(world)
        # Set by sbatch --export=NONE, it would start the step without a PATH.
        env.pop("SLURM_EXPORT_ENV", None)
        with open(attempt / "srun.log", "ab") as log:
            payload = LocalPayload([_spawn(argv, env, log.fileno())])
        payload.first_log = attempt / "rank-0.log"
        return payload


@dataclass(frozen=True)
class StageRunner:
    """Starts each program with the settings that its order names: its stage's, not those of now."""

    def start(self, order_path: Path, *, kind: str) -> LocalPayload:
        order = parse_order(order_path.read_bytes())
        settings = Settings.model_validate_json(Path(order.settings_path).read_bytes())
        runner = SrunRunner(settings) if settings.launcher == "slurm" else LocalRunner(settings)
        return runner.start(order_path, kind=kind)


def stage_command(settings: Settings, order_path: Path, *, kind: str) -> list[str]:
    """Arguments that run a stage's program, inside its container if it has one."""
    argv = [stage_interpreter(settings, kind), "-u", "-m", "slurm_rl.stages", str(order_path)]
    return enter_stage(settings, argv, kind=kind, attempt_name=order_path.parent.name)


def stage_interpreter(settings: Settings, kind: str) -> str:
    """The Python that a stage's program runs with, by its name inside the container."""
    return stage_python(settings, kind) or sys.executable


def enter_stage(
    settings: Settings,
    argv: Sequence[str],
    *,
    kind: str,
    attempt_name: str,
    env: Mapping[str, str] | None = None,
    binds: Sequence[str] | None = None,
) -> list[str]:
    """`argv` inside the stage's container, if it has one.

    Under pyxis the list begins with srun's own `--container-…` options. What an order points to
    is mounted at the same place inside, unless `binds` says otherwise. env: more names that must
    reach the program.
    """
    return render_payload_command(
        argv,
        container=stage_container(settings, kind),
        env={**_own_environment(settings, kind), **(env or {})},
        attempt_name=attempt_name,
        launcher=settings.launcher,
        binds=stage_binds(settings) if binds is None else binds,
    )


def stage_environment(
    settings: Settings, kind: str, base: Mapping[str, str], *, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of a stage's program: the job's, the stage's, the user's secrets, and `more`."""
    own = {**_own_environment(settings, kind), **(more or {})}
    return {**base, **render_payload_env(stage_container(settings, kind), own)}


def _own_environment(settings: Settings, kind: str) -> dict[str, str]:
    env = stage_env(settings, kind)
    return {**env, **read_env_file(Path(settings.env_file))} if settings.env_file else env


def stage_binds(settings: Settings) -> list[str]:
    """Host paths that a stage's program reads or writes: the run, the model, the prompts."""
    paths = [str(settings.run_dir.absolute())]
    for model in map(Path, model_folders(settings).values()):
        # The model's files may be links to elsewhere, as in a Hugging Face cache.
        paths.append(str(model))
        paths += sorted({str(file.resolve().parent) for file in model.glob("*")})
    paths += sorted({str(Path(path).parent) for path in data_paths(settings)})
    return paths


def read_env_file(path: Path) -> dict[str, str]:
    """`KEY=VALUE` lines; blank ones and `#` comments are skipped. Raises ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"env_file = {path}: not UTF-8", hint="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(
            f"env_file = {path}: {error.strerror}", hint="make it readable"
        ) from error
    found = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            # The line may hold a secret: it is named by its number alone.
            raise ConfigError(f"{path}:{number}: not a KEY=VALUE line")
        found[name.strip()] = value.strip().strip("\"'")
    return found


def _spawn(argv: list[str], env: dict[str, str], log: int) -> subprocess.Popen[bytes]:
    """A child in a process group of its own that is told to stop if we die."""
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,  # we have no threads when we start a program
    )


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
