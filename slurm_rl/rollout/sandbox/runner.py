"""Runs Python programs that a model wrote, each enclosed by a process of its own (`jail.py`).

What holds depends on the kernel, and `describe` says it. Isolated, a program sees a file system of
its own (the interpreter read-only, a little memory to write in), no other process, no network and
no variable of ours, and has no rights. Without user namespaces there are only the limits. In both,
time, memory, output and the number of processes are bounded, and nothing of it is left afterwards.

Whatever a program does is a `RunResult`; only a machine that cannot run any raises.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.config.derive import data_sets
from slurm_rl.config.rollout_schema import Overrides, Reward, Rollout, Sandbox
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

PROGRAM_NAME = "program.py"
OUTPUT_BYTES = 1 << 20
DISK_MB = 64
NUM_PROCESSES = 32
#: Beyond the program's own time, before the jail itself counts as hung.
_PATIENCE_S = 30.0
_END_S = 10.0
_ROOT = str(Path(__file__).resolve().parents[3])
_BOOT = (
    f"import sys; sys.path.insert(0, {_ROOT!r});"
    " from slurm_rl.rollout.sandbox.jail import main; main()"
)
#: As many runs at once as there are cores: waiting does not count as a program's time.
_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a run.

    status: `ok` (exit code 0), `error` (another one), `timeout`, `memory`, `output` (it printed
            more than is kept), `killed` (a signal).

    Example: `RunResult("ok", "42\\n", "", 0.02, isolated=True)`.
    """

    status: str
    stdout: str
    stderr: str
    seconds: float
    isolated: bool


@dataclass(frozen=True, slots=True)
class Isolation:
    """Whether programs are isolated on this machine; `why` not, in the kernel's words."""

    isolated: bool
    why: str = ""


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: Sandbox,
    files: Mapping[str, str] | None = None,
    python: str | None = None,
    isolate: bool = True,
) -> RunResult:
    """Run `code` as a program of its own; it may write in its working directory only.

    files: more files to lie beside it. python: another interpreter than ours. isolate: False
    leaves the namespaces out even where there are some, to see what is left.

    Raises ConfigError if the machine gives no isolation and `limits.require` wants it.
    """
    folder = None
    if limits.require == "best_effort":
        folder = tempfile.mkdtemp(prefix="slurm-rl-sandbox-")
    try:
        spec = _plan(code, stdin=stdin, limits=limits, python=python, folder=folder)
        spec["files"].update(files or {})
        spec["isolate"] = isolate
        async with _turn():
            answer = await _enclose(spec)
    finally:
        if folder is not None:
            _remove(folder)
    return _judge(answer, limits)


def find_isolation(python: str | None = None) -> Isolation:
    """Try it: run a program of nothing. For `slurm-rl doctor`; needs a thread without a loop."""
    limits = Sandbox(timeout_s=10.0)
    try:
        result = asyncio.run(run_python("", limits=limits, python=python))
    except (ConfigError, EngineError) as error:
        return Isolation(False, error.message)
    return Isolation(result.isolated and result.status == "ok", result.stderr.strip()[-200:])


def is_needed(settings: Settings) -> bool:
    """Whether a run gives a model's code a place to run: by a reward, or by the Python tool."""
    rollout = settings.rollout
    sources: list[Rollout | Reward | Overrides] = [rollout, *rollout.rewards]
    sources += [*data_sets(settings), *settings.eval.values()]
    return "python" in rollout.tools or any(source.rm_type == "code" for source in sources)


def describe(isolation: Isolation) -> str:
    """How a model's programs run, in one line."""
    if isolation.isolated:
        return (
            "isolated: no network, no other process or variable is seen, nothing is written but"
            f" {DISK_MB} MB in memory"
        )
    return f"with limits alone ({isolation.why}): {_what_is_missing()}"


def _what_is_missing() -> str:
    if os.geteuid() == 0:
        who = "as nobody, but with the network, and may write wherever anybody may"
    else:
        who = "with your rights over files and processes, and the network"
    return f"time, memory and processes are bounded; programs run {who}"


