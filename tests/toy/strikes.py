"""What can happen to a run, by name: each strike is one thing that goes wrong before one effect.

`size` (0, 1 or 2) makes it shorter or longer, milder or worse. A strike whose target is not there
(a preemption while only a person's shell works) takes the first running job instead.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from slurm_rl.chain.gc import collect
from slurm_rl.chain.needs import find_pruned_from
from slurm_rl.chain.scheduler import JobState
from slurm_rl.launch import memory_faults
from slurm_rl.launch.memory import MemoryJob
from slurm_rl.launch.memory_process import Process
from slurm_rl.storage.control import (
    Change,
    clear_stops,
    read_control,
    start_timeline,
    write_change,
    write_pause,
)
from slurm_rl.types import StageRef
from toy.faults import job_of
from toy.faulty_fs import FILLS, WRITES, StorageFault
from toy.program import fail_stage, set_service
from toy.world import World

_LONG = (5.0, 60.0, 400.0)


@dataclass
class Scene:
    """Where a strike falls: the run, the process that is about to do something, and the size."""

    world: World
    process: Process
    size: int
    storage: list[StorageFault] = field(default_factory=list)

    @property
    def job(self) -> MemoryJob | None:
        """The job of the process, or else the first that runs."""
        cluster = self.world.cluster
        running = [j for j in cluster.live_jobs() if j.process is not None]
        return job_of(cluster, self.process) or next(iter(running), None)

    def later(self, delay_s: float, act: Callable[[], object]) -> None:
        self.world.later(delay_s, act)


Strike = Callable[[Scene], None]


# -- jobs -----------------------------------------------------------------------------------------


def kill_job(scene: Scene) -> None:
    """Everything of a job dies without a word; with size 1 and 2 it is back in the queue."""
    cluster = scene.world.cluster
    job = job_of(cluster, scene.process)
    if job is not None:
        memory_faults.kill(cluster, job, requeue=scene.size > 0)
    cluster.kill_process(scene.process)


def kill_supervisor(scene: Scene) -> None:
    if scene.job is not None:
        memory_faults.kill_supervisor(scene.world.cluster, scene.job, requeue=scene.size > 0)


def kill_program(scene: Scene) -> None:
    if scene.job is not None and scene.job.process is not None:
        memory_faults.kill_program(scene.job.process)


def preempt(scene: Scene) -> None:
    if scene.job is not None:
        memory_faults.preempt(scene.world.cluster, scene.job)


def requeue(scene: Scene) -> None:
    """Somebody types `scontrol requeue`."""
    cluster = scene.world.cluster
    if scene.job is not None and cluster.now >= cluster.silent_until:
        cluster.requeue(scene.job.job_id)


def time_limit(scene: Scene) -> None:
    """A warning, and the end 60, 20 or 2 seconds later."""
    if scene.job is not None:
        warning_s = (60.0, 20.0, 2.0)[scene.size]
        memory_faults.reach_time_limit(scene.world.cluster, scene.job, warning_s=warning_s)


def scancel(scene: Scene) -> None:
    """By hand: the job that works, or the pending ones too."""
    cluster = scene.world.cluster
    if scene.job is None or cluster.now < cluster.silent_until:
        return
    links = [j.job_id for j in cluster.live_jobs() if not j.is_tick]
    cluster.cancel([scene.job.job_id, *(links if scene.size == 2 else [])])


def lose_node(scene: Scene) -> None:
    """Dead with all on it; cut off with all alive; the same, and its jobs not requeued."""
    cluster = scene.world.cluster
    node = scene.job.node if scene.job is not None else "node1"
    memory_faults.lose_node(cluster, node, live_on=scene.size > 0, requeue=scene.size < 2)
    cluster.at(120.0, lambda: memory_faults.return_node(cluster, node))


def split_brain(scene: Scene) -> None:
    """The job is given up, its processes live on; the one that works hangs for a while."""
    cluster = scene.world.cluster
    if scene.job is not None:
        memory_faults.split_brain(cluster, scene.job, requeue=scene.size != 1)
    cluster.run_for((0.0, 60.0, 150.0)[scene.size])


def run_twice(scene: Scene) -> None:
    """A controller's old state: the running job is pending again, and starts at once."""
    if scene.job is not None:
        memory_faults.restore_as_pending(scene.world.cluster, scene.job)


