import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from toy.orders import weights_input

from slurm_rl.config.schema import Settings
from slurm_rl.errors import CorruptError, DataError, EngineError, RewardError
from slurm_rl.rollout.embedded import EmbeddedEngine
from slurm_rl.rollout.engine import Completion, Engine, Request, Sampling, Weights
from slurm_rl.rollout.journal import JOURNAL_NAME
from slurm_rl.rollout.samples import read_samples
from slurm_rl.stages.rollout import run_rollout
from slurm_rl.storage.digest import digest_file
from slurm_rl.storage.durable import list_files
from slurm_rl.types import Order, Result


class Killed(Exception):
    pass


class DyingEngine:
    """The embedded engine, dying after some groups; remembers how many it was asked for."""

    def __init__(self, inner: Engine, *, num_groups: int = 1000) -> None:
        self._inner = inner
        self._left = num_groups
        self.num_requests = 0

    @property
    def concurrency(self) -> int:
        return 1  # one group at a time: what finished is known

    def start(self, weights: Weights) -> None:
        self._inner.start(weights)

    def load_weights(self, weights: Weights) -> None:
        self._inner.load_weights(weights)

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        if self._left == 0:
            raise Killed
        self._left -= 1
        self.num_requests += 1
        return await self._inner.generate(request, sampling)

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        return await self._inner.logprobs(tokens)

    async def abort(self) -> None:
        await self._inner.abort()

    def metrics(self) -> dict[str, float]:
        return self._inner.metrics()

    def stop(self) -> None:
        self._inner.stop()


def facts(order: Order, result: Result) -> object:
    """What is committed: content, and the files' digests checked against the disk."""
    for entry in result.files:
        assert digest_file(Path(order.attempt_dir) / entry.path) == entry.digest
    return result.content, result.files


def test_a_batch_is_made_and_read_back(prompts, make_settings, make_order) -> None:  # type: ignore[no-untyped-def]
    settings: Settings = make_settings()
    order = make_order()
    result = run_rollout(order, settings)
    root = Path(order.attempt_dir)
    assert [entry.path for entry in result.files] == ["samples.jsonl", "samples.safetensors"]
    batch = read_samples([root / "samples.safetensors"])
    assert batch.group_index.tolist() == [g for g in range(3) for _ in range(4)]
    assert batch.sample_index.tolist() == [0, 1, 2, 3] * 3
    lines = [json.loads(line) for line in (root / "samples.jsonl").read_text().splitlines()]
    assert len({line["seed"] for line in lines}) == 12
    assert [line["reward"] for line in lines] == pytest.approx(batch.rewards.tolist())
    for line, truncated in zip(lines, batch.truncated, strict=True):
        assert line["label"] == line["prompt"][1::-1]
        assert line["status"] == ("truncated" if truncated else "completed")
    assert result.content["weights"] == {
        "version": 0,
        "digest": order.input("weights").content["weights"]["digest"],
    }
    assert result.content["cursor"]["visits"] == 3
    assert (result.content["num_samples"], result.content["num_groups"]) == (12, 3)
    assert result.metrics["rollout/raw_reward"] == pytest.approx(batch.rewards.mean())
    assert result.metrics["rollout/response_len"] == pytest.approx(batch.response_lengths.mean())


def test_the_next_iteration_goes_on_and_draws_anew(prompts, make_settings, make_order) -> None:  # type: ignore[no-untyped-def]
    settings = make_settings(rollout_batch_size=6)
    first = run_rollout(order := make_order(), settings)
    second = run_rollout(after := make_order(iteration=1, previous=first), settings)
    assert second.content["cursor"]["sets"]["data"] == {"epoch": 2, "position": 0, "visits": 12}
    batches = [read_samples([Path(o.attempt_dir) / "samples.safetensors"]) for o in (order, after)]
    assert batches[1].group_index.min() == 6
    # The same prompts and weights, other seeds.
    assert sorted(batches[0].prompt_lengths) == sorted(batches[1].prompt_lengths)
    assert batches[0].tokens.tolist() != batches[1].tokens.tolist()


def test_the_iteration_is_part_of_every_seed(prompts, make_settings, make_order) -> None:  # type: ignore[no-untyped-def]
    orders = [make_order(iteration=iteration) for iteration in range(2)]
    for order in orders:
        run_rollout(order, make_settings())
    lines = [(Path(o.attempt_dir) / "samples.jsonl").read_text().splitlines() for o in orders]
    seeds = [{json.loads(line)["seed"] for line in found} for found in lines]
    assert len(seeds[0] | seeds[1]) == 24


def test_a_repetition_is_byte_identical(prompts, make_settings, make_order) -> None:  # type: ignore[no-untyped-def]
    settings = make_settings()
    results = [facts(order := make_order(), run_rollout(order, settings)) for _ in range(2)]
    assert results[0] == results[1]


def test_a_long_lived_engine_gives_the_same_bytes(
    prompts, make_settings, make_order, tokenizer, tmp_path, other_model
) -> None:  # type: ignore[no-untyped-def]
    settings = make_settings()
    other = weights_input(other_model, tmp_path / "other", version=1)
    fresh = [
        facts(o, run_rollout(o, settings))
        for o in (make_order(), make_order(weights=other, iteration=1))
    ]
    engine = EmbeddedEngine(tokenizer)
    orders = [make_order(), make_order(weights=other, iteration=1)]
    assert [facts(o, run_rollout(o, settings, engine=engine)) for o in orders] == fresh
    assert fresh[0] != fresh[1]


@pytest.mark.parametrize("num_groups", [0, 1, 2])
def test_a_killed_attempt_is_gone_on_from(
    prompts, make_settings, make_order, tokenizer, num_groups: int
) -> None:  # type: ignore[no-untyped-def]
    settings = make_settings()
    undisturbed = facts(whole := make_order(), run_rollout(whole, settings))
    killed = make_order()
    with pytest.raises(Killed):
        run_rollout(
            killed, settings, engine=DyingEngine(EmbeddedEngine(tokenizer), num_groups=num_groups)
        )
    engine = DyingEngine(EmbeddedEngine(tokenizer))
    order = make_order(earlier_attempts=[killed.attempt_dir])
    result = run_rollout(order, settings, engine=engine)
    assert engine.num_requests == 3 - num_groups
    assert facts(order, result) == undisturbed


def test_groups_of_other_weights_or_settings_are_not_taken_over(
    prompts, make_settings, make_order, tokenizer, tmp_path, other_model
) -> None:  # type: ignore[no-untyped-def]
    earlier = make_order()
    run_rollout(earlier, make_settings())
    other = weights_input(other_model, tmp_path / "other", version=1)
    for changes, settings, expected in (
        ({}, make_settings(), 0),
        ({"weights": other}, make_settings(), 3),
        ({}, make_settings(rollout_temperature=0.5), 3),
        ({}, make_settings(rm_type="exact_match"), 3),
        ({"code_dir": str(tmp_path / "mended")}, make_settings(), 3),
    ):
        engine = DyingEngine(EmbeddedEngine(tokenizer))
        run_rollout(
            make_order(earlier_attempts=[earlier.attempt_dir], **changes), settings, engine=engine
        )
        assert engine.num_requests == expected


def test_shards_together_are_the_whole(prompts, make_settings, make_order, tokenizer) -> None:  # type: ignore[no-untyped-def]
    settings = make_settings(rollout_batch_size=5)
    whole = make_order()
    complete = run_rollout(whole, settings)
    shards = [make_order(shard=k, num_shards=2) for k in range(2)]
    engines = [DyingEngine(EmbeddedEngine(tokenizer)) for _ in shards]
    results = [
        run_rollout(shard, settings, engine=engine)
        for shard, engine in zip(shards, engines, strict=True)
    ]
    # The first, alone for so long, has done it all; the second finds it in the journal.
    assert [engine.num_requests for engine in engines] == [5, 0]
    assert [r.content["num_groups"] for r in results] == [3, 2]
    assert all(r.content["cursor"] == complete.content["cursor"] for r in results)
    paths = [Path(o.attempt_dir) / "samples.safetensors" for o in shards]
    joined, single = (
        read_samples(paths),
        read_samples([Path(whole.attempt_dir) / "samples.safetensors"]),
    )
    for name in ("tokens", "rollout_logprobs", "group_index", "sample_index", "rewards"):
        assert (getattr(joined, name) == getattr(single, name)).all()


def test_changed_weights_are_refused_before_anything_is_served(
    prompts, make_settings, make_order, tokenizer
) -> None:  # type: ignore[no-untyped-def]
    order = make_order()
    path = Path(order.input("weights").files["weights/model.safetensors"])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
        run_rollout(order, make_settings())
    path.unlink()
    with pytest.raises(CorruptError, match=r"model\.safetensors: No such file"):
        run_rollout(make_order(), make_settings())
    assert list_files(Path(order.attempt_dir)) == []


class WrongEngine(DyingEngine):
    """Answers with other weights than it was given."""

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        completions = await super().generate(request, sampling)
        return [dataclasses.replace(c, label="run/v7/other") for c in completions]


def test_samples_of_other_weights_are_an_error(
    prompts, make_settings, make_order, tokenizer
) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(EngineError, match="a sample of run/v7/other, not of run/v0/xxh3"):
        run_rollout(make_order(), make_settings(), engine=WrongEngine(EmbeddedEngine(tokenizer)))


def test_changed_prompts_are_refused(prompts, make_settings, make_order, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    first = run_rollout(make_order(), make_settings())
    path = tmp_path / "prompts.jsonl"
    path.write_text(path.read_text().replace("ad=", "ax="))
    with pytest.raises(DataError, match="not those of the previous iteration"):
        run_rollout(make_order(iteration=1, previous=first), make_settings())


def test_a_reward_that_fails_keeps_what_is_journalled(
    prompts, make_settings, make_order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    code = "def score(args, sample):\n    if sample.group_index == 2: raise ValueError('x')\n    return 1.0\n"
    (tmp_path / "failing_reward.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    order = make_order()
    with pytest.raises(RewardError, match=r"failing_reward\.py:1\) raised ValueError: x"):
        run_rollout(order, make_settings(rm_type=None, custom_rm_path="failing_reward.score"))
    # The third group was begun when one of the first two was done.
    assert (Path(order.attempt_dir) / JOURNAL_NAME).read_bytes().count(b"\n") in (1, 2)
