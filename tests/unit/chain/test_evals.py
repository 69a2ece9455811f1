"""Which evaluations are due, wanted and still to be done."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy.world import FastFs, make_settings

from slurm_rl.chain.evals import Evals, read_evals
from slurm_rl.chain.graph import EvalRule, Graph, Link, StageNode, build_graph
from slurm_rl.chain.view import Spec
from slurm_rl.storage.commits import publish_commit
from slurm_rl.storage.control import Control, TimelineStart
from slurm_rl.storage.evals import GivenUp, publish_given_up, publish_wish
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import Pruned, publish_pruned
from slurm_rl.types import Slot, StageRef

SPEC = Spec("toy", "id", gpus=(("eval-a", 2), ("eval-b", 0)))
DATA = {"prompt_data": "none"}


def make_graph(folder: Path, **evals: dict[str, object]) -> Graph:
    sets = {name: {**DATA, **values} for name, values in evals.items()}
    return build_graph(make_settings(folder, num_rollout=9, eval=sets))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "toy").mkdir()
    return RunDir(tmp_path / "toy", FastFs())


def commit(run: RunDir, slot: Slot, *, gpu_s: float = 0.0) -> None:
    run.fs.mkdir(run.slot_dir(slot))
    provenance = {"attempt": "a0001-x", "gpu_s": gpu_s}
    publish_commit(run, slot, content={"files": []}, provenance=provenance)


def give_up(run: RunDir, slot: Slot) -> None:
    publish_given_up(run, slot, GivenUp(2, 3, "why"))


# -- due ------------------------------------------------------------------------------------------


@given(st.integers(0, 12), st.booleans(), st.integers(1, 30), st.data())
def test_due_are_the_first_the_multiples_and_the_last(
    interval: int, before: bool, last: int, data: st.DataObject
) -> None:
    rule = EvalRule("eval-a", interval, before)
    graph = Graph(last, (StageNode("init"),), (StageNode("train"),), evals=(rule,))
    due = [v for v in range(last + 1) if graph.due_evals(v)]
    wanted = {0} if before else set()
    wanted |= {last} | ({v for v in range(1, last + 1) if v % interval == 0} if interval else set())
    assert set(due) == wanted
    version = data.draw(st.integers(0, last))
    earlier = [ref.iteration for ref in graph.earlier("eval-a", before=version, most=5)]
    assert earlier == [v for v in reversed(due) if v < version][:5]


def test_an_evaluation_stands_right_behind_what_made_its_weights(tmp_path: Path) -> None:
    graph = make_graph(tmp_path, a={})
    assert graph.parents(StageRef(0, "eval-a")) == {"weights": StageRef(0, "init")}
    assert graph.parents(StageRef(4, "eval-a")) == {"weights": StageRef(3, "train")}
    assert graph.links_of(StageRef(4, "eval-a")) == (Link(4, ("eval-a",)),)
    assert graph.link_parents(Link(4, ("eval-a",))) == (Link(3, ("train",)),)
    assert graph.last_stage(3) == StageRef(3, "train")
    assert all(not link.anchor.is_eval for link in graph.links_from(0))


@given(st.integers(0, 9), st.sampled_from(["init", "rollout", "score", "train"]), st.integers(0, 9))
def test_its_timeline_is_that_of_its_weights(iteration: int, stage: str, version: int) -> None:
    if stage == "init":
        iteration = 0
    control = Control(timelines=(TimelineStart(1, iteration, stage),))
    weights = StageRef(version - 1, "train") if version else StageRef(0, "init")
    ref = StageRef(version, "eval-a")
    assert control.timeline_of(ref) == control.timeline_of(weights)


# -- wanted, settled, open ------------------------------------------------------------------------


def open_now(run: RunDir, graph: Graph, head: int, control: Control | None = None) -> list[str]:
    evals = read_evals(run, graph, control or Control(), head=head)
    found = list(evals.open_evals())
    evals.write_hint(SPEC, found[0] if found else None)
    return [str(ref) for ref in found]


def test_open_are_those_of_weights_that_are_there(run: RunDir) -> None:
    graph = make_graph(run.root, a={"interval": 3}, b={"before_training": False})
    assert open_now(run, graph, 0) == []
    commit(run, Slot(0, "init", 0))
    assert open_now(run, graph, 0) == ["i0000.eval-a"]
    assert open_now(run, graph, 4) == ["i0000.eval-a", "i0003.eval-a"]
    assert open_now(run, graph, 9)[-2:] == ["i0009.eval-a", "i0009.eval-b"]


def test_committed_given_up_and_pruned_ones_are_settled(run: RunDir) -> None:
    graph = make_graph(run.root, a={"interval": 1})
    commit(run, Slot(1, "eval-a", 0))
    give_up(run, Slot(2, "eval-a", 0))
    run.fs.mkdir(run.slot_dir(Slot(2, "train", 0)))
    publish_pruned(run, Slot(2, "train", 0), Pruned("t", 1, 1))
    assert open_now(run, graph, 4) == ["i0000.eval-a", "i0004.eval-a"]


def test_a_pardon_must_cover_attempts_and_submissions(run: RunDir) -> None:
    graph, slot = make_graph(run.root, a={}), Slot(0, "eval-a", 0)
    give_up(run, slot)

    def is_open(**forgiven: int) -> bool:
        names = {"slot": str(slot), "stage": str(slot.stage)}
        pairs = tuple((names[key], number) for key, number in forgiven.items())
        return open_now(run, graph, 3, Control(forgiven=pairs)) == [str(slot.stage)]

    assert not is_open() and not is_open(slot=2) and not is_open(stage=3)
    assert not is_open(slot=1, stage=3) and not is_open(slot=2, stage=2)
    assert is_open(slot=2, stage=3) and is_open(slot=9, stage=9)
    give_up(run, slot)  # another look that came to the same
    assert is_open(slot=2, stage=3)
    publish_given_up(run, slot, GivenUp(4, 5, "again"))
    assert not is_open(slot=2, stage=3)


def test_wishes_count_where_there_can_be_such_an_evaluation(run: RunDir) -> None:
    graph = make_graph(run.root, a={"before_training": False})
    for ref in (StageRef(2, "eval-a"), StageRef(2, "eval-zzz"), StageRef(77, "eval-a")):
        publish_wish(run, ref, by="me")
    (run.root / "evals" / "notes.txt").write_text("a user's own")
    assert open_now(run, graph, 5) == ["i0002.eval-a"]
    assert open_now(run, graph, 1) == []


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_hint_never_hides_one_that_is_open(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever happens in whatever order: with the hint the same is found as without."""
    root = tmp_path_factory.mktemp("run")
    run = RunDir(root, FastFs())
    (root / "control").mkdir()
    graph = make_graph(root, a={"interval": 2}, b={"interval": 3})
    commit(run, Slot(0, "init", 0))
    control, head = Control(), 0
    for _ in range(data.draw(st.integers(1, 14))):
        kind = data.draw(st.sampled_from(["a", "b"]))
        version = data.draw(st.integers(0, 9))
        ref = StageRef(version, f"eval-{kind}")
        slot = Slot(version, ref.kind, control.timeline_of(ref))
        act = data.draw(
            st.sampled_from(
                ["go", "go", "commit", "commit", "wish", "give", "pardon", "rewind", "rule"]
            )
        )
        if act == "go":
            head = min(9, head + data.draw(st.integers(1, 4)))
        elif act == "commit":
            commit(run, slot)
        elif act == "give":
            give_up(run, slot)
        elif act == "wish":
            publish_wish(run, ref, by="me")
        elif act == "pardon":
            pairs = dict(control.forgiven) | {str(slot): 2, str(ref): 3}
            control = dataclasses.replace(control, forgiven=tuple(sorted(pairs.items())))
        elif act == "rewind" and version < head:
            starts = (
                *control.timelines,
                TimelineStart(len(control.timelines) + 1, version, "rollout"),
            )
            control, head = dataclasses.replace(control, timelines=starts), version
        elif act == "rule":
            graph = make_graph(
                root, a={"interval": data.draw(st.integers(1, 4))}, b={"interval": 3}
            )
        with_hint = open_now(run, graph, head, control)
        (root / "evaluated").unlink(missing_ok=True)
        assert open_now(run, graph, head, control) == with_hint


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1e999}', '{"version": 3, "key": 1}'])
def test_a_damaged_hint_costs_a_look_and_no_more(run: RunDir, text: str) -> None:
    graph = make_graph(run.root, a={})
    (run.root / "evaluated").write_text(text)
    assert open_now(run, graph, 9) == ["i0000.eval-a", "i0009.eval-a"]


