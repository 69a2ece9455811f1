"""samples: what a rollout or an evaluation generated, in the terminal or as a file.

Reads what a COMMIT names, of one iteration, and compares it with that first. What models wrote is
shown with its control characters made visible: it must not steer the terminal.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slurm_rl.chain.graph import Graph
from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.cli.runs import check_iteration, find_run
from slurm_rl.cli.terminal import say
from slurm_rl.errors import ConfigError, CorruptError, NoRunError, NothingDone, PrunedError
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.commits import resolve_input
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.durable import write_file
from slurm_rl.storage.tombstones import explain_pruned, read_pruned
from slurm_rl.types import Input, Slot, StageRef

if TYPE_CHECKING:
    from slurm_rl.rollout.listing import Listing
    from slurm_rl.rollout.samples import Sample

SORTS = ("group", "reward", "length")
#: Characters of a text that are shown without `--full`.
_SHORT = 400
_DIM, _PLAIN = "\033[2m", "\033[0m"


@dataclass(frozen=True)
class Wanted:
    """Which samples, and in which order; None: whatever it is."""

    sort: str = "group"
    reverse: bool = False
    group: int | None = None
    data_set: str | None = None
    status: str | None = None
    limit: int | None = None

    @property
    def filters(self) -> dict[str, Any]:
        """What is asked for, by the name of its option."""
        asked = {"group": self.group, "data-set": self.data_set, "status": self.status}
        return {name: value for name, value in asked.items() if value is not None}


def show_samples(
    path: Path,
    *,
    iteration: int | None,
    stage: str,
    wanted: Wanted,
    is_full: bool = False,
    with_tokens: bool = False,
    export: Path | None = None,
) -> None:
    """Print the wanted samples of a committed stage, or write them to `export`.

    Raises NoRunError for a stage that there is not, NothingDone if it is not committed or nothing
    of it is wanted, PrunedError if retention deleted its files, CorruptError if they are not what
    was committed.
    """
    check_wanted(wanted, export)
    opened = find_run(path)
    control = read_control(opened.run)
    ref, source = find_samples(opened, control, stage, iteration)
    listing = read_listing(opened, control, source)
    chosen = choose(listing, wanted)
    if not chosen and wanted.filters:
        raise NothingDone(_none_found(listing, ref, wanted), hint="nothing is shown or written")
    if export is not None:
        was_there = export.exists()
        export_samples(export, (listing.sample(i) for i in chosen))
        instead = ", in place of what was there" if was_there else ""
        say(f"{export}: {len(chosen)} of {len(listing)} samples of {ref}{instead}")
        return
    _say_summary(listing, ref, source)
    shown = chosen if wanted.limit is None else chosen[: wanted.limit]
    _say_samples(listing, shown, is_full=is_full, with_tokens=with_tokens)
    if len(shown) < len(chosen):
        say(f"\n{len(shown)} of {len(chosen)} samples; --limit shows more, --export writes all")


def check_wanted(wanted: Wanted, export: Path | None) -> None:
    """ConfigError for options that no run can satisfy."""
    from slurm_rl.rollout.samples import STATUSES

    if wanted.sort not in SORTS:
        raise ConfigError(f"--sort {wanted.sort!r} is not one of {', '.join(SORTS)}")
    if wanted.status not in (None, *STATUSES):
        raise ConfigError(f"--status {wanted.status!r} is not one of {', '.join(STATUSES)}")
    if export is None:
        return
    if export.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--export {export}: the name must end in .jsonl or .parquet")
    if export.is_dir():
        raise ConfigError(f"--export {export}: is a folder", hint="name a file in it")
    if not export.absolute().parent.is_dir():
        raise ConfigError(
            f"--export {export}: there is no folder {export.absolute().parent}", hint="make it"
        )


def _none_found(listing: Listing, ref: StageRef, wanted: Wanted) -> str:
    """That no sample is what was asked for, and what there is instead."""
    asked = " ".join(f"--{name} {value}" for name, value in wanted.filters.items())
    said = f"{ref}: none of its {len(listing)} samples is of {asked}"
    if not len(listing):
        return said
    found = []
    if wanted.group is not None:
        groups = listing.batch.group_index
        num = len(set(groups.tolist()))
        found.append(f"{num} groups from {groups.min()} to {groups.max()}")
    lines = [listing.line(i) for i in range(len(listing))]
    for name, key in (("data-set", "data_set"), ("status", "status")):
        if name in wanted.filters:
            found.append(f"{name} {', '.join(sorted({str(line.get(key)) for line in lines}))}")
    return f"{said}; there are {', and '.join(found)}"


def find_samples(
    opened: OpenRun, control: Control, stage: str, iteration: int | None
) -> tuple[StageRef, Input]:
    """The committed stage whose samples are meant: of this iteration, or the newest."""
    run, graph = opened.run, opened.chain.graph
    of = _numbers_of(graph, stage)
    check_iteration(graph, iteration, of=of)
    newest = min(find_head(run, graph, control) + 1, graph.num_iterations - (of == "iteration"))
    for i in [iteration] if iteration is not None else range(newest, -1, -1):
        ref = StageRef(i, stage)
        commit = read_current(run, graph, control, ref)
        if commit is None:
            continue
        slot = Slot(i, stage, control.timeline_of(ref))
        pruned = read_pruned(run, slot)
        source = resolve_input(run, stage, ref, slot, commit)
        if pruned is not None and not all(Path(file).exists() for file in _files(source)):
            raise PrunedError(f"{ref}: {explain_pruned(run, slot, pruned)}")
        return ref, source
    where = "" if iteration is None else f" of iteration {iteration}"
    raise NothingDone(f"{run.root}: no samples of {stage}{where} are committed yet")


def _numbers_of(graph: Graph, stage: str) -> Literal["iteration", "version"]:
    """What number a stage that makes samples has: an evaluation the version of its weights."""
    evals = [rule.kind for rule in graph.evals]
    if stage not in ("rollout", *evals):
        known = ", ".join(["rollout", *evals])
        raise NoRunError(f"no samples are made by a stage {stage!r}; they are by {known}")
    return "version" if stage in evals else "iteration"


def _files(source: Input) -> list[str]:
    from slurm_rl.rollout.samples import LINES_NAME, TENSORS_NAME

    return source.named(TENSORS_NAME) + source.named(LINES_NAME)


def read_listing(opened: OpenRun, control: Control, source: Input) -> Listing:
    """The samples of a commit, with the rewards of its score stage where that has committed."""
    from slurm_rl.rollout.listing import open_listing
    from slurm_rl.rollout.samples import LINES_NAME, TENSORS_NAME

    names = [n for n in source.files if n.split("/")[-1] in (LINES_NAME, TENSORS_NAME)]
    check_inputs(source, names, patience_s=0.0)
    tensors, lines = source.named(TENSORS_NAME), source.named(LINES_NAME)
    if len(tensors) != len(lines):
        raise CorruptError(f"{source.path}: {len(tensors)} {TENSORS_NAME}, {len(lines)} lines")
    listing = open_listing((Path(a), Path(b)) for a, b in zip(tensors, lines, strict=True))
    return _with_scores(opened, control, source, listing)


def _with_scores(opened: OpenRun, control: Control, source: Input, listing: Listing) -> Listing:
    graph, ref = opened.chain.graph, StageRef(source.iteration, "score")
    has_stage = any(node.kind == "score" for node in graph.nodes)
    if source.kind != "rollout" or not has_stage:
        return listing
    commit = read_current(opened.run, graph, control, ref)
    slot = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
    if commit is None or commit.parents.get("rollout") != source.digest:
        return listing
    if read_pruned(opened.run, slot) is not None:
        return listing
    from slurm_rl.rollout.scores import SCORES_NAME, apply_scores, read_scores

    scores = resolve_input(opened.run, "score", ref, slot, commit)
    check_inputs(scores, [n for n in scores.files if n.endswith(SCORES_NAME)], patience_s=0.0)
    return listing.with_batch(apply_scores(listing.batch, read_scores(scores.named(SCORES_NAME))))


def choose(listing: Listing, wanted: Wanted) -> list[int]:
    """Numbers of the wanted samples, in the wanted order (of equal ones, by group)."""
    found = []
    for i in listing.order(wanted.sort, reverse=wanted.reverse).tolist():
        if wanted.group is not None and listing.batch.group_index[i] != wanted.group:
            continue
        if wanted.data_set is not None or wanted.status is not None:
            line = listing.line(i)
            if wanted.data_set not in (None, line.get("data_set")):
                continue
            if wanted.status not in (None, line.get("status")):
                continue
        found.append(i)
    return found


def export_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines or parquet; a crash leaves the old file or the new one.

    In parquet what may be of any shape (prompt, label, rewards, metadata) is JSON text.
    """
    from slurm_rl.rollout.listing import PARQUET_TEXTS, as_entry

    if path.suffix == ".jsonl":
        lines = (json.dumps(as_entry(sample), ensure_ascii=False) + "\n" for sample in samples)
        write_file(path, "".join(lines).encode())
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"--export {path}: parquet needs pyarrow",
            hint="`pip install pyarrow`, or export .jsonl",
        ) from error
    rows = [as_entry(sample) for sample in samples]
    for row in rows:
        for name in PARQUET_TEXTS:
            row[name] = json.dumps(row[name], ensure_ascii=False)
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    write_file(path, sink.getvalue())


