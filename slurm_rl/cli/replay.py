"""replay: a committed stage again on this machine, compared with what was committed.

Nothing is committed, and nothing is written into the run but the lease that keeps retention away
from the inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.chain.observe import read_current
from slurm_rl.cli.runs import find_run
from slurm_rl.cli.shell import find_stage, hold_inputs
from slurm_rl.cli.terminal import format_seconds, say
from slurm_rl.config.roles import stage_ranks
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, SlurmRlError
from slurm_rl.launch.build import OpenRun
from slurm_rl.launch.replay import count_equal, place_of, put_samples, run_order, write_order
from slurm_rl.launch.shell import find_inputs, make_order
from slurm_rl.launch.stage_settings import parse_settings
from slurm_rl.storage.commits import file_path
from slurm_rl.storage.control import Control, read_control
from slurm_rl.types import Commit, Input, Result, Slot, StageRef


@dataclass(frozen=True)
class Replay:
    """A stage that is to be done again in `folder`."""

    opened: OpenRun
    control: Control
    ref: StageRef
    inputs: Mapping[str, Input]
    folder: Path
    beat: Callable[[], None]

    @property
    def settings(self) -> Settings:
        return parse_settings(self.opened.identity, self.control, at=self.ref)

    @property
    def committed(self) -> Commit | None:
        return read_current(self.opened.run, self.opened.chain.graph, self.control, self.ref)

    @property
    def slot(self) -> Slot:
        return Slot(self.ref.iteration, self.ref.kind, self.control.timeline_of(self.ref))


#: Stages that can be done again: they read what is committed, and run a model.
_KINDS = ("train", "rollout", "critic", "reference", "teacher")


def choose_stage(flags: Mapping[str, bool], *, stage: str | None) -> str:
    """The kind of stage that a person names, by a flag of its own or by `--stage`."""
    named = [kind for kind, given in flags.items() if given] + ([] if stage is None else [stage])
    if len(named) != 1:
        raise ConfigError("say which one: --train-only, --rollout-only or --stage KIND")
    if named[0] not in _KINDS:
        raise ConfigError(f"--stage = {named[0]!r} is not one of {', '.join(_KINDS)}")
    return named[0]


def replay_stage(
    path: Path, *, kind: str, iteration: int, samples: Path | None, output: Path | None
) -> None:
    """Do it and say what came out. Raises NothingDone if the inputs are not committed, and what the
    stage's program fails with."""
    if samples is not None and kind != "train":
        raise ConfigError("--samples are what is trained on: give --train-only with it")
    opened = find_run(path)
    control = read_control(opened.run)
    ref = find_stage(opened, control, iteration, kind, 0)
    found = find_inputs(opened, control, ref)
    with (
        hold_inputs(opened, list(found), ref) as beat,
        scratch_folder(opened.run.root, output) as folder,
    ):
        inputs = {entry.role: entry for entry in found.values()}
        replay = Replay(opened, control, ref, inputs, folder, beat)
        if samples is not None:
            rollout = inputs["rollout"]
            where = folder / "samples"
            given = put_samples(
                rollout, samples, folder=where, settings=replay.settings, inputs=inputs
            )
            replay = dataclasses.replace(replay, inputs=given)
        began = time.monotonic()
        say(f"{ref}: again in {folder}; nothing of it is committed")
        results = list(_run(replay))
        say(f"done in {format_seconds(time.monotonic() - began)}")
        if kind != "rollout":
            _compare_files(replay, results[0], is_same=samples is None)
        else:
            _compare_samples(replay, results)
        if output is not None:
            say(f"what it made is in {folder}")


