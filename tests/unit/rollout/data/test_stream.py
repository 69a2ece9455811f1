from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import CorruptError, DataError
from slurm_rl.rollout.data.cursor import Cursor, Place, parse_cursor, start_cursor
from slurm_rl.rollout.data.mixture import to_shares
from slurm_rl.rollout.data.rows import Prompt
from slurm_rl.rollout.data.stream import Feed, Stream, Visit, plan_limit
from slurm_rl.types import canonical_json


@dataclass
class Words:
    """Row k is a word of `lengths[k]` letters."""

    name: str
    lengths: Sequence[int]
    fingerprint: str = "xxh3:words"

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def read(self, row: int) -> Prompt:
        return Prompt(row, "x" * self.lengths[row], None, {}, self.name)

    def check(self) -> None: ...
    def close(self) -> None: ...


def open_words(
    sets: dict[str, Sequence[int]],
    *,
    weights: Sequence[float] | None = None,
    at: Cursor | None = None,
    seed: int | None = 1,
    longest: int | None = None,
    context: int | None = None,
) -> Stream:
    shares = to_shares(weights or [1] * len(sets))
    feeds = [
        Feed(name, Words(name, lengths), share, lambda p: [7] * len(p.prompt), seed)
        for (name, lengths), share in zip(sets.items(), shares, strict=True)
    ]
    start = at or Cursor(0, {name: Place() for name in sets}, "xxh3:f")
    return Stream(feeds, start, limit=plan_limit(max_prompt_len=longest, max_context_len=context))


def take(stream: Stream, num: int) -> list[Visit]:
    return [stream.take() for _ in range(num)]


sizes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=8), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    sets=sizes,
    weights=st.lists(st.sampled_from([1.0, 2.0, 0.3, 7.0]), min_size=4, max_size=4),
    pieces=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    shuffle=st.booleans(),
    longest=st.none() | st.just(3),
)
def test_pieces_in_turn_are_one_long_stream(
    sets: list[list[int]],
    weights: list[float],
    pieces: list[int],
    shuffle: bool,
    longest: int | None,
) -> None:
    named = {f"s{k}": [*lengths, 1] for k, lengths in enumerate(sets)}  # one that fits in each
    own = weights[: len(named)]
    seed = 1 if shuffle else None
    whole = open_words(named, weights=own, seed=seed, longest=longest)
    expected = take(whole, sum(pieces))
    assert [visit.group_index for visit in expected] == list(range(sum(pieces)))
    cursor, found = None, []
    for piece in pieces:
        stream = open_words(named, weights=own, seed=seed, longest=longest, at=cursor)
        found += take(stream, piece)
        # As it goes through a commit.
        cursor = parse_cursor(stream.cursor.as_dict())
    assert (found, cursor) == (expected, whole.cursor)


@settings(deadline=None)
@given(sets=sizes, num=st.integers(0, 40), longest=st.none() | st.just(3))
def test_the_cursor_after_any_earlier_visit_is_what_it_was_then(
    sets: list[list[int]], num: int, longest: int | None
) -> None:
    named = {f"s{k}": [*lengths, 1] for k, lengths in enumerate(sets)}
    first = open_words(named, longest=longest)
    take(first, 5)
    stream = open_words(named, longest=longest, at=first.cursor)
    assert stream.start == first.cursor
    cursors = [stream.cursor]
    visits = []
    for _ in range(num):
        visits.append(stream.take())
        cursors.append(stream.cursor)
    assert [stream.cursor_after(4 + k) for k in range(num + 1)] == cursors
    for outside in (3, 5 + num):
        with pytest.raises(IndexError):
            stream.cursor_after(outside)
    assert [stream.visit(5 + k) for k in reversed(range(num))] == visits[::-1]
    for outside in (4, 5 + num):
        with pytest.raises(IndexError):
            stream.visit(outside)


@settings(deadline=None)
@given(
    sets=sizes,
    passed=st.lists(st.booleans(), max_size=40),
    shuffle=st.booleans(),
    longest=st.none() | st.just(3),
)
def test_a_visit_that_was_passed_by_is_the_one_that_would_have_been_taken(
    sets: list[list[int]], passed: list[bool], shuffle: bool, longest: int | None
) -> None:
    named = {f"s{k}": [*lengths, 1] for k, lengths in enumerate(sets)}
    seed = 1 if shuffle else None
    whole = open_words(named, seed=seed, longest=longest)
    expected = take(whole, len(passed))
    stream = open_words(named, seed=seed, longest=longest)
    for number, is_passed in enumerate(passed):
        assert number == (stream.pass_by() if is_passed else stream.take().group_index)
    assert [stream.visit(k) for k in range(len(passed))] == expected
    assert stream.cursor == whole.cursor