def _say_summary(listing: Listing, ref: StageRef, source: Input) -> None:
    import numpy as np

    batch = listing.batch
    version = source.content.get("weights", {}).get("version")
    groups = np.unique(batch.group_index)
    graded = batch.rewards[~np.isnan(batch.rewards)].astype(np.float64)
    say(f"{ref}: {len(batch)} samples in {len(groups)} groups, weights version {version}")
    if not len(batch):
        return
    reward = f"{graded.mean():.4g} ± {graded.std():.3g}" if len(graded) else "not graded"
    open_ = f", {len(batch) - len(graded)} not graded" if 0 < len(graded) < len(batch) else ""
    say(
        f"reward {reward}{open_}; response {batch.response_lengths.mean():.1f} tokens "
        f"({batch.response_lengths.min()}–{batch.response_lengths.max()}); "
        f"{batch.truncated.mean():.1%} truncated"
    )


def _say_samples(listing: Listing, chosen: list[int], *, is_full: bool, with_tokens: bool) -> None:
    group = None
    for i in chosen:
        sample = listing.sample(i)
        if sample.group_index != group:
            group = sample.group_index
            _say_group(listing, sample, is_full=is_full)
        say("\n".join(render_sample(sample, is_full=is_full, with_tokens=with_tokens)))


