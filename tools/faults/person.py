"""The person beside the run: mends what is broken when its time comes, and types `resume`."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from faults.report import Stop
from faults.site import Site

_RETRY_S = 5.0
#: A controller that dies this soon after a submission may forget it: it saves its state lazily.
_FORGETS_S = 15.0
#: Time in which a run whose queue is empty would have been moved by a job that is just ending.
_EMPTY_S = 20.0


class Stuck(Exception):
    """What was waited for did not come."""


@dataclass
class Person:
    """Does nothing but repairs and `slurm-rl resume`; notes each resume with its reason."""

    site: Site
    stops: list[Stop] = field(default_factory=list)
    typed: float = field(default_factory=time.monotonic)
    _next: float = 0.0
    _empty_since: float | None = None
    _next_look: float = 0.0

    def stop_reason(self) -> tuple[str, str] | None:
        """(`PAUSE` or `HALT`, why) if the run is stopped."""
        for word in ("HALT", "PAUSE"):
            path = self.site.root / "control" / word
            try:
                said = path.read_text()
                return word, str(json.loads(said)["reason"])
            except FileNotFoundError:
                continue
            except (ValueError, KeyError):
                return word, "not readable"
        return None

    def tend(self) -> None:
        """Mend what is due, and resume a run that is stopped."""
        self.site.repair()
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _RETRY_S
            self.site.undrain()
            self.look_for_jobs()
        stop = self.stop_reason() or self.forgotten()
        if stop is None or time.monotonic() < self._next:
            return
        noted = Stop(self.site.elapsed_s(), *stop)
        self._next = time.monotonic() + _RETRY_S
        if self.type("resume") == 0:
            self.typed, self._empty_since = time.monotonic(), None
            self.stops.append(noted)
            say(self.site, f"{noted.word} ({noted.reason}): resumed")

    def look_for_jobs(self) -> None:
        """Note since when the run has had no job in the queue."""
        left = self.site.left()
        if left:
            self._empty_since = None
        elif left == [] and self._empty_since is None:
            self._empty_since = time.monotonic()

    def forgotten(self) -> tuple[str, str] | None:
        """If all that a person had just submitted went with the controller: then no process is
        left that could move the run. An empty queue for any other reason is a failure."""
        empty = self._empty_since is not None and time.monotonic() - self._empty_since > _EMPTY_S
        soon = 0.0 <= self.site.controller_killed - self.typed <= _FORGETS_S
        if not (empty and soon) or self.site.progress() >= self.site.num_stages:
            return None
        return "NO JOBS", "the controller died just after a submission and forgot every job"

    def type(self, word: str) -> int:
        """`slurm-rl WORD RUN`; its exit status."""
        try:
            done = self.site.run.command(word, str(self.site.root))
        except subprocess.TimeoutExpired:
            return -1
        if done.returncode:
            say(self.site, f"slurm-rl {word}: {done.stderr.strip()[:300]}")
        return done.returncode

    def wait(self, look: Callable[[], object], what: str, timeout_s: float) -> object:
        """The first true value of `look`, tending meanwhile. Raises Stuck."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.tend()
            found = look()
            if found:
                return found
            if time.monotonic() > deadline:
                raise Stuck(f"no {what} in {timeout_s:.0f} s")
            time.sleep(0.2)


def say(site: Site, text: str) -> None:
    print(f"[{site.elapsed_s():5.0f} s, {site.progress():3d} commits] {text}", flush=True)
