"""adopt: take over a run that a colleague began."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_rl.cli.runs import find_run
from slurm_rl.cli.terminal import say
from slurm_rl.errors import NothingDone, OwnerError
from slurm_rl.storage.control import read_control, write_owner
from slurm_rl.storage.owner import current_user, owner_of


def adopt_run(path: Path) -> None:
    """Make the run this user's. Jobs of the owner before go on and commit, and submit no more.

    Raises OwnerError if the run directory cannot be written to.
    """
    opened = find_run(path)
    root, user = opened.run.root, current_user()
    owner = owner_of(opened.identity, read_control(opened.run))
    if owner == user:
        raise NothingDone(f"{root}: it is yours already")
    if not os.access(opened.run.control_dir, os.W_OK | os.X_OK):
        raise OwnerError(
            f"{root}: you may not write in it",
            hint=f"{owner} makes runs that colleagues can take over with run.group",
        )
    write_owner(opened.run, user)
    say(f"{root}: was {owner}'s, is {user}'s now. Go on with: slurm-rl resume {root}")
