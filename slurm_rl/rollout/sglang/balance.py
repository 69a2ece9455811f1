"""Which server a request goes to, and when. No I/O: a state machine with futures.

A request goes to the least loaded server that has room; one of a session to the session's own
server, which keeps its prefix cached. What finds no room waits in one line: nobody is overtaken on
a server that they could have had, so that neither a large group nor a session starves. A group
that is larger than all the room there is goes to a server that is empty.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

import xxhash

from slurm_rl.errors import EngineError


@dataclass(slots=True)
class Load:
    """What one server has in flight."""

    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """What wants a place. tokens: the most that it may come to, prompts included.

    avoid: a server that just failed; another is taken if there is one.
    """

    samples: int
    tokens: int = 0
    session: str = ""
    avoid: int | None = None


def has_room(load: Load, samples: int, *, limit: int) -> bool:
    """Whether a server with `load` may take `samples` more."""
    return load.samples == 0 or load.samples + samples <= limit


def choose_server(loads: dict[int, Load], samples: int, *, limit: int) -> int | None:
    """The least loaded of those with room: fewest samples, then tokens, then the lowest number."""
    open_ = [i for i, load in loads.items() if has_room(load, samples, limit=limit)]
    return min(open_, key=lambda i: (loads[i].samples, loads[i].tokens, i), default=None)


def home_server(session: str, servers: Collection[int]) -> int:
    """The session's server: the one that draws the highest number with it.

    When a server goes, its own sessions move, and no others.
    """
    return max(servers, key=lambda i: (xxhash.xxh3_64_intdigest(f"{session}/{i}".encode()), i))


class Balance:
    """The places of all servers. limit: samples in flight to one of them."""

    def __init__(self, num_servers: int, *, limit: int) -> None:
        self._limit = limit
        self._loads = {i: Load() for i in range(num_servers)}
        self._line: deque[tuple[Ask, asyncio.Future[int]]] = deque()
        self._why_none = "no SGLang server was started"

    @property
    def alive(self) -> list[int]:
        """Numbers of the servers that are not lost."""
        return list(self._loads)

    @property
    def num_in_flight(self) -> int:
        return sum(load.samples for load in self._loads.values())

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def samples_at(self, server: int) -> int:
        return self._loads[server].samples if server in self._loads else 0

    @asynccontextmanager
    async def place(self, ask: Ask) -> AsyncIterator[int]:
        """A server's number, while the request is there. EngineError once no server is left."""
        server = await self._take(ask)
        try:
            yield server
        finally:
            self._give_back(server, ask)

    def lose(self, server: int, *, why: str) -> bool:
        """Nothing goes to `server` any more; False if that was known. why: for those who wait."""
        if self._loads.pop(server, None) is None:
            return False
        self._why_none = why
        self._let_in()
        return True

    async def _take(self, ask: Ask) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._line.append((ask, future))
        self._let_in()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result(), ask)  # given just when the caller left
            raise

    def _give_back(self, server: int, ask: Ask) -> None:
        if server in self._loads:
            self._loads[server].samples -= ask.samples
            self._loads[server].tokens -= ask.tokens
        self._let_in()

    def _let_in(self) -> None:
        """Give what room there is to those who have waited longest for it."""
        full: set[int] = set()
        waiting = []
        while self._line and (not self._loads or len(full) < len(self._loads)):
            ask, future = self._line.popleft()
            if future.done():  # its caller left
                continue
            if not self._loads:
                future.set_exception(EngineError(self._why_none))
                continue
            wanted = self._wanted(ask)
            free = {i: self._loads[i] for i in wanted if i not in full}
            server = choose_server(free, ask.samples, limit=self._limit)
            if server is None:
                full.update(wanted)
                waiting.append((ask, future))
                continue
            self._loads[server].samples += ask.samples
            self._loads[server].tokens += ask.tokens
            future.set_result(server)
        self._line.extendleft(reversed(waiting))

    def _wanted(self, ask: Ask) -> list[int]:
        """The servers that would do."""
        if ask.session:
            return [home_server(ask.session, self._loads)]
        return [i for i in self._loads if i != ask.avoid] or list(self._loads)