def test_each_epoch_visits_each_row_once_in_an_order_of_its_own() -> None:
    orders = []
    for seed in (1, 2):
        stream = open_words({"a": [1] * 30}, seed=seed)
        rows = [visit.prompt.row for visit in take(stream, 60)]
        assert sorted(rows[:30]) == sorted(rows[30:]) == list(range(30))
        orders += [tuple(rows[:30]), tuple(rows[30:])]
    assert len(set(orders)) == 4
    stream = open_words({"a": [1] * 5}, seed=None)
    assert [visit.prompt.row for visit in take(stream, 12)] == [0, 1, 2, 3, 4] * 2 + [0, 1]


def test_data_sets_of_a_mixture_have_epochs_of_their_own() -> None:
    stream = open_words({"small": [1] * 3, "large": [1] * 100}, weights=[1, 3])
    visits = take(stream, 400)
    of = {
        name: [v.prompt.row for v in visits if v.prompt.data_set == name]
        for name in ("small", "large")
    }
    assert (len(of["small"]), len(of["large"])) == (100, 300)
    assert sorted(of["large"][:100]) == list(range(100))
    assert sorted(of["small"][3:6]) == [0, 1, 2]
    assert stream.cursor.sets == {"small": Place(33, 1, 100), "large": Place(3, 0, 300)}


def test_long_prompts_are_skipped_and_take_no_number() -> None:
    stream = open_words({"a": [1, 2, 3, 4, 5]}, seed=None, longest=3)
    assert [(v.group_index, v.prompt.row) for v in take(stream, 4)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 0),
    ]
    assert stream.cursor.sets["a"] == Place(1, 1, 4)
    assert stream.num_skipped == 2


def test_a_prompt_must_leave_room_for_an_answer() -> None:
    stream = open_words({"a": [1, 2, 3, 4, 5]}, seed=None, longest=9, context=3)
    assert [v.prompt.row for v in take(stream, 3)] == [0, 1, 0]
    with pytest.raises(DataError, match="a: every prompt leaves no room in a context of 1 tokens"):
        open_words({"a": [1, 2]}, context=1).take()


@pytest.mark.parametrize("position", [0, 1, 4])
def test_data_of_which_nothing_fits_is_an_error(position: int) -> None:
    at = Cursor(0, {"a": Place(0, position, 0)}, "xxh3:f")
    message = r"a: every prompt is longer than rollout\.rollout_max_prompt_len = 2"
    with pytest.raises(DataError, match=message):
        open_words({"a": [3] * 5}, at=at, longest=2).take()


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 60), st.integers(0, 20))
def test_one_prompt_that_fits_is_always_found(num: int, fits: int, seed: int) -> None:
    """First of one epoch and last of the next, the others between may be twice as many."""
    lengths = [9] * num
    lengths[fits % num] = 1
    stream = open_words({"a": lengths}, seed=seed, longest=2)
    assert {visit.prompt.row for visit in take(stream, 6)} == {fits % num}
    assert stream.cursor.sets["a"].epoch in (5, 6)


def start(previous: object, sizes: dict[str, int], fingerprint: str = "xxh3:f") -> Cursor:
    return start_cursor(previous, sizes=sizes, fingerprint=fingerprint, path="/d/x.jsonl")


def test_a_cursor_starts_goes_on_and_refuses_changed_data() -> None:
    sizes = {"b": 4, "a": 9}
    assert start(None, sizes) == Cursor(0, {"b": Place(), "a": Place()}, "xxh3:f")
    saved = Cursor(5, {"a": Place(0, 8, 3), "b": Place(1, 0, 2)}, "xxh3:f")
    raw = saved.as_dict()
    assert canonical_json(raw)
    assert start(raw, sizes) == saved
    assert list(start(raw, sizes).sets) == ["b", "a"]
    message = r"/d/x\.jsonl: the prompts are not those of the previous iteration \(xxh3:g, they were xxh3:f\)"
    with pytest.raises(DataError, match=message):
        start(raw, sizes, "xxh3:g")
    with pytest.raises(DataError, match=r"data sets are b, c; those of the previous .* were a, b"):
        start(raw, {"b": 4, "c": 9})
    with pytest.raises(CorruptError, match="cursor is not one"):
        start(raw, {"b": 4, "a": 8})  # beyond its rows


@pytest.mark.parametrize(
    "change",
    [
        {"visits": 4},
        {"visits": "5"},
        {"sets": {"a": {"epoch": 0, "position": 8}}},
        {"sets": {"a": {"epoch": 0, "position": 8, "visits": 5, "more": 1}}},
        {"sets": {"a": {"epoch": -1, "position": 8, "visits": 5}}},
        {"sets": {"a": {"epoch": 0, "position": 1.5, "visits": 5}}},
        {"sets": [1]},
        {"sets": None},
    ],
)
def test_what_is_no_cursor_is_refused(change: dict[str, object]) -> None:
    raw = Cursor(5, {"a": Place(0, 8, 5)}, "xxh3:f").as_dict()
    assert parse_cursor(raw).as_dict() == raw
    with pytest.raises(CorruptError, match="cursor is not one"):
        parse_cursor(raw | change)
    with pytest.raises(CorruptError):
        parse_cursor({"epoch": 0, "position": 3, "data_fingerprint": "xxh3:f"})
    with pytest.raises(CorruptError):
        parse_cursor([raw])
