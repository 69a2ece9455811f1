"""Faults of the file system while a chain runs: it ends with the same content, or says why it stops.

The table is in `docs/durability.md`. Visibility between real nodes is `slurm-rl doctor`'s to check:
here one kernel is shared, and lateness is simulated (`toy.faulty_fs.NodeFs`).
"""

from __future__ import annotations

import ast
import errno
import functools
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy.faults import first_of_each, kill
from toy.faulty_fs import EVERY, FILLS, MAKES, WRITES, Disk, FaultyFs, NodeFs, StorageFault
from toy.mirror_fs import MirrorFs
from toy.world import World, make_settings, record_effects

import slurm_rl
from slurm_rl.errors import CorruptError, SpaceError
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.storage.claims import read_claims
from slurm_rl.storage.control import Control, clear_stops, read_control, write_budget
from slurm_rl.storage.fs import Fs
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.space import Need, Room, check_room
from slurm_rl.types import Slot

#: Seconds, by the toy's clock, for which late things are waited for (`TIMING.visible_s`).
VISIBLE_S = 45.0


def make_world(folder: Path, *, fs: MirrorFs | None = None, **changes: object) -> World:
    """A run in a fresh directory. fs: what it lies on, where nothing is changed past it."""
    root = folder / "run"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    world = World(root, make_settings(root, **{"retry_delay_s": 5.0, **changes}), fs=fs)
    if fs is not None:
        fs.clock = world.cluster.clock
    return world


def file_operations(folder: Path, **changes: object) -> list[Effect]:
    """Every file operation of a run where nothing goes wrong, one for each place in the code."""
    world = make_world(folder, fs=MirrorFs(), **changes)
    effects = record_effects(world)
    world.shell()
    assert world.finish()
    numbers = first_of_each(effects, of=lambda effect: effect.op in EVERY)
    return [effects[number - 1][1] for number in numbers]


def undisturbed(**changes: object) -> dict[str, str]:
    """Digests of a run where nothing goes wrong: they are the same wherever it lies."""
    return dict(_undisturbed(tuple(sorted(changes.items()))))


@functools.cache
def _undisturbed(changes: tuple[tuple[str, object], ...]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder), **dict(changes))
        world.shell()
        assert world.finish()
        return world.digests()


def strike(world: World, *faults: StorageFault, node: str = "") -> None:
    """Let faults happen to every process (of a node)."""

    def view(process: Process, fs: Fs) -> Fs:
        return FaultyFs(fs, list(faults), process.node) if node in ("", process.node) else fs

    world.cluster.view = view


def between(world: World, start_s: float, stop_s: float | None, *faults: StorageFault) -> None:
    """Let faults happen from one time to another; for ever if that is None."""

    def switch(is_on: bool) -> None:
        for fault in faults:
            fault.is_on = is_on

    switch(False)
    strike(world, *faults)
    world.cluster.at(start_s, lambda: switch(True))
    if stop_s is not None:
        world.later(stop_s, lambda: switch(False))


def resume(world: World) -> None:
    """`slurm-rl resume`: stops are taken away, attempts so far are forgiven, the chain goes on."""
    forgiven = {}
    for ref in world.stages():
        number = world.graph.node(ref.kind).num_shards
        for shard in [None] if number == 1 else range(number):
            slot = Slot(ref.iteration, ref.kind, read_control(world.run).timeline_of(ref), shard)
            claims = read_claims(world.run, slot)
            if claims:
                forgiven[str(slot)] = claims[-1].epoch
    write_budget(world.run, forgiven)
    clear_stops(world.run)
    world.shell("resume")


def run_to_the_end(world: World, *, limit_s: float = 8_000.0) -> bool:
    world.shell()
    try:
        done = world.finish(limit_s=limit_s)
    except CorruptError:
        done = False  # of a commit that is damaged nobody can say that it is complete
    for process, error in world.cluster.crashes:
        raise AssertionError(f"{process.name}: a traceback instead of a line") from error
    return done


