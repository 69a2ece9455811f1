"""Megatron's distributed checkpoint: model, optimizer, schedule, random state, progress.

Owns the files below `checkpoint/`. The format is Megatron-core's `torch_dist`, so that it can
be read with another number of ranks or another layout. What is ours is that the bytes depend
on the state alone: not on the directory's name, the process's age or the threads' timing.

    checkpoint/
      __<rank>_<n>.distcp   tensors and objects, written by each rank
      .metadata             which tensor lies where (torch)
      common.pt             schedule, parameter groups, progress (Megatron)
      metadata.json         the format's name (Megatron)
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from slurm_rl.errors import ConfigError, CorruptError, StorageError
from slurm_rl.train.chunks import model_chunks
from slurm_rl.train.optimizer import current_lr
from slurm_rl.train.rng import RngState

logger = logging.getLogger(__name__)

#: Tensors in the model's own shapes, so that any layout can load them.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
#: Characters of an error that are shown.
_LONGEST = 300
_EXPERTS = "expert_model_parallel_size"
_DISTRIBUTED = "use_distributed_optimizer"
#: What torch and Megatron raise for files that are missing, damaged or of another model.
_LOAD_ERRORS = (
    OSError,
    EOFError,
    KeyError,
    TypeError,
    RuntimeError,
    pickle.UnpicklingError,
    CheckpointException,
    CheckpointingException,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training is. `iteration`: the next one to train; the others are totals."""

    iteration: int = 0
    optimizer_steps: int = 0
    num_samples_trained: int = 0


