"""What the stages that train have in common: the policy's (`train`) and the critic's.

Owns the way from the commits to an open trainer: digests of what is read, partial saves of earlier
attempts, and the continuity of versions, counters and rates. A commit that carries a role forward
unchanged holds the files of an earlier one; what it continues is that one's state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_rl.config.roles import num_ranks, updating_roles
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.errors import CorruptError, NumericsError
from slurm_rl.stages.rank import current_rank
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.digest import digest_entries, digest_value
from slurm_rl.types import Input, Order, Result

if TYPE_CHECKING:
    from slurm_rl.train.trainer import Trainer

log = logging.getLogger(__name__)

#: Role -> key of its weights in a commit's content; also the folder of its first ones in init's.
FACTS = {"train": "weights", "critic": "critic"}


def run_role(
    order: Order, settings: Settings, kind: str, iterate: Callable[[Trainer, Order], Result]
) -> Result:
    """One iteration of a role in a process of its own; every rank runs it.

    Raises what `open_role` and `iterate` raise; on disk are then files that nothing names.
    """
    started = time.monotonic()
    trainer = open_role(order, settings, kind)
    opened = time.monotonic()
    with parting_on_error(trainer):
        result = iterate(trainer, order)
    trainer.close()
    result.metrics["perf/load_time"] = opened - started
    result.provenance["open_s"] = round(opened - started, 3)
    result.provenance["train_s"] = round(time.monotonic() - opened, 3)
    return result


def open_role(order: Order, settings: Settings, kind: str) -> Trainer:
    """Build a role's trainer and load what the order continues from.

    Raises ModelError, ConfigError, CorruptError (a file is not what was committed, or the
    checkpoint's counters are not the commit's).
    """
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        from slurm_rl.train.trainer import Trainer

    source = order.input("checkpoint")
    folder = weights_folder(source, kind)
    check_inputs(source, named(source, f"{folder}/", but=".safetensors"))
    trainer = Trainer.build(
        settings,
        attempt_dir=Path(order.attempt_dir),
        weights_dir=Path(source.path) / folder,
        kind=kind,
    )
    with parting_on_error(trainer):
        if not _load_partial(trainer, order, source):
            _load(trainer, order, source, folder)
    trainer.weights_digest = source.content[FACTS[kind]]["digest"]
    _check_memory(trainer)
    return trainer


def _check_memory(trainer: Trainer) -> None:
    """Before the work, not after it: whether this node has the memory that a save takes."""
    from slurm_rl.train.host_memory import check_host_memory, free_memory

    check_host_memory(trainer.save_need, free_bytes=free_memory(), kind=trainer.kind)


def weights_folder(source: Input, kind: str) -> str:
    """Where a commit has a role's Hugging Face weights."""
    return FACTS[kind] if source.kind == "init" else "weights"


@contextlib.contextmanager
def parting_on_error(trainer: Trainer) -> Iterator[None]:
    """On an error close the trainer, so that this process can open another one.

    Of several ranks the others may be waiting in a collective: there the process must end.
    """
    try:
        yield
    except BaseException:
        if trainer.world.size == 1:
            trainer.close()
        raise


def made_from(order: Order, settings: Settings) -> str:
    """Digest of all that an iteration's training depends on."""
    inputs = {role: entry.digest for role, entry in order.inputs.items()}
    code = Path(order.code_dir).name  # a loss that was mended is another one
    return digest_value({"inputs": inputs, "settings": settings_digest(settings), "code": code})


def check_share(source: Input, folder: str, settings: Settings, kind: str) -> None:
    """Compare this rank's share of a folder's files with their commit. Raises CorruptError."""
    share = (current_rank(os.environ), num_ranks(settings, kind))
    check_inputs(source, named(source, f"{folder}/"), share=share)


def named(source: Input, prefix: str, *, only: str = "", but: str = "\0") -> list[str]:
    """The input's files below `prefix` that end with `only` and not with `but`."""
    names = [name for name in source.files if name.startswith(prefix)]
    return [name for name in names if name.endswith(only) and not name.endswith(but)]


def check_versions_follow(trainer: Trainer, order: Order) -> None:
    """The trainer must stand where the order continues. Raises CorruptError."""
    before = order.input("checkpoint").content[FACTS[trainer.kind]]
    for what, is_now, should_be in (
        ("the trainer's iteration", trainer.progress.iteration, order.iteration),
        ("the checkpoint's version", before["version"], order.iteration),
        (
            "the trainer's weights digest",
            trainer.weights_digest or before["digest"],
            before["digest"],
        ),
    ):
        check_same(order, what, is_now, should_be)


