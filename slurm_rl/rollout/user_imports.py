"""Finding a function of the user's by its dotted path.

The import runs code of the user's, which may raise, exit or never end. It has a deadline, kept by
a timer of the process, so that it holds where Python can be interrupted: an import that hangs
within a C library, or that begins in a thread, is ended by the stage's own deadline.
"""

from __future__ import annotations

import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from slurm_rl.errors import ConfigError, RewardError, Stopped
from slurm_rl.rollout.user_errors import raised_at, say_error

#: Longest that the import of a module may take. Large libraries on a busy file system take minutes.
IMPORT_S = 900.0
#: For a timer whose time has come meanwhile: none would mean that it is off.
_AT_ONCE_S = 1e-6


class TooLong(BaseException):
    """Not an Exception: user code that swallows those must not swallow it."""


def import_function(dotted: str, *, field: str, timeout_s: float = IMPORT_S) -> Callable[..., Any]:
    """The function at `package.module.name`; errors say which part is wrong.

    A module that fails while it is imported is the user's code failing: RewardError.
    """
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise ConfigError(f"{field} = {dotted!r} has no module", hint="write module.function")
    if not all(dotted.split(".")):
        raise ConfigError(f"{field} = {dotted!r} is no dotted path", hint="write module.function")
    about = f"{field} = {dotted!r}"
    module = _import(module_name, about, timeout_s)
    try:
        function = getattr(module, name)
    except AttributeError:
        raise RewardError(f"{about}: {_place_of(module)} has no function {name!r}") from None
    except Exception as error:  # the module's own __getattr__
        raise RewardError(
            f"{about}: asking {module_name} for it raised {say_error(error)}"
        ) from error
    if not callable(function):
        raise RewardError(
            f"{about}: {_place_of(module)} has no function {name!r}, but a"
            f" {type(function).__name__} of that name",
            hint="name a function",
        )
    return function  # type: ignore[no-any-return]


def _import(name: str, about: str, timeout_s: float) -> ModuleType:
    try:
        with deadline(timeout_s):
            return importlib.import_module(name)
    except TooLong as error:
        raise RewardError(
            f"{about}: importing {name} took longer than {timeout_s:g} s{raised_at(error)}",
            hint="what takes long belongs into the function, which has a deadline of its own",
        ) from error
    except ModuleNotFoundError as error:
        is_itself = error.name is not None and f"{name}.".startswith(f"{error.name}.")
        where = "" if is_itself else f", which is imported{raised_at(error)}"
        raise RewardError(
            f"{about}: no module named {error.name!r}{where}",
            hint="add the folder that holds it to `code`, or install it for this stage",
        ) from error
    except Stopped:
        raise
    except BaseException as error:  # the user's code, at import; `sys.exit` too
        raise RewardError(f"{about}: importing {name} raised {say_error(error)}") from error


@contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """Raise TooLong in what runs after that time; nothing in a thread, which has no signals.

    A timer that runs already goes on afterwards, with what is left of its time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _give_up)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        # None: a C library's handler, which Python cannot put back. Its timer would now be fatal.
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        if left_s and before is not None:
            left_s = max(left_s - (time.monotonic() - began), _AT_ONCE_S)
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise TooLong


def _place_of(module: ModuleType) -> str:
    """The module's file; its name where it has none, as those within Python."""
    return str(getattr(module, "__file__", None) or f"the module {module.__name__}")
