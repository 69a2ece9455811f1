"""gc and lease: what retention deletes, what it keeps and why, and how a reader is spared."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from slurm_rl.chain.gc import Report, collect
from slurm_rl.chain.observe import read_current
from slurm_rl.cli.runs import check_iteration, find_run
from slurm_rl.cli.terminal import format_bytes, format_seconds, say
from slurm_rl.errors import NothingDone, StorageError
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.control import read_control
from slurm_rl.storage.leases import take_lease
from slurm_rl.storage.owner import current_user
from slurm_rl.storage.retention import Act, Item
from slurm_rl.storage.tombstones import check_there
from slurm_rl.types import Slot, StageRef

_LOOK_S = 5.0


def collect_garbage(path: Path, *, dry_run: bool, wait: bool) -> None:
    """One pass, and with `wait` more until nothing is marked. Raises StorageError on trouble.

    Works on a run that goes on, is paused, halted or complete.
    """
    opened = find_run(path)
    report = collect(opened.keeper, dry_run=dry_run)
    show_report(opened, report, dry_run=dry_run)
    while wait and not dry_run and _is_going(report) and not report.problems:
        time.sleep(min(_LOOK_S, opened.settings.retention.gc_grace_s))
        report = collect(opened.keeper)
        _show_acts(report, dry_run=False, only=(Act.DELETE, Act.CONDEMN))
    if report.problems:
        raise StorageError(
            f"{opened.run.root}: {len(report.problems)} thing(s) could not be done:\n  "
            + "\n  ".join(report.problems)
        )


def show_report(opened: OpenRun, report: Report, *, dry_run: bool) -> None:
    """What goes and what stays, in counts and bytes, with the reasons."""
    rules = opened.settings.retention
    if rules.keep_last is None:
        say("retention.keep_last is not set: nothing is deleted; set it with")
        say(f"  slurm-rl set {opened.run.root} retention.keep_last=4")
    _show_acts(report, dry_run=dry_run)
    if report.num_folded:
        done = "would be folded" if dry_run else "folded"
        say(f"{report.num_folded} records of old iterations {done} into one file each")
    kept = [(item, verdict.why) for item, verdict in report.verdicts if verdict.act is Act.KEEP]
    for why, number in Counter(why for _, why in kept).most_common():
        items = [item for item, reason in kept if reason == why]
        say(f"stays   {number:>4}  {format_bytes(_bytes(items)):>9}  {why}")
    if not dry_run and report.having(Act.CONDEMN):
        grace = format_seconds(rules.gc_grace_s)
        say(f"what is marked is deleted by the first gc (or tick) after {grace}")


def lease_iteration(path: Path, *, iteration: int, hours: float, why: str) -> None:
    """Hold the files of an iteration's commits. Raises PrunedError if it is too late."""
    opened = find_run(path)
    graph, control = opened.chain.graph, read_control(opened.run)
    check_iteration(graph, iteration)
    refs = [StageRef(iteration, node.kind) for node in graph.stages(iteration)]
    slots = [
        Slot(iteration, ref.kind, control.timeline_of(ref))
        for ref in refs
        if read_current(opened.run, graph, control, ref) is not None
    ]
    if not slots:
        raise NothingDone(f"{opened.run.root}: iteration {iteration} has no commit yet")
    holder = f"{current_user()} on {socket.gethostname()}" + (f": {why}" if why else "")
    now = opened.chain.clock()
    lease = take_lease(opened.run, slots, holder=holder, now=now, lifetime_s=hours * 3600)
    for slot in slots:
        # The lease stays where a part is gone already: it holds the other parts.
        check_there(opened.run, slot)
    say(f"iteration {iteration} stays for {format_seconds(hours * 3600)} (lease {lease.token})")
    say(f"let go earlier with: rm {opened.run.root}/leases/lease.{lease.token}")


def _show_acts(
    report: Report, *, dry_run: bool, only: Iterable[Act] = (Act.DELETE, Act.CONDEMN, Act.WAIT)
) -> None:
    words = {
        Act.DELETE: "would go" if dry_run else "deleted",
        Act.CONDEMN: "would be marked" if dry_run else "marked",
        Act.WAIT: "waits",
    }
    for act in only:
        for item, verdict in report.verdicts:
            if verdict.act is act:
                size = format_bytes(item.size_bytes)
                say(f"{words[act]}  {item}  {size}, {item.num_files} files: {verdict.why}")
        items = report.having(act)
        if len(items) > 1:
            say(f"{words[act]}: {len(items)} in all, {format_bytes(_bytes(items))}")
    gone = report.having(Act.GONE)
    if gone and Act.WAIT in only:
        say(f"gone    {len(gone):>4}  {format_bytes(_bytes(gone)):>9}  pruned before")


def _is_going(report: Report) -> bool:
    return bool(report.having(Act.CONDEMN) or report.having(Act.WAIT))


def _bytes(items: Iterable[Item]) -> int:
    return sum(item.size_bytes for item in items)
