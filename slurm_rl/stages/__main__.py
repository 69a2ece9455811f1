"""The process around a stage program: `python -m slurm_rl.stages <attempt>/order.json`.

Owns the way in (order, settings, logging, the user's code on the path, signals) and the way
out: `result.json` from rank 0 and exit code 0, or `failure.json` and another code. It never
publishes a COMMIT; that is the supervisor's.

    failure.json   {"blame": "user" | "system" | "repeat" | "outage", "error": <class>,
                    "message": …, "hint": …, "place": <file:line>, "node": …, "service": …}
                   The first rank to fail writes it; the others' errors follow from that one.
                   `repeat` is for what may be anybody's fault (a bug, no memory left): it is tried
                   once more, and halts the run if the same comes at the same place. `outage`:
                   `service` is down; that is no failure, and the stage is tried again later.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from slurm_rl.config.schema import EVAL_PREFIX, Settings
from slurm_rl.errors import ConfigError, RewardError, SlurmRlError, SpaceError, Stopped
from slurm_rl.stages.rank import current_rank
from slurm_rl.storage.claims import node_name
from slurm_rl.storage.durable import publish, read_patiently, write_file
from slurm_rl.types import Order, Result, canonical_json, dump_record, parse_order

log = logging.getLogger("slurm_rl.stages")

_CHECKED = ("init", "rollout", "reference", "teacher", "critic", "train")
#: kind -> module and function; imported when needed, since each brings its own libraries.
PROGRAMS = {
    "init": ("slurm_rl.stages.init", "run_init"),
    "rollout": ("slurm_rl.stages.rollout", "run_rollout"),
    "score": ("slurm_rl.stages.score", "run_score"),
    "reference": ("slurm_rl.stages.reference", "run_reference"),
    "teacher": ("slurm_rl.stages.teacher", "run_teacher"),
    "critic": ("slurm_rl.stages.critic", "run_critic"),
    "train": ("slurm_rl.stages.train", "run_train"),
    # `eval-<name>`, whatever the name.
    "eval": ("slurm_rl.stages.evaluate", "run_eval"),
    # What a stage would meet, started in the same way: `slurm-rl doctor --stage`.
    **{f"check.{kind}": ("slurm_rl.stages.check", "run_check") for kind in _CHECKED},
}


#: Errors that a second try on another node may not help. By name: torch is not imported here.
_REPEATING = {
    "MemoryError",
    "OutOfMemoryError",
    "ArithmeticError",
    "AssertionError",
    "AttributeError",
    "ImportError",
    "LookupError",
    "NameError",
    "TypeError",
    "ValueError",
    "NotImplementedError",
}


def main(arguments: list[str]) -> int:
    """Run the order; returns the exit code. Usage errors go to stderr with code 2."""
    if len(arguments) != 1:
        print("usage: python -m slurm_rl.stages ORDER.json", file=sys.stderr)
        return 2
    # This rank's node may see late what the supervisor's wrote: the very directory is new.
    order = parse_order(read_patiently(Path(arguments[0])))
    rank = current_rank(os.environ)
    configure_logging(order, rank=rank)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stopped)
    try:
        result = run_program(order)
        if rank == 0:
            write_file(Path(order.attempt_dir) / "result.json", dump_record(result))
        return 0
    except Stopped as stopped:
        log.warning("%s", stopped)
        return _leave_failure(order, stopped, code=128 + stopped.number)
    except SlurmRlError as error:
        # What the user's code raised is one line for a person; the log has all of it.
        users = error.__cause__ if isinstance(error, RewardError) else None
        log.error("%s", error, exc_info=users or log.isEnabledFor(logging.DEBUG))
        return _leave_failure(order, error, code=error.exit_code)
    except Exception as error:  # the process entry: whatever it is, say it and leave
        log.exception("%s: %s", type(error).__name__, error)
        return _leave_failure(order, error, code=1)


def run_program(order: Order) -> Result:
    """Read the settings, make the user's code importable, run the stage of `order.kind`."""
    if order.code_dir and order.code_dir not in sys.path:
        sys.path.insert(0, order.code_dir)
    settings = read_settings(Path(order.settings_path))
    check_versions(order.versions)
    kind = "eval" if order.kind.startswith(EVAL_PREFIX) else order.kind
    if kind not in PROGRAMS:
        raise ConfigError(f"no stage program for kind {order.kind!r}; there are {list(PROGRAMS)}")
    module, name = PROGRAMS[kind]
    program: Callable[[Order, Settings], Result] = getattr(importlib.import_module(module), name)
    log.info("starts in %s", order.attempt_dir)
    return program(order, settings)


def read_settings(path: Path) -> Settings:
    """The resolved settings at `path`; ConfigError naming the first wrong field."""
    try:
        return Settings.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error


def configure_logging(order: Order, *, rank: int) -> None:
    """Lines on stderr, each starting with run, stage, iteration, attempt and rank."""
    attempt = Path(order.attempt_dir).name
    place = f"{order.run_id} {order.kind} i{order.iteration:04d} {attempt} r{rank}"
    level = logging.DEBUG if os.environ.get("SLURM_RL_DEBUG") else logging.INFO
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format=f"%(asctime)s [{place}] %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("slurm_rl").setLevel(level)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    # Once: a second signal must not interrupt the clean-up that the first one began.
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


def _leave_failure(order: Order, error: BaseException, *, code: int) -> int:
    failure = {"blame": "system", "error": type(error).__name__, "hint": ""}
    failure |= {
        "place": find_place(error),
        "node": node_name(),
    }
    if isinstance(error, SlurmRlError):
        failure |= {"blame": error.blame, "message": error.message, "hint": error.hint}
        failure["service"] = getattr(error, "service", "")
    elif isinstance(error, Stopped):
        failure["message"] = str(error)
    else:
        failure["message"] = f"{type(error).__name__}: {error}"
        names = {cls.__name__ for cls in type(error).__mro__}
        failure["blame"] = "repeat" if names & _REPEATING else "system"
    try:
        publish(Path(order.attempt_dir) / "failure.json", canonical_json(failure))
    except (OSError, SpaceError) as second:  # a full disk: the log and the code still say it
        log.error("failure.json could not be written: %s", second)
    return code


def find_place(error: BaseException) -> str:
    """Where an error arose, as `file:line` of the innermost frame; empty if nobody raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def check_versions(expected: Mapping[str, str]) -> None:
    """ConfigError if a library is not of the version that the stages before ran with."""
    for name, wanted in sorted(expected.items()):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "missing"
        if found != wanted:
            raise ConfigError(
                f"{name} is {found} here, but the stages before ran with {wanted}",
                hint="put the environment back; or, to go on with this one, versions=any",
            )


def _leave(code: int) -> None:
    """End at once: torch's and Megatron's exit handlers cost most of a second."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
