"""`slurm-rl samples`: what it shows, in which order, and what an export holds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.cli.eval import evaluate
from slurm_rl.cli.gc import lease_iteration
from slurm_rl.cli.samples import (
    Wanted,
    choose,
    export_samples,
    find_samples,
    render_sample,
    render_tokens,
    render_versions,
    show_samples,
    visible,
)
from slurm_rl.cli.shell import find_stage
from slurm_rl.cli.submit import make_run
from slurm_rl.cli.verify import find_output, verify_run
from slurm_rl.config.load import load_config
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.errors import ConfigError, CorruptError, NoRunError, NothingDone, PrunedError
from slurm_rl.launch.build import open_run
from slurm_rl.launch.shell import find_inputs
from slurm_rl.rollout.dumps import read_dump
from slurm_rl.rollout.listing import Listing, as_entry, open_listing, spans
from slurm_rl.rollout.samples import Sample, read_samples, write_samples
from slurm_rl.rollout.scores import Score, write_scores
from slurm_rl.storage.claims import attempt_dir, try_claim
from slurm_rl.storage.commits import make_content, publish_commit, read_commit
from slurm_rl.storage.control import read_control
from slurm_rl.storage.durable import seal_files
from slurm_rl.storage.tombstones import Pruned, publish_pruned
from slurm_rl.types import Claim, Result, Slot, StageRef

ROOT = Path(__file__).resolve().parents[3]


def make_sample(group: int, index: int, **changes: Any) -> Sample:
    num = 1 + (3 * group + index) % 4
    values: dict[str, Any] = {
        "prompt_tokens": (1, 2),
        "response_tokens": tuple(range(10, 10 + num)),
        "rollout_logprobs": tuple(-0.125 * k for k in range(num)),
        "loss_mask": (1,) * num,
        "prompt": f"prompt of {group}",
        "response": f"response {index} of {group}",
        "label": "ü",
        "reward": 0.1 * ((5 * group + 3 * index) % 7),
        "weights_version": 3,
        "metadata": {"level": group},
        "rewards": {"math": 0.5},
        "seed": 77,
        "data_set": "even" if group % 2 == 0 else "odd",
        "status": "truncated" if index == 2 else "completed",
        "rollout_index": index,
    }
    return Sample(group, index, **(values | changes))


SAMPLES = [make_sample(g, k) for g in range(4) for k in range(3)]


def listing_of(folder: Path, *parts: list[Sample]) -> Listing:
    pairs = []
    for number, part in enumerate(parts):
        place = folder / f"part-{number}"
        place.mkdir(parents=True)
        write_samples(place, part)
        pairs.append((place / "samples.safetensors", place / "samples.jsonl"))
    return open_listing(pairs)


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    return listing_of(tmp_path, SAMPLES[::2], SAMPLES[1::2])


def names(listing: Listing, chosen: list[int]) -> list[tuple[int, int]]:
    return [(int(listing.batch.group_index[i]), int(listing.batch.sample_index[i])) for i in chosen]


def test_a_listing_gives_back_what_was_written(listing: Listing) -> None:
    for i, sample in enumerate(SAMPLES):
        whole = dataclasses.replace(sample, token_versions=(3,) * sample.response_length)
        assert dataclasses.replace(listing.sample(i), rollout_logprobs=()) == dataclasses.replace(
            whole, rollout_logprobs=()
        )
        assert listing.sample(i).rollout_logprobs == pytest.approx(sample.rollout_logprobs)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sort", ["group", "reward", "length"])
def test_the_order_is_that_of_sorting_the_samples(
    listing: Listing, sort: str, reverse: bool
) -> None:
    key = {
        "group": lambda s: s.group_index,
        "reward": lambda s: np.float32(s.reward),
        "length": lambda s: s.response_length,
    }[sort]
    expected = sorted(SAMPLES, key=lambda s: -key(s) if reverse else key(s))
    found = names(listing, choose(listing, Wanted(sort=sort, reverse=reverse)))
    assert found == [(s.group_index, s.sample_index) for s in expected]


def test_filters_leave_what_was_asked_for(listing: Listing) -> None:
    assert names(listing, choose(listing, Wanted(group=2))) == [(2, 0), (2, 1), (2, 2)]
    odd = names(listing, choose(listing, Wanted(data_set="odd", status="truncated")))
    assert odd == [(1, 2), (3, 2)]
    assert choose(listing, Wanted(group=9)) == []


def test_samples_without_a_reward_come_last_and_count_in_no_mean(tmp_path: Path) -> None:
    some = [make_sample(0, k, reward=value) for k, value in enumerate([None, 1.0, 0.0])]
    listing = listing_of(tmp_path, some)
    for reverse, expected in ((False, [2, 1, 0]), (True, [1, 2, 0])):
        assert choose(listing, Wanted(sort="reward", reverse=reverse)) == expected
    summary = listing.summarize(0)
    assert (summary.num, summary.num_graded, summary.mean, summary.std) == (3, 2, 0.5, 0.5)
    assert listing.sample(0).reward is None
    assert "not graded" in render_sample(listing.sample(0))[0]


def test_lines_that_are_not_the_arrays_are_damage(tmp_path: Path) -> None:
    write_samples(tmp_path, SAMPLES[:2])
    pair = (tmp_path / "samples.safetensors", tmp_path / "samples.jsonl")
    lines = pair[1].read_bytes().splitlines(keepends=True)
    pair[1].write_bytes(b"".join(lines[::-1]))
    with pytest.raises(CorruptError, match="stands where"):
        open_listing([pair]).sample(0)
    pair[1].write_bytes(lines[0])
    with pytest.raises(CorruptError, match="1 lines, but"):
        open_listing([pair])
    pair[1].write_bytes(b"{}\n[\n")
    with pytest.raises(CorruptError, match="no sample's"):
        open_listing([pair]).sample(1)


MIXED = make_sample(
    0,
    1,
    response_tokens=(10, 11, 12, 13),
    rollout_logprobs=(-0.5,) * 4,
    loss_mask=(0, 0, 1, 0),
    token_versions=(2, 2, 3, 3),
)


def test_masked_spans_and_versions_are_shown() -> None:
    assert render_versions(MIXED) == "v3 (v2 at 0–1, v3 at 2–3)"
    assert render_versions(make_sample(0, 0)) == "v3"
    assert list(render_tokens(MIXED, colour=False)) == ["[10 11]", "12", "[13]"]
    assert next(iter(render_tokens(MIXED, colour=True))) == "\033[2m10 11\033[0m"
    text = "\n".join(render_sample(MIXED, with_tokens=True, colour=False))
    assert "not trained on: 3 tokens, at 0–1, 3\n" in text and "(math 0.5)" in text


def test_a_long_text_is_cut_and_shown_in_full_when_asked() -> None:
    sample = make_sample(0, 0, response="a" * 300 + "b" * 300)
    short, whole = ("\n".join(render_sample(sample, is_full=full)) for full in (False, True))
    assert "… (200 characters) …" in short and "a" * 300 not in short
    assert "a" * 300 + "b" * 300 in whole


@given(st.text())
def test_no_text_of_a_model_steers_the_terminal(text: str) -> None:
    shown = visible(text)
    assert all(char in "\n\t" or char.isprintable() for char in shown)
    if text.isprintable():
        assert shown == text


def test_escape_sequences_are_made_visible() -> None:
    lines = render_sample(make_sample(0, 0, response="\033]0;owned\007 \u202e x"), is_full=True)
    assert r"\x1b]0;owned\x07 \u202e x" in "\n".join(lines)


@given(st.lists(st.integers(0, 2), max_size=30))
def test_spans_cover_everything_once(values: list[int]) -> None:
    found = spans(values)
    assert [value for value, a, b in found for _ in range(a, b)] == values
    assert all(x[0] != y[0] and x[2] == y[1] for x, y in itertools.pairwise(found))


def test_an_export_reads_back_to_the_same_bytes(tmp_path: Path, listing: Listing) -> None:
    """Out as JSON lines, in again as a dump: the arrays are those that were committed."""
    export_samples(tmp_path / "a.jsonl", (listing.sample(i) for i in range(len(listing))))
    (tmp_path / "again").mkdir()
    write_samples(tmp_path / "again", read_dump(tmp_path / "a.jsonl"))
    again = read_samples([tmp_path / "again/samples.safetensors"])
    for field in dataclasses.fields(again):
        np.testing.assert_array_equal(
            getattr(again, field.name), getattr(listing.batch, field.name), field.name
        )
    text = (tmp_path / "again/samples.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["response"] for line in lines] == [s.response for s in SAMPLES]
    assert [line["reward"] for line in lines] == [s.reward for s in SAMPLES]


def test_a_parquet_file_holds_every_column(tmp_path: Path, listing: Listing) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    export_samples(path, (listing.sample(i) for i in range(3)))
    rows = parquet.read_table(path).to_pylist()
    expected = as_entry(listing.sample(1))
    assert rows[1].keys() == expected.keys()
    for name in ("prompt", "label", "rewards", "metadata"):
        assert json.loads(rows[1][name]) == expected[name]
    assert rows[1]["tokens"] == expected["tokens"] and rows[1]["reward"] == expected["reward"]


def test_parquet_without_pyarrow_says_how_to_get_it(
    tmp_path: Path, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        export_samples(tmp_path / "a.parquet", [listing.sample(0)])
    assert not (tmp_path / "a.parquet").exists()


# -- on a run ---------------------------------------------------------------------------------


class Committed:
    """A run whose stages are committed by hand."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        value = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
        value["run"] = {"name": "run", "dir": str(folder)}
        value["rollout"]["prompt_data"] = str(ROOT / "configs/data/quickstart.jsonl")
        for place, change in changes.items():
            value.setdefault(place, {}).update(change)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(value))
        self.settings: Settings = load_config(config).settings
        opened, _ = make_run(load_config(config))
        self.run = opened.run
        self.root = self.run.root

    def commit(
        self,
        kind: str,
        iteration: int,
        samples: list[Sample] | list[Score],
        shard: int | None = None,
        **content: Any,
    ) -> str:
        """Commit a stage or shard that holds `samples`; its digest."""
        slot = Slot(iteration, kind, 0, shard)
        claim = Claim(1, "job", "attempt")
        assert try_claim(self.run, slot, claim)
        folder = attempt_dir(self.run, slot, claim)
        is_score = kind == "score"
        written = write_scores(folder, samples) if is_score else write_samples(folder, samples)  # type: ignore[arg-type]
        result = Result(
            seal_files(folder, written),
            content={"weights": {"version": 3}, "num_samples": len(samples)},
        )
        body = make_content(
            slot, result, parents=content, settings_digest=settings_digest(self.settings)
        )
        assert publish_commit(
            self.run, slot, content=body, provenance={"attempt": claim.attempt_name}
        )
        commit = read_commit(self.run, slot)
        assert commit is not None
        return commit.digest

    def show(self, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
        values = {"iteration": None, "stage": "rollout", "wanted": Wanted()} | options
        show_samples(self.root, **values)
        return capsys.readouterr().out


@pytest.fixture
def committed(tmp_path: Path) -> Committed:
    return Committed(tmp_path)


def test_the_newest_committed_rollout_is_shown(
    committed: Committed, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NothingDone, match="no samples of rollout are committed yet"):
        committed.show(capsys)
    committed.commit("rollout", 0, SAMPLES)
    shown = committed.show(capsys)
    assert shown.startswith("i0000.rollout: 12 samples in 4 groups, weights version 3")
    mean = np.mean([s.reward for s in SAMPLES])
    assert f"reward {mean:.4g} ±" in shown and "33.3% truncated" in shown
    assert "group 1 of odd: 3 samples, reward" in shown and "prompt: prompt of 1" in shown
    with pytest.raises(NothingDone, match="of iteration 1 are committed"):
        committed.show(capsys, iteration=1)
    with pytest.raises(NoRunError, match="is not one of 0 to 9"):
        committed.show(capsys, iteration=10)


def test_only_what_the_commit_names_is_read(
    committed: Committed, capsys: pytest.CaptureFixture[str]
) -> None:
    committed.commit("rollout", 0, SAMPLES)
    before = committed.show(capsys)
    (attempt,) = (committed.root / "iterations/000000/rollout.t0").glob("a0001-*")
    other = attempt.with_name("a0002-later")
    other.mkdir()
    write_samples(other, SAMPLES[:1])
    assert committed.show(capsys) == before
    path = attempt / "samples.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"response 0 of 0", b"response 9 of 0"))
    with pytest.raises(CorruptError, match=r"samples\.jsonl: digest"):
        committed.show(capsys)


def test_shards_are_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed = Committed(tmp_path, rollout={"shards": 2})
    committed.commit("rollout", 0, [s for s in SAMPLES if s.group_index % 2], shard=0)
    with pytest.raises(NothingDone):
        committed.show(capsys)
    committed.commit("rollout", 0, [s for s in SAMPLES if s.group_index % 2 == 0], shard=1)
    shown = committed.show(capsys, wanted=Wanted(limit=5))
    assert shown.startswith("i0000.rollout: 12 samples in 4 groups")
    assert shown.index("group 0 of even") < shown.index("group 1 of odd")
    assert "group 2" not in shown and "5 of 12 samples; --limit shows more" in shown


def test_pruned_samples_say_so_and_where_the_copy_is(
    committed: Committed, capsys: pytest.CaptureFixture[str]
) -> None:
    committed.commit("rollout", 0, SAMPLES)
    pruned = Pruned("token", num_files=2, archive="/cold/run")
    publish_pruned(committed.run, Slot(0, "rollout", 0), pruned)
    assert "12 samples" in committed.show(capsys), "they are there still"
    for path in (committed.root / "iterations/000000/rollout.t0").glob("a0001-*/samples.*"):
        path.unlink()
    with pytest.raises(PrunedError, match=r"pruned by retention .* a copy is in /cold/run"):
        committed.show(capsys)


def test_the_score_stages_rewards_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    committed = Committed(tmp_path, score={"enabled": True})
    open_ = [dataclasses.replace(s, reward=None) for s in SAMPLES]
    digest = committed.commit("rollout", 0, open_)
    assert "reward not graded;" in committed.show(capsys)
    scores = [Score(s.group_index, s.sample_index, 7.0) for s in SAMPLES]
    committed.commit("score", 0, scores, rollout=digest)
    assert "reward 7 ± 0;" in committed.show(capsys)


def test_an_evaluation_is_named_by_its_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(ROOT / "configs/data/quickstart.jsonl")
    committed = Committed(tmp_path, eval={"aime": {"prompt_data": data, "interval": 2}})
    with pytest.raises(NoRunError, match="'eval-gsm'; they are by rollout, eval-aime"):
        committed.show(capsys, stage="eval-gsm")
    committed.commit("eval-aime", 0, SAMPLES)
    assert committed.show(capsys, stage="eval-aime").startswith("i0000.eval-aime: 12 samples")


def test_an_export_says_what_it_wrote(
    committed: Committed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    committed.commit("rollout", 0, SAMPLES)
    path = tmp_path / "out.jsonl"
    shown = committed.show(capsys, export=path, wanted=Wanted(data_set="odd", limit=1))
    assert shown == f"{path}: 6 of 12 samples of i0000.rollout\n"
    assert len(read_dump(path)) == 6
    with pytest.raises(ConfigError, match=r"must end in \.jsonl or \.parquet"):
        committed.show(capsys, export=tmp_path / "out.csv")
    with pytest.raises(ConfigError, match="--sort 'length_' is not one of"):
        committed.show(capsys, wanted=Wanted(sort="length_"))


def test_an_empty_batch_is_shown_as_that(
    committed: Committed, capsys: pytest.CaptureFixture[str]
) -> None:
    committed.commit("rollout", 0, [])
    assert (
        committed.show(capsys).strip() == "i0000.rollout: 0 samples in 0 groups, weights version 3"
    )
    assert math.isnan(open_listing([]).summarize(0).mean)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Wanted(group=9), "--group 9; there are 4 groups from 0 to 3"),
        (Wanted(data_set="od"), "--data-set od; there are data-set even, odd"),
        (Wanted(status="failed"), "--status failed; there are status completed, truncated"),
        (Wanted(group=2, data_set="odd"), "--group 2 --data-set odd; there are 4 groups"),
    ],
)
def test_nothing_found_says_so(
    committed: Committed, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    wanted: Wanted, problem: str,
) -> None:  # fmt: skip
    committed.commit("rollout", 0, SAMPLES)
    path = tmp_path / "none.jsonl"
    for export in (None, path):
        with pytest.raises(NothingDone, match=problem) as caught:
            committed.show(capsys, wanted=wanted, export=export)
        assert "i0000.rollout: none of its 12 samples is of" in str(caught.value)
    assert not path.exists()


