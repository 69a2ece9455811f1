"""The train stage: rollout and checkpoint in, checkpoint and weights out.

Owns what stands between the trainer and the commits: digests of what is read, the continuity
of iteration, versions, steps, rate and data cursor, and the content of the commit. In one
long-lived process, `open_trainer` once and `train_iteration` for each order do the same as
`run_train` does in processes of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_rl.config.derive import admission, settings_digest
from slurm_rl.config.schema import Settings
from slurm_rl.errors import CorruptError, NumericsError
from slurm_rl.stages.train_samples import read_batch, served_version
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.digest import digest_entries, digest_value
from slurm_rl.types import Input, Order, Result

if TYPE_CHECKING:
    from slurm_rl.train.trainer import Trainer

log = logging.getLogger(__name__)


def run_train(order: Order, settings: Settings) -> Result:
    """One iteration in a process of its own; every rank runs it.

    Rank 0's result holds the files of all ranks; the others' hold none. Raises what
    `open_trainer` and `train_iteration` raise; on disk are then files that nothing names.
    """
    started = time.monotonic()
    trainer = open_trainer(order, settings)
    opened = time.monotonic()
    with _parting_on_error(trainer):
        result = train_iteration(trainer, order)
    trainer.close()
    result.provenance["open_s"] = round(opened - started, 3)
    result.provenance["train_s"] = round(time.monotonic() - opened, 3)
    return result


def open_trainer(order: Order, settings: Settings) -> Trainer:
    """Build a trainer and load what the order continues from.

    Raises ModelError, ConfigError, CorruptError (a file is not what was committed, or the
    checkpoint's counters are not the commit's).
    """
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        from slurm_rl.train.trainer import Trainer

    source = order.input("checkpoint")
    check_inputs(source, _named(source, "weights/", but=".safetensors"))
    trainer = Trainer.build(
        settings,
        attempt_dir=Path(order.attempt_dir),
        weights_dir=Path(source.path) / "weights",
    )
    with _parting_on_error(trainer):
        if not _load_partial(trainer, order, source):
            _load(trainer, source)
    trainer.weights_digest = source.content["weights"]["digest"]
    return trainer


def train_iteration(trainer: Trainer, order: Order) -> Result:
    """Train on the order's rollout with an open trainer; save; describe the commit.

    Raises CorruptError if the order does not continue where the trainer is, or if its inputs
    are of different histories; NumericsError and DataError as the trainer does.
    """
    rollout, before = order.input("rollout"), order.input("checkpoint").content
    _check_continuity(trainer, order)
    batch = read_batch(order, trainer.settings)
    metrics = trainer.step(
        batch.samples,
        reference_dir=_reference_dir(order, trainer),
        attempt_dir=Path(order.attempt_dir),
        made_from=_made_from(order, trainer.settings),
        first_gap=before.get("logprob_gap_first"),
    )
    _check_schedule(trainer)
    probe = trainer.probe()
    began = time.monotonic()
    files = trainer.save(Path(order.attempt_dir))
    save_s = time.monotonic() - began
    if not files:
        return Result(files=[])
    weights = [entry for entry in files if entry.path.startswith("weights/")]
    trainer.weights_digest = digest_entries(weights)
    made = {"version": order.iteration + 1, "digest": trainer.weights_digest, "probe": probe}
    return Result(
        files=files,
        content={
            "weights": made,
            "lr": trainer.lr,
            "optimizer_steps": trainer.progress.optimizer_steps,
            "schedule_step": trainer.schedule_step,
            "num_samples_trained": trainer.progress.num_samples_trained,
            "logprob_gap_first": _first_gap(before.get("logprob_gap_first"), metrics),
            "cursor": rollout.content.get("cursor", {}),
        },
        metrics=metrics | batch.metrics(),
        provenance=_provenance(trainer, save_s=save_s),
    )


@contextlib.contextmanager
def _parting_on_error(trainer: Trainer) -> Iterator[None]:
    """On an error close the trainer, so that this process can open another one.

    Of several ranks the others may be waiting in a collective: there the process must end.
    """
    try:
        yield
    except BaseException:
        if trainer.world.size == 1:
            trainer.close()
        raise


def _load_partial(trainer: Trainer, order: Order, source: Input) -> bool:
    """Go on from a partial save of an earlier attempt, if there is one that is whole."""
    from slurm_rl.train.partial import find_partial

    if trainer.settings.train.save_steps is None:
        return False
    partial = find_partial(
        order.earlier_attempts,
        made_from=_made_from(order, trainer.settings),
        num_ranks=trainer.world.size,
    )
    partial = trainer.agree_on(partial)
    if partial is None or not trainer.load_partial(partial):
        return False
    steps, loaded = len(partial.reports), trainer.progress
    expected = int(source.content.get("optimizer_steps", 0)) + steps
    if (loaded.iteration, loaded.optimizer_steps) != (order.iteration, expected):
        raise CorruptError(
            f"{partial.folder}: at optimizer step {loaded.optimizer_steps} of iteration "
            f"{loaded.iteration}, not {expected} of {order.iteration}"
        )
    log.info("goes on after %d optimizer steps of an earlier attempt", steps)
    return True


def _made_from(order: Order, settings: Settings) -> str:
    """Digest of all that an iteration's training depends on."""
    inputs = {role: entry.digest for role, entry in order.inputs.items()}
    return digest_value({"inputs": inputs, "settings": settings_digest(settings)})


