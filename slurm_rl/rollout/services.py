"""Servers outside the run that rewards ask: whether they live, and how they are asked.

A service is *healthy*, *suspect* (it failed, or does not say that it is healthy) or *down* (suspect
for `down_after_s`). While it is suspect its requests wait and are sent again, and no retry is
spent: an outage is nobody's fault. What a healthy service answers wrongly costs retries. Each
client has one watch of its service's health, whatever the number of requests that wait.

`url_file` is read again whenever a request failed, so that a service that moved is found.
Requests never go through a proxy of the environment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slurm_rl.config.rollout_schema import Service
from slurm_rl.errors import RewardError, ServiceDown

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

State = Literal["healthy", "suspect", "down"]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 30.0
_HEALTH_TIMEOUT_S = 10.0
_HEALTH_POLL_S = 1.0
_LONGEST_BODY = 200
#: Answers that say "not now" rather than "no".
_PASSING = (408, 425, 429)


class Unavailable(Exception):
    """The service is down: nothing is said about the request. Never leaves the grader."""

    def __init__(self, client: Client) -> None:
        super().__init__(client.describe())
        self.client = client


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of a service. `since`: when it stopped being healthy (monotonic seconds)."""

    state: State = "healthy"
    since: float = 0.0


def fold_health(health: Health, *, is_healthy: bool, now: float, down_after_s: float) -> Health:
    """What is known after one more look at the service. Pure."""
    if is_healthy:
        return Health("healthy")
    since = now if health.state == "healthy" else health.since
    return Health("down" if now - since >= down_after_s else "suspect", since)


