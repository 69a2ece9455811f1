"""`slurm-rl replay`: a stage of a run once more, on this machine, in a folder outside the run.

Owns the orders of such attempts and the processes that carry them out: the stage's own program,
with the settings, code, interpreter, environment and number of ranks that the stage had. No claim
is made and no supervisor runs, so that nothing can be committed; an order names the scratch folder
alone as its place, and a rollout finds there no journals but those of its own replay.

    <folder>/train/a0001-replay/      order.json, rank-<r>.log, and what the program leaves
    <folder>/rollout/shard-0000/…     a rollout of several shards has an attempt for each
    <folder>/samples/                 what is trained on, if it is not what was committed
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rl import errors
from slurm_rl.config.derive import stage_container
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, DataError, SlurmRlError
from slurm_rl.launch.payload import (
    LocalRunner,
    enter_stage,
    stage_binds,
    stage_environment,
    stage_interpreter,
)
from slurm_rl.launch.results import read_failure
from slurm_rl.storage.durable import seal_files
from slurm_rl.storage.fs import POSIX
from slurm_rl.types import Input, Order, Result, dump_record, parse_result

if TYPE_CHECKING:
    from slurm_rl.rollout.samples import SampleBatch

#: Like an attempt of a claim: a shard finds the others' journals by such names.
ATTEMPT = "a0001-replay"
_POLL_S = 0.1
_BEAT_S = 600.0


def place_of(folder: Path, kind: str, *, shard: int, num_shards: int) -> Path:
    """The attempt directory of a shard."""
    stage = folder / kind
    return (stage if num_shards == 1 else stage / f"shard-{shard:04d}") / ATTEMPT


def write_order(order: Order) -> Path:
    """Make the order's attempt directory and write it there."""
    attempt = Path(order.attempt_dir)
    attempt.mkdir(parents=True)
    path = attempt / "order.json"
    path.write_bytes(dump_record(order))
    return path


def run_order(path: Path, settings: Settings, *, kind: str, beat: Callable[[], None]) -> Result:
    """Carry out the order at `path`; what its program left.

    beat: called now and then meanwhile. Raises what the program failed with, as far as it said so.
    """
    payload = LocalRunner(_with_bind(settings, kind, path.parent)).start(path, kind=kind)
    beat_at = time.monotonic() + _BEAT_S
    try:
        while (status := payload.poll()) is None:
            time.sleep(_POLL_S)
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + _BEAT_S
                beat()
    except BaseException:
        payload.kill()  # nobody watches it any more
        raise
    if status != 0:
        failure = read_failure(path.parent, status, fs=POSIX)
        found = getattr(errors, failure.error, SlurmRlError)
        is_ours = isinstance(found, type) and issubclass(found, SlurmRlError)
        raise (found if is_ours else SlurmRlError)(
            failure.message, hint=f"its logs are in {path.parent}"
        )
    return parse_result((path.parent / "result.json").read_bytes())


def put_samples(
    source: Input, file: Path, *, folder: Path, settings: Settings, inputs: Mapping[str, Input]
) -> dict[str, Input]:
    """The inputs of a train stage with the samples in `file` in place of the rollout `source`.

    They are taken for samples of the weights that the rollout served, with the rewards that they
    have: a score stage has no say. Raises DataError or CorruptError for a file that holds none.
    """
    others = [role for role in ("reference", "teacher", "critic") if _has_signals(inputs, role)]
    if others:
        raise ConfigError(
            f"{file}: the {others[0]} stage of this run has scored the rollout's own samples alone",
            hint="replay without --samples, or in a run without such a stage",
        )
    version = int(source.content["weights"]["version"])
    folder.mkdir(parents=True)
    if file.suffix == ".safetensors":
        names = _copy_tensors(file, folder, version)
    else:
        names = _convert(file, folder, version, settings)
    entries = [dataclasses.asdict(entry) for entry in seal_files(folder, names)]
    given = dataclasses.replace(
        source,
        path=str(folder),
        files={name: str(folder / name) for name in names},
        content=source.content | {"files": entries},
    )
    return {role: entry for role, entry in inputs.items() if role != "score"} | {"rollout": given}


def _has_signals(inputs: Mapping[str, Input], role: str) -> bool:
    """Whether a stage of the iteration's own computed something for each sample."""
    return role in inputs and inputs[role].kind == role


def count_equal(ours: SampleBatch, theirs: SampleBatch) -> int:
    """How many samples are the same in both: tokens, log-probs, mask, versions and reward."""
    import numpy as np

    places = {
        pair: i for i, pair in enumerate(zip(theirs.group_index, theirs.sample_index, strict=True))
    }
    equal = 0
    for i, pair in enumerate(zip(ours.group_index, ours.sample_index, strict=True)):
        j = places.get(pair)
        if j is None:
            continue
        here, there = ours.response_slice(i), theirs.response_slice(j)
        same = (
            np.array_equal(ours.sample_tokens(i), theirs.sample_tokens(j))
            and np.array_equal(ours.rewards[i : i + 1], theirs.rewards[j : j + 1], equal_nan=True)
            and all(
                np.array_equal(getattr(ours, name)[here], getattr(theirs, name)[there])
                for name in ("rollout_logprobs", "loss_mask", "token_versions")
            )
        )
        equal += bool(same)
    return equal


def _copy_tensors(file: Path, folder: Path, version: int) -> list[str]:
    from slurm_rl.rollout.samples import as_version, read_samples, write_tensors

    try:
        return write_tensors(folder, as_version(read_samples([file]), version))
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}") from error


def _convert(file: Path, folder: Path, version: int, settings: Settings) -> list[str]:
    """Have the train stage's interpreter read it: this one may have no torch."""
    argv = [stage_interpreter(settings, "train"), "-m", "slurm_rl.rollout.dumps"]
    argv += [str(file.absolute()), str(folder), str(version)]
    argv += [settings.rollout.reward_key] if settings.rollout.reward_key else []
    binds = [*stage_binds(settings), str(file.absolute().parent), str(folder)]
    done = subprocess.run(
        enter_stage(settings, argv, kind="train", attempt_name=folder.name, binds=binds),
        env=stage_environment(settings, "train", os.environ),
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise DataError(done.stderr.strip().rpartition("\n")[2] or f"{file}: it cannot be read")
    return sorted(path.name for path in folder.iterdir())


def _with_bind(settings: Settings, kind: str, folder: Path) -> Settings:
    """The settings with `folder` mounted in the stage's container, if it has one."""
    container = stage_container(settings, kind)
    if container.runtime == "none":
        return settings
    if container.runtime == "pyxis":
        raise ConfigError(
            f"{kind}.container.runtime = pyxis needs srun, and a replay runs without it",
            hint="replay it in `slurm-rl shell`, or with an image for apptainer",
        )
    bound = container.model_copy(update={"bind": [*container.bind, str(folder)]})
    section = settings.stage(kind).model_copy(update={"container": bound})
    return settings.model_copy(update={kind: section})