def why_halted(world: World) -> str:
    halt = read_control(world.run).halt
    return "" if halt is None else halt.reason


def temporaries(world: World) -> list[Path]:
    return list(world.run.root.rglob(".tmp-*"))


# -- once, anywhere -------------------------------------------------------------------------------

#: name -> (what happens, which operations it can happen to)
#: Which fault, at which operations, and at which of their places in the code: where two are told
#: apart by their number alone they take every second place in turn.
ONCE: dict[str, tuple[StorageFault, tuple[str, ...], slice]] = {
    "EIO": (StorageFault(errno.EIO), EVERY, slice(0, None, 2)),
    "ESTALE": (StorageFault(errno.ESTALE), EVERY, slice(1, None, 2)),
    "EIO after a success": (StorageFault(errno.EIO, happens=True), WRITES, slice(None)),
    "EEXIST after a success": (
        StorageFault(errno.EEXIST, happens=True),
        ("link", "rename"),
        slice(None),
    ),
    "ENOSPC, torn": (StorageFault(errno.ENOSPC, part=0.5), FILLS, slice(0, None, 2)),
    "EDQUOT": (StorageFault(errno.EDQUOT), FILLS, slice(1, None, 2)),
    "EROFS": (StorageFault(errno.EROFS), WRITES, slice(None)),
}


@dataclass
class OnceAt:
    """Arms a fault just before the `number`-th file operation at a place in the code."""

    world: World
    target: Effect
    fault: StorageFault
    faults: list[StorageFault] = field(default_factory=list)

    def __call__(self, process: Process, effect: Effect) -> None:
        if not self.faults and (effect.op, _place(effect)) == (self.target.op, _place(self.target)):
            self.fault.ops, self.fault.path = (effect.op,), f"^{re.escape(effect.target)}$"
            self.faults.append(self.fault)


def _place(effect: Effect) -> str:
    """A path without what is drawn anew in each run."""
    return re.sub(r"[0-9a-f]{8,}", "*", effect.target)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"shards": 2, "pack": "iteration"}], ids=["plain", "packed"]
)
@pytest.mark.parametrize("name", ONCE)
def test_a_fault_that_happens_once_anywhere_costs_an_attempt_at_most(
    folder: Path, name: str, changes: dict[str, object]
) -> None:
    kind, ops, places = ONCE[name]
    wanted = undisturbed(**changes)
    operations = file_operations(folder, **changes)
    struck = [effect for effect in operations if effect.op in ops][places]
    for effect in struck[:: 2 if changes else 1]:
        world = make_world(folder, fs=MirrorFs(), **changes)
        fault = StorageFault(kind.error, happens=kind.happens, part=kind.part)
        armed = OnceAt(world, effect, fault)
        world.cluster.before = armed
        world.cluster.view = lambda process, fs, f=armed.faults: FaultyFs(fs, f, process.node)
        assert run_to_the_end(world), f"{effect}: {why_halted(world)} {world.last_words}"
        assert len(fault.struck) == 1, f"{effect}: it did not happen"
        assert world.digests() == wanted, effect
        assert why_halted(world) == "", effect
        assert world.num_claims() <= 2, effect
        # Tasks of an array that find nothing to do are submitted again one by one.
        most = 1 + int(str(changes.get("shards", 1)))
        assert max(world.num_submissions().values()) <= most, effect
        if effect.op not in ("unlink", "rmdir"):
            assert temporaries(world) == [], effect


