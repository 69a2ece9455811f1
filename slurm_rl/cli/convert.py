"""convert: a model of a run, or any other, as a directory that stands by itself.

Owns what may be asked for. From a run, committed weights are compared with their digests while they
are copied; the work on tensors is `train/convert.py`'s. Nothing that exists is written over, and
what was begun is taken away again if it fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.cli.runs import check_iteration, find_run
from slurm_rl.cli.terminal import format_bytes, say
from slurm_rl.errors import ConfigError, CorruptError, NoRunError, NothingDone, PrunedError
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.commits import file_path
from slurm_rl.storage.control import read_control
from slurm_rl.storage.digest import digest_file
from slurm_rl.storage.tombstones import explain_pruned, read_pruned
from slurm_rl.types import FileEntry, Slot, StageRef

#: What `--file-size` may end in.
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_DTYPES = ("float32", "bfloat16", "float16")
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for. config: where a checkpoint's `config.json` is."""

    version: int | None = None
    critic: bool = False
    dtype: str | None = None
    file_size: str | None = None
    megatron: bool = False
    config: Path | None = None
    through: str | None = None

    @property
    def file_size_bytes(self) -> int | None:
        """`--file-size` as a number. Raises ConfigError if it is none."""
        return None if self.file_size is None else parse_size(self.file_size)


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit's model: its folder, and its files as they were committed, below that folder."""

    what: str
    folder: Path
    files: tuple[FileEntry, ...]


def parse_size(text: str) -> int:
    """Bytes that a text like `5GB` or `500MB` says. Raises ConfigError."""
    found = re.fullmatch(r"(\d+) *([KMG]B)?", text.strip().upper())
    size = int(found[1]) * _UNITS[found[2] or ""] if found else 0
    if size <= 0:
        raise ConfigError(f"--file-size {text} is no size", hint="as 5GB or 500MB")
    return size


