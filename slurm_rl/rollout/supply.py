"""What a shard works on: its own visits in the order of the data, then what others have not done.

Owns the ledger of the rollout and what is known of each group: planned, under way here, or done,
and then where its samples lie. It takes visits from the stream as late as it can, so that little
is held. Visits are dealt to the shards by their number; one of another shard's is only read when
it is to be made here, and its group is known by its number and by what all keys share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from slurm_rl.rollout.carry import Carried
from slurm_rl.rollout.closing import Close
from slurm_rl.rollout.data import Visit
from slurm_rl.rollout.groups import PlannedGroup, Planner
from slurm_rl.rollout.journal import Entry
from slurm_rl.rollout.ledger import Ledger
from slurm_rl.rollout.samples import Sample


class Visits(Protocol):
    """Where new visits come from: `data.Stream`, or every row once."""

    @property
    def start(self) -> Cursor: ...
    def take(self) -> Visit: ...
    def pass_by(self) -> int: ...
    def visit(self, group_index: int) -> Visit: ...
    def cursor_after(self, group_index: int) -> Cursor: ...


class Cursor(Protocol):
    """A place in the data; `visits` were taken before it."""

    @property
    def visits(self) -> int: ...
    def as_dict(self) -> dict[str, Any]: ...


class Supply:
    """See the module.

    carried: what the rollout before handed on; these visits come first.
    entries: number of a kept group of ours -> where its samples lie.
    """

    def __init__(
        self,
        *,
        carried: Sequence[Carried],
        stream: Visits,
        planner: Planner,
        ledger: Ledger,
        group_size: int = 1,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        self.group_size = group_size
        self._carried = carried
        self._stream = stream
        self._planner = planner
        self._shard, self._num_shards = shard, num_shards
        self._num_entered = 0
        #: Entered, without a verdict; None: another shard's, which was not read.
        self._open: dict[int, PlannedGroup | None] = {}
        self._under_way: set[int] = set()
        self._ready: deque[int] = deque()  # entered, ours, and not begun
        self._wanted: set[int] | None = None  # all that is still to be made, once it is closed
        self._given_up: set[int] = set()  # of those: a reward failed once more
        self._dropped: dict[int, str] = {}  # number -> key
        self._spare: dict[int, Entry] = {}  # kept copies of groups that were dropped here
        self._found: dict[str | int, Entry] = {}  # not entered yet; others' by number
        self.ledger = ledger
        self.entries: dict[int, Entry] = {}
        # All of them at once: a batch that closes early must know what carries over again.
        for _ in carried:
            self._enter()

    def is_own(self, group_index: int) -> bool:
        return group_index % self._num_shards == self._shard

    # -- work ---------------------------------------------------------------------------------

    def take(self) -> PlannedGroup | None:
        """The next group to generate: our own, else one that another shard has not done, from the
        far end. None: nothing to do now. It counts as under way here."""
        group = None if self._wanted is not None else self._take_own()
        group = group or self._take_left()
        if group is not None:
            self._under_way.add(group.group_index)
        return group

    def _take_own(self) -> PlannedGroup | None:
        while True:
            while self._ready:
                group = self._open.get(self._ready.popleft())
                if group is not None:
                    return group
            if not self.ledger.wants_more():
                return None
            self._enter()

    def _take_left(self) -> PlannedGroup | None:
        """What others have not done, or what came back from here, from the far end."""
        for index in reversed(self._open):
            if index not in self._under_way and (self._wanted is None or index in self._wanted):
                group = self._open[index]
                if group is None:
                    group = self._open[index] = self._planner.plan(self._stream.visit(index))
                return group
        return None

    def _enter(self) -> bool:
        """Enter the next visit; whether a journal holds its group already."""
        number, self._num_entered = self._num_entered, self._num_entered + 1
        index, group = self._read(number)
        self.ledger.enter(index)
        self._open[index] = group
        entry = self._found.pop(index if group is None else group.key, None)
        if entry is not None:
            self.absorb(entry)
        elif self.is_own(index):
            self._ready.append(index)
        return entry is not None

    def _read(self, number: int) -> tuple[int, PlannedGroup | None]:
        """The visit that is entered as `number`, and its group unless another shard makes it."""
        if number < len(self._carried):
            group = self._resume(*self._carried[number])
        elif self.is_own(self._num_visits - 1):
            group = self._planner.plan(self._stream.take())
        else:
            return self._stream.pass_by(), None
        return group.group_index, group

    @property
    def _num_visits(self) -> int:
        """Visits of the run up to the last one that was entered."""
        return self._stream.start.visits + self._num_entered - len(self._carried)

    def _resume(self, visit: Visit, samples: Sequence[Sample]) -> PlannedGroup:
        return self._planner.resume(visit, samples) if samples else self._planner.plan(visit)

    def catch_up(self) -> None:
        """Enter visits as long as the batch wants more and the journals hold them."""
        while self.ledger.wants_more() and self._enter():
            pass

    # -- verdicts -----------------------------------------------------------------------------

    def absorb(self, entry: Entry) -> bool:
        """A journal holds a group; whether that is news."""
        index = entry.group_index
        if index not in self._open or not self._is_of(entry, self._open[index]):
            self._remember(entry)
            return False
        del self._open[index]
        self._under_way.discard(index)
        if self.is_own(index):  # of the others' groups the verdict is enough
            if entry.keep:
                self.entries[index] = entry
            elif self.is_wanted(index):
                self._given_up.add(index)
            else:
                self._dropped[index] = entry.key
        return self.ledger.judge(index, keep=entry.keep, reason=entry.reason)

    def _is_of(self, entry: Entry, group: PlannedGroup | None) -> bool:
        """Whether a journal's group is the one that stands here under its number."""
        return self._planner.is_alike(entry.key) if group is None else group.key == entry.key

    def _remember(self, entry: Entry) -> None:
        """A copy of a group that is not open: not entered yet, or done already.

        A kept and graded one is preferred: two copies may have got different verdicts, and what
        the stage's decision admits must be there.
        """
        index, done = entry.group_index, self.entries.get(entry.group_index)
        if done is not None:
            if done.key == entry.key and _rank(entry) > _rank(done):
                self.entries[index] = entry
        elif self._dropped.get(index) == entry.key:
            if entry.keep:
                self._spare[index] = entry
        elif self._may_enter(entry):
            name = entry.key if self.is_own(index) else index
            known = self._found.get(name)
            if known is None or _rank(entry) > _rank(known):
                self._found[name] = entry

    def _may_enter(self, entry: Entry) -> bool:
        """Whether its group is still to be entered, if the batch goes so far."""
        return entry.group_index >= self._num_visits and self._planner.is_alike(entry.key)

    def put(self, entry: Entry) -> None:
        """Another word on a group that is done: it was graded after all, or could not be."""
        self.entries[entry.group_index] = entry

    def give_back(self, group_index: int) -> None:
        """A group that was taken did not come to its end here."""
        self._under_way.discard(group_index)

    # -- closing ------------------------------------------------------------------------------

    def close(self, *, is_late: bool) -> Close | None:
        """How the batch can be closed by what is known here; None: not yet."""
        decision = self.ledger.decide(is_late=is_late)
        if decision is None:
            return None
        first, num = self._stream.start, decision.num_taken
        after = self._stream.cursor_after(first.visits + num - 1) if num else first
        return Close(decision, after.as_dict())

    def adopt(self, close: Close) -> None:
        """Another shard has closed the batch: enter all that it had taken."""
        self._wanted = self._wanted or set()
        while self._num_entered < len(self._carried) + close.decision.num_taken:
            self._enter()

    def ask_for(self, groups: Iterable[int]) -> None:
        """Have these made again, and nothing else."""
        self._wanted = set(groups)

    def is_wanted(self, group_index: int) -> bool:
        """Whether the decision admits a group that has to be made again, whatever a filter says."""
        return self._wanted is not None and group_index in self._wanted

    def missing(self, close: Close) -> list[int]:
        """Our own admitted groups that no journal is known to hold, ready to be made again."""
        lacking = []
        for index in filter(self.is_own, close.decision.admitted):
            if index in self._spare and index not in self.entries:
                self.entries[index] = self._spare[index]
            if index not in self.entries and index not in self._given_up:
                lacking.append(index)
        samples = {visit.group_index: had for visit, had in self._carried}
        for visit in self._visits(index for index in lacking if index not in self._open):
            index = visit.group_index
            self._open[index] = self._resume(visit, samples.get(index, ()))
        return lacking

    def carried_visits(self, close: Close) -> list[Visit]:
        """The visits of our own groups that carry over."""
        return self._visits(filter(self.is_own, close.decision.carried))

    def _visits(self, wanted: Iterable[int]) -> list[Visit]:
        """Visits of this rollout, also of groups that are done and were let go."""
        found = {visit.group_index: visit for visit, _ in self._carried}
        return [found.get(i) or self._stream.visit(i) for i in sorted(wanted)]


def _rank(entry: Entry) -> tuple[bool, bool]:
    """Which copy of a group is of more use."""
    return entry.keep, entry.outcome == "graded"