@pytest.mark.slow
def test_a_process_that_dies_in_the_middle_of_a_write_leaves_nothing_that_misleads(
    folder: Path,
) -> None:
    wanted = undisturbed()
    operations = file_operations(folder)
    for effect in [effect for effect in operations if effect.op in ("create", "append")]:
        world = make_world(folder, fs=MirrorFs())
        fault = StorageFault(0, part=0.5)
        armed = OnceAt(world, effect, fault)

        def before(process: Process, effect: Effect, armed: OnceAt = armed) -> None:
            armed(process, effect)
            armed.fault.die = lambda: kill(process.cluster, process)

        world.cluster.before = before
        world.cluster.view = lambda process, fs, f=armed.faults: FaultyFs(fs, f, process.node)
        assert run_to_the_end(world), f"{effect}: {why_halted(world)}"
        assert len(fault.struck) == 1, effect
        assert world.digests() == wanted, effect


def test_work_of_hours_is_not_lost_to_an_error_while_it_is_published(folder: Path) -> None:
    wanted = undisturbed()
    world = make_world(folder)
    fault = StorageFault(errno.EIO, ops=("create", "link"), path="train.t0/.*COMMIT", times=3)
    strike(world, fault)
    assert run_to_the_end(world)
    assert len(fault.struck) == 3
    assert world.digests() == wanted
    assert world.num_claims() == 1


def test_an_error_while_a_job_looks_for_work_costs_no_job(folder: Path) -> None:
    world = make_world(folder)
    faults = [
        StorageFault(errno.EIO, ops=("create",), path="train.t0/.tmp-claim", times=2),
        StorageFault(errno.ESTALE, ops=("list",), path="rollout.t0$", node="node1", skip=2),
    ]
    strike(world, *faults)
    assert run_to_the_end(world)
    assert [len(fault.struck) for fault in faults] == [2, 1]
    assert world.num_claims() == max(world.num_submissions().values()) == 1


# -- for a while ----------------------------------------------------------------------------------

#: name -> (errno, operations, what the processes say)
WHILE: dict[str, tuple[int, tuple[str, ...], str]] = {
    "a full disk": (errno.ENOSPC, FILLS, "no space left"),
    "a quota of files": (errno.EDQUOT, MAKES, "no space left"),
    "a read-only file system": (errno.EROFS, WRITES, "the file system is read-only"),
    "a server that fails": (errno.EIO, EVERY, "Input/output error"),
}


@pytest.mark.parametrize("start_s", [3.0, 12.0, 20.0, 33.0])
@pytest.mark.parametrize("name", WHILE)
def test_an_outage_is_outlived_by_the_ticks(folder: Path, name: str, start_s: float) -> None:
    """Nobody types anything: what could not be submitted is, when it can be written again."""
    number, ops, says = WHILE[name]
    wanted = undisturbed()
    world = make_world(folder)
    fault = StorageFault(number, ops=ops, times=None)
    between(world, start_s, 5_000.0, fault)
    assert run_to_the_end(world, limit_s=20_000.0), why_halted(world)
    assert world.digests() == wanted
    assert world.num_claims() <= 3
    assert fault.struck and any(says in line for line in world.last_words)
    assert all("\n" not in line for line in world.last_words)
    assert temporaries(world) == []


@pytest.mark.parametrize("name", WHILE)
def test_an_outage_that_stays_submits_no_jobs_and_is_said_in_a_line(
    folder: Path, name: str
) -> None:
    number, ops, says = WHILE[name]
    wanted = undisturbed()
    world = make_world(folder)
    fault = StorageFault(number, ops=ops, times=None)
    between(world, 12.0, None, fault)
    assert not run_to_the_end(world, limit_s=4_000.0)
    assert world.digests().items() < wanted.items()
    assert max(world.num_submissions().values()) <= 2
    assert says in world.last_words[-1]
    fault.is_on = False
    resume(world)
    assert world.finish()
    assert world.digests() == wanted


def test_where_jobs_submit_nothing_an_outage_ends_the_run_until_a_person_resumes(
    folder: Path,
) -> None:
    wanted = undisturbed()
    world = make_world(folder, submit_from="login")
    fault = StorageFault(errno.ENOSPC, ops=FILLS, times=None)
    between(world, 12.0, None, fault)
    assert not run_to_the_end(world)
    assert "no space left" in world.last_words[-1]
    assert not world.cluster.live_jobs()
    fault.is_on = False
    while not world.is_complete():  # a window at a time: nobody else submits
        before = world.digests()
        world.cluster.run_for(100.0)  # until what was submitted is surely over
        resume(world)
        world.finish()
        assert before.items() < world.digests().items()
    assert world.digests() == wanted