def requeue_ended(scene: Scene) -> None:
    cluster = scene.world.cluster
    ended = [j for j in cluster.jobs if j.state is JobState.ENDED and j.request.command]
    if ended:
        memory_faults.requeue_ended(cluster, ended[-1 - min(scene.size, len(ended) - 1)])


def stall(scene: Scene) -> None:
    scene.world.cluster.run_for((3.0, 60.0, 500.0)[scene.size])


def fail(scene: Scene) -> None:
    """A stage's program fails: by itself, by a crash, or without having done anything."""
    world = scene.world
    iteration = scene.size % world.graph.num_iterations
    how = ("system", "crash", "lie")[scene.size]
    fail_stage(world.run.root, ("rollout", "train", "rollout")[scene.size], iteration, how=how)


def fail_users(scene: Scene) -> None:
    """A reward that fails: a person has to mend it."""
    fail_stage(scene.world.run.root, ("train", "rollout", "train")[scene.size], 1, how="user")


def fail_eval(scene: Scene) -> None:
    """An evaluation fails: that is nobody's business but its own."""
    version = scene.size % (scene.world.graph.num_iterations + 1)
    how = ("system", "crash", "user")[scene.size]
    fail_stage(scene.world.run.root, "eval-judged", version, how=how)


def outage(scene: Scene) -> None:
    """The service that scores and evaluations ask is down for a while."""
    run_dir = scene.world.run.root
    set_service(run_dir, is_down=True)
    scene.later((20.0, 200.0, 1_500.0)[scene.size], lambda: set_service(run_dir, is_down=False))


# -- the queue ------------------------------------------------------------------------------------


def silence(scene: Scene) -> None:
    memory_faults.silence(scene.world.cluster, (20.0, 100.0, 400.0)[scene.size])


def forget(scene: Scene) -> None:
    """The controller is killed: what was submitted just now is gone; ids come round again."""
    cluster = scene.world.cluster
    lost = memory_faults.crash_controller(cluster, within_s=1.0, reissue=scene.size > 0)
    if lost and scene.size == 2:
        memory_faults.submit_stranger(cluster, runs_s=50_000.0)
        memory_faults.silence(cluster, 10.0)


def forget_next(scene: Scene) -> None:
    """The controller is killed within a second of what is submitted next."""
    cluster, seen = scene.world.cluster, len(scene.world.cluster.history)

    def look() -> None:
        if len(cluster.history) > seen:
            memory_faults.crash_controller(cluster, within_s=1.0, reissue=scene.size > 0)
        elif cluster.now < start + 100.0:
            cluster.at(0.5, look)

    start = cluster.now
    cluster.at(0.5, look)


def lose_submission(scene: Scene) -> None:
    scene.world.cluster.submit_faults.append(("refused", "lost", "made")[scene.size])


def reach_limit(scene: Scene) -> None:
    """For a while no more jobs are taken."""
    cluster = scene.world.cluster

    def allow(max_jobs: int | None) -> None:
        cluster.habits = dataclasses.replace(cluster.habits, max_jobs=max_jobs)

    allow(len(cluster.live_jobs()))
    scene.later(_LONG[scene.size], lambda: allow(None))


def hold(scene: Scene) -> None:
    """Pending links are held; with size 2 ticks too, but for the last one."""
    cluster = scene.world.cluster
    pending = [j for j in cluster.live_jobs() if j.state is JobState.PENDING and j.request.command]
    ticks = [j for j in pending if j.is_tick]
    for job in pending:
        if not job.is_tick or (scene.size == 2 and job is not ticks[-1]):
            memory_faults.hold(cluster, job)
        if scene.size == 0:
            break


def fail_prolog(scene: Scene) -> None:
    """The next job to start is held, or ends before it begins; so does the one after."""
    faults = (["held"], ["ended"], ["ended", "held"])[scene.size]
    scene.world.cluster.start_faults.extend(faults)


def send_stranger(scene: Scene) -> None:
    """A job of another run of the same name, or of somebody else, is in the queue."""
    name = ("stranger", "toy.i0000.rollout.123456abcdef", "toy.tick.123456abcdef")[scene.size]
    memory_faults.submit_stranger(scene.world.cluster, runs_s=300.0, name=name)


# -- people ---------------------------------------------------------------------------------------


