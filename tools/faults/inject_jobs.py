"""Faults that befall jobs, processes and files. Each returns what it did, or None: not now."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from slurm.processes import find_payloads, find_supervisors

from faults.person import Person
from faults.site import Job, Site

Inject = Callable[[Person, random.Random], str | None]


def pick_working(site: Site, rng: random.Random) -> Job | None:
    jobs = sorted(site.working(), key=lambda job: job.name)
    return rng.choice(jobs) if jobs else None


def preempt(person: Person, rng: random.Random) -> str | None:
    site = person.site
    job = pick_working(site, rng)
    if job is None:
        return None
    node = rng.choice(job.nodes)
    before = restarts(site, job)
    urgent = site.call(
        "sbatch", "--parsable", "-p", "high", "--exclusive", f"-w{node}", "-t1",
        "-J", "urgent", "-o", "/dev/null", "--wrap", "sleep 2",
    )  # fmt: skip
    if urgent is None or before is None:
        return None
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        now = restarts(site, job)
        if now is not None and now > before:
            return f"{job.stage} on {node} (job {job.job_id})"
        if state_of(site, job) not in ("RUNNING", "COMPLETING", "PENDING"):
            break  # it was done before the urgent job came
        site.repair()
        time.sleep(0.3)
    site.call("scancel", urgent.strip())
    return None


def restarts(site: Site, job: Job) -> int | None:
    said = site.call("scontrol", "show", "job", "-o", job.job_id) or ""
    words = dict(word.partition("=")[::2] for word in said.split())
    return int(words["Restarts"]) if "Restarts" in words else None


def state_of(site: Site, job: Job) -> str:
    return next((j.state for j in site.jobs() if j.job_id == job.job_id), "")


def requeue_running(person: Person, rng: random.Random) -> str | None:
    job = pick_working(person.site, rng)
    if job is None or person.site.call("scontrol", "requeue", job.job_id) is None:
        return None
    return f"{job.stage} (job {job.job_id})"


def requeue_completed(person: Person, rng: random.Random) -> str | None:
    site = person.site
    done = [job for job in site.jobs() if job.is_link and job.state == "COMPLETED"]
    if not done:
        return None
    job = rng.choice(done)
    if site.call("scontrol", "requeue", job.job_id) is None:
        return None
    return f"{job.stage} (job {job.job_id})"


def cancel(person: Person, rng: random.Random) -> str | None:
    """Of a job whose program runs: one that is just starting dies before it can ask why."""
    job = pick_working(person.site, rng)
    if job is None or job.stage not in stages_at_work(person.site):
        return None
    if person.site.call("scancel", job.job_id) is None:
        return None
    deadline = time.monotonic() + 15.0
    while person.stop_reason() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    what = "paused the run" if person.stop_reason() else "did not pause the run"
    return f"{job.stage} (job {job.job_id}); {what}"


def hold(person: Person, rng: random.Random) -> str | None:
    """By an administrator, who forgets it; or of a running job, with a requeue.

    Never of every tick: a run all of whose jobs are held cannot move by itself.
    """
    site = person.site
    if rng.random() < 0.5:
        job = pick_working(site, rng)
        if job is None or site.call("scontrol", "requeuehold", job.job_id) is None:
            return None
        return f"requeuehold of {job.stage} (job {job.job_id})"
    jobs = [job for job in site.jobs() if job.state == "PENDING"]
    ticks = [job for job in jobs if not job.is_link]
    pending = [job for job in jobs if job.is_link] + ticks[1:]
    if not ticks:
        return None
    held = [j.stage for j in pending if site.call("scontrol", "hold", j.job_id) is not None]
    return f"hold of {', '.join(held)}" if held else None


def kill_supervisor(person: Person, rng: random.Random) -> str | None:
    found = find_supervisors(person.site.root)
    if not found:
        return None
    process = rng.choice(found)
    return f"supervisor of {process.job}" if process.kill() else None


def kill_payload(person: Person, rng: random.Random) -> str | None:
    found = find_payloads(person.site.root)
    if not found:
        return None
    process = rng.choice(found)
    return f"program of {short(process.words[-1])}" if process.kill() else None


def stages_at_work(site: Site) -> set[str]:
    """Stages whose programs run."""
    return {stage_of(process.words[-1]) for process in find_payloads(site.root)}


def stage_of(path: str) -> str:
    """`i0003.train`, from a path in `iterations/000003/train.t0`."""
    iteration, stage = path.split("/iterations/")[1].split("/")[:2]
    return f"i{iteration[2:]}.{stage.partition('.')[0]}"


def short(name: str) -> str:
    """The telling part of a job's name or of a path in the run."""
    return "/".join(name.split("/iterations/")[-1].split("/")[:3])