def test_where_no_intent_can_be_written_ticks_are_submitted_all_the_same(folder: Path) -> None:
    """Then the run goes on by itself when there is room again, although no job of it is queued."""
    world = make_world(folder)
    fault = StorageFault(errno.EDQUOT, ops=("create",), path="submit", times=None)
    strike(world, fault)
    shell = world.shell()
    world.cluster.run_for(1_000.0)
    jobs = world.cluster.history
    assert jobs and all(job.is_tick for job in jobs)
    assert shell.exit_code != 0
    fault.is_on = False
    assert world.cluster.run_until(world.is_complete, limit_s=2_000.0)


# -- file systems that lack something -------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"shards": 2}, {"pack": "iteration"}])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV])
def test_without_hard_links_a_run_is_the_same(
    folder: Path, number: int, changes: dict[str, object]
) -> None:
    wanted = undisturbed(**changes)
    world = make_world(folder, **changes)
    strike(world, StorageFault(number, ops=("link",), times=None))
    assert run_to_the_end(world)
    assert world.digests() == wanted
    assert world.num_claims() == max(world.num_submissions().values()) == 1
    assert (world.run.root / "iterations/000000/init.t0/COMMIT/content").is_file()


def test_nodes_with_and_without_hard_links_share_a_run(folder: Path) -> None:
    wanted = undisturbed(shards=3, rollout_batch_size=3)
    world = make_world(folder, shards=3, rollout_batch_size=3)
    world.cluster.nodes = {"node1": 1, "node2": 1, "node3": 1}
    strike(world, StorageFault(errno.EPERM, ops=("link",), times=None), node="node2")
    assert run_to_the_end(world)
    assert {path.is_dir() for path in world.run.root.rglob("COMMIT")} == {True, False}
    assert len(world.digests()) == len(wanted)


def test_no_lock_is_relied_upon() -> None:
    """Where flock does nothing, nothing of the run is missed.

    The doctor knows of it, which tries it; and the copies of weights on a node's own disk, which lie
    outside the run directory: there a lock keeps one that is served from being deleted, so that at
    worst a server fails to load, and its attempt is tried again. What is served is decided by digests.
    """
    package = Path(slurm_rl.__file__).parent
    may_lock = {package / "storage" / "probe.py", package / "rollout" / "staging.py"}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            locks = {name for name in names if name.split(".")[0] in ("fcntl", "filelock")}
            assert not locks or path in may_lock, f"{path} imports {locks}"


@pytest.mark.parametrize("shards", [1, 2])
def test_clocks_ten_minutes_apart_change_nothing(folder: Path, shards: int) -> None:
    wanted = undisturbed(shards=shards)
    world = make_world(folder, shards=shards)
    world.skew_s = {"node1": 600.0, "node2": -600.0, "login": 1_200.0}
    assert run_to_the_end(world)
    assert world.digests() == wanted
    assert world.num_claims() == max(world.num_submissions().values()) == 1


# -- nodes that see late --------------------------------------------------------------------------

#: What is late: everything, or names in which this is found.
LATE = ("", "COMMIT", "state.json|samples", "claim", "ended", "submit", "order|a0001-", "control")


def make_late(world: World, disk: Disk, *, apart: bool, strict: bool) -> None:
    """Three nodes take turns; `apart`: a job's program and its supervisor are on different ones."""
    nodes: dict[object, str] = {}
    kept: list[Process] = []

    def view(process: Process, fs: Fs) -> Fs:
        kept.append(process)
        key = id(process) if apart else process.name
        return NodeFs(fs, disk, nodes.setdefault(key, f"n{len(nodes) % 3}"))

    world.cluster.view = view
    if strict:
        world.fits = lambda have, need: have == need


