"""An engine for a stage that generates: start it, prove what it serves, run a pipeline, stop it.

Owns what a rollout and an evaluation do alike once their groups are planned.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from slurm_rl.config.pools import settings_of_shard
from slurm_rl.config.rollout_schema import Overrides
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ModelError
from slurm_rl.rollout.engine import Engine, Weights
from slurm_rl.rollout.grading import Grade
from slurm_rl.rollout.groups import Finisher
from slurm_rl.rollout.instant import InstantEngine
from slurm_rl.rollout.pipeline import Outcome, Pipeline
from slurm_rl.rollout.rewards import Graded, Grader
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.single_turn import SingleTurn
from slurm_rl.rollout.supervised import FromLabels, grade_labels
from slurm_rl.rollout.turns import make_generate
from slurm_rl.rollout.weights import check_probe, describe_weights, hold_weights, weight_entries
from slurm_rl.seeds import derive_seed
from slurm_rl.stages.rank import current_rank
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.durable import write_hint
from slurm_rl.types import JOURNAL_NAME, Order

if TYPE_CHECKING:
    from slurm_rl.rollout.sglang import SglangOptions

log = logging.getLogger(__name__)

#: What decides samples besides the weights, as far as it is installed beside this program.
_LIBRARIES = ("transformers", "tokenizers", "torch", "sglang")


@dataclass(frozen=True, slots=True)
class Floor:
    """Where a stage generates, and what with. overrides: of an evaluation, by its name."""

    order: Order
    settings: Settings
    tokenizer: Any
    overrides: dict[str, Overrides] | None = None


def run_pipeline(
    floor: Floor,
    pipeline: Pipeline,
    *,
    engine: Engine | None = None,
    is_graded: bool = True,
) -> tuple[Outcome, dict[str, float]]:
    """What `pipeline` comes to, and numbers about it: from the journals alone if they hold the
    whole batch, else on an engine that has shown that it serves the weights.

    engine: one that is running already, and is left running. is_graded: False leaves all rewards
    to the score stage.
    """
    close = pipeline.settle()
    if close is not None:
        log.info("the journals hold the whole batch; no engine is started")
        _dismiss_followers(floor.order, floor.settings)
        return Outcome(close), {}
    began = time.monotonic()
    with serving(floor, engine) as (ready, weights):
        started = time.monotonic()
        outcome, gap = asyncio.run(_run(floor, pipeline, ready, weights, is_graded))
        numbers = ready.metrics()
    numbers |= {
        "perf/engine_start_time": started - began,
        "perf/generate_time": outcome.generate_s,
        "perf/tokens_per_s": outcome.num_tokens / max(outcome.generate_s, 1e-9),
    }
    return outcome, numbers if gap is None else numbers | {"engine/probe_gap": gap}


async def _run(
    floor: Floor,
    pipeline: Pipeline,
    engine: Engine,
    weights: Weights,
    is_graded: bool,
) -> tuple[Outcome, float | None]:
    settings = floor.settings
    gap = await check_probe(engine, weights, tolerance=settings.rollout.probe_tolerance)
    generate = make_generate(
        settings,
        engine=engine,
        tokenizer=floor.tokenizer,
        weights=weights,
        overrides=floor.overrides,
        context_len=find_context_len(settings, weights.path),
    ) or SingleTurn(
        engine,
        Finisher(
            weights,
            floor.tokenizer,
            masks_old=settings.rollout.mask_offpolicy_in_partial_rollout,
        ),
    )
    journal_path = Path(floor.order.attempt_dir) / JOURNAL_NAME
    if not is_graded:
        return await pipeline.run(engine, generate, _leave, journal_path=journal_path), gap
    own = next(iter(floor.overrides.values())) if floor.overrides else None
    async with Grader(settings, overrides=own) as grader:
        grade: Grade = grader.grade
        return await pipeline.run(engine, generate, grade, journal_path=journal_path), gap


def run_on_labels(floor: Floor, pipeline: Pipeline, weights: Weights) -> Outcome:
    """What `pipeline` comes to where the labels are the answers: no engine is started."""
    close = pipeline.settle()
    if close is not None:
        return Outcome(close)
    none = InstantEngine()
    journal_path = Path(floor.order.attempt_dir) / JOURNAL_NAME
    generate = FromLabels(weights, floor.tokenizer)
    return asyncio.run(pipeline.run(none, generate, grade_labels, journal_path=journal_path))


async def _leave(samples: Sequence[Sample]) -> Graded:
    return Graded(tuple(samples), "ungraded", "the score stage grades")


@contextmanager
def serving(floor: Floor, engine: Engine | None) -> Iterator[tuple[Engine, Weights]]:
    """An engine with the weights loaded, and the weights; ended on leaving if it was made here.

    Raises CorruptError if a file of the weights is not what was committed.
    """
    with _hold(floor.order, floor.settings) as weights:
        if engine is not None:
            engine.load_weights(weights)
            yield engine, weights
            return
        engine = make_engine(floor)
        try:
            engine.start(weights)
            yield engine, weights
        finally:
            engine.stop()


def _hold(order: Order, settings: Settings) -> AbstractContextManager[Weights]:
    """The order's weights, verified, and on this node if that is asked for."""
    return hold_weights(
        order.input("weights"),
        run_id=order.run_id,
        folder=settings.rollout.stage_weights,
        limit_gb=settings.rollout.stage_weights_gb,
    )