def test_options_that_no_run_can_satisfy(
    committed: Committed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.jsonl").mkdir()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"wanted": Wanted(status="lost")}, "--status 'lost' is not one of completed, truncated"),
        ({"export": tmp_path / "d.jsonl"}, r"d\.jsonl: is a folder"),
        ({"export": tmp_path / "no" / "a.jsonl"}, f"there is no folder {tmp_path}/no"),
    ]
    for options, problem in cases:
        with pytest.raises(ConfigError, match=problem):
            committed.show(capsys, **options)


def test_an_export_replaces_and_says_so(
    committed: Committed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    committed.commit("rollout", 0, SAMPLES)
    path = tmp_path / "a.jsonl"
    assert "in place of" not in committed.show(capsys, export=path)
    shown = committed.show(capsys, export=path, wanted=Wanted(group=1))
    assert shown == f"{path}: 3 of 12 samples of i0000.rollout, in place of what was there\n"
    assert len(read_dump(path)) == 3


def test_eval_refuses_what_would_have_no_effect(committed: Committed) -> None:
    with pytest.raises(ConfigError, match=r"--now evaluates one version.*--version"):
        evaluate(committed.root, version=None, names=[], now=True, as_json=False)
    with pytest.raises(ConfigError, match="--json is of the list"):
        evaluate(committed.root, version=1, names=[], now=False, as_json=True)


@pytest.mark.parametrize("number", [-1, 11])
def test_a_number_that_the_run_will_never_have_is_refused_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """Of versions there is one more than of iterations, the one that the run starts from."""
    data = str(ROOT / "configs/data/quickstart.jsonl")
    committed = Committed(tmp_path, eval={"aime": {"prompt_data": data}})
    root, opened = committed.root, open_run(committed.root)
    control = read_control(opened.run)
    by_version: list[Callable[[int], object]] = [
        lambda n: evaluate(root, version=n, names=[], now=False, as_json=False),
        lambda n: find_stage(opened, control, n, "eval-aime", 0),
        lambda n: find_samples(opened, control, "eval-aime", n),
        lambda n: verify_run(root, iteration=n),
    ]
    by_iteration: list[Callable[[int], object]] = [
        lambda n: find_stage(opened, control, n, "train", 0),
        lambda n: find_samples(opened, control, "rollout", n),
        lambda n: find_output(opened, control, "weights", n),
        lambda n: lease_iteration(root, iteration=n, hours=1.0, why=""),
    ]
    for ask in by_version:
        with pytest.raises(NoRunError, match=f"^version {number} is not one of 0 to 10$"):
            ask(number)
    for ask in by_iteration:
        with pytest.raises(NoRunError, match=f"^iteration {number} is not one of 0 to 9$"):
            ask(number)
        with pytest.raises(NoRunError, match=r"^iteration 10 is not one of 0 to 9$"):
            ask(10)
    verify_run(root, iteration=10)
    assert "0 commits" in capsys.readouterr().out


def test_a_shell_of_an_evaluation_is_named_by_its_version(tmp_path: Path) -> None:
    data = str(ROOT / "configs/data/quickstart.jsonl")
    committed = Committed(tmp_path, eval={"aime": {"prompt_data": data, "interval": 2}})
    opened = open_run(committed.root)
    control = read_control(opened.run)
    assert find_stage(opened, control, 10, "eval-aime", 0) == StageRef(10, "eval-aime")
    assert find_stage(opened, control, None, "eval-aime", 0) == StageRef(0, "eval-aime")
    assert find_stage(opened, control, 3, "train", 0) == StageRef(3, "train")
    with pytest.raises(NoRunError, match="version 11 is not one of 0 to 10"):
        find_stage(opened, control, 11, "eval-aime", 0)
    with pytest.raises(NoRunError, match="has no stage 'eval-x'; it has rollout, train, eval-aime"):
        find_stage(opened, control, 1, "eval-x", 0)
    with pytest.raises(NoRunError, match="eval-aime has 1 shard"):
        find_stage(opened, control, 1, "eval-aime", 1)
    with pytest.raises(NothingDone, match=r"its weights, i0000\.init, is not committed"):
        find_inputs(opened, control, StageRef(0, "eval-aime"))