def save(
    folder: Path, *, model: Any, optimizer: Any, scheduler: Any, rng: RngState, progress: Progress
) -> None:
    """Write the checkpoint into `folder`, which must be empty; every rank calls it.

    On return all ranks' files are written and fsynced. A crash midway leaves files that
    nothing names yet. Raises StorageError if they cannot be written.
    """
    state = _sharded_state(model, optimizer, loading=False)
    state |= {
        "schedule": scheduler.state_dict(),
        "progress": dataclasses.asdict(progress),
        "rng": _rng_object(rng),
    }
    strategy = FullyParallelSaveStrategyWrapper(
        _SameBytes("torch_dist", 1),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    try:
        dist_checkpointing.save(
            _canonical_containers(state),
            str(folder),
            strategy,
            content_metadata=_canonical_containers({**_SHARDING, **_layout(), **_form(optimizer)}),
        )
    except CheckpointException as error:
        # torch's is a BaseException, which would pass every handler.
        raise StorageError(f"{folder}: cannot be written: {_first(error)}") from error


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says besides the state that it fills.

    rng: None if it was saved with another tensor- or pipeline-parallel size.
    lr:  the learning rate of the next step, as the settings were then.
    is_same_schedule: whether the settings still ask for that schedule.
    """

    progress: Progress
    rng: RngState | None
    lr: float
    is_same_schedule: bool


def load(folder: Path, *, model: Any, optimizer: Any, scheduler: Any) -> Loaded:
    """Fill model, optimizer and schedule from `folder`; every rank calls it.

    Of the optimizer only its state is taken: rates, decay and betas are what the settings say now.
    Raises CorruptError if the checkpoint cannot be read or does not fit the model, ConfigError if
    it cannot be laid out as this job is.
    """
    try:
        saved = dist_checkpointing.load_content_metadata(str(folder)) or {}
        _check_form(saved, _form(optimizer), folder)
        same_layout = {key: saved.get(key) for key in _layout()} == _layout()
        state = _sharded_state(model, optimizer, loading=True)
        if same_layout:
            state["rng"] = _rng_object(None)
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(folder)),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        loaded = dist_checkpointing.load(state, str(folder), strategy)
        progress = Progress(**loaded["progress"])
    except _LOAD_ERRORS as error:
        raise CorruptError(f"{folder}: the checkpoint cannot be read: {_first(error)}") from error
    for key, chunk in _named_chunks(model).items():
        chunk.load_state_dict(loaded[key])
    asked = _hyperparameters(optimizer)
    optimizer.load_state_dict(loaded["optimizer"])
    lr = current_lr(optimizer)
    for group, values in zip(optimizer.param_groups, asked, strict=True):
        group.update(values)
    is_same = _load_schedule(scheduler, loaded["schedule"])
    return Loaded(progress, RngState(loaded["rng"]) if same_layout else None, lr, is_same)


def save_model(folder: Path, *, model: Any, facts: dict[str, Any]) -> None:
    """Write a checkpoint of the weights alone into `folder`, which must be empty.

    facts: plain values beside them. Raises StorageError if they cannot be written.
    """
    sharded = {key: c.sharded_state_dict() for key, c in _named_chunks(model).items()}
    try:
        dist_checkpointing.save(
            _canonical_containers({**sharded, **facts}),
            str(folder),
            _SameBytes("torch_dist", 1),
            content_metadata=_canonical_containers(_layout()),
        )
    except CheckpointException as error:
        raise StorageError(f"{folder}: cannot be written: {_first(error)}") from error


def load_model(folder: Path, *, model: Any) -> None:
    """Fill the model from `folder`, whatever else is in it. Raises CorruptError."""
    chunks = _named_chunks(model)
    try:
        state = {key: chunk.sharded_state_dict() for key, chunk in chunks.items()}
        loaded = dist_checkpointing.load(state, str(folder))
    except _LOAD_ERRORS as error:
        raise CorruptError(f"{folder}: the checkpoint cannot be read: {_first(error)}") from error
    for key, chunk in chunks.items():
        chunk.load_state_dict(loaded[key])


def _hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """What the settings say of each parameter group; a checkpoint says what earlier ones did."""
    state = ("params", "step")
    return [{k: v for k, v in g.items() if k not in state} for g in optimizer.param_groups]


def _load_schedule(scheduler: Any, saved: dict[str, Any]) -> bool:
    """Go on at the position that the checkpoint was at, in the shape that the settings say now;
    whether it is the same."""
    asked = scheduler.state_dict()
    changed = {k: v for k, v in saved.items() if k != "num_steps" and asked[k] != v}
    for name, value in changed.items():
        logger.info("the schedule goes on with %s = %s; it was %s", name, asked[name], value)
    scheduler.load_state_dict({**asked, "num_steps": saved["num_steps"]})
    return not changed


def _sharded_state(model: Any, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    # The model without its wrappers, which would prefix every key with `module.`.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**_SHARDING, "dp_cp_group": group}
    chunks = _named_chunks(model)
    sharded = {key: c.sharded_state_dict(metadata=metadata) for key, c in chunks.items()}
    return {
        **sharded,
        "optimizer": optimizer.sharded_state_dict(
            sharded if len(chunks) > 1 else sharded["model"],
            is_loading=loading,
            metadata=dict(_SHARDING),
        ),
    }


def _named_chunks(model: Any) -> dict[str, Any]:
    """What of the state is which chunk's: its keys are in no file, those of its tensors are."""
    chunks = model_chunks(model)
    return {f"model{i}" if len(chunks) > 1 else "model": c for i, c in enumerate(chunks)}


def _layout() -> dict[str, int]:
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _form(optimizer: Any) -> dict[str, Any]:
    """What the form of the optimizer's state depends on, where it is not as usual."""
    size = parallel_state.get_expert_model_parallel_world_size()
    is_split = optimizer.chained_optimizers[0].config.use_distributed_optimizer
    experts = {_EXPERTS: size} if size > 1 else {}
    return experts if is_split else experts | {_DISTRIBUTED: False}


def _check_form(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """ConfigError unless the optimizer's state can be read in this form."""
    experts = [int(found.get(_EXPERTS, 1)) for found in (saved, now)]
    if (experts[0] > 1) != (experts[1] > 1):
        raise ConfigError(
            f"{folder}: saved with {_EXPERTS} = {experts[0]}, which is {experts[1]} now: Megatron "
            "keeps the experts' optimizer state apart from the others' only if it is above 1",
            hint=f"keep it {'above 1' if experts[0] > 1 else '= 1'}; other sizes may change",
        )
    split = [bool(found.get(_DISTRIBUTED, True)) for found in (saved, now)]
    if split[0] != split[1]:
        raise ConfigError(
            f"{folder}: saved with {_DISTRIBUTED} = {split[0]}, which is {split[1]} now: the two "
            "keep the optimizer's state in different forms",
            hint=f"set train.megatron.{_DISTRIBUTED}: {str(split[0]).lower()}",
        )


def _rng_object(rng: RngState | None) -> ShardedObject:
    layout = _layout()
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    shape = (
        layout["pipeline_model_parallel_size"],
        layout["tensor_model_parallel_size"],
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    data = None if rng is None else _canonical_containers(rng.states)
    return ShardedObject("rng", data, shape, place, replica_id=replica)


def _canonical_containers(value: Any) -> Any:
    """`value` with fresh containers, keys in order, and one object for equal strings.

    pickle writes a reference where it meets the same *object* again. After a load, equal
    strings and tuples are other objects than in a process that made them, so that equal
    states gave different bytes. Other objects (tensors, shards) are passed on as they are.
    """
    if type(value) is dict:
        items = list(value.items())
        if all(isinstance(key, str) for key in value):
            items.sort(key=lambda item: item[0])
        return {_canonical_containers(k): _canonical_containers(v) for k, v in items}
    if type(value) in (list, tuple):
        return type(value)(_canonical_containers(item) for item in value)
    if type(value) is str:
        return sys.intern(value)
    return value


class _SameBytes(SaveShardedStrategy):
    """Megatron's torch_dist strategy on torch's own writer, in this process.

    Megatron's writer spawns a manager and forks workers (2 s on a tiny model) and needs
    psutil; the format is the same.
    """

    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_checkpoint.state_dict_saver.save(
            mcore_to_pyt_state_dict(flat, False),
            # One thread: torch's writer loses the errors of its other threads (a full disk),
            # and with them a part of the checkpoint.
            storage_writer=_Writer(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )


class _Writer(FileSystemWriter):
    """torch's writer, whose `.metadata` says nothing of where, when or in what order."""

    def finish(self, metadata: Any, results: Any) -> None:
        """Write `.metadata` (rank 0), without the path and the random id that torch adds."""
        entries = {item.index: item.storage_data for part in results for item in part}
        ordered = sorted(entries, key=lambda index: (index.fqn, index.offset or ()))
        metadata.storage_data = {index: entries[index] for index in ordered}
        metadata.version = torch_checkpoint.filesystem.CURRENT_DCP_VERSION
        with open(Path(self.path) / ".metadata", "xb") as file:
            pickler = pickle.Pickler(file, protocol=4)
            pickler.fast = True  # no references to objects met before: see above
            pickler.dump(metadata)


def _first(error: BaseException) -> str:
    """The first line of what went wrong; torch's own error says only on which ranks."""
    if isinstance(error, CheckpointException):
        error = next((failed[0] for failed in error.failures.values()), error)
    lines = str(error).strip().splitlines()
    # A key that is missing comes with all that are there.
    return f"{type(error).__name__}: {lines[0][:_LONGEST] if lines else ''}"
