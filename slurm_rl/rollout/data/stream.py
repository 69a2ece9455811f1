"""The run's stream of prompts: visits in turn, from a cursor on.

Owns the order: from which data set the next visit comes, which row of it, and what is skipped. All
of it is a function of the settings, the data and the cursor, so that 10 visits and then 10 are
the same as 20.

A prompt that is too long is skipped when it is met, so that no job tokenizes the whole set first.
It takes up a position, but no visit.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from slurm_rl.errors import DataError
from slurm_rl.rollout.data.cursor import Cursor, Place
from slurm_rl.rollout.data.mixture import Schedule
from slurm_rl.rollout.data.rows import Prompt, Source
from slurm_rl.rollout.data.templates import Tokenize
from slurm_rl.seeds import Permutation, permutation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Visit:
    """A prompt that was taken. `group_index` is its number in the run, over all data sets."""

    group_index: int
    prompt: Prompt
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """Most tokens of a prompt, and the words for it; None: any number."""

    max_tokens: int | None = None
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Feed:
    """One data set as a stream uses it. seed: of its orders; None: rows in turn."""

    name: str
    source: Source
    share: Fraction
    tokenize: Tokenize
    seed: int | None


def plan_limit(*, max_prompt_len: int | None, max_context_len: int | None) -> Limit:
    """The tighter of the two: a prompt must leave room for one token in the context."""
    room = None if max_context_len is None else max_context_len - 1
    if max_prompt_len is not None and (room is None or max_prompt_len <= room):
        rule = f"is longer than rollout.rollout_max_prompt_len = {max_prompt_len}"
        return Limit(max_prompt_len, rule)
    if room is not None:
        return Limit(room, f"leaves no room in a context of {max_context_len} tokens")
    return Limit()


class Stream:
    """Visits from `start` on. `start` is the cursor that it was opened at."""

    def __init__(self, feeds: Sequence[Feed], start: Cursor, *, limit: Limit) -> None:
        self.start = start
        self.num_skipped = 0
        self._feeds = list(feeds)
        self._limit = limit
        self._schedule = Schedule([feed.share for feed in feeds])
        places = [start.sets[feed.name] for feed in feeds]
        #: Where each data set is; plain numbers, since they change with every row.
        self._epochs = [place.epoch for place in places]
        self._positions = [place.position for place in places]
        self._visits = [place.visits for place in places]
        self._orders: list[tuple[int, Permutation] | None] = [None] * len(self._feeds)
        #: Of each visit since the start: its data set, and the place in it afterwards.
        self._taken = (array("L"), array("Q"), array("Q"))

    @property
    def cursor(self) -> Cursor:
        """The place after what was taken."""
        places = map(Place, self._epochs, self._positions, self._visits)
        sets = {feed.name: place for feed, place in zip(self._feeds, places, strict=True)}
        return Cursor(sum(self._visits), sets, self.start.data_fingerprint)

    def __iter__(self) -> Iterator[Visit]:
        while True:  # the data begins again when it ends
            yield self.take()

    def take(self) -> Visit:
        """The next visit. Raises DataError if a whole epoch of its data set is too long."""
        index = self._schedule.pick(self._visits)
        feed = self._feeds[index]
        # So many in a row hold a whole epoch, wherever they begin.
        for _ in range(2 * feed.source.num_rows - 1):
            prompt = feed.source.read(self._row(index, *self._next_place(index)))
            tokens = feed.tokenize(prompt)
            if self._limit.max_tokens is None or len(tokens) <= self._limit.max_tokens:
                return Visit(self._enter(index), prompt, tuple(tokens))
            self.num_skipped += 1
        raise DataError(f"{feed.source.name}: every prompt {self._limit.rule}")

    def pass_by(self) -> int:
        """Take the next visit without opening it (`visit` does); its number.

        Where prompts have a limit it has to be read all the same: it may be one to skip.
        """
        if self._limit.max_tokens is not None:
            return self.take().group_index
        index = self._schedule.pick(self._visits)
        self._next_place(index)
        return self._enter(index)

    def visit(self, group_index: int) -> Visit:
        """A visit that was taken, once more."""
        num = group_index - self.start.visits
        if not 0 <= num < len(self._taken[0]):
            raise IndexError(group_index)
        index, epoch, after = (column[num] for column in self._taken)
        feed = self._feeds[index]
        if after == 0:
            epoch, after = epoch - 1, feed.source.num_rows
        prompt = feed.source.read(self._row(index, epoch, after - 1))
        return Visit(group_index, prompt, tuple(feed.tokenize(prompt)))

    def cursor_after(self, group_index: int) -> Cursor:
        """The cursor just after a visit that this stream gave; before the first one, its start."""
        num = group_index + 1 - self.start.visits
        if not 0 <= num <= len(self._taken[0]):
            raise IndexError(group_index)
        chosen, epochs, positions = (column[:num] for column in self._taken)
        sets = dict(self.start.sets)
        for index, feed in enumerate(self._feeds):
            if count := chosen.count(index):
                last = next(k for k in reversed(range(num)) if chosen[k] == index)
                sets[feed.name] = Place(
                    epochs[last], positions[last], sets[feed.name].visits + count
                )
        return Cursor(group_index + 1, sets, self.start.data_fingerprint)

    def _row(self, index: int, epoch: int, position: int) -> int:
        """The row at a place of a data set."""
        feed = self._feeds[index]
        if feed.seed is None:
            return position
        order = self._orders[index]
        if order is None or order[0] != epoch:
            made = permutation(feed.source.num_rows, seed=feed.seed, epoch=epoch)
            order = self._orders[index] = (epoch, made)
        return order[1][position]

    def _next_place(self, index: int) -> tuple[int, int]:
        """Epoch and position of a data set's next row; its place moves on by one."""
        epoch, position = self._epochs[index], self._positions[index]
        is_last = position + 1 == self._feeds[index].source.num_rows
        self._epochs[index] = epoch + is_last
        self._positions[index] = 0 if is_last else position + 1
        return epoch, position

    def _enter(self, index: int) -> int:
        """Count a visit of a data set as taken; its number."""
        chosen, epochs, positions = self._taken
        number = self.start.visits + len(chosen)
        self._visits[index] += 1
        chosen.append(index)
        epochs.append(self._epochs[index])
        positions.append(self._positions[index])
        return number
