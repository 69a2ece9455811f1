"""Which server a request goes to: no server, no network, a loop and futures."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import EngineError
from slurm_rl.rollout.sglang.balance import Ask, Balance, Load, choose_server, home_server


@pytest.mark.parametrize(
    ("loads", "samples", "expected"),
    [
        ([(0, 0), (0, 0)], 4, 0),
        ([(4, 9), (2, 99)], 4, 1),
        ([(4, 9), (4, 8)], 4, 1),
        ([(6, 0), (8, 0)], 4, None),
        ([(6, 0), (5, 0)], 3, 1),
        ([(1, 0), (0, 0)], 99, 1),
        ([(1, 0), (1, 0)], 99, None),
        ([], 1, None),
    ],
)
def test_the_least_loaded_with_room(
    loads: list[tuple[int, int]], samples: int, expected: int | None
) -> None:
    found = {i: Load(*load) for i, load in enumerate(loads)}
    assert choose_server(found, samples, limit=8) == expected


def test_only_the_sessions_of_a_lost_server_move() -> None:
    names = [f"session-{i}" for i in range(400)]
    before = {name: home_server(name, range(4)) for name in names}
    sizes = [list(before.values()).count(i) for i in range(4)]
    assert min(sizes) > 60
    after = {name: home_server(name, [0, 1, 3]) for name in names}
    assert {before[n] for n in names if before[n] != after[n]} == {2}


asks = st.lists(
    st.builds(Ask, st.integers(1, 6), st.integers(0, 9), st.sampled_from(["", "", "a", "b"])),
    min_size=1,
    max_size=20,
)


@settings(max_examples=200, deadline=None)
@given(asks, st.integers(1, 3), st.integers(2, 8), st.data())
def test_limits_order_and_progress(
    wanted: list[Ask], num: int, limit: int, data: st.DataObject
) -> None:
    """Whatever order requests end in: no server holds more than its limit (but one that is too
    large, alone), nobody is overtaken by one that asked later for the same, and all are served."""

    async def play() -> list[int]:
        balance = Balance(num, limit=limit)
        held: dict[int, list[int]] = {i: [] for i in range(num)}
        served: list[int] = []
        ends = [asyncio.Event() for _ in wanted]

        async def use(i: int) -> None:
            async with balance.place(wanted[i]) as server:
                held[server].append(i)
                served.append(i)
                sizes = [wanted[k].samples for k in held[server]]
                assert sum(sizes) <= limit or len(sizes) == 1
                if wanted[i].session:
                    assert server == home_server(wanted[i].session, range(num))
                await ends[i].wait()
                held[server].remove(i)

        tasks = [asyncio.ensure_future(use(i)) for i in range(len(wanted))]
        while not all(task.done() for task in tasks):
            for _ in range(4):
                await asyncio.sleep(0)
            running = [i for server in held.values() for i in server]
            assert running, "some wait, and nothing runs"
            ends[data.draw(st.sampled_from(sorted(running)))].set()
            for _ in range(4):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert (balance.num_in_flight, balance.num_waiting) == (0, 0)
        return served

    served = asyncio.run(play())
    assert sorted(served) == list(range(len(wanted)))
    for session in ("", "a", "b"):
        same = [i for i in served if wanted[i].session == session]
        assert same == sorted(same)


def test_a_session_that_waits_holds_up_its_own_server_alone() -> None:
    async def play() -> None:
        balance = Balance(2, limit=2)
        home = home_server("s", range(2))
        async with balance.place(Ask(2, session="s")) as first:
            assert first == home
            second = asyncio.ensure_future(take(balance, Ask(2, session="s")))
            await asyncio.sleep(0)
            assert await asyncio.wait_for(take(balance, Ask(2)), 1) == 1 - home
            assert not second.done()
        assert await second == home

    asyncio.run(play())


async def take(balance: Balance, ask: Ask) -> int:
    async with balance.place(ask) as server:
        await asyncio.sleep(0)
        return server


def test_who_waits_for_a_lost_server_moves_and_the_last_one_ends_all() -> None:
    async def play() -> None:
        balance = Balance(2, limit=1)
        home = home_server("s", range(2))
        async with balance.place(Ask(1, session="s")):
            waiting = asyncio.ensure_future(take(balance, Ask(1, session="s")))
            await asyncio.sleep(0)
            assert balance.lose(home, why="it died") is True
            assert balance.lose(home, why="again") is False
            assert await asyncio.wait_for(waiting, 1) == 1 - home
        async with balance.place(Ask(1)):
            waiting = asyncio.ensure_future(take(balance, Ask(1)))
            await asyncio.sleep(0)
            balance.lose(1 - home, why="it died too")
            with pytest.raises(EngineError, match="it died too"):
                await asyncio.wait_for(waiting, 1)
        with pytest.raises(EngineError, match="it died too"):
            await take(balance, Ask(1))

    asyncio.run(play())


def test_a_server_that_failed_is_avoided_while_there_is_another() -> None:
    async def play() -> None:
        balance = Balance(2, limit=4)
        assert await take(balance, Ask(1, avoid=0)) == 1
        balance.lose(1, why="")
        assert await take(balance, Ask(1, avoid=0)) == 0

    asyncio.run(play())


@pytest.mark.parametrize("when", ["waiting", "given"])
def test_a_caller_who_leaves_takes_nothing_along(when: str) -> None:
    async def play(then: Callable[[Balance], object] = lambda balance: None) -> None:
        balance = Balance(1, limit=1)
        holder = asyncio.ensure_future(hold(balance))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(take(balance, Ask(1)))
        await asyncio.sleep(0)
        if when == "given":
            holder.cancel()
            await asyncio.sleep(0)  # its place is given on, and the taker has not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        assert balance.num_in_flight == 0
        assert await asyncio.wait_for(take(balance, Ask(1)), 1) == 0

    asyncio.run(play())


async def hold(balance: Balance) -> None:
    async with balance.place(Ask(1)):
        await asyncio.Event().wait()