def fill_disk(person: Person, rng: random.Random) -> str | None:
    site = person.site
    if not site.working():
        return None
    ballast = site.root.parent / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    delay_s = rng.uniform(4.0, 12.0)
    site.repair_later(delay_s, "the disk", lambda: ballast.unlink(missing_ok=True))
    return f"full for {delay_s:.0f} s"


def corrupt_uncommitted(person: Person, rng: random.Random) -> str | None:
    """What only the next attempt reads: this one has read its order, and remembers its groups."""
    payloads = find_payloads(person.site.root)
    if not payloads:
        return None
    folder = Path(rng.choice(payloads).words[-1]).parent
    names = ("journal.jsonl", "order.json", "heartbeat")
    files = [folder / name for name in names if (folder / name).exists()]
    if not files or (folder / "result.json").exists():
        return None
    path = files[0] if files[0].name == "journal.jsonl" else rng.choice(files)
    flip(path, rng)
    for process in payloads:
        if Path(process.words[-1]).parent == folder:
            process.kill()
    return short(str(path)) + f"/{path.name}"


def corrupt_committed(person: Person, rng: random.Random) -> str | None:
    """Of what the next train stage reads: the run must halt and name it."""
    site = person.site
    iteration, is_rollout = divmod(site.progress() - 1, 2)
    train = site.root / "iterations" / f"{iteration - 1:06d}" / "train.t0"
    payloads = find_payloads(site.root)
    rollout = site.root / "iterations" / f"{iteration:06d}" / "rollout.t0"
    at_work = any(str(rollout) in process.words[-1] for process in payloads)
    if is_rollout or iteration == 0 or not at_work or person.stop_reason():
        return None
    commit = train / "COMMIT"
    attempt = json.loads(commit.read_bytes())["provenance"]["attempt"]
    path = rng.choice([commit, train / attempt / "checkpoint" / "state.json"])
    good = path.read_bytes()
    # What a COMMIT says beside its content is not digested: who made it, where and when.
    flip(path, rng, end=good.find(b',"provenance"') if path == commit else None)
    site.allow(2 * iteration + 1)
    try:
        reason = wait_named(person, path)
        told = site.run.command("verify", str(site.root))
        if told.returncode != 5 or str(path) not in told.stderr:
            raise AssertionError(f"verify does not name {path}: {told.stderr}")
    finally:
        path.write_bytes(good)
    return f"{short(str(path))}/{path.name}; halted: {reason}"


def wait_named(person: Person, path: Path) -> str:
    """The reason of the halt that names `path`; other stops are resumed meanwhile."""
    deadline = time.monotonic() + 150.0
    while time.monotonic() < deadline:
        stop = person.stop_reason()
        if stop is not None and str(path) in stop[1]:
            return stop[1]
        person.tend()
        time.sleep(0.2)
    raise AssertionError(f"{path}: damaged, and the run did not halt for it")


def flip(path: Path, rng: random.Random, *, end: int | None = None) -> None:
    """Change one byte in place, before `end` if there is one."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(end or len(data))
    data[at] ^= 1 << rng.randrange(7)
    path.write_bytes(data)