def check_same(order: Order, what: str, is_now: Any, should_be: Any) -> None:
    """CorruptError unless both are equal."""
    if is_now != should_be:
        raise CorruptError(f"{order.kind} {order.iteration}: {what} is {is_now}, not {should_be}")


def save_role(trainer: Trainer, order: Order) -> Result:
    """Save checkpoint and weights; the commit's words for both. Only rank 0's has files.

    Raises NumericsError unless schedule and optimizer have taken the same number of steps.
    """
    if trainer.schedule_step != trainer.progress.optimizer_steps:
        raise NumericsError(
            f"the schedule counted {trainer.schedule_step} steps, the optimizer took "
            f"{trainer.progress.optimizer_steps}"
        )
    began = time.monotonic()
    files = trainer.save(Path(order.attempt_dir))
    save_s = time.monotonic() - began
    made: dict[str, Any] = {"version": order.iteration + 1}
    if files:
        weights = [entry for entry in files if entry.path.startswith("weights/")]
        made["digest"] = trainer.weights_digest = digest_entries(weights)
    counters = {
        "lr": trainer.lr,
        "optimizer_steps": trainer.progress.optimizer_steps,
        "schedule_step": trainer.schedule_step,
        "num_samples_trained": trainer.progress.num_samples_trained,
    }
    return Result(
        files=files,
        content={FACTS[trainer.kind]: made, **counters},
        metrics={"perf/save_time": save_s},
        provenance=_describe_process(trainer, save_s=save_s),
    )


def _describe_process(trainer: Trainer, *, save_s: float) -> dict[str, Any]:
    """Where and with what a stage ran."""
    import torch

    from slurm_rl.train import fused

    cuda = torch.cuda.is_available()
    return {
        "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
        "save_s": round(save_s, 3),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "num_ranks": trainer.world.size,
        "fused_kernels": fused.is_on(trainer.model.config),
        "pid": os.getpid(),
    }


def _load_partial(trainer: Trainer, order: Order, source: Input) -> bool:
    """Go on from a partial save of an earlier attempt, if there is one that is whole."""
    from slurm_rl.train.partial import agree_on, find_partial

    if updating_roles(trainer.settings)[trainer.kind].save_steps is None:
        return False
    partial = find_partial(
        order.earlier_attempts,
        made_from=made_from(order, trainer.settings),
        num_ranks=trainer.world.size,
    )
    partial = agree_on(partial)
    if partial is None or not trainer.load_partial(partial):
        return False
    steps, loaded = len(partial.reports), trainer.progress
    expected = int(source.content.get("optimizer_steps", 0)) + steps
    reached = _reached(order, source)
    if (loaded.iteration, loaded.optimizer_steps) != (reached, expected):
        raise CorruptError(
            f"{partial.folder}: at optimizer step {loaded.optimizer_steps} of iteration "
            f"{loaded.iteration}, not {expected} of {reached}"
        )
    trainer.stand_at(order.iteration)
    log.info("goes on after %d optimizer steps of an earlier attempt", steps)
    return True


def _reached(order: Order, source: Input) -> int:
    """The iteration that a checkpoint says it stands at: one that was carried forward, an earlier
    one than its commit's."""
    return int(source.content.get("carried_since", order.iteration))


def _load(trainer: Trainer, order: Order, source: Input, folder: str) -> None:
    share = (trainer.world.rank, trainer.world.size)
    path, files = Path(source.path), named(source, "checkpoint/")
    if files:
        check_inputs(source, files, share=share)
        trainer.load_checkpoint(path / "checkpoint")
        _check_counters(trainer, order, source)
    elif source.kind == "init" or source.content.get("carried_since") == 0:
        check_inputs(source, named(source, f"{folder}/", only=".safetensors"), share=share)
        trainer.load_weights(path / folder)
    else:
        raise CorruptError(
            f"{source.path}: holds no checkpoint; the optimizer's state is gone, and {trainer.kind}"
            f" {order.iteration} cannot go on from weights alone"
        )
    trainer.stand_at(order.iteration)


def _check_counters(trainer: Trainer, order: Order, source: Input) -> None:
    """The checkpoint's own counters must be those of its commit."""
    content = source.content
    for key, loaded, committed in (
        ("iteration", trainer.progress.iteration, _reached(order, source)),
        ("optimizer_steps", trainer.progress.optimizer_steps, content["optimizer_steps"]),
        ("schedule_step", trainer.schedule_step, content["schedule_step"]),
        (
            "num_samples_trained",
            trainer.progress.num_samples_trained,
            content["num_samples_trained"],
        ),
        ("lr", trainer.loaded_lr, content["lr"]),
    ):
        if loaded != committed:
            raise CorruptError(
                f"{source.path}: after loading, {key} is {loaded}, but {committed} was committed"
            )