@contextlib.contextmanager
def scratch_folder(root: Path, output: Path | None) -> Iterator[Path]:
    """`output`, made and kept; or a temporary folder, which stays if a program failed in it."""
    if output is None:
        folder = Path(tempfile.mkdtemp(prefix="slurm-rl-replay-"))
    else:
        folder = output.absolute()
        if folder.resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"--output {output}: it lies in the run", hint="choose another place")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--output {output}: it is there already, and not an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
    has_failed = False
    try:
        yield folder
    except SlurmRlError:
        has_failed = any(folder.rglob("*.log"))
        raise
    finally:
        if output is None and not has_failed:
            shutil.rmtree(folder, ignore_errors=True)


def _run(replay: Replay) -> Iterator[Result]:
    """The stage's shards, one after the other: the first may do the work of the others, too."""
    opened, ref, settings = replay.opened, replay.ref, replay.settings
    num_shards = opened.chain.graph.node(ref.kind).num_shards
    for shard in range(num_shards):
        attempt = place_of(replay.folder, ref.kind, shard=shard, num_shards=num_shards)
        order = make_order(
            opened,
            replay.control,
            ref,
            inputs=list(replay.inputs.values()),
            attempt=attempt,
            shard=shard,
        )
        order = dataclasses.replace(order, run_dir=str(replay.folder))
        yield run_order(write_order(order), settings, kind=ref.kind, beat=replay.beat)


def _compare_files(replay: Replay, result: Result, *, is_same: bool) -> None:
    commit = replay.committed
    _say_metrics({} if commit is None else commit.provenance.get("metrics", {}), result.metrics)
    say(f"{stage_ranks(replay.settings, replay.ref.kind)} ranks")
    if commit is None:
        say("this stage is not committed: there is nothing to compare with")
        return
    theirs = {entry.path: entry.digest for entry in commit.files}
    ours = {entry.path: entry.digest for entry in result.files}
    differing = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
    if not differing:
        say(f"all {len(theirs)} files are, byte for byte, those that were committed")
        return
    say(f"{len(differing)} of {len(theirs)} files differ from the committed: {differing[0]}, …")
    if not is_same:
        say("it was trained on other samples than the committed: that is to be expected")
    elif not replay.settings.deterministic:
        say("the run is not deterministic: that is to be expected")


def _compare_samples(replay: Replay, results: list[Result]) -> None:
    from slurm_rl.rollout.samples import TENSORS_NAME, read_samples

    num = len(results)
    attempts = [
        place_of(replay.folder, replay.ref.kind, shard=shard, num_shards=num)
        for shard in range(num)
    ]
    paths = [
        attempt / entry.path
        for attempt, result in zip(attempts, results, strict=True)
        for entry in result.files
        if entry.path.split("/")[-1] == TENSORS_NAME
    ]
    ours = read_samples(paths)
    say(f"{len(ours)} samples, reward {ours.rewards.mean():.6g}")
    commit = replay.committed
    if commit is None:
        say("this stage is not committed: there is nothing to compare with")
        return
    names = [entry.path for entry in commit.files if entry.path.split("/")[-1] == TENSORS_NAME]
    theirs = read_samples([file_path(replay.opened.run, replay.slot, commit, n) for n in names])
    say(f"committed were {len(theirs)}, reward {theirs.rewards.mean():.6g}")
    equal = count_equal(ours, theirs)
    say(
        f"{equal} samples are equal"
        + (": all of them" if equal == len(theirs) == len(ours) else "")
    )
    if equal < len(theirs) and not replay.settings.deterministic:
        say("the run is not deterministic: that is to be expected")


def _say_metrics(committed: Mapping[str, float], here: Mapping[str, float]) -> None:
    """A table of both, and their difference."""
    width = max((len(name) for name in here), default=6)
    say(f"{'metric':<{width}}  {'committed':>12}  {'here':>12}  {'difference':>12}")
    for name in sorted(here):
        known = committed.get(name)
        before = "" if known is None else f"{known:.6g}"
        change = "" if known is None else f"{here[name] - known:.3g}"
        say(f"{name:<{width}}  {before:>12}  {here[name]:>12.6g}  {change:>12}")
