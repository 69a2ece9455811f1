"""Groups from the supply to the journal, on one event loop: generate, grade, filter, close.

A worker takes a group, generates it, has it graded, appends it to the journal and takes the next
one. Twice as many are in generation as the engine has room for, and as many in grading, so that
neither a slow reward nor our own work on an answer leaves the engine idle. A watcher reads what
other attempts and shards have done. As soon as the batch can be closed the engine is told to stop,
and what was under way comes back cut off.

It decides nothing: which group comes next and when the batch is closed is the supply's, what a
reward is worth the grader's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.errors import EngineError
from slurm_rl.rollout.closing import Close, Desk
from slurm_rl.rollout.engine import Engine
from slurm_rl.rollout.filters import Filter
from slurm_rl.rollout.grading import GivenUp, Grade, grade_open
from slurm_rl.rollout.groups import PlannedGroup
from slurm_rl.rollout.journal import Journal, JournalReader
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.supply import Supply

log = logging.getLogger(__name__)

#: How long a group that another shard's decision admits is looked for before it is made again.
_LOOK_FOR_S = 10.0
#: How long cut-off answers may take to come back; what has not come by then starts afresh.
_CUT_OFF_S = 60.0

Made = list[Sample] | GivenUp
Generate = Callable[[PlannedGroup], Awaitable[Made]]


@dataclass(frozen=True, slots=True)
class Watch:
    """Where other attempts and shards leave their journals, and where all agree on the close.

    attempts: called at each look; directories of attempts, also of those that are over.
    desk:     None where there is nobody to agree with.
    """

    attempts: Callable[[], Iterable[Path]]
    desk: Desk | None = None
    poll_s: float = 1.0
    close_after_s: float | None = None


@dataclass
class Outcome:
    """What a pipeline did: the close, the groups made here, and the samples that were cut off."""

    close: Close
    num_made: int = 0
    num_tokens: int = 0
    generate_s: float = 0.0
    cut_off: dict[int, list[Sample]] = field(default_factory=dict)


class Pipeline:
    """One rollout on this process's engine. `settle` first; `run` if that was not enough."""

    def __init__(self, supply: Supply, watch: Watch, *, keep: Filter | None = None) -> None:
        self._supply = supply
        self._watch = watch
        self._keep = keep
        self._reader = JournalReader()
        self._began = time.monotonic()
        self._close: Close | None = None
        self._decided: Close | None = None
        self._lacking_since: float | None = None
        self._num_made = self._num_tokens = 0
        self._cut_off: dict[int, list[Sample]] = {}

    def settle(self) -> Close | None:
        """The close, if the journals that lie there already are enough for it."""
        self._look()
        self._supply.catch_up()
        return self._settled(asks=True)

    async def run(
        self, engine: Engine, generate: Generate, grade: Grade, *, journal_path: Path
    ) -> Outcome:
        """Generate until the batch is closed. Raises what engine, rewards and rule raise."""
        began = time.monotonic()
        with Journal(journal_path) as journal:
            # One place a group: samples of a group are asked for together. As many more wait in
            # the engine, so that the next ones leave as soon as there is room for them.
            num_slots = max(1, 2 * engine.concurrency // self._supply.group_size)
            floor = _Floor(_Slots(num_slots), generate, grade, journal)
            tasks = [asyncio.create_task(self._work(floor)) for _ in range(2 * num_slots)]
            tasks.append(asyncio.create_task(self._look_often(floor)))
            try:
                await self._until_closed(tasks, floor)
            finally:
                await self._end(engine, tasks, floor)
        assert self._close is not None
        seconds = time.monotonic() - began
        return Outcome(self._close, self._num_made, self._num_tokens, seconds, self._cut_off)

    async def _until_closed(self, tasks: list[asyncio.Task[None]], floor: _Floor) -> None:
        closed = asyncio.create_task(floor.closed.wait())
        pending: set[asyncio.Task[object]] = {closed, *tasks}
        try:
            while not closed.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what went wrong there
        finally:
            closed.cancel()

    async def _end(self, engine: Engine, tasks: list[asyncio.Task[None]], floor: _Floor) -> None:
        """Cut off what is under way and wait for it, as long as that makes sense."""
        # Also after an error: a worker that waits for news may miss being cancelled (Python 3.11).
        floor.closed.set()
        floor.tell()
        if self._close is not None:
            await engine.abort()
            await asyncio.wait(tasks, timeout=_CUT_OFF_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- workers ------------------------------------------------------------------------------

    async def _work(self, floor: _Floor) -> None:
        while not floor.closed.is_set():
            async with floor.slots:
                group = None if floor.closed.is_set() else self._supply.take()
                made: Made = [] if group is None else await floor.generate(group)
            if group is None:
                await floor.wait(self._watch.poll_s)
                continue
            samples = [*made.samples] if isinstance(made, GivenUp) else made
            is_cut = any(sample.status == "aborted" for sample in samples)
            if is_cut and not floor.closed.is_set():
                raise EngineError(
                    f"group {group.group_index}: an answer came back as aborted, but nothing was"
                    " aborted",
                    hint="a generate function of yours says `failed` of what it gives up",
                )
            if floor.closed.is_set():
                self._cut_off[group.group_index] = samples
                self._supply.give_back(group.group_index)
                continue
            self._num_tokens += sum(sample.response_length for sample in samples)
            await self._finish(group, made, floor)
            await asyncio.sleep(0)  # an engine that answers at once must not shut others out

    async def _finish(self, group: PlannedGroup, made: Made, floor: _Floor) -> None:
        graded = await grade_open(made, floor.grade)
        keep, reason = graded.outcome != "dropped", ""
        if not keep:  # the message is in the log: it has paths, which no commit may depend on
            reason = "generation failed" if isinstance(made, GivenUp) else "reward failed"
        index = group.group_index
        is_asked = graded.outcome == "graded" and not self._supply.is_wanted(index)
        if is_asked and self._keep is not None:
            keep, reason = await self._keep(graded.samples)
            if self._supply.is_wanted(index):  # decided by others meanwhile
                keep, reason = True, ""
        entry = floor.journal.append(
            group.key, graded.samples, outcome=graded.outcome, keep=keep, reason=reason
        )
        self._num_made += 1
        if self._supply.absorb(entry) or self._is_late():
            self._conclude(floor)

    def _conclude(self, floor: _Floor, *, asks: bool = False) -> None:
        """See whether the batch can be closed now, and wake those who wait for news."""
        if self._settled(asks=asks) is not None:
            floor.closed.set()
        floor.tell()

    # -- the others ---------------------------------------------------------------------------

    async def _look_often(self, floor: _Floor) -> None:
        while not floor.closed.is_set():
            try:
                await asyncio.wait_for(floor.closed.wait(), self._watch.poll_s)
                return
            except TimeoutError:
                pass
            self._look()
            self._conclude(floor, asks=True)

    def _look(self) -> None:
        """Take in what others have journalled."""
        for entry in self._reader.poll(self._watch.attempts()):
            self._supply.absorb(entry)

    def _is_late(self) -> bool:
        limit_s = self._watch.close_after_s
        return limit_s is not None and time.monotonic() - self._began > limit_s

    def _settled(self, *, asks: bool = False) -> Close | None:
        """The close of the batch, once all of our own part of it is there.

        asks: look whether another shard has decided, not only whether we can.
        """
        if self._close is None:
            stands = self._decide(asks=asks)
            if stands is not None and not self._lacks(stands):
                self._close = stands
        return self._close

    def _decide(self, *, asks: bool) -> Close | None:
        desk = self._watch.desk
        if self._decided is None and desk is not None and asks:
            self._decided = desk.read()
        if self._decided is None:
            mine = self._supply.close(is_late=self._is_late())
            self._decided = mine if mine is None or desk is None else desk.publish(mine)
        return self._decided

    def _lacks(self, close: Close) -> bool:
        """Whether groups of ours are missing that another shard's decision admits."""
        self._supply.adopt(close)
        missing = self._supply.missing(close)
        if missing and self._lacking_since is None:
            self._lacking_since = time.monotonic()
        since = self._lacking_since
        if missing and since is not None and time.monotonic() - since > _LOOK_FOR_S:
            self._supply.ask_for(missing)
        return bool(missing)


class _Slots:
    """Room for so many workers at a time, in the order in which they came.

    A semaphore that hands a place on at once: asyncio's own (Python 3.11) looks through all that
    wait, which with hundreds of workers is more than all the rest of the loop.
    """

    def __init__(self, num: int) -> None:
        self._num_free = num
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it had been handed on already
                self._hand_on()
            raise

    async def __aexit__(self, *exception: object) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1


class _Floor:
    """What the workers of one run share."""

    def __init__(self, slots: _Slots, generate: Generate, grade: Grade, journal: Journal) -> None:
        self.slots = slots
        self.generate = generate
        self.grade = grade
        self.journal = journal
        self.closed = asyncio.Event()
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Wake the workers that found nothing to do."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until there are news, or for `timeout_s`."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            pass
