"""Planning of evaluations: when one is given up, and where its job stands among the others'. Pure.

None holds up the chain, but where one machine does all in turn: there it lets those of its weights
go first, if they can be submitted. Behind the chain they would come when all is over, and every
version's weights would have to be kept until then.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rl.chain.graph import Link
from slurm_rl.chain.halts import explain_end
from slurm_rl.chain.scheduler import QueuedJob
from slurm_rl.chain.view import GiveUp, LinkView, Spec, View
from slurm_rl.config.schema import EVAL_PREFIX
from slurm_rl.storage.evals import GivenUp
from slurm_rl.types import StageRef


def plan_giving_up(spec: Spec, view: View) -> list[GiveUp]:
    """Evaluations that failed for good. One that may be at work is let be."""
    found = []
    for seen in view.evals:
        slot, why = seen.slots[0], _find_end(spec, seen)
        at_work = any(job.state.may_be_at_work for job in view.jobs_of(seen))
        if why and not at_work and view.queue is not None:
            number = seen.intents[-1][0].number if seen.intents else 0
            given_up = GivenUp(slot.epoch, number, why, slot.log, view.now)
            found.append(GiveUp(seen.link.anchor, given_up))
    return found


def links_in_turn(
    spec: Spec, view: View, *, most_evals: int
) -> Iterator[tuple[LinkView, list[Link]]]:
    """Links that need a job, parents first, each with the open ones whose ends wake it.

    Evaluations come after the chain: what is left of places in the queue is theirs. In turn
    (`spec.serial`) they come right behind what makes their weights, and what is behind them waits.
    """
    chain = [seen for seen in view.links if not seen.is_done]
    evals = _choose_evals(spec, view, most_evals)
    is_open = {seen.link for seen in (*chain, *evals)}

    def parents(seen: LinkView) -> list[Link]:
        return [link for link in seen.waits_for if link in is_open]

    if not spec.serial:
        yield from ((seen, parents(seen)) for seen in (*chain, *evals))
        return
    first: list[Link] = []
    behind: StageRef | None = None  # the stage that waits for `first`: all its pools do
    for seen in _merge(chain, evals):
        if behind not in (None, seen.link.anchor):
            first, behind = [], None
        yield seen, [*parents(seen), *first]
        if seen.is_eval:
            first, behind = [seen.link], None
        elif first:
            behind = seen.link.anchor


def _merge(chain: list[LinkView], evals: list[LinkView]) -> Iterator[LinkView]:
    """Each evaluation behind the link that makes its weights, or at the front if they are there."""
    links = {seen.link for seen in chain}
    yield from (seen for seen in evals if not links & set(seen.waits_for))
    for seen in chain:
        yield seen
        yield from (other for other in evals if seen.link in other.waits_for)


def _choose_evals(spec: Spec, view: View, most: int) -> list[LinkView]:
    """Those that have jobs, and the next ones while there are fewer than `most`."""
    found = [seen for seen in view.evals if not seen.is_done and not _find_end(spec, seen)]
    has_job = [any(job.state.is_live for job in view.jobs_of(seen)) for seen in found]
    # Also jobs of those that are done or given up: they hold a place until they end.
    room = most - sum(_is_evals(job) for job in view.queue or ())
    chosen = []
    for seen, has_one in zip(found, has_job, strict=True):
        if not has_one:
            room -= 1
        if has_one or room >= 0:
            chosen.append(seen)
    return chosen


def _is_evals(job: QueuedJob) -> bool:
    """Whether a job is an evaluation's, and in the queue."""
    return job.state.is_live and f".{EVAL_PREFIX}" in job.name


def _find_end(spec: Spec, seen: LinkView) -> str:
    """Why an evaluation is not to be tried again; empty if it is."""
    slot = seen.slots[0]
    if slot.committed:
        return ""
    if slot.is_users:
        return f"{slot.name}: {slot.last_error}"
    halt = explain_end(spec, seen)
    return "" if halt is None else halt.reason
