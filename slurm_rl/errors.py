"""Every error that a person can meet, in one tree.

    SlurmRlError                  exit code 1
    ├── UserError            2    the user must change something; never retried
    │   ├── ConfigError           a configuration file or a `--set` is wrong
    │   ├── DataError             prompts or a data set are wrong
    │   ├── ModelError            a model or its weights are wrong
    │   ├── RewardError           the user's own code (reward, generate) failed
    │   └── OwnerError            the run is somebody else's
    ├── StorageError         5    the run directory cannot be used as it is
    │   ├── CorruptError          something committed is not what it was
    │   ├── FormatError           the run directory is of another format
    │   ├── SpaceError            no space, inodes or quota left
    │   ├── PrunedError           retention deleted it, or is about to
    │   └── NoRunError            there is no run there
    ├── SchedulerError       6    the scheduler did not do what was asked
    │   ├── SchedulerUnavailable  it did not answer: this says nothing about jobs
    │   ├── SubmitRefused         it said no, and will say no again
    │   └── SubmitDeferred        it said not now (a limit): ask again later
    ├── EngineError               the inference engine failed
    ├── ServiceDown               a service that rewards ask is down: no failure, to be tried later
    ├── NumericsError             a loss or gradient is not finite, or a guard was breached
    ├── NothingDone          3    nothing could be done, and the run is not complete
    └── Halted               4    the run is halted: it says why and what to type

A message is one line: what, where, the rule and the fix. A traceback is for `--debug`.

Beside the tree stands Stopped, which is no error: a signal has told a stage's program to end.
"""

from __future__ import annotations

import signal


class SlurmRlError(Exception):
    """Base of the tree. `hint` is what the person should do, in one clause."""

    exit_code = 1
    #: 'user': retrying cannot help. 'system': a retry may. 'outage': later, and it counts as none.
    blame = "system"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UserError(SlurmRlError):
    exit_code = 2
    blame = "user"


class ConfigError(UserError): ...


class DataError(UserError): ...


class ModelError(UserError): ...


class RewardError(UserError): ...


class OwnerError(UserError): ...


class StorageError(SlurmRlError):
    exit_code = 5


class CorruptError(StorageError):
    blame = "user"


class FormatError(StorageError):
    blame = "user"


class SpaceError(StorageError): ...


class PrunedError(StorageError):
    exit_code = 3
    blame = "user"


class NoRunError(StorageError):
    exit_code = 2
    blame = "user"


class SchedulerError(SlurmRlError):
    exit_code = 6


class SchedulerUnavailable(SchedulerError): ...


class SubmitRefused(SchedulerError): ...


class SubmitDeferred(SchedulerError): ...


class EngineError(SlurmRlError): ...


class ServiceDown(SlurmRlError):
    """`service` (its name in `services`) is down. With `on_down: halt` it is the user's to mend."""

    def __init__(self, message: str, *, service: str, defers: bool = True, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.service = service
        self.blame = "outage" if defers else "user"


class NumericsError(SlurmRlError):
    blame = "user"


class NothingDone(SlurmRlError):
    exit_code = 3


class Halted(SlurmRlError):
    exit_code = 4


class Stopped(BaseException):
    """A signal told us to stop. Not an Exception: nothing but the entry may swallow it, and what
    calls code of the user's lets it through."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
