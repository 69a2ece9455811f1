"""One SGLang server: its process, the check of what it serves, and the exchange by HTTP.

Owns what a failed exchange means, in three kinds, each of which its caller treats otherwise:
`ServerDied` (the process ended), `ServerHangs` (no answer in time) and `ServerFailed` (it lives,
and answered 5xx or broke the connection: another try may do). An answer that is wrong is a plain
EngineError. Starting and loading are plain calls; generation is asynchronous.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from slurm_rl.errors import EngineError
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.server_process import (
    ServerProcess,
    find_free_port,
    start_server,
    wait_until,
)
from slurm_rl.rollout.sglang.options import HOST

log = logging.getLogger(__name__)

_START_ATTEMPTS = 3
#: A connection breaks a little before the process that held it is seen to have ended.
_DYING_S = 2.0
#: Below the server's own 5 s: a connection must not be used again just when it is closed.
_KEEP_ALIVE_S = 2.0
_JSON = {"Content-Type": "application/json"}


class ServerDied(EngineError):
    """The server's process has ended."""


class ServerHangs(EngineError):
    """The server did not answer in time."""


class ServerFailed(EngineError):
    """The server lives, and could not answer this request."""


class Http:
    """The client that all servers of an engine share: one session while anything is in flight.

    It ends with the last request, so that no event loop is left with open connections.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._users = 0
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=1 << 20,
                trust_env=False,
            )
        session = self._session
        self._users += 1
        try:
            yield session
        finally:
            self._users -= 1
            if self._users == 0:
                self._session = None
                await session.close()


class SglangServer:
    """See the module.

    render:  the command line for a port that is free just now, and for an identity.
    name:    for messages, as `server 1`.
    """

    def __init__(
        self,
        render: Callable[[int, str], list[str]],
        *,
        environment: dict[str, str],
        log_path: Path,
        name: str,
        start_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self._render = render
        self._environment = environment
        self._log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self._given_up = threading.Event()
        self._process: ServerProcess | None = None
        self._identity = ""
        self.name = name
        self.port = 0

    @property
    def process(self) -> ServerProcess:
        if self._process is None:
            raise EngineError("no SGLang server was started")
        return self._process

    def start(self, weights: Weights) -> None:
        """Start a process and wait until it serves `weights`; EngineError says what it said.

        A port is taken by another between our looking and SGLang's binding, rarely; then the
        server is started again on another. Until then that other, perhaps of this very run, may
        answer in its place: only the server that tells our identity counts.
        """
        deadline = time.monotonic() + self._start_timeout_s
        tried: frozenset[int] = frozenset()
        for attempt in range(1, _START_ATTEMPTS + 1):
            self._check_wanted()
            self.port = find_free_port(avoid=tried)
            tried |= {self.port}
            self._identity = f"slurm-rl-{secrets.token_hex(8)}"
            command = self._render(self.port, self._identity)
            log.info("starts %s", " ".join(command))
            self._process = start_server(
                command, environment=self._environment, log_path=self._log_path
            )
            try:
                left_s = deadline - time.monotonic()
                wait_until(self._process, self._is_healthy, timeout_s=max(left_s, 0.0))
                break
            except EngineError as error:
                self._process.stop(grace_s=1.0)
                taken = "address already in use" in str(error).lower()
                if not taken or attempt == _START_ATTEMPTS or self._given_up.is_set():
                    raise
                log.warning("port %d was taken meanwhile; trying another", self.port)
        self.check_served(weights)

    def load(self, weights: Weights) -> None:
        """Load other weights into the running server. On a refusal the old ones stay served."""
        body = {
            "model_path": str(weights.path),
            "weight_version": weights.label,
            "flush_cache": True,
        }
        status, answer = self.call("POST", "/update_weights_from_disk", body)
        if status != 200 or not answer.get("success", False):
            raise EngineError(
                f"SGLang did not load {weights.path}: {answer.get('message', answer)}"
            )
        self.check_served(weights)

    def check_served(self, weights: Weights) -> None:
        """EngineError unless the server says that it serves `weights`, by path and label."""
        _, info = self.call("GET", "/model_info", timeout_s=60)
        served = (info.get("model_path"), info.get("weight_version"))
        if served != (str(weights.path), weights.label):
            raise EngineError(
                f"SGLang serves {served[1]} from {served[0]}, not {weights.label} from"
                f" {weights.path}"
            )
        log.info("%s serves %s", self.name, weights.label)

    def stop(self) -> None:
        """Abort what runs, end the server, and check that nothing of it is left."""
        self._given_up.set()
        process = self._process
        if process is None:
            return
        try:
            # SIGTERM alone drains: it waits for every request in flight.
            self.call("POST", "/abort_request", {"abort_all": True}, timeout_s=5)
        except EngineError as error:
            log.info("nothing aborted: %s", error)
        process.stop()

    def kill(self) -> None:
        """End a server that is lost: it may hold memory that the next job needs."""
        if self._process is not None:
            self._process.stop(grace_s=0.0)

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None
    ) -> tuple[int, Any]:
        """One exchange that is waited for: status and parsed answer. EngineError without one."""
        wait_s = timeout_s or self._request_timeout_s
        connection = http.client.HTTPConnection(HOST, self.port, timeout=wait_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), _JSON)
            response = connection.getresponse()
            return response.status, _read_message(response.read())
        except (OSError, http.client.HTTPException) as error:
            self.process.check_alive()
            raise EngineError(f"SGLang does not answer {path}: {error!r}") from error
        finally:
            connection.close()

    async def post(self, session: aiohttp.ClientSession, path: str, body: bytes) -> bytes:
        """The body of a good answer. Raises ServerDied, ServerHangs, ServerFailed, EngineError."""
        try:
            url = f"http://{HOST}:{self.port}{path}"
            async with session.post(url, data=body, headers=_JSON) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise ServerHangs(
                f"{self.name} gave no answer within {self._request_timeout_s:g} s",
                hint=f"see {self._log_path}; raise rollout.request_timeout_s if it is slow",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            await self._check_alive()
            raise ServerFailed(
                f"{self.name} broke the connection: {error!r}", hint=f"see {self._log_path}"
            ) from error
        if response.status >= 500:
            raise ServerFailed(self._describe(response.status, answer))
        if response.status != 200:
            raise EngineError(self._describe(response.status, answer))
        return answer

    def _describe(self, status: int, answer: bytes) -> str:
        return (
            f"{self.name} answered {status} to a request: {answer[:300].decode(errors='replace')}"
        )

    async def _check_alive(self) -> None:
        """ServerDied if the process has ended, or ends in a moment."""
        deadline = time.monotonic() + _DYING_S
        while True:
            try:
                self.process.check_alive()
            except EngineError as error:
                raise ServerDied(f"{self.name}: {error.message}", hint=error.hint) from error
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.05)

    def _is_healthy(self) -> bool:
        self._check_wanted()
        try:
            if self.call("GET", "/health", timeout_s=5)[0] != 200:
                return False
            models = self.call("GET", "/v1/models", timeout_s=5)[1].get("data") or [{}]
        except EngineError:
            return False
        return bool(models[0].get("id") == self._identity)

    def _check_wanted(self) -> None:
        if self._given_up.is_set():
            raise EngineError("given up, since another server failed")


def _read_message(data: bytes) -> Any:
    """The JSON object of an answer; else its text as {"message": …}."""
    try:
        answer = orjson.loads(data)
    except ValueError:
        return {"message": data.decode(errors="replace")[:300]}
    return answer if isinstance(answer, dict) else {"message": str(answer)[:300]}
