"""Each rule of the protocol, broken in a copy of the package, must be found out by some run.

A mutant is a change of one piece of text; `toy.hunt` runs on the copy in a process of its own.
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
        "kills",
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
        "kills", "storage/claims.py", (("    if won:\n", "    won = True\n    if won:\n"),)
    ),
    "commits are read before the queue": Mutant(
        "plain ticks",
        "chain/observe.py",
        (
            (
                "    queue = read_queue(",
                "    early = {r: read_current(run, graph, control, r)"
                " for w in window for r in w.stages}\n    queue = read_queue(",
            ),
            (
                "            commit = read_current(run, graph, control, ref)",
                "            commit = early[ref]",
            ),
        ),
    ),
    "no lease: a claim of another job is free at once": Mutant(
        "kills",
        "launch/supervisor.py",
        (
            (
                "            self._seen[slot, claim.epoch] = (counter, now)\n            return False\n",
                "            return True\n",
            ),
        ),
    ),
    "a silent queue shows no jobs": Mutant(
        "controller",
        "chain/observe.py",
        (
            (
                "    except SchedulerUnavailable:\n        return None",
                "    except SchedulerUnavailable:\n        return ()",
            ),
        ),
    ),
    "an intent without a job is over at once": Mutant(
        "advances", "chain/plan.py", (("age_s >= spec.submit_deadline_s:", "age_s >= 0:"),)
    ),
    "a job that waits for a stranger is left alone": Mutant(
        "controller",
        "chain/plan.py",
        (("            draft.actions.append(Repoint(base_id, previous))", "            pass"),),
    ),
    "no ticks": Mutant("forgets", "chain/plan.py", (("TICKS_WANTED = 2", "TICKS_WANTED = 0"),)),
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
