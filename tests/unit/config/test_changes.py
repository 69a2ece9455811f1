"""Settings that change on the way: what holds where, and what never may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.changes import FIXED, apply_changes, check_changes
from slurm_rl.config.load import change_settings
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, CorruptError
from slurm_rl.launch.stage_settings import find_stage_settings, parse_settings
from slurm_rl.storage.control import Change, Control, read_control, write_change
from slurm_rl.storage.rundir import RunDir, RunIdentity, create_run
from slurm_rl.storage.snapshot import snapshot_code
from slurm_rl.types import STAGE_ORDER, StageRef

PLAIN: dict[str, Any] = {
    "run": {"name": "demo", "dir": "/runs"},
    "hf_checkpoint": "/model",
    "num_rollout": 9,
    "rollout": {"prompt_data": "/p.jsonl", "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rm_type": "exact_match",
                "label_key": "a"},
    "train": {"global_batch_size": 4, "megatron": {"lr": 1e-3}},
}  # fmt: skip


def identity(**facts: Any) -> RunIdentity:
    settings = Settings.model_validate(PLAIN).model_dump(mode="json")
    return RunIdentity("id", "demo", 0.0, "me", "0", settings, "", **facts)


REFS = st.builds(StageRef, st.integers(0, 4), st.sampled_from(("rollout", "train")))


@given(st.lists(st.tuples(REFS, st.integers(1, 99)), max_size=5), REFS)
def test_a_change_holds_from_its_stage_on_and_the_last_made_wins(
    made: list[tuple[StageRef, int]], at: StageRef
) -> None:
    changes = tuple(Change(r.iteration, r.kind, {"chain.window": n}) for r, n in made)

    def place(ref: StageRef) -> tuple[int, int]:
        return ref.iteration, STAGE_ORDER.index(ref.kind)

    before = [n for r, n in made if place(r) <= place(at)]
    found = parse_settings(identity(), Control(changes=changes), at=at)
    assert found.chain.window == (before[-1] if before else 3)
    newest = parse_settings(identity(), Control(changes=changes))
    assert newest.chain.window == (made[-1][1] if made else 3)


def test_changes_leave_what_they_change_alone() -> None:
    before = {"a": {"b": 1, "c": [1]}, "d": 2}
    assert apply_changes(before, [{"a.b": 2}, {"e.f": 3}]) == {
        "a": {"b": 2, "c": [1]}, "d": 2, "e": {"f": 3},
    }  # fmt: skip
    assert before == {"a": {"b": 1, "c": [1]}, "d": 2}
    assert apply_changes({"a": None}, [{"a.b": 1}]) == {"a": {"b": 1}}, "a section that was not set"


@pytest.mark.parametrize("path", [*FIXED, "run.name", "init_model.config.x"])
def test_what_makes_the_run_is_fixed(path: str) -> None:
    with pytest.raises(ConfigError, match="is fixed when a run is made"):
        check_changes([path], before=PLAIN)
    check_changes(["seeds", "chain.lease_s", "rollout.shard"], before=PLAIN)


def test_assignments_are_checked_as_in_a_file() -> None:
    settings, values = change_settings(
        identity().settings, ["train.megatron.lr=2e-3", "slurm.qos=x"]
    )
    assert values == {"train.megatron.lr": 2e-3, "slurm.qos": "x"}
    assert settings.train.megatron["lr"] == 2e-3
    for wrong, said in (
        ("train.megatron.lrr=1", "lr"),
        ("train.global_batch_size=3", "global_batch_size"),
        ("slurm.time=soon", "not a wall time"),
    ):
        with pytest.raises(ConfigError, match=said):
            change_settings(identity().settings, [wrong])


@pytest.mark.parametrize("nothing", ["{}", "null"])
def test_evaluations_of_a_run_are_taken_out(nothing: str) -> None:
    before = {**identity().settings, "eval": {"a": {"prompt_data": "/d/a.jsonl"}}}
    settings, values = change_settings(before, [f"eval={nothing}"])
    assert settings.eval == {} and list(values) == ["eval"]
    changed = Settings.model_validate_json(json.dumps(apply_changes(before, [values])))
    assert changed == settings, "what is recorded is read alike"
    again, _ = change_settings(apply_changes(before, [values]), ["eval.b.prompt_data=/d/b.jsonl"])
    assert list(again.eval) == ["b"]


def test_a_stage_reads_a_file_of_its_own_after_a_change(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo")
    code = tmp_path / "mine"
    code.mkdir()
    (code / "reward.py").write_text("one")
    assert create_run(run, identity())
    digest = snapshot_code(run, [code])
    write_change(run, Change(1, "train", {"train.eps_clip": 0.3}, digest))
    control = read_control(run)
    before = find_stage_settings(run, identity(), control, StageRef(1, "rollout"))
    after = find_stage_settings(run, identity(), control, StageRef(1, "train"))
    assert before.path == str(run.settings_path) and before.code_dir == ""
    assert after.code_dir == str(run.code_dir(digest)) and after.same_versions
    assert Settings.model_validate_json(Path(after.path).read_bytes()).train.eps_clip == 0.3
    assert before.digest != after.digest
    assert after == find_stage_settings(run, identity(), control, StageRef(2, "rollout"))
    (run.code_dir(digest) / "mine" / "__pycache__").mkdir()
    (run.code_dir(digest) / "mine" / "__pycache__" / "x.pyc").write_text("made by Python")
    find_stage_settings(run, identity(), control, StageRef(1, "train"))
    (run.code_dir(digest) / "mine" / "more.py").write_text("two")
    with pytest.raises(CorruptError, match="snapshot of your code was changed"):
        find_stage_settings(run, identity(), control, StageRef(1, "train"))