@pytest.mark.parametrize(
    "delay_s",
    [pytest.param(3.0, marks=pytest.mark.slow), pytest.param(30.0, marks=pytest.mark.slow), 40.0],
)
@pytest.mark.parametrize("only", LATE)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("strict", [False, True], ids=["any", "own"])
def test_what_another_node_did_may_show_late(
    folder: Path, only: str, delay_s: float, apart: bool, strict: bool
) -> None:
    """Jobs of another shape cannot do a stage instead: so none is burnt, each waits."""
    wanted = undisturbed()
    world = make_world(folder, fs=MirrorFs())
    disk = Disk(world.cluster.clock, delay_s, only=only)
    make_late(world, disk, apart=apart, strict=strict)
    assert run_to_the_end(world), f"{why_halted(world)} {world.last_words}"
    assert world.digests() == wanted
    assert why_halted(world) == ""
    if only:  # a heartbeat that is late for longer than the lease (20 s) looks silent
        assert world.num_claims() == 1
        assert max(world.num_submissions().values()) == 1


def test_a_commit_that_shows_after_its_descendants_is_no_conflict(folder: Path) -> None:
    """The login node sees the second rollout, which was made after the first, but not the first."""
    wanted = undisturbed()
    world = make_world(folder, fs=MirrorFs())
    disk = Disk(world.cluster.clock, 1_000.0, only="000000/rollout.t0/COMMIT")

    def view(process: Process, fs: Fs) -> Fs:
        return NodeFs(fs, disk, "login" if process.node == "login" else "others")

    world.cluster.view = view
    second = world.run.root / "iterations/000001/rollout.t0/COMMIT"

    def look(process: Process, effect: Effect) -> None:
        if second.exists() and len(world.shells) == 1:
            world.shell("look")

    world.cluster.before = look
    assert run_to_the_end(world), why_halted(world)
    assert len(world.shells) == 2 and disk.num_late
    assert why_halted(world) == ""
    assert world.digests() == wanted


@pytest.mark.parametrize("looks", [1, 3, 10])
def test_what_shows_after_some_looks_is_found(folder: Path, looks: int) -> None:
    wanted = undisturbed(shards=2)
    world = make_world(folder, shards=2)
    disk = Disk(world.cluster.clock, 40.0, looks)
    make_late(world, disk, apart=True, strict=True)
    assert run_to_the_end(world), f"{why_halted(world)} {world.last_words}"
    assert disk.num_late and world.digests() == wanted


@pytest.mark.parametrize(
    ("only", "says"),
    [
        ("COMMIT", "COMMIT: it was published, and is gone"),
        ("state.json", "state.json: No such file"),
    ],
)
def test_what_shows_too_late_halts_and_a_resume_goes_on(folder: Path, only: str, says: str) -> None:
    wanted = undisturbed()
    world = make_world(folder, fs=MirrorFs())
    disk = Disk(world.cluster.clock, 3 * VISIBLE_S, only=only)
    make_late(world, disk, apart=False, strict=True)
    assert not run_to_the_end(world)
    assert says in why_halted(world)
    assert world.digests().items() < wanted.items()
    disk.delay_s = 0.0
    resume(world)
    assert world.finish()
    assert world.digests() == wanted


def test_a_parent_that_failed_is_not_waited_for(folder: Path) -> None:
    """Only what may be there is waited for: a failure that is visible frees the job at once."""
    from toy.program import fail_stage

    world = make_world(folder, max_attempts=3)
    world.fits = lambda have, need: have == need
    fail_stage(world.run.root, "rollout", 0, how="system", times=1)
    last: dict[str, float] = {}

    def look(process: Process, effect: Effect) -> None:
        last[process.name] = world.cluster.now

    world.cluster.before = look
    assert run_to_the_end(world)
    burnt = [
        job
        for job in world.cluster.history
        if job.exit_code == 75 and (".train." in job.request.name or ".i0001." in job.request.name)
    ]
    assert burnt
    assert all(last[job.request.name] - job.started < 5.0 for job in burnt)


