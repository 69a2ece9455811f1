"""What the rollout costs around its engine: samples a second and memory, answers made up at once.

    python tools/bench_rollout.py [--prompts 100000] [--samples 8] [--batch N]

Everything but the engine is the product's: jsonl rows, shuffled visits, tokens, seeds, keys,
rewards (exact_match), the journal, and the sealed files. Memory is compared with a run over a tenth
of the prompts: it must not grow with the data set. `--batch` cuts the prompts into iterations of
that size instead of one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slurm_rl.config.derive import data_overrides
from slurm_rl.config.schema import Settings
from slurm_rl.rollout.data import open_stream, resolve
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.filters import make_filter
from slurm_rl.rollout.groups import Finisher, Planner
from slurm_rl.rollout.instant import InstantEngine
from slurm_rl.rollout.ledger import Ledger, plan_rule
from slurm_rl.rollout.metrics import RolloutMetrics
from slurm_rl.rollout.pipeline import Pipeline, Watch
from slurm_rl.rollout.rewards import Grader
from slurm_rl.rollout.sealing import seal_groups
from slurm_rl.rollout.single_turn import SingleTurn
from slurm_rl.rollout.supply import Supply
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import JOURNAL_NAME, Order

CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz"
WEIGHTS = Weights(Path("none"), version=0, digest="xxh3:0", label="bench/v0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--batch", type=int, default=0, help="prompts of an iteration; 0: all")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer")
    chosen = parser.parse_args()
    small = measure(chosen, max(1, chosen.prompts // 10))
    large = measure(chosen, chosen.prompts)
    for name, found in (("a tenth", small), ("all", large)):
        print(
            f"{name:8} {found['num_samples']:>9,} samples  {found['seconds']:7.1f} s"
            f"  {found['num_samples'] / found['seconds']:>9,.0f} samples/s"
            f"  peak {found['peak_mb']:,.0f} MB (grew by {found['grown_mb']:,.0f})"
        )


def measure(chosen: argparse.Namespace, num_prompts: int) -> dict[str, float]:
    """One run in a process of its own, whose peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(
            work, (num_prompts, chosen.samples, chosen.batch or num_prompts, chosen.tokens)
        )


def work(num_prompts: int, num_samples: int, batch: int, num_tokens: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", num_prompts)
        settings = make_settings(folder, num_samples=num_samples, batch=batch)
        tokenizer = make_tokenizer()
        before_mb = peak_mb()
        began = time.perf_counter()
        cursor, num = None, 0
        for iteration in range(-(-num_prompts // batch)):
            root = folder / f"attempt-{iteration}"
            root.mkdir()
            cursor, made = roll_out(root, settings, tokenizer, cursor, iteration, num_tokens)
            num += made
        seconds = time.perf_counter() - began
    return {
        "num_samples": num,
        "seconds": seconds,
        "peak_mb": peak_mb(),
        "grown_mb": peak_mb() - before_mb,
    }


def roll_out(
    root: Path, settings: Settings, tokenizer: Any, cursor: Any, iteration: int, num_tokens: int
) -> tuple[Any, int]:
    """One rollout as the stage does it; the cursor after it, and its samples."""
    order = Order("", "bench", "rollout", iteration, 0, str(root), "", "", {})
    with resolve(settings) as data:
        if cursor is None:
            data.check()
        supply = Supply(
            carried=(),
            stream=open_stream(data, settings, cursor=cursor, tokenizer=tokenizer),
            planner=Planner(
                order,
                settings,
                WEIGHTS,
                overrides=data_overrides(settings),
                purpose=("sample", iteration),
            ),
            ledger=Ledger(
                plan_rule(batch_size=settings.rollout.rollout_batch_size, admission="cursor")
            ),
            group_size=settings.rollout.n_samples_per_prompt,
        )
        pipeline = Pipeline(supply, Watch(attempts=lambda: ()), keep=make_filter(settings))
        assert pipeline.settle() is None
        engine = InstantEngine(num_tokens=(num_tokens, num_tokens), vocabulary=len(CHARACTERS))
        engine.start(WEIGHTS)

        async def run() -> Any:
            generate = SingleTurn(engine, Finisher(WEIGHTS, tokenizer))
            async with Grader(settings) as grader:
                path = root / JOURNAL_NAME
                return await pipeline.run(engine, generate, grader.grade, journal_path=path)

        outcome = asyncio.run(run())
        metrics = RolloutMetrics()
        entries = (supply.entries[index] for index in sorted(supply.entries))
        seal_files(root, seal_groups(root, entries, metrics=metrics))
        assert metrics.fold()
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