def advance_too(scene: Scene) -> None:
    """Somebody else advances just now, while the one at work is slow."""
    scene.world.start_visitor("another")
    scene.world.cluster.run_for((0.0, 3.0, 60.0)[scene.size])


def pause(scene: Scene) -> None:
    world = scene.world

    def resume() -> None:
        clear_stops(world.run)
        world.shell("resume")

    write_pause(world.run, "by a person")
    scene.later(_LONG[scene.size], resume)


def rewind(scene: Scene) -> None:
    """History is rewritten from a stage on, if what that needs is still there."""
    world = scene.world
    control = read_control(world.run)
    ref = (StageRef(0, "rollout"), StageRef(0, "train"), StageRef(1, "rollout"))[scene.size]
    if find_pruned_from(world.run, world.graph, control, ref.iteration, stage=ref.kind):
        return
    last = max((start.number for start in control.timelines), default=0)
    assert start_timeline(world.run, ref, after=last, reason="by a person")
    scene.later(1.0, lambda: world.shell("rewind"))


def set_window(scene: Scene) -> None:
    """A person changes a setting."""
    world = scene.world
    write_change(world.run, Change(0, "init", values={"chain.window": scene.size + 1}))
    world.spec = dataclasses.replace(world.spec, window=scene.size + 1)


def collect_garbage(scene: Scene) -> None:
    """`slurm-rl gc` from the login node, now and once more after the grace."""
    world = scene.world

    def life(process: Process) -> Generator[float, None, int]:
        collect(world.keeper(process))
        return 0
        yield 0.0

    def start() -> None:
        process = Process(world.cluster, name="gc")
        world.cluster.start_process(process, life(process))

    for delay_s in (0.0, 40.0):
        scene.later(delay_s, start)


# -- storage --------------------------------------------------------------------------------------


def storage_error(scene: Scene) -> None:
    """One operation fails: as such, half done, or done all the same."""
    fault = StorageFault(errno.EIO, ops=WRITES, node=scene.process.node)
    if scene.size == 1:
        fault.ops, fault.part = ("append", "create"), 0.5
    fault.happens = scene.size == 2
    scene.storage.append(fault)


def storage_reply_lost(scene: Scene) -> None:
    """The next publishing happens, but its answer is an error."""
    error = (errno.EIO, errno.EEXIST, errno.EIO)[scene.size]
    path = ("COMMIT$", "(COMMIT|claim|submit)", "claim")[scene.size]
    scene.storage.append(StorageFault(error, ops=("link",), path=path, happens=True))


def storage_full(scene: Scene) -> None:
    """No space, for everybody or on one node, or read-only, for a while."""
    code = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)[scene.size]
    ops = WRITES if code == errno.EROFS else FILLS
    node = scene.process.node if scene.size == 1 else ""
    fault = StorageFault(code, ops=ops, times=None, node=node)
    scene.storage.append(fault)
    scene.later(_LONG[1], lambda: scene.storage.remove(fault))


#: Simplest first: shrinking goes that way.
STRIKES: dict[str, Strike] = {
    "kill": kill_job,
    "stall": stall,
    "preempt": preempt,
    "kill supervisor": kill_supervisor,
    "kill program": kill_program,
    "requeue": requeue,
    "time limit": time_limit,
    "scancel": scancel,
    "lose node": lose_node,
    "split brain": split_brain,
    "run twice": run_twice,
    "requeue ended": requeue_ended,
    "fail": fail,
    "fail by user": fail_users,
    "fail eval": fail_eval,
    "outage": outage,
    "silence": silence,
    "forget": forget,
    "forget next": forget_next,
    "lose submission": lose_submission,
    "limit": reach_limit,
    "hold": hold,
    "fail prolog": fail_prolog,
    "stranger": send_stranger,
    "another advance": advance_too,
    "pause": pause,
    "rewind": rewind,
    "set": set_window,
    "gc": collect_garbage,
    "storage: error": storage_error,
    "storage: reply lost": storage_reply_lost,
    "storage: full": storage_full,
}

#: Those after which the queue still tells the truth, and nobody acts on an old look at it.
HONEST = frozenset(
    {
        "kill",
        "preempt",
        "kill program",
        "requeue",
        "time limit",
        "scancel",
        "fail",
        "fail by user",
        "fail eval",
        "outage",
        "silence",
        "limit",
        "hold",
        "fail prolog",
        "stranger",
        "pause",
        "set",
        "gc",
    }
)
