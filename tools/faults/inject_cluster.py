"""Faults that befall nodes and the controller. Each returns what it did, or None: not now."""

from __future__ import annotations

import random
import time

from faults.inject_jobs import pick_working, stages_at_work
from faults.person import Person
from faults.site import Site

#: Longer than it takes Slurm to give a silent node up (measured: 27 to 40 s).
_NOTICED_S = 40.0
#: For so long a slurmd stays dead where its job is to run twice at once.
_SPLIT_S = 65.0


def pick_node(site: Site, rng: random.Random) -> tuple[str, str] | None:
    """A whole node at work and the stage on it; None if too few would be left."""
    if len([name for name in site.broken if name.startswith("node")]) > 1:
        return None
    job = pick_working(site, rng)
    return None if job is None else (rng.choice(job.nodes), job.stage)


def power_off(person: Person, rng: random.Random) -> str | None:
    site = person.site
    if (found := pick_node(site, rng)) is None:
        return None
    node, stage = found
    delay_s = rng.choice([3.0, _NOTICED_S])
    site.cluster.tool("node", "poweroff", node)
    site.repair_later(delay_s, node, lambda: site.node_up(node))
    return f"{node} under {stage}; on again after {delay_s:.0f} s"


def kill_slurmd(person: Person, rng: random.Random) -> str | None:
    site = person.site
    if (found := pick_node(site, rng)) is None or found[1] not in stages_at_work(site):
        return None
    node, stage = found
    site.cluster.tool("node", "kill-slurmd", node)
    delay_s = rng.choice([3.0, _SPLIT_S, _SPLIT_S])
    site.repair_later(delay_s, node, lambda: site.node_up(node))
    told = wait_for_twin(person, stage) if delay_s == _SPLIT_S else ""
    return f"{node} under {stage}; started again after {delay_s:.0f} s{told}"


def wait_for_twin(person: Person, stage: str) -> str:
    """Until the requeued job works on the stage whose first processes still live; what came."""
    site, began = person.site, time.monotonic()
    before = site.num_claims(stage)
    with site.nothing_ends():
        while time.monotonic() < began + _SPLIT_S - 5.0:
            if site.num_claims(stage) > before:
                return f"; claimed again after {time.monotonic() - began:.0f} s"
            time.sleep(0.2)
    return ""


def hang_slurmd(person: Person, rng: random.Random) -> str | None:
    site = person.site
    if (found := pick_node(site, rng)) is None:
        return None
    node, stage = found
    delay_s = rng.choice([12.0, _NOTICED_S])
    site.cluster.tool("node", "hang", node)
    site.repair_later(delay_s, node, lambda: unhang(site, node))
    return f"{node} under {stage}; for {delay_s:.0f} s"


def unhang(site: Site, node: str) -> None:
    site.cluster.tool("node", "unhang", node)
    site.node_up(node)


def kill_controller(person: Person, rng: random.Random) -> str | None:
    site, delay_s = person.site, rng.uniform(0.0, 5.0)
    site.kill_controller()
    time.sleep(delay_s)
    site.cluster.tool("controller", "up")
    return f"down for {delay_s:.0f} s"


def kill_controller_at_submission(person: Person, rng: random.Random) -> str | None:
    """State is saved lazily: a controller killed at once forgets the job, and reissues its id."""
    site = person.site
    known = newest_job(site)
    deadline = time.monotonic() + 10.0
    while known is not None and time.monotonic() < deadline:
        job_id = newest_job(site)
        if job_id is not None and job_id > known:
            site.kill_controller()
            site.cluster.tool("controller", "up")
            found = site.call("squeue", "-h", "-t", "all", "-j", str(job_id), "-o", "%i")
            return f"job {job_id} was {'kept' if found else 'forgotten'}"
        time.sleep(0.05)
    return None


def newest_job(site: Site) -> int | None:
    """The highest job id; None if the controller does not answer."""
    said = site.call("squeue", "-h", "-t", "all", "-o", "%A")
    return None if said is None else max(map(int, said.split()), default=0)


def silence_controller(person: Person, rng: random.Random) -> str | None:
    site = person.site
    if not site.working():
        return None
    delay_s = rng.uniform(11.0, 20.0)
    site.cluster.tool("controller", "hang")
    time.sleep(delay_s)
    site.cluster.tool("controller", "unhang")
    return f"for {delay_s:.0f} s"