def test_looking_does_not_grow_with_what_is_settled(run: RunDir) -> None:
    class Counting(FastFs):
        def list(self, path: Path) -> list[str]:
            seen.append(path)
            return super().list(path)

    seen: list[Path] = []
    graph = make_graph(run.root, a={"interval": 1})
    for version in range(8):
        commit(run, Slot(version, "eval-a", 0), gpu_s=10.0)
    assert open_now(run, graph, 7) == []
    counting = RunDir(run.root, Counting())
    assert open_now(counting, graph, 8) == ["i0008.eval-a"]
    assert {path.parent.name for path in seen if path.name.startswith("eval-a")} == {"000008"}
    assert json.loads((run.root / "evaluated").read_bytes())["gpu_s"] == 80.0
    evals = read_evals(run, graph, Control(), head=8)
    assert evals.read_gpu_s(SPEC) == 80.0 and evals.read_gpu_s(SPEC, last=3) == 40.0


def test_a_run_without_evaluations_looks_at_nothing(run: RunDir) -> None:
    class Blind(FastFs):
        def list(self, path: Path) -> list[str]:
            raise AssertionError(path)

        def read(self, path: Path) -> bytes:
            raise AssertionError(path)

    graph = build_graph(make_settings(run.root, num_rollout=9))
    evals: Evals = read_evals(RunDir(run.root, Blind()), graph, Control(), head=5)
    assert list(evals.open_evals()) == [] and evals.read_gpu_s(SPEC) == 0.0
    evals.write_hint(SPEC, None)