def convert(source: Path, to: Path, wanted: Wanted) -> None:
    """Write the model at `source`, a run, Hugging Face directory or Megatron checkpoint, into `to`.

    Raises ConfigError for what cannot be asked for, NoRunError if `source` is none of these, and
    ModelError and CorruptError for what is wrong with it. On an error `to` is as it was.
    """
    _check_options(wanted)
    if to.exists():
        raise ConfigError(f"{to}: exists already", hint="choose another name, or delete it")
    run = next((f for f in to.resolve().parents if (f / "run.json").exists()), None)
    if run is not None:
        raise ConfigError(f"{to}: lies in the run {run}", hint="choose a folder outside of it")
    if is_checkpoint(source):
        _refuse(wanted, "of a Megatron checkpoint", "version", "critic", "megatron")
        with _made(to):
            _from_checkpoint(source, to, wanted)
    elif (source / _CONFIG).is_file():
        _refuse(wanted, "of a model directory", "version", "critic", "config")
        if not (wanted.dtype or wanted.file_size or wanted.megatron):
            raise ConfigError(
                f"{source}: is a Hugging Face directory already",
                hint="say what is to change: --dtype, --file-size or --megatron",
            )
        with _made(to):
            _from_directory(source, to, wanted)
    else:
        _refuse(wanted, "of a run", "config")
        committed = find_committed(source, version=wanted.version, critic=wanted.critic)
        with _made(to):
            _from_run(committed, to, wanted)
    size = sum(path.stat().st_size for path in to.iterdir())
    say(f"{to}: {len(list(to.iterdir()))} files, {format_bytes(size)}")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one that Megatron saved."""
    return (folder / ".metadata").is_file() and (folder / "metadata.json").is_file()


def find_committed(path: Path, *, version: int | None, critic: bool) -> Committed:
    """Version `version` (None: the newest) of a run's weights, or of its critic's.

    Raises NoRunError, NothingDone if it is not committed, PrunedError if retention deleted it.
    """
    opened = _find_run(path)
    graph, control = opened.chain.graph, read_control(opened.run)
    check_iteration(graph, version, of="version")
    kind = "critic" if critic else "train"
    if critic and opened.settings.critic is None:
        raise ConfigError(f"{opened.run.root}: has no critic", hint="leave --critic out")
    head = min(find_head(opened.run, graph, control), graph.num_iterations)
    for number in [head + 1, head, head - 1] if version is None else [version]:
        if not 0 <= number <= graph.num_iterations:
            continue
        ref = StageRef(0, "init") if number == 0 else StageRef(number - 1, kind)
        commit = read_current(opened.run, graph, control, ref)
        if commit is None:
            continue
        slot = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
        pruned = read_pruned(opened.run, slot)
        if pruned is not None:
            raise PrunedError(f"{ref}: {explain_pruned(opened.run, slot, pruned)}")
        name = "critic" if critic and number == 0 else "weights"
        folder = file_path(opened.run, slot, commit, name)
        files = [e for e in commit.files if e.path.startswith(f"{name}/")]
        return Committed(f"version {number}", folder, tuple(files))
    asked = "no weights are" if version is None else f"version {version} is not"
    raise NothingDone(f"{opened.run.root}: {asked} committed yet")


def _find_run(path: Path) -> OpenRun:
    try:
        return find_run(path)
    except NoRunError as error:
        if path.suffix in (".yaml", ".yml") or not path.is_dir():
            raise
        raise NoRunError(
            f"{path}: neither a run, nor a Hugging Face directory (config.json), nor a Megatron "
            "checkpoint (.metadata and metadata.json)",
            hint="give one of these",
        ) from error


def _check_options(wanted: Wanted) -> None:
    """Raises ConfigError for options that cannot be, whatever the source is."""
    if wanted.file_size is not None:
        parse_size(wanted.file_size)
    if wanted.dtype is not None and wanted.dtype not in _DTYPES:
        raise ConfigError(f"--dtype {wanted.dtype} is not one of {', '.join(_DTYPES)}")
    if wanted.megatron:
        _refuse(wanted, "with --megatron", "dtype", "file_size")
    if wanted.through is not None:
        if wanted.through != "mbridge":
            raise ConfigError(f"--through {wanted.through} is not known", hint="mbridge is")
        _refuse(wanted, "with --through mbridge", "dtype", "file_size", "critic")
        from slurm_rl.train.bridge import check_bridge

        check_bridge()


def _refuse(wanted: Wanted, what: str, *names: str) -> None:
    for name in names:
        if getattr(wanted, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} has no effect {what}", hint="leave it out")


def _from_run(committed: Committed, to: Path, wanted: Wanted) -> None:
    """Without anything to change, the very files; else what is read is compared first."""
    if not (wanted.dtype or wanted.file_size or wanted.megatron):
        to.mkdir()
        # Without it the folder is no model, if this process dies midway.
        for entry in sorted(committed.files, key=lambda e: e.path.endswith(f"/{_CONFIG}")):
            name = entry.path.partition("/")[2]
            shutil.copyfile(committed.folder / name, to / name)
            _check_digest(to / name, entry)
    else:
        for entry in committed.files:
            _check_digest(committed.folder / entry.path.partition("/")[2], entry)
        _from_directory(committed.folder, to, wanted)
    say(f"{committed.what}, as it was committed: {committed.folder}")


def _check_digest(path: Path, entry: FileEntry) -> None:
    found = digest_file(path)
    if found != entry.digest:
        raise CorruptError(
            f"{entry.path}: digest {found}, but {entry.digest} was committed",
            hint="see `slurm-rl verify`",
        )


def _from_directory(source: Path, to: Path, wanted: Wanted) -> None:
    if wanted.through:
        if not wanted.megatron:
            raise ConfigError("--through has no effect without --megatron", hint="leave it out")
        from slurm_rl.train import bridge

        bridge.hf_to_megatron(source, to)
        return
    with _needing_torch():
        from slurm_rl.train import convert as tensors

        if wanted.megatron:
            tensors.hf_to_megatron(source, to)
        else:
            size = wanted.file_size_bytes
            tensors.rewrite_weights(source, to, dtype=wanted.dtype, file_size_bytes=size)


def _from_checkpoint(source: Path, to: Path, wanted: Wanted) -> None:
    places = [wanted.config] if wanted.config else [source, source.parent / "weights"]
    like = next((place for place in places if (place / _CONFIG).is_file()), None)
    if like is None:
        raise ConfigError(
            f"{source}: there is no config.json in {' or '.join(map(str, places))}",
            hint="name a directory of the model's config and tokenizer with --config",
        )
    if wanted.through:
        from slurm_rl.train import bridge

        bridge.megatron_to_hf(source, to, like=like)
        return
    with _needing_torch():
        from slurm_rl.train import convert as tensors

        size = wanted.file_size_bytes
        tensors.megatron_to_hf(source, to, like=like, dtype=wanted.dtype, file_size_bytes=size)


@contextlib.contextmanager
def _needing_torch() -> Iterator[None]:
    """Where tensors are worked on: on the CPU, since the model need not fit on a GPU.

    Raises ConfigError where torch or Megatron-core is not installed, as on a login node.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this needs {error.name}, which is not installed here",
            hint="run it with the Python of the train stage",
        ) from error


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """`folder` is written inside; after an error it is gone again."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
