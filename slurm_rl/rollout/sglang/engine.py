"""An engine over real SGLang servers, started from the weights on disk and spoken to by HTTP.

Owns the servers of a node as one: they start together, each is checked, requests are spread over
them, and what one that died had in hand goes to the others. Each server is given a label (run,
version, digest) as its `--weight-version`; label and path are checked before anything is generated,
and the label again in every result: a result of other weights is an EngineError, never a sample.

What a failure means:

    a server dies, or hangs       its requests go to the others, with a warning; the last one's
                                  end is the engine's
    5xx, a broken connection      once more, on another server if there is one
    4xx, a wrong answer           the engine's end: what it says cannot be believed

Samples carry their seeds, so asking twice does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp
import orjson

from slurm_rl.errors import ConfigError, EngineError
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.routing import Experts, read_experts
from slurm_rl.rollout.server_process import find_free_port
from slurm_rl.rollout.sglang.balance import Ask, Balance
from slurm_rl.rollout.sglang.nodes import Leader
from slurm_rl.rollout.sglang.options import (
    Place,
    SglangOptions,
    plan_environments,
    plan_log_path,
    plan_meeting,
    read_dtype,
    render_command,
)
from slurm_rl.rollout.sglang.server import (
    Http,
    ServerDied,
    ServerFailed,
    ServerHangs,
    SglangServer,
)
from slurm_rl.rollout.sglang.wire import (
    Answer,
    Scores,
    parse_answer,
    parse_scores,
    parse_scoring,
    render_request,
    render_scoring,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_ABORT_AGAIN_S = 0.25
_ABORT_PATIENCE_S = 30.0
_ABORT_ALL = orjson.dumps({"abort_all": True})


@dataclass(slots=True)
class Counts:
    """What the engine has seen so far; sums over requests."""

    requests: int = 0
    retries: int = 0
    moved: int = 0
    servers_lost: int = 0
    queue_s: float = 0.0
    latency_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class SglangEngine:
    """See the module. One or several servers on this node."""

    def __init__(self, options: SglangOptions) -> None:
        self._options = options
        self._servers: list[SglangServer] = []
        self._balance = Balance(0, limit=options.concurrency)
        self._http = Http(timeout_s=options.request_timeout_s)
        self._weights: Weights | None = None
        self._experts: Experts | None = None
        #: Set by `abort`; new weights bring a new one, so that what was aborted stays so.
        self._cut = threading.Event()
        self._counts = Counts()
        self._endings: set[asyncio.Future[None]] = set()
        self._leader = Leader(plan_meeting(options)) if options.num_nodes > 1 else None

    @property
    def concurrency(self) -> int:
        """Samples that all servers together take at once."""
        return self._options.concurrency * max(1, self._options.replicas)

    @property
    def servers(self) -> list[SglangServer]:
        return list(self._servers)

    def start(self, weights: Weights) -> None:
        """Start all servers at once and wait until each serves `weights`.

        EngineError says what the first one to fail said; then none is left running.
        """
        dtype = read_dtype(weights.path)
        if self._options.routed:
            self._experts = read_experts(weights.path)
        environments = plan_environments(self._options)
        self._servers = [
            self._make_server(i, environment, weights, dtype)
            for i, environment in enumerate(environments)
        ]
        each([partial(server.start, weights) for server in self._servers], give_up=self.stop)
        self._balance = Balance(len(self._servers), limit=self._options.concurrency)
        self._weights, self._cut = weights, threading.Event()

    def load_weights(self, weights: Weights) -> None:
        """Load other weights into all servers. On a refusal by one the old ones stay everywhere."""
        before = self._serving()
        loaded: list[SglangServer] = []

        def load(server: SglangServer) -> None:
            server.load(weights)
            loaded.append(server)

        try:
            each([partial(load, self._servers[i]) for i in self._balance.alive])
        except EngineError:
            each([partial(server.load, before) for server in loaded])
            raise
        self._weights, self._cut = weights, threading.Event()

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """The group's completions, once a server has room for it and has answered."""
        weights, cut, experts = self._serving(), self._cut, self._experts
        self._check_sampling(sampling)
        body = orjson.dumps(render_request(request, sampling, routed=experts is not None))
        num = len(request.seeds)
        tokens = sum(
            len(request.entry_tokens(i)) + request.max_new_tokens(i, sampling) for i in range(num)
        )

        def parse(data: bytes) -> Answer:
            return parse_answer(data, request, sampling, label=weights.label, experts=experts)

        async with self._http.session() as session:
            ask = Ask(num, tokens, request.session)
            answer = await self._ask(session, ask, body, parse=parse, is_cut=cut.is_set)
        if answer is None:
            return [Completion((), (), "abort", weights.label)] * num
        if not cut.is_set() and any(c.finish == "abort" for c in answer.completions):
            raise EngineError(f"SGLang cut a sample off by itself: {answer.why_aborted}")
        self._counts.requests += 1
        self._counts.prompt_tokens += answer.prompt_tokens
        self._counts.cached_tokens += answer.cached_tokens
        return answer.completions

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """As the least loaded server computes them."""
        return (await self.scores(tokens)).logprobs

    async def scores(self, tokens: Sequence[int], *, top_num: int = 0) -> Scores:
        """The same, with the `top_num` likeliest tokens at each place."""
        label = self._serving().label
        body = orjson.dumps(render_scoring(tokens, top_num=top_num))
        async with self._http.session() as session:
            found = await self._ask(
                session,
                Ask(1, len(tokens)),
                body,
                parse=lambda data: parse_scores(data, tokens, label=label, top_num=top_num),
                is_cut=lambda: False,
            )
        assert found is not None
        return found

    async def logprobs_of_each(self, tokens: Sequence[int]) -> list[list[float]]:
        """As `logprobs`, from every server, in their order."""
        label = self._serving().label
        body = orjson.dumps(render_scoring(tokens))
        async with self._http.session() as session:
            alive = [self._servers[i] for i in self._balance.alive]
            answers = await asyncio.gather(*(s.post(session, "/generate", body) for s in alive))
        return [parse_scoring(data, tokens, label=label) for data in answers]

    async def abort(self) -> None:
        """End what is in flight; returns once it has ended, or after a while.

        Said again until then: what a server has taken and not yet scheduled does not hear it.
        """
        self._cut.set()
        deadline = time.monotonic() + _ABORT_PATIENCE_S
        async with self._http.session() as session:
            while self._balance.num_in_flight and time.monotonic() < deadline:
                busy = [i for i in self._balance.alive if self._balance.samples_at(i)]
                posts = [self._servers[i].post(session, "/abort_request", _ABORT_ALL) for i in busy]
                await asyncio.gather(*posts, return_exceptions=True)
                await self._wait_idle(_ABORT_AGAIN_S)

    def metrics(self) -> dict[str, float]:
        """Means over the requests so far, and what the servers say of themselves now."""
        counts = self._counts
        num = max(counts.requests, 1)
        found = {
            "engine/requests": float(counts.requests),
            "engine/queue_time_mean": counts.queue_s / num,
            "engine/latency_mean": counts.latency_s / num,
            "engine/cached_token_share": counts.cached_tokens / max(counts.prompt_tokens, 1),
            "engine/retries": float(counts.retries),
            "engine/servers_lost": float(counts.servers_lost),
            "engine/waiting": float(self._balance.num_waiting),
            "engine/running": float(self._balance.num_in_flight),
        }
        return found | fold_loads([self._read_loads(i) for i in self._balance.alive])

    def stop(self) -> None:
        """Abort what runs, end the servers, and check that nothing of them is left."""
        if self._leader is not None:  # first: the other nodes' processes end with ours
            self._leader.stop()
        servers, self._servers, self._weights = self._servers, [], None
        self._balance = Balance(0, limit=self._options.concurrency)
        each([server.stop for server in servers])

    def _check_sampling(self, sampling: Sampling) -> None:
        """ConfigError for what would end the server: an assertion in SGLang 0.5.17."""
        options = self._options
        seeded = options.deterministic or options.arguments.get("enable_deterministic_inference")
        if sampling.min_p > 0 and seeded:
            raise ConfigError(
                f"rollout_min_p = {sampling.min_p:g} cannot be with enable_deterministic_inference",
                hint="set it to 0, and use rollout_top_p",
            )

    def _make_server(
        self, index: int, environment: dict[str, str], weights: Weights, dtype: str | None
    ) -> SglangServer:
        options, leader = self._options, self._leader

        def render(port: int, identity: str) -> list[str]:
            place = None
            if leader is not None:
                meet = find_free_port(avoid=frozenset({port}))
                place = Place(0, options.num_nodes, f"{options.leader_host}:{meet}")
                leader.announce(place.address)
            return render_command(
                options,
                weights,
                port=port,
                dtype=dtype,
                identity=identity,
                replica=index,
                place=place,
            )

        return SglangServer(
            render,
            environment=environment,
            log_path=plan_log_path(options, index),
            name=f"SGLang server {index}" if options.replicas > 1 else "the SGLang server",
            start_timeout_s=options.start_timeout_s,
            request_timeout_s=options.request_timeout_s,
        )

    def _serving(self) -> Weights:
        if self._weights is None:
            raise EngineError("the SGLang engine serves nothing: not started, or stopped")
        return self._weights

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        ask: Ask,
        body: bytes,
        *,
        parse: Callable[[bytes], T],
        is_cut: Callable[[], bool],
    ) -> T | None:
        """The parsed answer of some server; None if it was cut off before any was asked."""
        asked = time.monotonic()
        is_second = has_hung = False
        while True:
            data: bytes | None = None
            async with self._balance.place(ask) as index:
                self._serving()  # it may have been stopped while this waited
                if is_cut():
                    return None
                server, began = self._servers[index], time.monotonic()
                try:
                    data = await server.post(session, "/generate", body)
                    self._counts.queue_s += began - asked
                    self._counts.latency_s += time.monotonic() - began
                except ServerDied as error:
                    self._lose(index, server, error)
                except ServerHangs as error:
                    if has_hung:  # it is the request that takes so long, not the server
                        raise
                    has_hung = True
                    self._lose(index, server, error)
                except ServerFailed as error:
                    if is_second:
                        raise
                    log.warning("%s; trying once more", error)
                    is_second, ask = True, Ask(ask.samples, ask.tokens, ask.session, index)
                    self._counts.retries += 1
            if data is not None:
                # Its place is free: whoever waited for it is sent before this is read.
                await asyncio.sleep(0)
                return parse(data)

    def _lose(self, index: int, server: SglangServer, error: EngineError) -> None:
        """Go on without a server; raises `error` if it was the last one."""
        is_new = self._balance.lose(index, why=str(error))
        if is_new:
            self._counts.servers_lost += 1
            ending = asyncio.get_running_loop().run_in_executor(None, server.kill)
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        if not self._balance.alive:
            raise error
        if is_new:
            left = len(self._balance.alive)
            log.warning("%s; its requests go to the other %d", error, left)

    async def _wait_idle(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._balance.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _read_loads(self, index: int) -> list[dict[str, Any]]:
        try:
            _, answer = self._servers[index].call("GET", "/v1/loads?include=core", timeout_s=5)
        except EngineError as error:
            log.info("no load figures: %s", error)
            return []
        return list(answer.get("loads") or [])


def each(works: Sequence[Callable[[], None]], *, give_up: Callable[[], None] | None = None) -> None:
    """Do all at once; raises the first error once all have ended.

    give_up: called at an error, so that the others need not end by themselves.
    """
    if not works:
        return
    with ThreadPoolExecutor(len(works), "sglang") as pool:
        try:
            for future in as_completed([pool.submit(work) for work in works]):
                future.result()
        except BaseException:
            if give_up is not None:
                give_up()
            raise


def fold_loads(loads: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """What the workers of all servers say of themselves, as one figure each."""
    workers = [load for server in loads for load in server]
    if not workers:
        return {}
    return {
        "engine/cache_hit_rate": sum(w.get("cache_hit_rate") or 0.0 for w in workers)
        / len(workers),
        "engine/server_running": float(sum(w.get("num_running_reqs") or 0 for w in workers)),
        "engine/server_waiting": float(sum(w.get("num_waiting_reqs") or 0 for w in workers)),
        "engine/token_usage": max(float(w.get("token_usage") or 0.0) for w in workers),
    }