def read_address(service: Service) -> str | None:
    """Where the service is now, without a slash at the end; None if its file does not say."""
    if service.url is not None:
        return service.url.rstrip("/")
    assert service.url_file is not None
    try:
        text = Path(service.url_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text.splitlines()[0].strip().rstrip("/") if text else None


def ask_health(service: Service, *, timeout_s: float = _HEALTH_TIMEOUT_S) -> bool:
    """Whether the service says that it works. Blocks; never raises."""
    address = read_address(service)
    if address is None:
        return False
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address + service.health, timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


async def wait_until_healthy(service: Service, timeout_s: float, *, poll_s: float = 1.0) -> bool:
    """Wait until the service says that it works; False if it did not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(ask_health, service):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        await asyncio.sleep(min(poll_s, left))
    return True


class Clients:
    """The clients of all services, over one pool of connections; `close` ends them."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._clients: dict[str, Client] = {}

    async def close(self) -> None:
        """Stop looking, close the connections; nothing can be asked any more."""
        self._is_closed = True
        for client in self._clients.values():
            client.end()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def check(self) -> None:
        """Raise Unavailable if any service is not healthy."""
        for client in self._clients.values():
            if client.state != "healthy":
                raise Unavailable(client)

    def get(self, name: str, service: Service, *, has_health: bool = True) -> Client:
        """The client of that name, made when it is first asked for.

        has_health: False for a bare address, of which nothing but its answers is known.
        """
        import aiohttp  # an extra: only who asks services needs it

        if self._is_closed:
            raise RewardError(f"{name} is asked after the grading ended")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        if name not in self._clients:
            self._clients[name] = Client(
                name, service, session=self._session, has_health=has_health
            )
        return self._clients[name]


class Client:
    """Asks one service, on one event loop."""

    def __init__(
        self, name: str, service: Service, *, session: aiohttp.ClientSession, has_health: bool
    ) -> None:
        self.name = name
        self.service = service
        self._session = session
        self._has_health = has_health
        self._health = Health()
        self._asked_at = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[bool] | None = None
        self._address = read_address(service)

    @property
    def state(self) -> State:
        return self._health.state

    def describe(self) -> str:
        """`service rm at http://… is down since 40 s`, for a person."""
        if self.state == "healthy":
            return f"service {self.name} at {self._where()} is healthy"
        seconds = time.monotonic() - self._health.since
        return f"service {self.name} at {self._where()} is {self.state} since {seconds:.0f} s"

    def as_error(self) -> ServiceDown:
        """What a person is told where the run halts for it."""
        return ServiceDown(
            f"services.{self.name}: {self.describe().partition(' at ')[2]}",
            service=self.name,
            defers=False,
            hint="start it and `slurm-rl resume`, or set its on_down: defer to grade later",
        )

    def end(self) -> None:
        """Look no longer."""
        for task in (self._watch, self._asking):
            if task is not None:
                task.cancel()

    async def post(self, payload: dict[str, Any], *, path: str = "") -> Any:
        """The JSON that the service answers to `payload`.

        Raises Unavailable if it is down, and RewardError for an answer that says no, or if what
        should pass did not pass after all retries.
        """
        spent, problem = 0, ""
        while True:
            await self._wait_until_usable()
            problem, answer = await self._try(payload, path)
            if not problem:
                return answer
            if self._has_health and not await self._is_healthy():
                continue  # an outage: wait for its end, or for `down`
            spent += 1
            if spent > self.service.retries:
                raise RewardError(
                    f"{self.name} at {self._where()}{path}: {problem}, {spent} time(s)",
                    hint="see the service's log",
                )
            await asyncio.sleep(backoff_s(spent))

    async def _try(self, payload: dict[str, Any], path: str) -> tuple[str, Any]:
        """(what went wrong for now, the answer)."""
        import aiohttp

        if self._address is None:
            return f"{self.service.url_file} holds no address", None
        limit = aiohttp.ClientTimeout(total=self.service.timeout_s)
        try:
            where = self._address + path
            async with self._session.post(where, json=payload, timeout=limit) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"{type(error).__name__} {error}".strip(), None
        if answer.status >= 500 or answer.status in _PASSING:
            return f"status {answer.status}: {_shorten(body)}", None
        if answer.status >= 300:
            raise RewardError(
                f"{self.name} at {where} answered {answer.status}: {_shorten(body)}",
                hint="this request will never do: mend the address or what the service expects",
            )
        try:
            return "", json.loads(body)
        except ValueError:
            raise RewardError(
                f"{self.name} at {where} answered what is no JSON: {_shorten(body)}"
            ) from None

    async def _wait_until_usable(self) -> None:
        """Return when it is healthy; raise Unavailable when it is down."""
        if self.state == "down":
            if time.monotonic() - self._asked_at < self._pause_s():
                raise Unavailable(self)
            await self._is_healthy()
        while self.state == "suspect":
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._look_again())
            await asyncio.shield(self._watch)
        if self.state == "down":
            raise Unavailable(self)

    async def _look_again(self) -> None:
        """Once for all that wait: pause, then ask."""
        await asyncio.sleep(min(_HEALTH_POLL_S, self.service.down_after_s / 10))
        await self._is_healthy()

    async def _is_healthy(self) -> bool:
        """Ask, or join who asks already."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> bool:
        """One look at its health, which is remembered, where it is now."""
        self._address = read_address(self.service)
        is_healthy = await self._get_health()
        now = self._asked_at = time.monotonic()
        before, limit = self.state, self.service.down_after_s
        self._health = fold_health(self._health, is_healthy=is_healthy, now=now, down_after_s=limit)
        if self.state != before:
            log.warning("%s", self.describe())
        return is_healthy

    async def _get_health(self) -> bool:
        import aiohttp

        if self._address is None:
            return False
        limit = aiohttp.ClientTimeout(total=min(_HEALTH_TIMEOUT_S, self.service.down_after_s))
        try:
            where = self._address + self.service.health
            async with self._session.get(where, timeout=limit) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False

    def _pause_s(self) -> float:
        return min(_LONGEST_WAIT_S, self.service.down_after_s)

    def _where(self) -> str:
        return self._address or f"(nothing in {self.service.url_file})"


def backoff_s(num_tries: int) -> float:
    """Seconds before the next try: twice as long each time, a little random, bounded."""
    wait = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(num_tries - 1, 30))
    return wait * random.uniform(0.75, 1.25)


def _shorten(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return text if len(text) <= _LONGEST_BODY else text[: _LONGEST_BODY - 1] + "…"
