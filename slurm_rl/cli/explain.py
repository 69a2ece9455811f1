"""explain: why a run is not moving, in a person's words, and what to type."""

from __future__ import annotations

import re
from pathlib import Path

from slurm_rl.chain.advance import look
from slurm_rl.chain.outages import deferred_for, describe_outage
from slurm_rl.chain.plan import plan
from slurm_rl.chain.plan_ticks import is_tick
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import LinkView, View
from slurm_rl.cli.runs import find_run
from slurm_rl.cli.terminal import format_seconds, say
from slurm_rl.errors import CorruptError
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.owner import current_user, owner_of

#: Slurm's reasons (as patterns), and what they mean to somebody who waits.
_REASONS = (
    ("Priority", "others are before it in the queue"),
    ("Resources", "it is next, and waits for nodes to become free"),
    ("BeginTime", "it waits for its time: a retry, or a requeue, which takes Slurm two minutes"),
    ("Dependency", "it waits for the job before it"),
    ("DependencyNeverSatisfied", "it waits for a job that is over; the next advance frees it"),
    (r"JobHeldUser", "you hold it; `scontrol release {id}` lets it go"),
    (r"JobHeldAdmin|.*held.*", "an administrator or a failed launch holds it; it is replaced"),
    ("JobArrayTaskLimit", "as many shards as rollout.array_throttle allows are running"),
    (r"QOS.*|Assoc.*|Max.*Per.*", "a limit of your account or quality of service is reached"),
    (r"PartitionTimeLimit", "it asks for more time than its partition gives: it will never start;"
     " `slurm-rl set RUN STAGE.slurm.time=…`, then `scancel {id}`"),
    (r"PartitionNodeLimit|PartitionConfig", "its partition never gives that; change slurm options"),
    (r"PartitionDown|PartitionInactive", "its partition is closed for now"),
    (r"ReqNodeNotAvail.*|Nodes.*DOWN.*", "the nodes that it needs are down or reserved"),
    (r"BadConstraints", "no node has what it asks for; change slurm options"),
    (r"Reservation.*", "it waits for its reservation"),
    (r"Licenses", "it waits for licenses"),
)  # fmt: skip


def explain_run(path: Path) -> None:
    """Print what keeps the run from moving, each reason with what to type about it."""
    opened = find_run(path)
    try:
        view = look(opened.chain)
    except CorruptError as error:
        say(f"{opened.run.root}: something committed is damaged: {error}")
        say(f"see all of it with: slurm-rl verify {opened.run.root}")
        return
    for line in explain(opened, view):
        say(line)


def explain(opened: OpenRun, view: View) -> list[str]:
    """The answer as lines; reads nothing but the head."""
    root, control = opened.run.root, view.control
    if view.is_complete:
        return [f"{root} is complete; there is nothing left to do"]
    if control.halt is not None:
        halt = control.halt
        log = [f"its log: {halt.log}"] if halt.log else []
        return [f"{root} is halted: {halt.reason}", *log, f"to do: {halt.hint or 'resume it'}"]
    if control.paused is not None:
        why = f" ({control.paused})" if control.paused else ""
        return [f"{root} is paused{why}", f"to go on: slurm-rl resume {root}"]
    lines = [*_explain_owner(opened, view)]
    if view.queue is None:
        lines.append("the scheduler does not answer: what is in the queue is not known. Nothing is")
        lines.append("lost: jobs that run go on, and the next advance that gets an answer goes on")
    for seen in view.all_links:
        lines += _explain_outages(opened, seen, view)
        lines += _explain_link(seen, view)
    planned = plan(opened.chain.spec, view)
    told = ("is pending", *lines)
    lines += [reason for reason in planned.waiting if not any(part in reason for part in told)]
    return [*lines, *_explain_advancers(opened, view)] or [f"{root} is moving"]


def _explain_owner(opened: OpenRun, view: View) -> list[str]:
    owner = owner_of(opened.identity, view.control)
    if owner == current_user():
        return []
    return [f"it belongs to {owner}; jobs of other people do not show here"]


def _explain_outages(opened: OpenRun, seen: LinkView, view: View) -> list[str]:
    """What waits for a service, that it costs nothing, and what to do about it."""
    lines = []
    for slot in seen.open_slots:
        if not slot.num_deferrals:
            continue
        left_s = deferred_for(slot, opened.chain.spec)
        when = f"in {format_seconds(left_s)}" if left_s else "at once"
        lines.append(f"{slot.name} {describe_outage(slot, now=view.now)}")
        lines.append(
            "  that is no failure: it goes on when the service answers, and no node is held"
            f" meanwhile; the next look is due {when}"
        )
        name = slot.service or "NAME"
        lines.append(
            f"  to do: bring it up again, or, if it has moved: slurm-rl set {opened.run.root}"
            f" services.{name}.url=URL"
        )
    return lines


def _explain_link(seen: LinkView, view: View) -> list[str]:
    """What the attempts at a link's stages, and its jobs, are doing."""
    lines = [
        f"{slot.name}: {slot.failures} attempt(s) failed; the last said: {slot.last_error}"
        f" (log: {slot.log})"
        for slot in seen.slots
        if slot.failures and not slot.committed
    ]
    tokens = {intent.token for intent, _ in seen.intents}
    for job in view.queue or ():
        if job.token in tokens and job.state is not JobState.ENDED:
            lines.append(f"{seen.link}: job {job.job_id} {describe_job(job)}")
    return lines


def describe_job(job: QueuedJob) -> str:
    """A job of the queue, in words."""
    if job.state is JobState.RUNNING:
        return f"has been running for {format_seconds(job.elapsed_s)} on {job.nodes or '?'}"
    if job.state is JobState.UNKNOWN:
        return f"is in a state that is not known here ({job.raw})"
    if job.after:
        return f"waits for job {', '.join(job.after)}"
    if job.begins_in_s:
        when = format_seconds(job.begins_in_s)
        return f"begins in {when}: that is the delay of a retry, or of a look at a service"
    waited = format_seconds(job.age_s)
    if not job.reason:
        return f"has waited {waited}, and is to begin by itself"
    return f"has waited {waited} ({job.reason}): {explain_reason(job)}"


def explain_reason(job: QueuedJob) -> str:
    """What Slurm's reason means; `Slurm's own word` for one that is not in the table."""
    word = job.reason.strip("()").replace(" ", "")
    for pattern, meaning in _REASONS:
        if re.fullmatch(pattern, word, re.IGNORECASE):
            return meaning.replace("{id}", job.base_id)
    return "Slurm's own word; `scontrol show job` says more"


def _explain_advancers(opened: OpenRun, view: View) -> list[str]:
    """Who moves the run on, if nobody would."""
    root = opened.run.root
    jobs = [job for job in view.queue or () if job.state.is_live]
    if view.queue is None or any(not is_tick(job.name) for job in jobs):
        return []
    if jobs:
        return [f"only ticks are in the queue; one of them submits the next job, or now: slurm-rl"
                f" resume {root}"]  # fmt: skip
    return [f"no job of it is in the queue, so nothing moves it: slurm-rl resume {root}"]