def _load(trainer: Trainer, source: Input) -> None:
    share = (trainer.world.rank, trainer.world.size)
    folder = Path(source.path)
    if source.kind == "init":
        check_inputs(source, _named(source, "weights/", only=".safetensors"), share=share)
        trainer.load_weights(folder / "weights")
    else:
        check_inputs(source, _named(source, "checkpoint/"), share=share)
        trainer.load_checkpoint(folder / "checkpoint")
        _check_counters(trainer, source)


def _named(source: Input, prefix: str, *, only: str = "", but: str = "\0") -> list[str]:
    names = [name for name in source.files if name.startswith(prefix)]
    return [name for name in names if name.endswith(only) and not name.endswith(but)]


def _check_counters(trainer: Trainer, source: Input) -> None:
    """The checkpoint's own counters must be those of its commit."""
    for key, loaded in (
        ("optimizer_steps", trainer.progress.optimizer_steps),
        ("schedule_step", trainer.schedule_step),
        ("num_samples_trained", trainer.progress.num_samples_trained),
        ("lr", trainer.loaded_lr),
    ):
        committed = source.content[key]
        if loaded != committed:
            raise CorruptError(
                f"{source.path}: after loading, {key} is {loaded}, but {committed} was committed"
            )


def _check_continuity(trainer: Trainer, order: Order) -> None:
    """The trainer must stand where the order continues, and the rollout be made from it."""
    source, rollout = order.input("checkpoint"), order.input("rollout")
    before, used = source.content["weights"], rollout.content["weights"]
    for what, is_now, should_be in (
        ("the trainer's iteration", trainer.progress.iteration, order.iteration),
        ("the checkpoint's weights version", before["version"], order.iteration),
        ("the rollout's iteration", rollout.iteration, order.iteration),
        ("the rollout's weights version", used["version"], served_version(order, trainer.settings)),
        (
            "the rollout's weights digest",
            used["digest"] if used["version"] == before["version"] else before["digest"],
            before["digest"],
        ),
        (
            "the trainer's weights digest",
            trainer.weights_digest or before["digest"],
            before["digest"],
        ),
    ):
        if is_now != should_be:
            raise CorruptError(f"train {order.iteration}: {what} is {is_now}, not {should_be}")
    cursors = source.content.get("cursor"), rollout.content.get("cursor")
    _check_cursor(*cursors, order, may_stay=admission(trainer.settings) == "arrival")


def _check_cursor(before: Any, after: Any, order: Order, *, may_stay: bool) -> None:
    """Data must move on: never the same prompts again, never those of another data set.

    may_stay: a batch may be made of carried-over groups alone.
    """
    if not before or not after:
        return
    visits = [int(cursor["visits"]) for cursor in (before, after)]
    if visits[1] < visits[0] or (visits[1] == visits[0] and not may_stay):
        raise CorruptError(
            f"train {order.iteration}: the data cursor went from visit {visits[0]} to {visits[1]}; "
            "it must move on"
        )
    prints = [cursor.get("data_fingerprint") for cursor in (before, after)]
    if prints[0] != prints[1]:
        raise CorruptError(
            f"train {order.iteration}: the data set changed from {prints[0]} to {prints[1]}"
        )


def _check_schedule(trainer: Trainer) -> None:
    if trainer.schedule_step != trainer.progress.optimizer_steps:
        raise NumericsError(
            f"the schedule counted {trainer.schedule_step} steps, the optimizer took "
            f"{trainer.progress.optimizer_steps}"
        )


def _reference_dir(order: Order, trainer: Trainer) -> Path | None:
    if not trainer.settings.train.use_kl_loss:
        return None
    source = order.input("reference")
    share = (trainer.world.rank, trainer.world.size)
    check_inputs(source, _named(source, "weights/"), share=share)
    return Path(source.path) / "weights"


def _first_gap(before: float | None, metrics: dict[str, float]) -> float | None:
    """What `logprob_gap_first` of the commit is: the first iteration's, handed on for ever."""
    from slurm_rl.train.gap import NAME

    if before is not None or NAME not in metrics:
        return before
    return float(f"{metrics[NAME]:.6g}")


def _provenance(trainer: Trainer, *, save_s: float) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
        "save_s": round(save_s, 3),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "num_ranks": trainer.world.size,
        "pid": os.getpid(),
    }