def _say_group(listing: Listing, sample: Sample, *, is_full: bool) -> None:
    summary = listing.summarize(sample.group_index)
    mean, std = format_reward(summary.mean), format_reward(summary.std)
    data_set = "" if sample.data_set == "data" else f" of {sample.data_set}"
    say(f"\ngroup {sample.group_index}{data_set}: {summary.num} samples, reward {mean} ± {std}")
    say(_block("prompt", _prompt_text(sample.prompt), is_full))
    if sample.label is not None:
        say(_block("label", _plain_text(sample.label), is_full))


def render_sample(
    sample: Sample, *, is_full: bool = False, with_tokens: bool = False, colour: bool | None = None
) -> list[str]:
    """The lines that show a sample. colour: dim what is masked; else it stands in brackets."""
    reward = format_reward(sample.reward)
    parts = ", ".join(f"{name} {value:.4g}" for name, value in sorted(sample.rewards.items()))
    lines = [
        f"  [{sample.sample_index}] reward {reward}{f' ({parts})' if parts else ''}  "
        f"{sample.status}  {sample.response_length} tokens  {render_versions(sample)}"
    ]
    if sample.rollout_index != sample.sample_index:
        lines[0] += f"  conversation {sample.rollout_index}"
    masked = [_place(a, b) for value, a, b in _spans(sample.loss_mask) if not value]
    if masked:
        num = len(sample.loss_mask) - sum(sample.loss_mask)
        lines.append(f"    not trained on: {num} tokens, at {', '.join(masked)}")
    lines.append(_block("response", sample.response, is_full, indent=4))
    if with_tokens:
        shown = sys.stdout.isatty() if colour is None else colour
        lines.append("    tokens " + " ".join(render_tokens(sample, colour=shown)))
    return lines


def render_versions(sample: Sample) -> str:
    """The weights version, or those of the spans: `v3 (v2 at 0–11, v3 at 12–40)`."""
    found = _spans(sample.token_versions)
    if all(version == sample.weights_version for version, _, _ in found):
        return f"v{sample.weights_version}"
    places = ", ".join(f"v{version} at {_place(a, b)}" for version, a, b in found)
    return f"v{sample.weights_version} ({places})"


def render_tokens(sample: Sample, *, colour: bool) -> Iterator[str]:
    """The response's token ids; runs that are not trained on are dim, or in brackets."""
    for value, a, b in _spans(sample.loss_mask):
        run = " ".join(map(str, sample.response_tokens[a:b]))
        if value:
            yield run
        else:
            yield f"{_DIM}{run}{_PLAIN}" if colour else f"[{run}]"


def format_reward(value: float | None) -> str:
    return "not graded" if value is None or math.isnan(value) else f"{value:.4g}"


def visible(text: str) -> str:
    """The text with control characters, but for line ends and tabs, as escapes."""
    return "".join(
        char if char in "\n\t" or char.isprintable() else repr(char)[1:-1] for char in text
    )


def _block(name: str, text: str, is_full: bool, *, indent: int = 2) -> str:
    """A text under its name, each line indented; cut in the middle unless it is wanted in full."""
    if not is_full and len(text) > _SHORT:
        left_out = len(text) - _SHORT
        text = f"{text[: _SHORT // 2]} … ({left_out} characters) … {text[-_SHORT // 2 :]}"
    lines = visible(text).split("\n")
    pad = " " * indent
    if len(lines) == 1:
        return f"{pad}{name}: {lines[0]}"
    return "\n".join([f"{pad}{name}:", *(f"{pad}  {line}" for line in lines)])


def _prompt_text(prompt: Any) -> str:
    """A conversation as `role: content` lines; a text as it is."""
    if not isinstance(prompt, list):
        return _plain_text(prompt)
    parts = []
    for message in prompt:
        is_message = isinstance(message, dict) and "content" in message
        content = _plain_text(message["content"] if is_message else message)
        parts.append(f"{message.get('role', '?')}: {content}" if is_message else content)
    return "\n".join(parts)


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _place(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}–{end - 1}"


def _spans(values: Iterable[int]) -> list[tuple[int, int, int]]:
    from slurm_rl.rollout.listing import spans

    return spans(values)
