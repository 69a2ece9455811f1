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
        self._places = [start.sets[feed.name] for feed in feeds]
        self._orders: list[tuple[int, Permutation] | None] = [None] * len(self._feeds)
        #: Of each visit since the start: its data set, and the place in it afterwards.
        self._taken = (array("L"), array("Q"), array("Q"))

    @property
    def cursor(self) -> Cursor:
        """The place after what was taken."""
        places = {feed.name: place for feed, place in zip(self._feeds, self._places, strict=True)}
        visits = sum(place.visits for place in self._places)
        return Cursor(visits, places, self.start.data_fingerprint)

    def __iter__(self) -> Iterator[Visit]:
        while True:  # the data begins again when it ends
            yield self.take()

    def take(self) -> Visit:
        """The next visit. Raises DataError if a whole epoch of its data set is too long."""
        counts = [place.visits for place in self._places]
        index = self._schedule.pick(counts)
        feed = self._feeds[index]
        # So many in a row hold a whole epoch, wherever they begin.
        for _ in range(2 * feed.source.num_rows - 1):
            prompt = feed.source.read(self._next_row(index))
            tokens = feed.tokenize(prompt)
            if self._limit.max_tokens is None or len(tokens) <= self._limit.max_tokens:
                return self._enter(index, Visit(sum(counts), prompt, tuple(tokens)))
            self.num_skipped += 1
        raise DataError(f"{feed.source.name}: every prompt {self._limit.rule}")

    def cursor_after(self, group_index: int) -> Cursor:
        """The cursor just after a visit that this stream gave; before the first one, its start."""
        num = group_index + 1 - self.start.visits
        if not 0 <= num <= len(self._taken[0]):
            raise IndexError(group_index)
        places = [self.start.sets[feed.name] for feed in self._feeds]
        for index, epoch, position in zip(*(column[:num] for column in self._taken), strict=True):
            places[index] = Place(epoch, position, places[index].visits + 1)
        sets = {feed.name: place for feed, place in zip(self._feeds, places, strict=True)}
        return Cursor(group_index + 1, sets, self.start.data_fingerprint)

    def reopen(self) -> Stream:
        """A stream of its own that gives the same visits again."""
        return Stream(self._feeds, self.start, limit=self._limit)

    def _next_row(self, index: int) -> int:
        """The row at a data set's place, which moves on by one."""
        place, feed = self._places[index], self._feeds[index]
        row, num_rows = place.position, feed.source.num_rows
        if feed.seed is not None:
            order = self._orders[index]
            if order is None or order[0] != place.epoch:
                made = permutation(num_rows, seed=feed.seed, epoch=place.epoch)
                order = self._orders[index] = (place.epoch, made)
            row = order[1][place.position]
        if place.position + 1 < num_rows:
            self._places[index] = Place(place.epoch, place.position + 1, place.visits)
        else:
            self._places[index] = Place(place.epoch + 1, 0, place.visits)
        return row

    def _enter(self, index: int, visit: Visit) -> Visit:
        place = self._places[index]
        self._places[index] = Place(place.epoch, place.position, place.visits + 1)
        for column, value in zip(self._taken, (index, place.epoch, place.position), strict=True):
            column.append(value)
        return visit
