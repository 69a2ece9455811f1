"""The rollout stage: from a weights commit to a committed batch of rewarded samples.

Owns the order of things: verify the weights, take the next prompts, start the engine,
generate, reward, journal, seal. What each of these means is in `slurm_rl.rollout`.

Nothing is generated before the engine has shown that it serves the weights of the commit.
In deterministic mode the sealed files are a function of the order and the settings, however
often the stage was killed and whatever the journals held.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from slurm_rl.config.schema import Settings
from slurm_rl.errors import CorruptError, ModelError
from slurm_rl.rollout.engine import Engine, Weights
from slurm_rl.rollout.groups import Collector, plan_groups, plan_sampling, take_over
from slurm_rl.rollout.prompts import (
    Cursor,
    Visit,
    epoch_order,
    prompt_tokenizer,
    read_prompts,
    start_cursor,
    take_batch,
)
from slurm_rl.rollout.rewards import Rewarder
from slurm_rl.rollout.samples import Sample, write_samples
from slurm_rl.rollout.sglang import SglangEngine, plan_options
from slurm_rl.seeds import derive_seed
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import JOURNAL_NAME, Input, Order, Result

log = logging.getLogger(__name__)

#: What decides samples besides the weights, as far as it is installed beside this program.
_LIBRARIES = ("transformers", "tokenizers", "torch", "sglang")


def run_rollout(order: Order, settings: Settings, *, engine: Engine | None = None) -> Result:
    """Run the stage (or shard) that `order` names; everything is fsynced on return.

    engine: one that is already serving, for a process that lives longer than a stage: it is
    given the new weights and left running. Without it, one is started and stopped here.

    Raises DataError, RewardError, ModelError (the user's), CorruptError (the weights are not
    what was committed) and EngineError.
    """
    began = time.monotonic()
    weights = verify_weights(order.input("weights"), run_id=order.run_id)
    with Rewarder(settings) as rewarder:
        tokenizer = load_tokenizer(weights.path)
        visits, cursor = take_visits(order, settings, tokenizer=tokenizer)
        plan = plan_groups(visits, order=order, settings=settings, weights=weights)
        taken = take_over(plan, order.earlier_attempts)
        journal_path = Path(order.attempt_dir) / JOURNAL_NAME
        with serving(engine, weights, order=order, settings=settings, tokenizer=tokenizer) as ready:
            started = time.monotonic()
            todo = [group for group in plan if group.key not in taken]
            collector = Collector(todo, weights=weights, tokenizer=tokenizer, path=journal_path)
            made = collector.run(ready, plan_sampling(settings), rewarder)
            generated = time.monotonic()
    durations = {
        "perf/engine_start_time": started - began,
        "perf/rollout_time": time.monotonic() - began,
        "perf/tokens_per_s": count_tokens(made) / max(generated - started, 1e-9),
        "rollout/groups_taken_over": float(len(taken)),
    }
    content = {
        "weights": {"version": weights.version, "digest": weights.digest},
        "cursor": cursor.as_dict(),
        "seed": settings.seed,
    }
    return seal([*taken.values(), *made], order=order, content=content, metrics=durations)


@contextmanager
def serving(
    engine: Engine | None, weights: Weights, *, order: Order, settings: Settings, tokenizer: Any
) -> Iterator[Engine]:
    """An engine that has shown that it serves `weights`; ended on leaving if it was made here."""
    if engine is not None:
        engine.load_weights(weights)
        yield engine
        return
    engine = make_engine(order, settings, tokenizer=tokenizer)
    try:
        engine.start(weights)
        yield engine
    finally:
        engine.stop()


def seal(
    groups: list[list[Sample]], *, order: Order, content: dict[str, Any], metrics: dict[str, float]
) -> Result:
    """Write and fsync the samples; the result that names them."""
    began = time.monotonic()
    root = Path(order.attempt_dir)
    samples = [sample for group in groups for sample in group]
    files = seal_files(root, write_samples(root, samples))
    metrics = fold_metrics(groups) | metrics
    log.info("reward %.4f over %d samples", metrics["rollout/raw_reward"], len(samples))
    counts = {"num_samples": len(samples), "num_groups": len(groups)}
    versions = read_versions(_LIBRARIES)
    facts = {"versions": versions, "save_s": round(time.monotonic() - began, 3)}
    return Result(files, content=content | counts, metrics=metrics, provenance=facts)


def read_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those libraries that are installed here."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer beside the weights. Raises ModelError."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise ModelError(
            f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {error})",
            hint="the model's tokenizer files are missing or damaged",
        ) from error


def verify_weights(source: Input, *, run_id: str) -> Weights:
    """The weights of a commit, after every file of theirs was read and compared with it.

    Raises CorruptError naming the first file that is missing or differs, and StorageError for one
    that cannot be read.
    """
    names = [e["path"] for e in source.content["files"] if e["path"].startswith("weights/")]
    if "weights/config.json" not in names:
        raise CorruptError(f"{source.path}: the commit of {source.kind} holds no weights")
    check_inputs(source, names)
    facts = source.content["weights"]
    return Weights(
        path=Path(source.files["weights/config.json"]).parent,
        version=facts["version"],
        digest=facts["digest"],
        label=f"{run_id}/v{facts['version']}/{facts['digest']}",
    )


def take_visits(order: Order, settings: Settings, *, tokenizer: Any) -> tuple[list[Visit], Cursor]:
    """This shard's prompts of the iteration, and the cursor after the whole batch."""
    rollout = settings.rollout
    data = read_prompts(rollout)
    previous = order.inputs.get("previous")
    cursor = start_cursor(data, previous.content["cursor"] if previous else None)
    visits, after = take_batch(
        data,
        cursor,
        num_prompts=rollout.rollout_batch_size,
        order=epoch_order(len(data.prompts), seed=settings.seed, shuffle=rollout.rollout_shuffle),
        tokenize=prompt_tokenizer(tokenizer, rollout),
        max_tokens=rollout.rollout_max_prompt_len,
    )
    return visits[order.shard :: order.num_shards], after


def make_engine(order: Order, settings: Settings, *, tokenizer: Any) -> Engine:
    """The engine that `rollout.engine` names, not started."""
    if settings.rollout.engine == "embedded":
        # Imported here: with SGLang this process needs no torch.
        from slurm_rl.rollout.embedded import EmbeddedEngine

        return EmbeddedEngine(tokenizer, num_threads=settings.rollout.embedded_threads)
    seed = derive_seed(settings.seed, "server", order.iteration, order.shard)
    options = plan_options(
        settings,
        environment=os.environ,
        log_path=Path(order.attempt_dir) / "sglang.log",
        random_seed=seed,
    )
    return SglangEngine(options)


def fold_metrics(groups: Iterable[list[Sample]]) -> dict[str, float]:
    """Numbers for people, over all samples; `zero_std` is the share of groups that teach
    nothing, since all their rewards are equal."""
    rewards = [[sample.reward or 0.0 for sample in group] for group in groups]
    samples = [sample for group in groups for sample in group]
    num = max(len(samples), 1)
    return {
        "rollout/raw_reward": sum(sum(group) for group in rewards) / num,
        "rollout/response_len": sum(sample.response_length for sample in samples) / num,
        "rollout/truncated_ratio": sum(s.status == "truncated" for s in samples) / num,
        "rollout/zero_std": sum(len(set(g)) == 1 for g in rewards) / max(len(rewards), 1),
    }


def count_tokens(groups: Iterable[list[Sample]]) -> int:
    """Response tokens of all samples."""
    return sum(sample.response_length for group in groups for sample in group)
