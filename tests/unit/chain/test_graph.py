"""The graph: who needs whom, and which jobs that makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy.world import make_settings

from slurm_rl.chain.graph import Link, build_graph
from slurm_rl.config.stages import stage_kinds
from slurm_rl.types import StageRef


def refs(**stages: tuple[int, str]) -> dict[str, StageRef]:
    return {role: StageRef(*ref) for role, ref in stages.items()}


@pytest.mark.parametrize(
    ("ref", "parents"),
    [
        (StageRef(0, "init"), refs()),
        (StageRef(0, "rollout"), refs(weights=(0, "init"))),
        (StageRef(0, "train"), refs(rollout=(0, "rollout"), checkpoint=(0, "init"))),
        (StageRef(3, "rollout"), refs(weights=(2, "train"), previous=(2, "rollout"))),
        (StageRef(3, "train"), refs(rollout=(3, "rollout"), checkpoint=(2, "train"))),
    ],
)
def test_grpo(tmp_path: Path, ref: StageRef, parents: dict[str, StageRef]) -> None:
    graph = build_graph(make_settings(tmp_path, num_rollout=5))
    assert graph.parents(ref) == parents


@pytest.mark.parametrize("iteration", [0, 1, 4])
def test_with_a_kl_loss_train_is_handed_the_initial_weights(tmp_path: Path, iteration: int) -> None:
    train = {"global_batch_size": 4, "use_kl_loss": True, "kl_loss_coef": 0.1}
    graph = build_graph(make_settings(tmp_path, num_rollout=5, train=train))
    parents = graph.parents(StageRef(iteration, "train"))
    assert parents["reference"] == StageRef(0, "init")
    assert "reference" not in graph.parents(StageRef(iteration, "rollout"))


@pytest.mark.parametrize("number", range(6))
def test_every_parent_is_a_stage_that_comes_before(tmp_path: Path, number: int) -> None:
    all_of_it = {**KL_REWARD, **TEACHER}
    moving = {**all_of_it, "reference": {"update_interval": 2}}
    plain = {"train": KL_STAGE["train"]}
    changes = [plain, PPO, KL_REWARD, KL_STAGE, all_of_it, moving][number]
    graph = build_graph(make_settings(tmp_path, num_rollout=4, **changes))
    order = [StageRef(i, node.kind) for i in range(4) for node in graph.stages(i)]
    for ref in order:
        for parent in graph.parents(ref).values():
            assert order.index(parent) < order.index(ref)


PPO: dict[str, Any] = {
    "train": {"global_batch_size": 4, "advantage_estimator": "gae"},
    "critic": {"megatron": {"lr": 1e-3}},
}
KL_REWARD = {**PPO, "train": {**PPO["train"], "kl_coef": 0.1}}
KL_STAGE: dict[str, Any] = {
    "train": {"global_batch_size": 4, "use_kl_loss": True, "kl_loss_coef": 0.1},
    "reference": {"stage": True},
}
TEACHER: dict[str, Any] = {"teacher": {"hf_checkpoint": "/teacher"}}
CHECKPOINTS = {0: (0, "init"), 3: (2, "train")}


def kinds_of(tmp_path: Path, **changes: Any) -> list[str]:
    return [node.kind for node in build_graph(make_settings(tmp_path, **changes)).stages(1)]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (PPO, ["rollout", "critic", "train"]),
        (KL_REWARD, ["rollout", "reference", "critic", "train"]),
        (KL_STAGE, ["rollout", "reference", "train"]),
        (TEACHER, ["rollout", "teacher", "train"]),
        ({**KL_REWARD, **TEACHER}, ["rollout", "reference", "teacher", "critic", "train"]),
    ],
)
def test_what_has_to_be_computed_before_training_is_a_stage(
    tmp_path: Path, changes: dict[str, Any], kinds: list[str]
) -> None:
    assert kinds_of(tmp_path, **changes) == kinds
    settings = make_settings(tmp_path, **changes)
    assert [kind for kind in stage_kinds(settings) if kind not in ("init", "tick")] == kinds


@pytest.mark.parametrize("iteration", [0, 3])
def test_actor_and_critic_advance_in_turn(tmp_path: Path, iteration: int) -> None:
    graph = build_graph(make_settings(tmp_path, num_rollout=5, **KL_REWARD))
    shared = {"rollout": (iteration, "rollout"), "reference": (iteration, "reference")}
    before = {0: (0, "init"), 3: (2, "critic")}[iteration]
    assert graph.parents(StageRef(iteration, "critic")) == refs(**shared, checkpoint=before)
    assert graph.parents(StageRef(iteration, "train")) == refs(
        **shared, critic=(iteration, "critic"), checkpoint=CHECKPOINTS[iteration]
    )


@pytest.mark.parametrize("iteration", [0, 3])
def test_a_reference_stage_is_given_policy_and_reference(tmp_path: Path, iteration: int) -> None:
    fixed = build_graph(make_settings(tmp_path, num_rollout=5, **KL_STAGE))
    given = {"rollout": (iteration, "rollout"), "weights": CHECKPOINTS[iteration]}
    parents = fixed.parents(StageRef(iteration, "reference"))
    assert parents == refs(**given, reference=(0, "init"))
    moving = {**KL_STAGE, "reference": {"ema": 0.9}}
    graph = build_graph(make_settings(tmp_path, num_rollout=5, **moving))
    last = {0: (0, "init"), 3: (2, "reference")}[iteration]
    parents = graph.parents(StageRef(iteration, "reference"))
    assert parents == refs(**given, reference=last)


def test_a_teacher_is_the_init_stages(tmp_path: Path) -> None:
    graph = build_graph(make_settings(tmp_path, num_rollout=5, **TEACHER))
    parents = graph.parents(StageRef(3, "teacher"))
    assert parents == refs(rollout=(3, "rollout"), teacher=(0, "init"))
    assert graph.parents(StageRef(3, "train"))["teacher"] == StageRef(3, "teacher")


def test_a_link_for_each_stage(tmp_path: Path) -> None:
    graph = build_graph(make_settings(tmp_path))
    assert [link.kinds for link in graph.links(0)] == [("init",), ("rollout",), ("train",)]
    assert [link.kinds for link in graph.links(1)] == [("rollout",), ("train",)]


def test_a_link_for_each_iteration(tmp_path: Path) -> None:
    graph = build_graph(make_settings(tmp_path, pack="iteration"))
    assert graph.links(0) == (Link(0, ("init", "rollout", "train")),)
    assert graph.links(1) == (Link(1, ("rollout", "train")),)
    assert graph.links(1)[0].anchor == StageRef(1, "train")


def test_links_go_on_to_the_last_iteration(tmp_path: Path) -> None:
    graph = build_graph(make_settings(tmp_path, num_rollout=3))
    assert [link.anchor for link in graph.links_from(2)] == [
        StageRef(2, "rollout"),
        StageRef(2, "train"),
    ]
    assert list(graph.links_from(3)) == []


def test_names_say_what_a_job_is_for() -> None:
    assert Link(12, ("rollout",)).job_name("run", "tok") == "run.i0012.rollout.tok"
    assert Link(0, ("init", "rollout")).job_name("run", "tok") == "run.i0000.iteration.tok"


def test_shards_are_the_rollouts(tmp_path: Path) -> None:
    graph = build_graph(make_settings(tmp_path, shards=2))
    kinds = ("init", "rollout", "train")
    assert [graph.node(kind).num_shards for kind in kinds] == [1, 2, 1]
    assert graph.last_stage(1) == StageRef(1, "train")


SCORED = {"score": {"enabled": True}}


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["rollout", "train"]),
        (SCORED, ["rollout", "score", "train"]),
        ({"score": {"server": {"hf_checkpoint": "/rm"}}}, ["rollout", "score", "train"]),
        (
            {"services": {"a": {"url": "http://x", "on_down": "defer"}}},
            ["rollout", "score", "train"],
        ),
        ({"services": {"a": {"url": "http://x", "on_down": "halt"}}}, ["rollout", "train"]),
    ],
)
def test_scores_have_a_stage_exactly_where_one_is_needed(
    tmp_path: Path, changes: dict[str, object], kinds: list[str]
) -> None:
    graph = build_graph(make_settings(tmp_path, **changes))
    assert [node.kind for node in graph.stages(1)] == kinds


@pytest.mark.parametrize("lag", [0, 1])
def test_train_waits_for_scores_and_the_next_rollout_does_not(tmp_path: Path, lag: int) -> None:
    graph = build_graph(make_settings(tmp_path, num_rollout=5, lag=lag, **SCORED))
    assert graph.parents(StageRef(3, "score")) == refs(rollout=(3, "rollout"))
    assert graph.parents(StageRef(3, "train")) == refs(
        rollout=(3, "rollout"), score=(3, "score"), checkpoint=(2, "train")
    )
    version = 2 if lag == 0 else 1
    assert graph.parents(StageRef(3, "rollout")) == refs(
        weights=(version, "train"), previous=(2, "rollout")
    )
    assert graph.last_stage(3) == StageRef(3, "train")

    def waits(kind: str) -> set[StageRef]:
        return {link.anchor for link in graph.link_parents(Link(3, (kind,)))}

    before, score = StageRef(2, "train"), StageRef(3, "score")
    behind = {StageRef(2, "rollout"), StageRef(1, "train")}
    assert waits("rollout") == ({before} if lag == 0 else behind)
    assert waits("train") == ({score} if lag == 0 else {before, score})


def test_one_job_of_an_iteration_scores_too(tmp_path: Path) -> None:
    graph = build_graph(make_settings(tmp_path, pack="iteration", **SCORED))
    assert graph.links(1) == (Link(1, ("rollout", "score", "train")),)
