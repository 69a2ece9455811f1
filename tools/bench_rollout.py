"""What the rollout costs around its engine: samples a second and memory, answers made up at once.

    python tools/bench_rollout.py [--prompts 100000] [--samples 8] [--batch N] [--shards 2]

Everything but the engine is the product's: jsonl rows, shuffled visits, tokens, seeds, keys,
rewards (exact_match), the journals that shards read of each other, the decision, and the sealed
files. Memory is compared with a run over a tenth of the prompts: it must not grow with the data
set. `--batch` cuts the prompts into iterations of that size instead of one. On a machine that does
other things besides, the time of the processors says more than the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slurm_rl.config.derive import data_overrides
from slurm_rl.config.schema import Settings
from slurm_rl.rollout.collecting import rare_collections
from slurm_rl.rollout.data import open_stream, resolve
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.filters import open_filter
from slurm_rl.rollout.groups import Finisher, Planner
from slurm_rl.rollout.instant import InstantEngine
from slurm_rl.rollout.ledger import Ledger, plan_rule
from slurm_rl.rollout.metrics import RolloutMetrics
from slurm_rl.rollout.pipeline import Pipeline
from slurm_rl.rollout.rewards import Grader
from slurm_rl.rollout.sealing import seal_groups
from slurm_rl.rollout.single_turn import SingleTurn
from slurm_rl.rollout.supply import Supply
from slurm_rl.stages.rollout import plan_watch
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import JOURNAL_NAME, Order

CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz"
#: As a model has one: it is why each shard must know the length of every prompt.
CONTEXT_LEN = 32_768
WEIGHTS = Weights(Path("none"), version=0, digest="xxh3:0", label="bench/v0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--batch", type=int, default=0, help="prompts of an iteration; 0: all")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--shards", type=int, default=os.cpu_count() or 1, help="a process each")
    chosen = parser.parse_args()
    for name, num in (("a tenth", max(1, chosen.prompts // 10)), ("all", chosen.prompts)):
        found = measure(chosen, num)
        rate = found.num_samples / found.seconds
        print(
            f"{name:8} {found.num_samples:>9,} samples  {found.seconds:7.1f} s  {rate:>9,.0f}"
            f" samples/s  {found.cpu_s / found.num_samples * 1e6:.0f} µs of CPU a sample  peak of a"
            f" shard {found.peak_mb:,.0f} MB (grew by {found.grown_mb:,.0f})",
            flush=True,
        )


@dataclass(frozen=True)
class Found:
    """What one shard, or all of them, came to. began, ended: seconds of one clock."""

    num_samples: int
    began: float
    ended: float
    cpu_s: float
    peak_mb: float
    grown_mb: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def measure(chosen: argparse.Namespace, num_prompts: int) -> Found:
    """One run, each shard a process of its own, whose peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", num_prompts)
        start, results = context.Barrier(chosen.shards), context.SimpleQueue()
        shared = (num_prompts, chosen.samples, chosen.batch or num_prompts, chosen.tokens)
        shards = [
            context.Process(target=work, args=(folder, start, results, k, chosen.shards, *shared))
            for k in range(chosen.shards)
        ]
        for shard in shards:
            shard.start()
        parts = [results.get() for _ in shards]
        for shard in shards:
            shard.join()
    return Found(
        num_samples=sum(part.num_samples for part in parts),
        began=min(part.began for part in parts),
        ended=max(part.ended for part in parts),
        cpu_s=sum(part.cpu_s for part in parts),
        peak_mb=max(part.peak_mb for part in parts),
        grown_mb=max(part.grown_mb for part in parts),
    )


def work(
    folder: Path,
    start: Any,
    results: Any,
    shard: int,
    num_shards: int,
    num_prompts: int,
    num_samples: int,
    batch: int,
    num_tokens: int,
) -> None:
    """All iterations of one shard."""
    settings = make_settings(folder, num_samples=num_samples, batch=batch)
    tokenizer = make_tokenizer()
    start.wait()
    before_mb, began, before_s = peak_mb(), time.monotonic(), time.process_time()
    cursor, num = None, 0
    for iteration in range(-(-num_prompts // batch)):
        root = folder / f"rollout-{iteration}" / f"shard-{shard:04d}" / f"a0001-{shard}"
        root.mkdir(parents=True)
        order = Order(
            "", "bench", "rollout", iteration, 0, str(root), "", "", {}, shard, num_shards
        )
        cursor, made = roll_out(order, settings, tokenizer, cursor, num_tokens)
        num += made
    ended, cpu_s = time.monotonic(), time.process_time() - before_s
    results.put(Found(num, began, ended, cpu_s, peak_mb(), peak_mb() - before_mb))


def roll_out(
    order: Order, settings: Settings, tokenizer: Any, cursor: Any, num_tokens: int
) -> tuple[Any, int]:
    """One rollout as the stage does it; the cursor after it, and this shard's samples."""
    root = Path(order.attempt_dir)
    with rare_collections(), resolve(settings) as data, open_filter(settings) as keep:
        if cursor is None:
            data.check()
        stream = open_stream(
            data, settings, cursor=cursor, tokenizer=tokenizer, context_len=CONTEXT_LEN
        )
        planner = Planner(
            order,
            settings,
            WEIGHTS,
            overrides=data_overrides(settings),
            purpose=("sample", order.iteration),
            context_len=CONTEXT_LEN,
            start=stream.start.as_dict(),
        )
        rule = plan_rule(batch_size=settings.rollout.rollout_batch_size, admission="cursor")
        supply = Supply(
            carried=(),
            stream=stream,
            planner=planner,
            ledger=Ledger(rule),
            group_size=settings.rollout.n_samples_per_prompt,
            shard=order.shard,
            num_shards=order.num_shards,
        )
        watch = plan_watch(order, settings, key=planner.made_from)
        pipeline = Pipeline(supply, watch, keep=keep)
        pipeline.settle()
        engine = InstantEngine(num_tokens=(num_tokens, num_tokens), vocabulary=len(CHARACTERS))
        engine.start(WEIGHTS)

        async def run() -> Any:
            generate = SingleTurn(engine, Finisher(WEIGHTS, tokenizer))
            async with Grader(settings) as grader:
                path = root / JOURNAL_NAME
                return await pipeline.run(engine, generate, grader.grade, journal_path=path)

        outcome = asyncio.run(run())
        metrics = RolloutMetrics()
        own = (index for index in outcome.close.decision.admitted if supply.is_own(index))
        entries = (supply.entries[index] for index in own)
        seal_files(root, seal_groups(root, entries, count=metrics.add))
    return outcome.close.cursor, metrics.num_samples


def make_settings(folder: Path, *, num_samples: int, batch: int) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "bench", "dir": str(folder)},
            "hf_checkpoint": "none",
            "num_rollout": 1,
            "rollout": {
                "prompt_data": str(folder / "prompts.jsonl"),
                "label_key": "label",
                "rollout_batch_size": batch,
                "n_samples_per_prompt": num_samples,
                "rm_type": "exact_match",
            },
            "train": {"global_batch_size": 8},
        }
    )


def write_prompts(path: Path, num: int) -> None:
    """Sums, with their answers."""
    draws = random.Random(0)
    with open(path, "w") as file:
        for _ in range(num):
            a, b = draws.randrange(10_000), draws.randrange(10_000)
            file.write(json.dumps({"prompt": f"what is {a}+{b}?", "label": str(a + b)}) + "\n")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