# -- what was committed and is not there, or not as it was ----------------------------------------


def damage(world: World, name: str, change: Callable[[Path], object]) -> Callable[[], None]:
    """Let `change` happen to a path of the run; what puts it back."""
    (path,) = world.run.root.glob(name)
    backup = world.run.root.parent / "backup"
    shutil.rmtree(backup, ignore_errors=True)
    if path.is_dir():
        shutil.copytree(path, backup)
    else:
        backup.mkdir()
        shutil.copy(path, backup / "file")

    def put_back() -> None:
        if (backup / "file").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(backup / "file", path)
        else:
            shutil.copytree(backup, path, dirs_exist_ok=True)

    change(path)
    return put_back


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


#: name -> (what it happens to, what happens, what the halt says)
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "samples vanished": (
        "iterations/000000/rollout.t0/a*/samples.jsonl",
        Path.unlink,
        "No such file",
    ),
    "samples torn": ("iterations/000000/rollout.t0/a*/samples.jsonl", tear, "were committed"),
    "samples of another digest": ("iterations/000000/rollout.t0/a*/samples.jsonl", flip, "digest"),
    "the attempt vanished": ("iterations/000000/rollout.t0/a*", shutil.rmtree, "No such file"),
    "a commit torn": ("iterations/000000/rollout.t0/COMMIT", tear, "COMMIT: not a commit"),
    "a commit changed": ("iterations/000000/rollout.t0/COMMIT", flip, "COMMIT"),
    "a commit vanished": (
        "iterations/000000/rollout.t0/COMMIT",
        Path.unlink,
        "COMMIT: it was published, and is gone",
    ),
    "a claim torn": ("iterations/000000/train.t0/claim.0001", tear, "claim.0001: not a claim"),
    "control vanished": ("control", shutil.rmtree, "control: gone"),
}


