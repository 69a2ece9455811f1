"""Which commits are needed, and which iterations can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy.world import make_settings
from toy.yard import Yard

from slurm_rl.chain.graph import Graph, build_graph
from slurm_rl.chain.needs import (
    check_rewindable,
    find_needed,
    find_pruned_from,
    find_rewindable,
    format_ranges,
    inputs_from,
)
from slurm_rl.errors import PrunedError
from slurm_rl.storage.control import Control, read_control
from slurm_rl.types import StageRef


def make_graph(*, lag: int, kl: bool, num_rollout: int = 9) -> Graph:
    train = {"global_batch_size": 4, "use_kl_loss": kl}
    settings = make_settings(Path("runs"), num_rollout=num_rollout, train=train)
    chain = settings.chain.model_copy(update={"lag": lag})
    return build_graph(settings.model_copy(update={"chain": chain}))


@given(st.integers(0, 8), st.integers(0, 1), st.booleans(), st.sampled_from(["rollout", "train"]))
def test_what_is_made_again_reads_nothing_but_its_inputs(
    iteration: int, lag: int, kl: bool, stage: str
) -> None:
    """Every parent of every stage from there on is made again too, or among the inputs."""
    graph = make_graph(lag=lag, kl=kl)
    inputs = {slot.stage for slot in inputs_from(graph, Control(), iteration, stage=stage)}
    again = {
        StageRef(i, node.kind)
        for i in range(iteration, graph.num_iterations)
        for node in graph.stages(i)
    }
    kinds = [node.kind for node in graph.stages(iteration)]
    again -= {StageRef(iteration, kind) for kind in kinds[: kinds.index(stage)]}
    wanted = {
        parent
        for ref in again
        for role, parent in graph.parents(ref).items()
        if role != "previous" and parent not in again
    }
    assert inputs == wanted
    assert wanted <= find_needed(graph, again)


def test_lag_reads_further_back() -> None:
    def found(lag: int, kl: bool) -> set[str]:
        slots = inputs_from(make_graph(lag=lag, kl=kl), Control(), 5)
        return {str(slot.stage) for slot in slots}

    assert found(0, kl=False) == {"i0004.train"}
    assert found(1, kl=False) == {"i0003.train", "i0004.train"}
    assert found(0, kl=True) == {"i0004.train", "i0000.init"}


def test_only_iterations_whose_inputs_are_there_can_be_made_again(tmp_path: Path) -> None:
    yard = Yard(tmp_path, {"keep_every": 3, "keep_samples": False})
    yard.commit_until(8)
    yard.collect()
    control = read_control(yard.run)
    # What is only marked counts as gone: a look now must hold for a while.
    assert find_rewindable(yard.run, yard.graph, control) == [0, 3, 6, 7]
    yard.collect_all()
    assert yard.pruned() >= {"i0000.train", "i0003.train"}
    assert find_rewindable(yard.run, yard.graph, control) == [0, 3, 6, 7]
    assert find_pruned_from(yard.run, yard.graph, control, 2) == [StageRef(1, "train")]
    check_rewindable(yard.run, yard.graph, control, 3)
    with pytest.raises(PrunedError, match=r"iteration 2 .*i0001\.train .*these can: 0, 3, 6 to 7"):
        check_rewindable(yard.run, yard.graph, control, 2)
    yard.rewind(3)
    yard.commit_until(8)
    yard.check()


def test_a_stage_alone_needs_the_samples_too(tmp_path: Path) -> None:
    yard = Yard(tmp_path, {"keep_samples": False})
    yard.commit_until(6)
    yard.collect_all()
    control = read_control(yard.run)
    gone = find_pruned_from(yard.run, yard.graph, control, 0, stage="train")
    assert gone == [StageRef(0, "rollout")]
    assert find_pruned_from(yard.run, yard.graph, control, 0) == []


@given(st.sets(st.integers(0, 30)))
def test_ranges_say_the_same_numbers(numbers: set[int]) -> None:
    found = set()
    for part in filter(None, format_ranges(sorted(numbers)).split(", ")):
        first, _, last = part.partition(" to ")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers
