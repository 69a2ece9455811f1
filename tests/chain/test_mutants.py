"""Each rule of the protocol, broken in a copy of the package, must be found out by some run.

A mutant is a change of one piece of text; `toy.hunt` runs on the copy in a process of its own.
That everything is fsynced before it is named is held by `tests/unit/storage/test_power_cut.py`, which
leaves out each sync in turn.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import slurm_rl

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Mutant:
    """In `file`, each `old` becomes `new`; runs of `suite` must break."""

    suite: str
    file: str
    changes: tuple[tuple[str, str], ...]


MUTANTS = {
    "the winner is told by the job, not the attempt": Mutant(
        "late commits",
        "storage/commits.py",
        (
            (
                "    return publish(commit_path(run, slot), canonical_json(data), fs=run.fs)",
                "    publish(commit_path(run, slot), canonical_json(data), fs=run.fs)\n"
                "    found = read_commit(run, slot)\n"
                "    return found is not None"
                " and found.provenance.get('job_name') == provenance.get('job_name')",
            ),
        ),
    ),
    "intents are not exclusive": Mutant(
        "advances",
        "storage/intents.py",
        (("    return publish(intent_path", "    return True or publish(intent_path"),),
    ),
    "claims are not exclusive": Mutant(
        "late", "storage/claims.py", (("    if won:\n", "    won = True\n    if won:\n"),)
    ),
    "commits are read before the queue": Mutant(
        "plain ticks",
        "chain/observe.py",
        (
            (
                "    queue = read_queue(scheduler, spec.short_id)\n",
                "    early = CommitReader(run, graph, control)\n"
                "    for ref in [ref for link in window for ref in link.stages]:\n"
                "        early.read(ref)\n"
                "    queue = read_queue(scheduler, spec.short_id)\n",
            ),
            ("queue, now, CommitReader(run, graph, control))\n", "queue, now, early)\n"),
        ),
    ),
    "no lease: a claim of another job is free at once": Mutant(
        "lease",
        "launch/supervisor.py",
        (
            (
                "            self._seen[slot, claim.epoch] = (counter, now)\n            return False\n",
                "            return True\n",
            ),
        ),
    ),
    "a silent queue shows no jobs": Mutant(
        "silent",
        "chain/observe.py",
        (
            (
                "    except SchedulerUnavailable:\n        return None",
                "    except SchedulerUnavailable:\n        return ()",
            ),
        ),
    ),
    "an intent without a job is over at once": Mutant(
        "advances",
        "chain/plan_shards.py",
        (("abs(age_s) >= spec.submit_deadline_s or", "abs(age_s) >= 0 or"),),
    ),
    "a job that waits for a stranger is left alone": Mutant(
        "reissued",
        "chain/plan.py",
        (("            draft.actions.append(Repoint(base_id, ids))", "            pass"),),
    ),
    "a submission that timed out is made again at once": Mutant(
        "made",
        "chain/advance.py",
        (
            (
                "    except SubmitRefused as error:\n        if not request.exclude:\n            raise",
                "    except SchedulerError as error:\n        if not request.exclude:\n"
                "            return chain.scheduler.submit(request)",
            ),
        ),
    ),
    "an attempt that may still commit is collected": Mutant(
        "tidy ticks",
        "storage/retention.py",
        (
            ("    if item.is_current and not item.is_committed:\n", "    if False:\n"),
            # Nor does the lease that a running attempt holds on its own slot help.
            ("        if item.held_by:\n", "        if item.held_by and not item.attempt:\n"),
            (
                'left_s:.0f} s")\n    if item.held_by:\n',
                'left_s:.0f} s")\n    if item.held_by and not item.attempt:\n',
            ),
        ),
    ),
    "what an attempt wrote is deleted when it does not win": Mutant(
        "storage",
        "launch/attempt.py",
        (
            (
                '                logger.warning("%s: %s; once more in %.0f s", self.slot, error, wait_s)',
                "                for e in result.files:\n"
                "                    self.run_dir.fs.unlink(self.folder / e.path)\n"
                "                break",
            ),
            (
                "        for wait_s in (*supervisor.timing.publish_again, None):\n",
                "        won = False\n        for wait_s in (*supervisor.timing.publish_again, None):\n",
            ),
        ),
    ),
    "a job that was told to stop exits with 0": Mutant(
        "signals",
        "launch/supervisor.py",
        (
            (
                "                yield from leave(self)\n                return EXIT_UNFINISHED",
                "                yield from leave(self)\n                return EXIT_DONE",
            ),
        ),
    ),
    "a running tick counts": Mutant(
        "last tick",
        "chain/plan_ticks.py",
        (
            (
                "is_tick(job.name) and job.state is JobState.PENDING]\n    if len(ticks)",
                "is_tick(job.name) and job.state in (JobState.PENDING, JobState.RUNNING)]\n"
                "    if len(ticks)",
            ),
        ),
    ),
    "no ticks": Mutant(
        "forgets", "chain/plan_ticks.py", (("TICKS_WANTED = 2", "TICKS_WANTED = 0"),)
    ),
    "evaluations count for nothing when a run is over": Mutant(
        "evals",
        "chain/view.py",
        (
            (
                "        return not self.links and not self.evals and not self.has_more_evals",
                "        return not self.links",
            ),
        ),
    ),
    "an evaluation that is not done keeps its iteration from being complete": Mutant(
        "evals",
        "chain/observe.py",
        (
            (
                "        return has_commit(run, Slot(iteration, ref.kind, control.timeline_of(ref)))\n",
                "        done = has_commit(run, Slot(iteration, ref.kind, control.timeline_of(ref)))\n"
                "        due = graph.due_evals(iteration + 1)\n"
                "        return done and all(\n"
                "            has_commit(run, Slot(e.iteration, e.kind, control.timeline_of(e)))\n"
                "            for e in due\n"
                "        )\n",
            ),
        ),
    ),
    "a service that is down is a failure": Mutant(
        "outages", "chain/slots.py", (('"committed", "deferred")', '"committed")'),)
    ),
    "a deferred stage is looked at again at once": Mutant(
        "outages",
        "chain/outages.py",
        (("    return max(0.0, left_s)", "    return 0.0"),),
    ),
    "weights go before their evaluation is done": Mutant(
        "tidy evals",
        "chain/gc.py",
        (
            (
                "    open_refs |= find_open_evals("
                "read_evals(run, keeper.graph, control, head=head))\n",
                "",
            ),
        ),
    ),
    "a young job of an unknown intent is a stray": Mutant(
        "ticks", "chain/plan.py", (("job.age_s >= spec.submit_deadline_s", "job.age_s >= 0"),)
    ),
}


def make_mutant(folder: Path, mutant: Mutant) -> None:
    source = Path(slurm_rl.__file__).parent
    shutil.copytree(source, folder / "slurm_rl", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "slurm_rl" / mutant.file
    text = path.read_text()
    for old, new in mutant.changes:
        assert text.count(old) == 1, f"{mutant.file} changed: write this mutant anew"
        text = text.replace(old, new)
    path.write_text(text)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found_out(tmp_path: Path, folder: Path, name: str) -> None:
    mutant = MUTANTS[name]
    make_mutant(tmp_path, mutant)
    tests = Path(__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-m", "toy.hunt", mutant.suite, str(folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{tests}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert found.returncode == 1, "no run broke"
    # A run that broke a rule, not a program that cannot run.
    assert found.stdout.startswith("broken: "), found.stdout + found.stderr