def _plan(
    code: str, *, stdin: str, limits: Sandbox, python: str | None, folder: str | None
) -> dict[str, Any]:
    """What the jail is told."""
    interpreter = os.path.realpath(python or sys.executable)
    binds, paths = ([], []) if python else _own_folders()
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    } | _library_path()
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return {
        "argv": [interpreter, "-B", "-s", PROGRAM_NAME],
        "env": env,
        "stdin": stdin,
        "files": {PROGRAM_NAME: code},
        "binds": binds,
        "folder": folder,
        "best_effort": folder is not None,
        "timeout_s": limits.timeout_s,
        "memory_mb": limits.memory_mb,
        "disk_mb": DISK_MB,
        "processes": NUM_PROCESSES,
        "output_bytes": OUTPUT_BYTES,
    }


def _own_folders() -> tuple[list[str], list[str]]:
    """Folders of this interpreter and its packages: to be shown; and those to import from."""
    shown = [sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix]
    shown += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    paths = []
    if sys.prefix != sys.base_prefix:
        found = (sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
        paths = list(dict.fromkeys(os.path.realpath(path) for path in found))
    home = os.path.realpath(os.path.expanduser("~"))
    binds: list[str] = []
    for path in sorted({os.path.realpath(path) for path in shown if path.startswith("/")}):
        inside = any(path == other or path.startswith(other + "/") for other in ("/usr", *binds))
        around_home = home == path or home.startswith(path.rstrip("/") + "/")
        if not inside and not around_home and os.path.isdir(path):
            binds.append(path)
    return binds, paths


def _library_path() -> dict[str, str]:
    """Where modules of a cluster put the interpreter's libraries: it would not start without."""
    value = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": value} if value else {}


def _turn() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if loop not in _turns:
        _turns[loop] = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0))))
    return _turns[loop]


async def _enclose(spec: dict[str, Any]) -> dict[str, Any]:
    """Start a jail, hand it the run, take its answer. It ends if this is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *(os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", _BOOT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={"LANG": "C.UTF-8"} | _library_path(),
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        process.stdin.write(json.dumps(spec).encode() + b"\n")
        wait_s = spec["timeout_s"] + _PATIENCE_S
        data, said = await asyncio.wait_for(
            asyncio.gather(process.stdout.read(), process.stderr.read()), wait_s
        )
    except (TimeoutError, ConnectionError, BrokenPipeError):
        data, said = b"", b"it did not answer"
    finally:
        await _end(process)
    try:
        answer: dict[str, Any] = json.loads(data)
    except ValueError:
        if process.returncode is not None and process.returncode < 0:
            return _killed()  # by a program that shares our rights, or for memory
        text = said.decode("utf-8", "replace").strip().splitlines()
        raise EngineError(f"the sandbox failed: {text[-1] if text else 'no answer'}") from None
    return answer


def _killed() -> dict[str, Any]:
    return {
        "status": "killed",
        "stdout": "",
        "stderr": "",
        "seconds": 0.0,
        "isolated": False,
        "why": "",
    }


async def _end(process: asyncio.subprocess.Process) -> None:
    """The jail ends its run when its input closes, and then itself."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _judge(answer: dict[str, Any], limits: Sandbox) -> RunResult:
    if answer["status"] == "unavailable":
        raise ConfigError(
            f"rollout.sandbox.require = {limits.require!r}: this machine cannot run a model's code"
            f" so ({answer['why']})",
            hint="allow user namespaces there, or set require: best_effort"
            if limits.require == "isolated"
            else "let the interpreter be readable by all users",
        )
    if not answer["isolated"]:
        _tell(answer.get("isolation") or "as asked")
    return RunResult(
        status=answer["status"],
        stdout=answer["stdout"],
        stderr=answer["stderr"],
        seconds=answer["seconds"],
        isolated=answer["isolated"],
    )


def _tell(why: str) -> None:
    """Once a process: what does not hold."""
    if why not in _told:
        _told.add(why)
        log.warning("a model's code runs %s", describe(Isolation(False, why)))


def _remove(folder: str) -> None:
    """Delete a run's folder, also what it locked itself out of; links are not followed."""
    os.chmod(folder, 0o700)
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