def make_engine(floor: Floor) -> Engine:
    """The engine that `rollout.engine` names, not started."""
    order, settings = floor.order, floor.settings
    if settings.rollout.engine == "embedded":
        # Imported here: with SGLang this process needs no torch.
        from slurm_rl.rollout.embedded import EmbeddedEngine

        return EmbeddedEngine(
            floor.tokenizer,
            num_threads=settings.rollout.embedded_threads,
            routed=settings.rollout.use_rollout_routing_replay,
        )
    from slurm_rl.rollout.sglang import SglangEngine

    return SglangEngine(plan_server(order, settings))


def plan_server(order: Order, settings: Settings) -> SglangOptions:
    """What the stage's SGLang servers are told."""
    from slurm_rl.rollout.sglang import plan_options
    from slurm_rl.rollout.sglang.options import HOST

    num_nodes, host = settings.rollout.engine_nodes, HOST
    if num_nodes > 1:
        from slurm_rl.train.distributed import reachable_address

        host = reachable_address(settings, num_nodes=num_nodes)
    return plan_options(
        settings_of_shard(settings, order.kind, order.shard),
        environment=os.environ,
        log_path=Path(order.attempt_dir) / "sglang.log",
        random_seed=derive_seed(settings.seed, "server", order.iteration, order.shard),
        leader_host=host,
    )


def plan_other_server(
    order: Order, settings: Settings, arguments: Mapping[str, Any]
) -> SglangOptions:
    """What the server of another model than the policy is told: started as the rollout's are."""
    from slurm_rl.rollout.sglang import SglangOptions

    rollout = settings.rollout
    own = {name: str(value) for name, value in rollout.sglang_env.items()}
    return SglangOptions(
        arguments=arguments,
        environment={**os.environ, **own},
        log_path=Path(order.attempt_dir) / "sglang.log",
        start_timeout_s=rollout.server_start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        python=rollout.sglang_python or sys.executable,
    )


def follow(order: Order, settings: Settings) -> bool:
    """Where an engine spans several nodes: be another node's part of it until it is done.

    False at once for the first rank, which serves, and where there is but one.
    """
    rank = current_rank(os.environ)
    if settings.rollout.engine_nodes == 1 or rank == 0:
        return False
    from slurm_rl.rollout.sglang.nodes import serve_follower

    with _hold(order, settings) as weights:
        serve_follower(plan_server(order, settings), weights, rank=rank)
    return True


def _dismiss_followers(order: Order, settings: Settings) -> None:
    """No engine is needed after all: the other nodes, which wait for one, may leave."""
    if settings.rollout.engine_nodes > 1:
        from slurm_rl.rollout.sglang.nodes import done_path
        from slurm_rl.rollout.sglang.options import plan_meeting

        write_hint(done_path(plan_meeting(plan_server(order, settings))), b"{}")


def read_model(order: Order) -> tuple[Weights, Any]:
    """The weights by their commit's words, and the tokenizer beside them.

    The small files are compared with the commit here, the weights themselves when they are served.
    """
    source = order.input("weights")
    weights = describe_weights(source, run_id=order.run_id)
    names = [entry.path for entry in weight_entries(source)]
    check_inputs(source, [name for name in names if not name.endswith(".safetensors")])
    return weights, load_tokenizer(weights.path)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer beside the weights. Raises ModelError, also for one that is not the model's."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise ModelError(
            f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {error})",
            hint="the model's tokenizer files are missing or damaged",
        ) from error
    largest = max(tokenizer.get_vocab().values(), default=0)
    vocab_size = _read_config(folder).get("vocab_size")
    if isinstance(vocab_size, int) and largest >= vocab_size:
        raise ModelError(
            f"{folder}: its tokenizer has a token {largest}, but the model's vocabulary ends at"
            f" {vocab_size - 1}",
            hint="the tokenizer is another model's; copy the right one there",
        )
    return tokenizer


def find_context_len(settings: Settings, folder: Path) -> int | None:
    """Most tokens of prompt and response together: as set, else as the model's config says.

    Raises ModelError for more than the model takes.
    """
    model_len = _read_config(folder).get("max_position_embeddings")
    own = settings.rollout.rollout_max_context_len
    if own is not None and isinstance(model_len, int) and own > model_len:
        raise ModelError(
            f"rollout.rollout_max_context_len = {own} is more than the model's"
            f" max_position_embeddings = {model_len}",
            hint="lower it",
        )
    return own or model_len


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def read_versions(names: Iterable[str] = _LIBRARIES) -> dict[str, str]:
    """Versions of those libraries that are installed here."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
