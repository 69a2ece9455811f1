"""What may be deleted, as properties of the pure decision."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.schema import Retention
from slurm_rl.storage.retention import Act, Item, Scene, Verdict, judge, may_fold
from slurm_rl.storage.tombstones import Tombstone
from slurm_rl.types import Slot, StageRef

KINDS = ("init", "rollout", "reference", "critic", "train", "eval")
RULES = st.builds(
    Retention,
    keep_last=st.none() | st.integers(2, 5),
    keep_every=st.none() | st.integers(1, 4),
    keep_samples=st.booleans(),
    gc_grace_s=st.floats(1, 100),
)
REFS = st.builds(StageRef, st.integers(0, 12), st.sampled_from(KINDS))
TOMBSTONES = st.none() | st.builds(Tombstone, st.just("t"), st.none() | st.floats(0, 300))
ITEMS = st.builds(
    Item,
    slot=st.builds(
        Slot, st.integers(0, 12), st.sampled_from(KINDS), st.integers(0, 1), st.none() | st.just(1)
    ),
    attempt=st.sampled_from(["", "", "a0001-x"]),
    is_current=st.booleans(),
    is_committed=st.booleans(),
    is_winner=st.booleans(),
    held_by=st.sampled_from(["", "somebody"]),
    tombstone=TOMBSTONES,
    is_pruned=st.booleans(),
    is_done=st.booleans(),
)
SCENES = st.builds(
    Scene,
    head=st.integers(0, 14),
    needed=st.frozensets(REFS, max_size=6),
    now=st.floats(0, 400),
    damage=st.sampled_from(["", "", "a file is short"]),
)
DOING = (Act.CONDEMN, Act.DELETE)


def decide(item: Item, rules: Retention, scene: Scene) -> Verdict:
    return judge(item, rules=rules, scene=scene)


@given(ITEMS, RULES, SCENES)
def test_a_deletion_has_a_tombstone_that_stood_for_the_grace_and_no_reader(
    item: Item, rules: Retention, scene: Scene
) -> None:
    if decide(item, rules, scene).act is not Act.DELETE or (item.is_pruned and not item.attempt):
        return
    assert item.tombstone is not None and item.tombstone.since is not None
    assert scene.now - item.tombstone.since >= rules.gc_grace_s - 1e-6
    assert not item.held_by


@given(ITEMS, RULES, SCENES)
def test_an_input_of_an_open_stage_is_never_marked(
    item: Item, rules: Retention, scene: Scene
) -> None:
    """Not even where every other rule would let it."""
    item = dataclasses.replace(item, attempt="", is_current=True, is_pruned=False)
    assert_kept(item, rules, dataclasses.replace(scene, needed=frozenset({item.slot.stage})))
    for kind in KINDS:
        slot = Slot(0, kind, 0)
        scene = Scene(head=100, needed=frozenset({slot.stage}), now=scene.now)
        item = Item(slot, tombstone=item.tombstone)
        assert_kept(item, Retention(keep_last=2, keep_samples=False), scene)


def assert_kept(item: Item, rules: Retention, scene: Scene) -> None:
    assert decide(item, rules, scene).act in (Act.KEEP, Act.PARDON)


@given(ITEMS, RULES, SCENES)
def test_the_newest_two_are_never_marked_whatever_the_timeline(
    item: Item, rules: Retention, scene: Scene
) -> None:
    item = dataclasses.replace(item, attempt="", is_pruned=False)
    if decide(item, rules, scene).act in DOING:
        assert item.slot.iteration < scene.head - 2
        assert rules.keep_last is not None and item.slot.iteration < scene.head - rules.keep_last


@given(ITEMS, RULES, SCENES)
def test_initial_weights_and_results_never_go(item: Item, rules: Retention, scene: Scene) -> None:
    item = dataclasses.replace(item, attempt="", is_pruned=False)
    if decide(item, rules, scene).act in DOING:
        assert item.slot.kind in ("rollout", "reference", "critic", "train")
        assert item.slot.kind != "rollout" or not rules.keep_samples
    for kind in KINDS:  # where every other rule would let them
        item = Item(Slot(0, kind, 0), tombstone=item.tombstone)
        scene = Scene(head=100, needed=frozenset(), now=scene.now)
        act = decide(item, Retention(keep_last=2, keep_samples=False), scene).act
        assert (act in (Act.KEEP, Act.PARDON)) == (kind in ("init", "eval"))


@given(ITEMS, RULES, SCENES)
def test_an_attempt_that_may_still_commit_never_goes(
    item: Item, rules: Retention, scene: Scene
) -> None:
    item = dataclasses.replace(item, attempt="a0001-x")
    if decide(item, rules, scene).act in DOING:
        assert not item.is_winner
        assert item.is_committed or not item.is_current


@given(ITEMS, SCENES)
def test_unset_nothing_is_deleted(item: Item, scene: Scene) -> None:
    if not item.is_pruned:
        assert decide(item, Retention(), scene).act not in DOING


@given(ITEMS, RULES, SCENES)
def test_what_was_begun_is_ended_whatever_the_rules_say(
    item: Item, rules: Retention, scene: Scene
) -> None:
    item = dataclasses.replace(item, attempt="", is_pruned=True)
    act = decide(item, rules, scene).act
    finished = item.is_done and item.tombstone is None
    assert act is (Act.GONE if finished else Act.DELETE)


@given(ITEMS, RULES, SCENES, st.floats(0, 1000))
def test_what_is_final_stays_so_as_the_run_goes_on(
    item: Item, rules: Retention, scene: Scene, seconds: float
) -> None:
    verdict = decide(item, rules, scene)
    if not verdict.is_final or verdict.act is Act.DELETE:
        return
    later = dataclasses.replace(scene, head=scene.head + 3, now=scene.now + seconds)
    later = dataclasses.replace(later, needed=scene.needed - {item.slot.stage})
    assert decide(item, rules, later).act is verdict.act


@given(ITEMS, RULES, SCENES)
def test_with_time_and_without_readers_everything_comes_to_an_end(
    item: Item, rules: Retention, scene: Scene
) -> None:
    """Following the verdicts, an item is kept or gone after a few passes: nothing hangs."""
    item = dataclasses.replace(item, held_by="", is_done=False)
    scene = dataclasses.replace(scene, now=scene.now + 300.0)
    for _ in range(5):
        act = decide(item, rules, scene).act
        if act in (Act.KEEP, Act.GONE):
            return
        if act is Act.CONDEMN:
            item = dataclasses.replace(item, tombstone=Tombstone("t", scene.now))
        elif act is Act.PARDON:
            item = dataclasses.replace(item, tombstone=None)
        elif act is Act.DELETE:
            if item.attempt:
                return
            item = dataclasses.replace(item, is_pruned=True, is_done=True, tombstone=None)
        scene = dataclasses.replace(scene, now=scene.now + rules.gc_grace_s + 1)
    raise AssertionError(f"{item} is still {act}")


@given(ITEMS, RULES, SCENES)
def test_damage_to_the_newest_spares_the_older(item: Item, rules: Retention, scene: Scene) -> None:
    item = dataclasses.replace(item, attempt="", is_pruned=False)
    scene = dataclasses.replace(scene, damage="short")
    assert decide(item, rules, scene).act not in DOING


def test_every_nth_is_counted_by_the_version_it_makes() -> None:
    rules = Retention(keep_last=2, keep_every=3)
    scene = Scene(head=20, needed=frozenset(), now=0.0)
    kept = [i for i in range(20) if decide(Item(Slot(i, "train", 0)), rules, scene).act is Act.KEEP]
    assert kept == [2, 5, 8, 11, 14, 17, 18, 19]


@given(st.integers(0, 60), st.integers(0, 60), RULES, st.integers(0, 20))
def test_records_are_folded_far_behind_and_only_where_all_is_settled(
    iteration: int, head: int, rules: Retention, behind: int
) -> None:
    settled = Verdict(Act.KEEP, "", is_final=True)
    args = {"head": head, "rules": rules, "behind": behind}
    if may_fold(iteration, verdicts=[settled], **args):
        assert iteration + behind < head - (rules.keep_last or 2)
    assert not may_fold(iteration, verdicts=[settled, Verdict(Act.WAIT, "")], **args)
