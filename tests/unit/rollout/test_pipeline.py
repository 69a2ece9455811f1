"""The rollout around the engine: shards that help each other, kills, filters, closes, carry-over."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy.rollouts import Numbers, Shard, Slow, Text, by_length

from slurm_rl.errors import DataError, EngineError, RewardError
from slurm_rl.rollout.carry import read_carried, write_carried
from slurm_rl.rollout.closing import Close, desk_of, find_desk
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.filters import keep_nonzero_std
from slurm_rl.rollout.grading import GivenUp
from slurm_rl.rollout.groups import Finisher
from slurm_rl.rollout.journal import parse_head, parse_samples, render_line
from slurm_rl.rollout.ledger import Decision
from slurm_rl.rollout.rewards import Graded
from slurm_rl.rollout.single_turn import SingleTurn
from slurm_rl.types import JOURNAL_NAME

#: The fixtures hold nothing that one example leaves to the next.
OK = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("run")


@pytest.fixture
def plain(make_settings):
    return make_settings(n_samples_per_prompt=3)


def everything(shards):
    return sorted(
        (sample for shard in shards for sample in shard.samples()),
        key=lambda s: (s.group_index, s.sample_index),
    )


async def together(shards):
    return await asyncio.gather(*(shard.run() for shard in shards))


@settings(max_examples=25, deadline=None, suppress_health_check=OK)
@given(st.integers(1, 4), st.integers(0, 10**6), st.booleans())
def test_shards_make_what_one_makes(folder, plain, num_shards, seed, is_filtered):
    keep = keep_nonzero_std if is_filtered else None
    alone = asyncio.run(Shard(folder(), plain, keep=keep).run())
    root = folder()
    shards = [
        Shard(root, plain, number, num_shards, keep=keep, over=15, engine=Slow(seed=seed + number))
        for number in range(num_shards)
    ]
    asyncio.run(together(shards))
    assert everything(shards) == everything([alone])
    assert len(everything(shards)) == 12 * 3
    assert {str(shard.close) for shard in shards} == {str(alone.close)}


@settings(max_examples=20, deadline=None, suppress_health_check=OK)
@given(st.integers(0, 10**6), st.floats(0.0, 0.03), st.binary(max_size=20))
def test_one_is_killed_half_way(folder, plain, seed, after_s, torn):
    alone = asyncio.run(Shard(folder(), plain).run())
    root = folder()
    engines = [Slow(seed=seed + number, longest_s=0.02) for number in range(2)]
    victim, other = (Shard(root, plain, n, 2, engine=engines[n]) for n in range(2))

    async def run():
        tasks = [asyncio.create_task(shard.run()) for shard in (victim, other)]
        await asyncio.sleep(after_s)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        # What the kill leaves of a line.
        if (victim.folder / JOURNAL_NAME).exists():
            with open(victim.folder / JOURNAL_NAME, "ab") as file:
                file.write(torn.replace(b"\n", b" "))
        return await tasks[1]

    asyncio.run(run())
    # Its own job comes back, or another one's takes its place: there is nothing left to generate.
    again = Shard(root, plain, 0, 2, attempt=2)
    again.close = again.pipeline.settle()
    assert again.close is not None and again.close == other.close
    assert everything([again, other]) == everything([alone])


def test_a_shard_that_never_starts_is_done_by_the_other(folder, plain):
    root = folder()
    other = asyncio.run(Shard(root, plain, 1, 2).run())
    assert sorted(other.engine.made) == list(range(12)), "each was made once"
    late = Shard(root, plain, 0, 2)
    late.close = late.pipeline.settle()
    assert late.close == other.close
    assert {s.group_index for s in late.samples()} == set(range(0, 12, 2))


def test_a_slow_shard_is_helped_from_its_far_end(folder, plain):
    root = folder()
    slow = Shard(root, plain, 0, 2, engine=Slow(seed=1, longest_s=2.0, concurrency=3))
    fast = Shard(root, plain, 1, 2, engine=Slow(seed=1, longest_s=0.001, concurrency=3))
    began = time.monotonic()
    asyncio.run(together([slow, fast]))
    assert time.monotonic() - began < 5.0, "six groups in turn take six seconds"
    theirs = [index for index in fast.engine.made if index % 2 == 0]
    assert theirs[0] >= 6, "two at a time, from the far end"
    assert len(everything([slow, fast])) == 36


@settings(max_examples=15, deadline=None, suppress_health_check=OK)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 0.75, 1.0]))
def test_by_arrival_all_shards_agree_and_nothing_is_lost(folder, plain, seed, close_at):
    root = folder()
    shards = [
        Shard(
            root,
            plain,
            n,
            3,
            admission="arrival",
            close_at=close_at,
            over=16,
            keep=keep_nonzero_std,
            engine=Slow(seed=seed + n),
        )
        for n in range(3)
    ]
    asyncio.run(together(shards))
    decision = shards[0].close.decision
    assert all(shard.close == shards[0].close for shard in shards)
    # More than the quorum may have come between two looks.
    assert 12 * close_at <= len(decision.admitted) <= 12
    assert sorted({s.group_index for s in everything(shards)}) == decision.admitted
    assert len(everything(shards)) == 3 * len(decision.admitted)
    taken = decision.num_taken
    assert len(decision.admitted) + len(decision.carried) + decision.num_dropped == taken
    visits = [v.group_index for shard in shards for v in shard.supply.carried_visits(shard.close)]
    assert sorted(visits) == decision.carried
    assert shards[0].close.cursor == {"visits": taken}


def test_what_was_cut_off_goes_on_with_other_weights(folder, plain, tmp_path):
    engine = Slow(seed=3, longest_s=0.5, concurrency=36)
    first = Shard(folder(), plain, admission="arrival", close_at=0.5, engine=engine)
    asyncio.run(first.run())
    carried = [
        (visit, tuple(first.outcome.cut_off.get(visit.group_index, ())))
        for visit in first.supply.carried_visits(first.close)
    ]
    # As if each had got two tokens before it was cut off.
    carried = [
        (visit, tuple(cut(sample) for sample in samples)) for visit, samples in carried if samples
    ]
    assert len(carried) >= 4
    for visit, _ in carried:
        object.__setattr__(visit.prompt, "place", f"{tmp_path}/rows.jsonl:1")
    names = write_carried(tmp_path, carried)
    read = read_carried([tmp_path / name for name in names])
    assert read == carried
    written = b"".join((tmp_path / name).read_bytes() for name in names)
    assert str(tmp_path).encode() not in written, "a path is committed"

    newer = Weights(first.weights.path, version=4, digest="xxh3:4", label="run/v4")
    second = Shard(folder(), plain, first=12, carried=tuple(read), weights=newer)
    asyncio.run(second.run())
    groups = [visit.group_index for visit, _ in carried]
    assert [s.group_index for s in everything([second])][: 3 * len(groups)] == sorted(groups * 3)
    for sample in everything([second]):
        if sample.group_index in groups:
            assert sample.token_versions == (3, 3) + (4,) * (sample.response_length - 2)
            assert sample.weights_version == 4
        else:
            assert sample.token_versions == ()


def cut(sample):
    """A sample that had two tokens when it was cut off."""
    tokens = (sample.seed % 40, sample.seed % 40 + 1)
    return replace(
        sample,
        response_tokens=tokens,
        rollout_logprobs=(-0.5, -0.5),
        loss_mask=(1, 1),
        status="aborted",
        weights_version=3,
    )


def test_after_the_deadline_it_closes_with_what_there_is(folder, plain):
    engine = Slow(seed=2, longest_s=5.0, concurrency=36)
    shard = Shard(folder(), plain, admission="arrival", close_after_s=0.5, engine=engine)
    began = time.monotonic()
    asyncio.run(shard.run())
    assert 0.4 < time.monotonic() - began < 4.5
    assert 1 <= len(shard.close.decision.admitted) < 12


def test_an_engine_that_fails_ends_the_rollout_and_the_next_goes_on(folder, plain):
    class Breaks(Slow):
        async def generate(self, request, sampling):
            if len(self.made) >= 5:
                raise EngineError("the server died")
            return await super().generate(request, sampling)

    root = folder()
    with pytest.raises(EngineError, match="the server died"):
        asyncio.run(Shard(root, plain, engine=Breaks(seed=1)).run())
    again = asyncio.run(Shard(root, plain, attempt=2).run())
    assert 0 < len(again.engine.made) <= 12 - 1
    alone = asyncio.run(Shard(folder(), plain).run())
    assert everything([again]) == everything([alone])


def test_a_decision_whose_group_is_gone_has_it_made_again(folder, plain, monkeypatch):
    monkeypatch.setattr("slurm_rl.rollout.pipeline._LOOK_FOR_S", 0.1)
    root = folder()
    other = asyncio.run(Shard(root, plain, 1, 2).run())
    journal = other.folder / JOURNAL_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"group_index":4,' not in line))
    late = asyncio.run(Shard(root, plain, 0, 2).run())
    assert late.engine.made == [4]
    assert len(everything([late])) == 18


def test_rewards_that_samples_bring_are_kept(folder, plain):
    class Brings(Shard):
        async def run(self):
            self.engine.start(self.weights)
            generate = SingleTurn(self.engine, Finisher(self.weights, Text()))

            async def with_rewards(group):
                samples = await generate(group)
                # Of every other group all, of the others the first alone.
                some = samples if group.group_index % 2 else samples[:1]
                return [s.graded(7.5, {"own": 1.0}) if s in some else s for s in samples]

            self.outcome = await self.pipeline.run(
                self.engine, with_rewards, by_length, journal_path=self.folder / JOURNAL_NAME
            )
            self.close = self.outcome.close
            return self

    shard = asyncio.run(Brings(folder(), plain).run())
    for sample in everything([shard]):
        brought = sample.group_index % 2 == 1 or sample.sample_index == 0
        assert (sample.reward == 7.5) == brought
        assert sample.reward is not None


def verdict(function):
    """A filter of a plain function."""

    async def keep(group):
        return function(group)

    return keep


def test_what_failed_is_counted_without_its_message(folder, plain):
    """The message has paths and addresses in it; what is committed must not depend on them."""

    async def grade(samples):
        if samples[0].group_index % 3 == 0:
            return Graded(tuple(samples), "dropped", f"{folder()}/code.py:3 raised <x at 0x7f>")
        return await by_length(samples)

    shard = asyncio.run(Shard(folder(), plain, grade=grade).run())
    assert shard.close.decision.reasons == {"reward failed": shard.close.decision.num_dropped}
    assert shard.close.decision.num_dropped >= 4


def test_a_group_that_was_given_up_is_dropped_without_its_message(folder, plain):
    class Drops(Shard):
        async def run(self):
            self.engine.start(self.weights)
            generate = SingleTurn(self.engine, Finisher(self.weights, Text()))

            async def or_not(group):
                samples = await generate(group)
                if group.group_index % 3:
                    return samples
                failed = (replace(sample, status="failed") for sample in samples)
                return GivenUp(tuple(failed), f"{folder()}/code.py:3 raised <x at 0x7f>")

            self.outcome = await self.pipeline.run(
                self.engine, or_not, by_length, journal_path=self.folder / JOURNAL_NAME
            )
            self.close = self.outcome.close
            return self

    shard = asyncio.run(Drops(folder(), plain).run())
    decision = shard.close.decision
    assert decision.reasons == {"generation failed": decision.num_dropped}
    assert decision.num_dropped >= 4
    assert all(sample.group_index % 3 for sample in everything([shard]))


@pytest.mark.parametrize("is_lost", [False, True])
def test_two_verdicts_on_one_group_and_the_decision_wins(folder, plain, monkeypatch, is_lost):
    """Our own copy was dropped; the other shard's was kept, and the batch closed with it."""
    monkeypatch.setattr("slurm_rl.rollout.pipeline._LOOK_FOR_S", 0.1)
    root = folder()
    other = asyncio.run(Shard(root, plain, 1, 2).run())
    assert 4 in other.close.decision.admitted
    journal = other.folder / JOURNAL_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    found = [line for line in lines if b'"group_index":4,' in line]
    first = Shard(
        root, plain, 0, 2, keep=verdict(lambda group: (group[0].group_index != 4, "unlucky"))
    )
    head = parse_head(found[0][:-1])
    mine = render_line(head["key"], parse_samples(found[0][:-1]), keep=False, reason="unlucky")
    (first.folder / JOURNAL_NAME).write_bytes(mine)
    if is_lost:
        journal.write_bytes(b"".join(line for line in lines if line not in found))
    again = Shard(root, plain, 0, 2, attempt=2, keep=verdict(lambda group: (False, "unlucky")))
    asyncio.run(again.run())
    assert again.engine.made == ([4] if is_lost else [])
    assert {s.group_index for s in again.samples()} == set(range(0, 12, 2))


@settings(max_examples=15, deadline=None, suppress_health_check=OK)
@given(st.integers(0, 10**6))
def test_shards_whose_verdicts_differ_all_seal(folder, plain, seed):
    """Rewards that are not reproducible: each copy of a group meets its own verdict."""
    draws, root = random.Random(seed), folder()
    shards = [
        Shard(
            root,
            plain,
            n,
            3,
            admission="arrival",
            keep=verdict(lambda group: (draws.random() < 0.6, "unlucky")),
            engine=Slow(seed=seed + n),
            max_groups=400,
        )
        for n in range(3)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurm_rl.rollout.pipeline._LOOK_FOR_S", 0.05)
        asyncio.run(together(shards))
    decision = shards[0].close.decision
    assert all(shard.close == shards[0].close for shard in shards)
    assert sorted({s.group_index for s in everything(shards)}) == decision.admitted


@pytest.mark.parametrize("poll_s", [0.01, 0.3])
@pytest.mark.parametrize("how", ["all dropped", "filter fails"])
def test_an_error_ends_the_rollout_at_once(folder, plain, how, poll_s):
    def fail(group):
        raise RewardError("the filter failed")

    keep = verdict(fail if how == "filter fails" else lambda group: (False, "same"))
    for seed in range(8):
        shard = Shard(
            folder(), plain, keep=keep, max_groups=12, poll_s=poll_s, engine=Slow(seed=seed)
        )
        began = time.monotonic()
        with pytest.raises((DataError, RewardError)):
            asyncio.run(asyncio.wait_for(shard.run(), 20))
        assert time.monotonic() - began < 15


@settings(max_examples=20, deadline=None, suppress_health_check=OK)
@given(
    st.integers(0, 10**6),
    st.integers(0, 14),
    st.integers(1, 8),
    st.sampled_from(["cursor", "arrival"]),
    st.sampled_from([0.5, 1.0]),
)
def test_every_prompt_is_admitted_carried_or_dropped(
    folder, plain, seed, num_carried, batch, admission, close_at
):
    carried = tuple((visit, ()) for visit in (Numbers().take_many(num_carried)))
    shard = Shard(
        folder(),
        plain,
        first=num_carried,
        carried=carried,
        batch=batch,
        admission=admission,
        close_at=close_at,
        keep=keep_nonzero_std,
        engine=Slow(seed=seed, concurrency=3),
    )
    asyncio.run(shard.run())
    decision = shard.close.decision
    total = len(decision.admitted) + len(decision.carried) + decision.num_dropped
    assert total == num_carried + decision.num_taken
    assert len(decision.admitted) <= batch
    assert len(shard.supply.carried_visits(shard.close)) == len(decision.carried)
    assert shard.close.cursor == {"visits": num_carried + decision.num_taken}


def test_an_answer_that_says_aborted_by_itself_is_an_error(folder, plain):
    class Odd(Slow):
        async def generate(self, request, sampling):
            made = await super().generate(request, sampling)
            return [replace(completion, finish="abort") for completion in made]

    with pytest.raises(EngineError, match="nothing was aborted"):
        asyncio.run(Shard(folder(), plain, engine=Odd(seed=0)).run())


def test_a_shard_agrees_with_those_that_have_committed(tmp_path):
    """Its own settings or code may have been mended since, and its groups have other keys."""
    theirs = desk_of(tmp_path, "xxh3:" + "a" * 32)
    close = theirs.publish(Close(Decision([1, 2], [3], 3, 0), {"visits": 3}))
    ours = "xxh3:" + "b" * 32
    assert find_desk(tmp_path, ours, committed=[]) == desk_of(tmp_path, ours)
    assert find_desk(tmp_path, ours, committed=[close.decision.digest]) == theirs
    assert find_desk(
        tmp_path, ours, committed=[Decision([1], [], 1, 0).digest]
    ).path.name.startswith("CLOSE-bbbb")
