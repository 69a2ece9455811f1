from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from toy.services import FakeService, later

from slurm_rl.config.rollout_schema import Service
from slurm_rl.errors import RewardError
from slurm_rl.rollout.services import (
    Clients,
    Health,
    Unavailable,
    ask_health,
    backoff_s,
    fold_health,
    read_address,
    wait_until_healthy,
)

NOWHERE = "http://127.0.0.1:9"


def ask(service: Service, *, has_health: bool = True, then: Any = None) -> Any:
    """One request to a service, on a loop of its own."""

    async def run() -> Any:
        clients = Clients()
        try:
            client = clients.get("rm", service, has_health=has_health)
            return await client.post({"a": 1}, path="/score")
        finally:
            await clients.close()

    return asyncio.run(run())


looks = st.lists(st.tuples(st.booleans(), st.floats(0, 30)), max_size=30)


@given(looks, st.floats(0.1, 60))
def test_a_service_is_down_after_that_long_without_a_healthy_answer(
    seen: list[tuple[bool, float]], down_after_s: float
) -> None:
    """Against the words of the promise: down if the time since the first bad look after the last
    good one is at least `down_after_s`."""
    health, now, first_bad = Health(), 0.0, None
    for is_healthy, pause in seen:
        now += pause
        health = fold_health(health, is_healthy=is_healthy, now=now, down_after_s=down_after_s)
        first_bad = None if is_healthy else now if first_bad is None else first_bad
        if first_bad is None:
            assert health.state == "healthy"
        else:
            assert health.state == ("down" if now - first_bad >= down_after_s else "suspect")


@given(st.integers(1, 2000))
def test_waits_grow_and_stay_bounded(tries: int) -> None:
    assert 0.18 <= backoff_s(tries) <= 37.5
    assert backoff_s(tries + 3) > backoff_s(tries) or backoff_s(tries) > 20


def test_the_address_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    service = Service(url_file=str(file))
    assert read_address(service) is None
    assert not ask_health(service)
    file.write_text("\n")
    assert read_address(service) is None
    file.write_text(" http://a:1/ \n# by the launcher\n")
    assert read_address(service) == "http://a:1"
    assert read_address(Service(url="http://b/")) == "http://b"


def test_an_answer_is_json_as_the_service_gave_it() -> None:
    async def run() -> None:
        async with FakeService(lambda payload: {"score": 0.5}) as server:
            clients = Clients()
            client = clients.get("rm", Service(url=server.url))
            assert await client.post({"a": 1}, path="/score") == {"score": 0.5}
            assert server.payloads == [("/score", {"a": 1})]
            assert clients.get("rm", Service(url=server.url)) is client
            await clients.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (web.Response(status=404, text="no such\nmodel"), "/score answered 404: no such model"),
        (web.Response(status=422, text="x" * 500), "x…; this request will never do"),
        (web.Response(text="<html>"), "answered what is no JSON: <html>"),
    ],
)
def test_an_answer_that_says_no_is_told_with_its_words(answer: web.Response, message: str) -> None:
    async def run() -> None:
        async with FakeService(lambda payload: answer) as server:
            clients = Clients()
            try:
                with pytest.raises(RewardError) as caught:
                    await clients.get("rm", Service(url=server.url)).post({}, path="/score")
                assert message in str(caught.value)
                assert len(server.payloads) == 1  # not asked again
            finally:
                await clients.close()

    asyncio.run(run())


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_what_should_pass_is_tried_again(status: int) -> None:
    answers = iter([status, status, 200])

    def answer(payload: dict[str, Any]) -> web.Response:
        return web.json_response(1.5, status=next(answers))

    async def run() -> None:
        async with FakeService(answer) as server:
            clients = Clients()
            client = clients.get("rm", Service(url=server.url, retries=2))
            assert await client.post({}) == 1.5
            await clients.close()

    asyncio.run(run())


def test_retries_end() -> None:
    async def run() -> None:
        async with FakeService(lambda payload: web.Response(status=500, text="oom")) as server:
            clients = Clients()
            client = clients.get("rm", Service(url=server.url, retries=1))
            with pytest.raises(RewardError, match=r"rm at .*: status 500: oom, 2 time\(s\)"):
                await client.post({})
            assert len(server.payloads) == 2
            await clients.close()

    asyncio.run(run())


def test_a_bare_address_that_nobody_answers_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"http://127.0.0.1:9/score: .*, 1 time\(s\)"):
        ask(Service(url=NOWHERE, retries=0), has_health=False)


def test_an_answer_that_never_comes_is_given_up() -> None:
    async def never(payload: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        async with FakeService(never) as server:
            clients = Clients()
            client = clients.get("rm", Service(url=server.url, timeout_s=0.3, retries=0))
            with pytest.raises(RewardError, match="TimeoutError"):
                await client.post({})
            await clients.close()

    asyncio.run(run())


def test_a_service_that_stays_away_is_down_and_spends_no_retries() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"service rm at http://127.0.0.1:9 is down since"):
        ask(Service(url=NOWHERE, retries=0, down_after_s=0.5))
    assert 0.4 < time.monotonic() - began < 60


def test_requests_wait_for_a_service_that_moves(tmp_path: Path) -> None:
    """It dies with requests in flight, and comes back elsewhere: all of them are answered."""
    file = tmp_path / "url"
    service = Service(url_file=str(file), retries=0, down_after_s=60.0)

    async def never(payload: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        old, new = FakeService(never), FakeService(lambda payload: payload["n"])
        file.write_text(await old.start())
        clients = Clients()
        client = clients.get("rm", service)

        async def move() -> None:
            await old.stop()
            await asyncio.sleep(0.5)
            file.write_text(await new.start())

        moving = asyncio.create_task(later(0.1, move))
        answers = await asyncio.gather(*(client.post({"n": n}) for n in range(50)))
        assert answers == list(range(50))
        assert client.state == "healthy"
        assert len(new.payloads) == 50
        await moving
        await clients.close()
        await new.stop()

    asyncio.run(run())


def test_a_service_that_is_down_is_found_again() -> None:
    async def run() -> None:
        server = FakeService(lambda payload: 1)
        await server.start()
        server.is_healthy, server.answer = False, lambda payload: web.Response(status=503)
        clients = Clients()
        client = clients.get("rm", Service(url=server.url, down_after_s=0.2))
        with pytest.raises(Unavailable):
            await client.post({})
        num_asked = len(server.payloads)
        with pytest.raises(Unavailable):  # at once: it was looked at just now
            await client.post({})
        assert len(server.payloads) == num_asked
        server.is_healthy, server.answer = True, lambda payload: 2
        await asyncio.sleep(0.3)
        assert await client.post({}) == 2
        await clients.close()
        await server.stop()

    asyncio.run(run())


def test_health_is_asked_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)  # never used

    async def run() -> None:
        async with FakeService(lambda payload: 1) as server:
            service = Service(url=server.url)
            assert await asyncio.to_thread(ask_health, service)
            server.is_healthy = False
            assert not await asyncio.to_thread(ask_health, service)
            assert not await wait_until_healthy(service, 0.2, poll_s=0.05)

            async def mend() -> None:
                server.is_healthy = True

            mending = asyncio.create_task(later(0.3, mend))
            assert await wait_until_healthy(service, 30.0, poll_s=0.05)
            await mending
            client = Clients()
            assert await client.get("rm", service).post({}) == 1
            await client.close()

    asyncio.run(run())
    assert not ask_health(Service(url="http://[broken"))