@pytest.mark.parametrize("strict", [False, True], ids=["any", "own"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_halts_with_its_name_and_repair_goes_on(
    folder: Path, name: str, strict: bool
) -> None:
    where, change, says = DAMAGE[name]
    wanted = undisturbed()
    world = make_world(folder)
    if strict:
        world.fits = lambda have, need: have == need
    put_back: list[Callable[[], None]] = []

    def at_train(process: Process, effect: Effect) -> None:
        if effect.op == "create" and "train.t0/a0001-" in effect.target and not put_back:
            put_back.append(damage(world, where, change))
            # Before the train stage begins to read: it starts again on what is left.
            kill(process.cluster, process)

    world.cluster.before = at_train
    assert not run_to_the_end(world)
    assert put_back, "nothing was damaged"
    assert says in why_halted(world), (why_halted(world), world.last_words)
    assert world.num_claims() <= 3
    assert not world.cluster.live_jobs()
    put_back[0]()
    resume(world)
    assert world.finish(), (why_halted(world), world.last_words)
    assert world.digests() == wanted


def test_an_uncommitted_file_that_vanishes_is_made_again(folder: Path) -> None:
    wanted = undisturbed()
    world = make_world(folder)
    done: list[Path] = []

    def vanish(process: Process, effect: Effect) -> None:
        if effect.op == "rename" and effect.target.endswith("result.json") and len(done) < 2:
            path = next(Path(effect.target).parent.rglob("state.json"), None)
            if path is not None:
                path.unlink()
                done.append(path)

    world.cluster.before = vanish
    assert run_to_the_end(world), why_halted(world)
    assert len(done) == 2
    assert world.digests() == wanted


# -- room for a stage -----------------------------------------------------------------------------


def short_of_space(world: World, kind: str, *, times: int) -> list[str]:
    """The first `times` attempts at stages of a kind find too little room; whose they were."""
    found: list[str] = []

    def check(run: RunDir, slot: Slot, control: Control) -> None:
        if slot.kind == kind and len(found) < times:
            found.append(str(slot))
            check_room(Room("/scratch", 5), Need(10), what=str(slot), run_dir=run.root)

    world.check_space = check
    return found


def test_a_stage_without_room_does_not_start_and_is_tried_again(folder: Path) -> None:
    wanted = undisturbed()
    world = make_world(folder)
    found = short_of_space(world, "train", times=2)
    assert run_to_the_end(world), why_halted(world)
    assert world.digests() == wanted
    assert found == ["i0000.train.t0"] * 2
    assert not list(world.run.root.glob("iterations/000000/train.t0/a000[12]-*/order.json"))


def test_a_stage_without_room_three_times_in_a_row_halts_and_says_what_to_do(folder: Path) -> None:
    wanted = undisturbed()
    world = make_world(folder)
    found = short_of_space(world, "train", times=100)
    assert not run_to_the_end(world)
    assert len(found) == 3
    halt = read_control(world.run).halt
    assert halt is not None
    assert "i0000.train.t0: /scratch: 5 B free, but i0000.train.t0 needs 10 B" in halt.reason
    assert "retention.keep_last" in halt.reason and "slurm-rl gc" in halt.reason
    assert not world.cluster.live_jobs()
    world.check_space = lambda run, slot, control: None
    resume(world)
    assert world.finish()
    assert world.digests() == wanted


def test_a_want_of_room_between_other_failures_is_no_row(folder: Path) -> None:
    from toy.program import fail_stage

    world = make_world(folder, max_attempts=9)
    fail_stage(world.run.root, "train", 0, how="system", times=1)
    tries: list[str] = []

    def check(run: RunDir, slot: Slot, control: Control) -> None:
        if slot.kind == "train" and slot.iteration == 0:
            tries.append(str(slot))
            if len(tries) in (1, 2, 4, 5):
                raise SpaceError("full")

    world.check_space = check
    assert run_to_the_end(world), why_halted(world)
    assert len(tries) == 6


# -- any faults, anywhere -------------------------------------------------------------------------

DRAWN = st.builds(
    StorageFault,
    st.sampled_from(
        [errno.EIO, errno.ESTALE, errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.EROFS]
    ),
    ops=st.sets(st.sampled_from(EVERY), min_size=1, max_size=3).map(tuple),
    path=st.sampled_from(
        ["", "COMMIT", "claim", "control", "train", "init", "submit", "a000", "ended"]
    ),
    happens=st.booleans(),
    part=st.none() | st.floats(0, 1),
    skip=st.integers(0, 40),
    times=st.integers(1, 12) | st.none(),
    node=st.sampled_from(["", "node1", "login"]),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    faults=st.lists(DRAWN, min_size=1, max_size=3),
    off_s=st.sampled_from([20.0, 200.0, 2_000.0]),
    delay_s=st.sampled_from([0.0, 0.0, 10.0]),
)
def test_whatever_strikes_the_run_ends_the_same_or_says_why(
    folder: Path, faults: list[StorageFault], off_s: float, delay_s: float
) -> None:
    wanted = undisturbed(num_rollout=1)
    world = make_world(folder, fs=MirrorFs(), num_rollout=1)
    disk = Disk(world.cluster.clock, delay_s)

    def view(process: Process, fs: Fs) -> Fs:
        return FaultyFs(NodeFs(fs, disk, process.node), faults, process.node)

    def end_of_faults() -> None:
        for fault in faults:
            fault.is_on = False

    world.cluster.view = view
    world.later(off_s, end_of_faults)
    done = run_to_the_end(world, limit_s=20_000.0)
    assert world.digests().items() <= wanted.items()
    if not done:
        assert why_halted(world) or world.last_words
        resume(world)
        assert world.finish(), (why_halted(world), world.last_words)
    assert world.digests() == wanted
