"""Evaluations beside a chain: all that are due are done or given up, and none ever holds it up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy.faults import kill
from toy.program import fail_stage, set_service
from toy.world import World, make_settings, with_spec

from slurm_rl.chain.gc import collect
from slurm_rl.chain.observe import find_head
from slurm_rl.chain.scheduler import JobState
from slurm_rl.chain.usage import read_usage
from slurm_rl.chain.view import MAX_EVALS
from slurm_rl.launch.memory import MemoryJob
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.storage.claims import read_claims, read_elapsed
from slurm_rl.storage.commits import find_damage, read_commit
from slurm_rl.storage.control import clear_stops, read_control, start_timeline, write_budget
from slurm_rl.storage.evals import forgive_given_up, publish_wish, read_given_up
from slurm_rl.types import Slot, StageRef

DATA = {"prompt_data": "none"}
#: name -> settings; with versions 0 to 4 that makes seven.
SETS: dict[str, Any] = {"aime": {**DATA, "interval": 1}, "gpqa": DATA}
DUE = {*(f"i{v:04d}.eval-aime" for v in range(5)), "i0000.eval-gpqa", "i0004.eval-gpqa"}


def make_world(folder: Path, **changes: Any) -> World:
    values = {"num_rollout": 4, "eval": SETS, "retry_delay_s": 5.0, **changes}
    return World(folder, make_settings(folder, **values))


def evals_in(digests: dict[str, str]) -> set[str]:
    return {name for name in digests if ".eval-" in name}


def chain_in(digests: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if ".eval-" not in name}


def jobs(world: World, label: str) -> list[MemoryJob]:
    return [job for job in world.cluster.history if f".{label}" in job.request.name]


def ended(world: World, name: str) -> float:
    """When a stage's commit was published, by the cluster's clock."""
    iteration, _, kind = name.removeprefix("i").partition(".")
    commit = read_commit(world.run, Slot(int(iteration), kind, 0))
    assert commit is not None
    return float(commit.provenance["committed"])


@pytest.mark.parametrize("login", [False, True])
@pytest.mark.parametrize("pack", ["stage", "iteration"])
def test_all_that_are_due_are_done_each_once(folder: Path, pack: str, login: bool) -> None:
    submit_from = "login" if login else "anywhere"
    world = make_world(folder, pack=pack, submit_from=submit_from, window=24)
    world.shell()
    assert world.finish()
    world.check()
    done = evals_in(world.digests())
    assert done == DUE
    assert set(world.num_submissions().values()) == {1}


def test_from_the_login_node_those_of_the_window_are_submitted_ahead(folder: Path) -> None:
    world = make_world(folder, submit_from="login", window=5)
    world.shell()
    world.cluster.run_for(2.0)
    ahead = [job for job in jobs(world, "i") if ".eval-" in job.request.name]
    wanted = ["i0000.eval-aime", "i0000.eval-gpqa", "i0001.eval-aime", "i0002.eval-aime"]
    assert [str(job.request.stages[0]) for job in ahead] == wanted
    assert all(job.request.after for job in ahead)
    world.cluster.run_until(world.is_idle, limit_s=5_000.0)
    assert evals_in(world.digests()) == set(wanted)
    world.shell("visit")
    assert world.finish()
    assert evals_in(world.digests()) == DUE
    assert set(world.num_submissions().values()) == {1}


def test_elsewhere_they_are_submitted_when_their_weights_are_there(folder: Path) -> None:
    world = make_world(folder)
    world.shell()
    assert world.finish()
    for name in DUE:
        (job,) = jobs(world, name)
        assert not job.request.after
        if not name.startswith("i0000"):
            assert job.submitted >= ended(world, f"i{int(name[1:5]) - 1:04d}.train")


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    how=st.sampled_from(["user", "system", "again", "crash", "hang", "lie"]),
    version=st.integers(0, 4),
    pack=st.sampled_from(["stage", "iteration"]),
    lag=st.integers(0, 1),
)
def test_one_that_fails_for_good_is_given_up_and_the_chain_never_knows(
    tmp_path_factory: pytest.TempPathFactory, how: str, version: int, pack: str, lag: int
) -> None:
    folder = tmp_path_factory.mktemp("evals")
    world = make_world(folder, pack=pack, lag=lag, max_attempts=3)
    world.deadlines = {"eval-aime": 60.0}
    fail_stage(world.run.root, "eval-aime", version, how=how, times=99)
    world.shell()
    assert world.finish()
    world.check(may_fail=True)
    name = f"i{version:04d}.eval-aime"
    assert list(world.given_up()) == [name]
    assert evals_in(world.digests()) == DUE - {name}
    slot = Slot(version, "eval-aime", 0)
    tries = {"user": 1, "again": 2}.get(how, 3)
    assert len(read_claims(world.run, slot)) == tries
    plain = make_world(folder / "plain", pack=pack, lag=lag, eval={})
    plain.shell()
    assert plain.finish()
    assert chain_in(world.digests()) == plain.digests()
    assert ended(world, "i0003.train") == ended(plain, "i0003.train")


def test_one_that_hangs_holds_up_nothing(folder: Path) -> None:
    world = make_world(folder)
    fail_stage(world.run.root, "eval-aime", 0, how="hang", times=99)
    world.shell()
    assert world.cluster.run_until(world.is_trained, limit_s=3_000.0)
    plain = make_world(folder / "plain", eval={})
    plain.shell()
    assert plain.finish()
    assert ended(world, "i0003.train") == ended(plain, "i0003.train")
    assert not world.is_complete()


def test_the_run_is_over_only_with_the_last_of_them(folder: Path) -> None:
    """Ticks go on, and a controller that forgets its job is made up for."""
    world = make_world(folder, tick_s=60.0)
    world.shell()
    assert world.cluster.run_until(world.is_trained, limit_s=3_000.0)

    def last_job() -> MemoryJob | None:
        return next((j for j in jobs(world, "i0004.eval-gpqa") if j in world.cluster.jobs), None)

    assert world.cluster.run_until(lambda: last_job() is not None, limit_s=60.0)
    job = last_job()
    assert job is not None
    if job.process is not None:
        world.cluster.kill_process(job.process)
    world.cluster.jobs.remove(job)
    assert world.finish()
    assert len(jobs(world, "i0004.eval-gpqa")) == 2
    assert not world.cluster.live_jobs(), "ticks were left"


def test_so_many_at_once_and_no_more(folder: Path) -> None:
    many = {f"s{i}": {**DATA, "interval": 1} for i in range(7)}
    world = make_world(folder, eval=many, num_rollout=2)
    worst = 0

    def count(process: Process, effect: Effect) -> None:
        nonlocal worst
        live = [j for j in world.cluster.live_jobs() if ".eval-" in j.request.name]
        worst = max(worst, len(live))

    world.cluster.before = count
    world.shell()
    assert world.finish()
    assert len(evals_in(world.digests())) == 21
    # One that is about to end has submitted the next already.
    assert MAX_EVALS <= worst <= MAX_EVALS + 1


def test_where_places_are_few_the_chain_comes_first(folder: Path) -> None:
    """Six places: two ticks, two links of the chain, two evaluations."""
    world = make_world(folder, max_submit_jobs=6)
    fail_stage(world.run.root, "eval-aime", 0, how="hang", times=99)
    fail_stage(world.run.root, "eval-gpqa", 0, how="hang", times=99)
    world.shell()
    assert world.cluster.run_until(world.is_trained, limit_s=3_000.0)
    few = make_world(folder / "few", max_submit_jobs=4)
    few.shell()
    assert few.finish()
    first = min(job.submitted for job in jobs(few, "i") if ".eval-" in job.request.name)
    assert first >= ended(few, "i0002.train"), "an evaluation took a place of the chain"
    assert evals_in(few.digests()) == DUE


def test_a_wish_for_any_version_also_on_a_run_that_is_over(folder: Path) -> None:
    world = make_world(folder)
    world.shell()
    assert world.finish()
    publish_wish(world.run, StageRef(2, "eval-gpqa"), by="me")
    publish_wish(world.run, StageRef(2, "eval-gpqa"), by="another")
    publish_wish(world.run, StageRef(2, "eval-unknown"), by="me")
    assert not world.is_complete()
    world.shell("eval")
    assert world.finish()
    assert evals_in(world.digests()) == DUE | {"i0002.eval-gpqa"}


def test_given_up_is_opened_again_by_a_pardon(folder: Path) -> None:
    world = make_world(folder, max_attempts=2)
    fail_stage(world.run.root, "eval-gpqa", 4, how="system", times=3)
    world.shell()
    assert world.finish()
    slot = Slot(4, "eval-gpqa", 0)

    def pardon() -> None:
        given_up = read_given_up(world.run, read_control(world.run), slot)
        assert given_up is not None and "2 attempts" in given_up.reason
        write_budget(world.run, forgive_given_up(given_up, slot))
        world.shell("eval")

    pardon()
    assert not world.is_complete()
    assert world.finish()
    assert "i0004.eval-gpqa" in world.digests()
    assert len(read_claims(world.run, slot)) == 4


def test_after_a_rewind_they_are_made_again_but_for_those_of_weights_that_stay(
    folder: Path,
) -> None:
    world = make_world(folder)
    world.shell()
    assert world.finish()
    before = world.digests()
    assert start_timeline(world.run, StageRef(2, "rollout"), after=0, reason="why")
    assert evals_in(world.digests()) == {n for n in DUE if n < "i0003"}
    world.shell("rewind")
    assert world.finish()
    assert world.digests() == before
    again = {p.parent.name for p in world.run.root.glob("iterations/*/eval-*/COMMIT")}
    assert again == {"eval-aime.t0", "eval-aime.t1", "eval-gpqa.t0", "eval-gpqa.t1"}


def test_jobs_of_a_dead_timeline_are_taken_out(folder: Path) -> None:
    world = make_world(folder, tick_s=100.0)
    world.cluster.nodes = {"node1": 1}
    world.shell()
    assert world.cluster.run_until(
        lambda: any(j.state is JobState.PENDING for j in jobs(world, "i0001.eval-aime")),
        limit_s=2_000.0,
    )
    assert start_timeline(world.run, StageRef(0, "rollout"), after=0, reason="why")
    world.shell("rewind")
    assert world.finish()
    assert {p.parent.name for p in world.run.root.glob("iterations/000001/eval-*/COMMIT")} == {
        "eval-aime.t1"
    }


def test_a_pause_and_a_halt_hold_them_up_too(folder: Path) -> None:
    world = make_world(folder)
    with_spec(world, until=world.cluster.now + 20.0)
    world.shell()
    assert not world.finish()
    num = len(jobs(world, "i"))
    world.cluster.run_for(3_000.0)
    assert len(jobs(world, "i")) == num and not world.is_complete()
    clear_stops(world.run)
    with_spec(world, until=None).shell("resume")
    assert world.finish()


def test_their_gpu_time_counts(folder: Path) -> None:
    world = make_world(folder)
    with_spec(world, gpus=(("rollout", 1), ("train", 1), ("eval-aime", 2), ("eval-gpqa", 4)))
    fail_stage(world.run.root, "eval-gpqa", 4, how="system", times=2)
    world.shell()
    assert world.finish()
    own = {"rollout": 1, "train": 1, "eval-aime": 2, "eval-gpqa": 4}
    control = read_control(world.run)
    wanted = sum(
        own.get(ref.kind, 0) * read_elapsed(world.run, slot, claim)
        for ref in [*world.stages(), *world.wanted_evals()]
        for slot in [Slot(ref.iteration, ref.kind, 0)]
        for claim in read_claims(world.run, slot)
    )
    head = find_head(world.run, world.graph, control)
    used = read_usage(world.run, world.graph, control, world.spec, head=head)
    assert used == pytest.approx(wanted, abs=2.0)
    (world.run.root / "evaluated").write_text("damaged")
    again = read_usage(world.run, world.graph, control, world.spec, head=head)
    assert again == pytest.approx(used, abs=0.1)


def test_a_budget_that_they_use_up_halts_a_run_whose_chain_is_done(folder: Path) -> None:
    world = with_spec(make_world(folder), gpus=(("eval-gpqa", 900),), gpu_hours=4.0)
    fail_stage(world.run.root, "eval-gpqa", 4, how="hang", times=99)
    world.deadlines = {"eval-gpqa": 90.0}
    world.shell()
    assert not world.finish()
    halt = read_control(world.run).halt
    assert world.is_trained() and halt is not None and "gpu_hours" in halt.reason


@pytest.mark.slow
def test_weights_stay_until_their_evaluation_is_over(folder: Path) -> None:
    """It fails while the chain goes far beyond what retention keeps; then it is given up."""
    rules = {"keep_last": 2, "gc_grace_s": 5.0}
    world = make_world(folder, num_rollout=6, retention=rules, tick_s=15.0, max_attempts=20)
    fail_stage(world.run.root, "eval-aime", 2, how="system", times=99)
    slot = Slot(1, "train", 0)
    with_spec(world, retry_delay_s=0.0)
    world.shell()

    def is_over() -> bool:
        if read_claims(world.run, Slot(2, "eval-aime", 0)) and not world.given_up():
            commit = read_commit(world.run, slot)
            assert commit is not None and find_damage(world.run, slot, commit) == []
        return world.is_over()

    assert world.cluster.run_until(is_over, limit_s=20_000.0)
    assert world.is_complete() and list(world.given_up()) == ["i0002.eval-aime"]
    shell = Process(world.cluster, name="gc")
    for _ in range(3):
        assert collect(world.keeper(shell)).problems == []
        world.cluster.run_for(5_000.0)
    commit = read_commit(world.run, slot)
    assert commit is not None
    assert not (world.run.slot_dir(slot) / commit.provenance["attempt"] / "weights").exists()


def test_a_service_that_is_down_defers_them_and_the_chain_goes_on(folder: Path) -> None:
    world = make_world(folder, eval={"judged": {**DATA, "interval": 1}}, num_rollout=2)
    set_service(world.run.root, is_down=True)
    world.later(4_000.0, lambda: set_service(world.run.root, is_down=False))
    world.shell()
    assert world.cluster.run_until(world.is_trained, limit_s=500.0)
    assert world.finish()
    world.check()
    assert len(evals_in(world.digests())) == 3 and not world.given_up()


def test_a_person_who_cancels_one_gives_it_up_and_the_run_goes_on(folder: Path) -> None:
    world = make_world(folder)

    def job() -> MemoryJob | None:
        found = [j for j in jobs(world, "i0001.eval-aime") if j.process and j.process.program]
        return next(iter(found), None)

    world.shell()
    assert world.cluster.run_until(lambda: job() is not None, limit_s=1_000.0)
    found = job()
    assert found is not None
    world.cluster.cancel([found.job_id])
    assert world.finish()
    world.check()
    assert world.given_up() == {"i0001.eval-aime": f"job {found.job_id} was cancelled by hand"}
    assert read_control(world.run).paused is None


@pytest.mark.slow
def test_killed_anywhere_an_evaluation_is_done_in_the_end(folder: Path) -> None:
    world = make_world(folder)
    world.shell()
    assert world.finish()
    wanted = world.digests()
    number = 0
    while True:
        number += 23
        root = folder / str(number)
        root.mkdir()
        world = make_world(root)
        state = {"left": number}

        def strike(process: Process, effect: Effect, world=world, state=state) -> None:  # type: ignore[no-untyped-def]
            if ".i0001.eval-aime." in process.name:
                state["left"] -= 1
                if state["left"] == 0:
                    kill(world.cluster, process)

        world.cluster.before = strike
        world.shell()
        assert world.finish()
        assert world.digests() == wanted
        if state["left"] > 0:
            return
