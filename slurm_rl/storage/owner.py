"""Whose a run is: one person submits its jobs, others may look.

A run belongs to whoever made it, until somebody adopts it. Jobs of the owner before go on and
commit; they submit nothing more.
"""

from __future__ import annotations

import grp
import os
import pwd

from slurm_rl.errors import ConfigError, OwnerError
from slurm_rl.storage.control import Control
from slurm_rl.storage.rundir import RunDir, RunIdentity


def current_user() -> str:
    """The name of the user of this process; the number where there is no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def owner_of(identity: RunIdentity, control: Control) -> str:
    """Who may submit jobs of the run."""
    return control.owner or identity.owner


def check_owner(run: RunDir, identity: RunIdentity, control: Control) -> None:
    """OwnerError unless the run is this user's."""
    owner, user = owner_of(identity, control), current_user()
    if owner != user:
        raise OwnerError(
            f"{run.root}: belongs to {owner}, and you are {user}",
            hint=f"look with `slurm-rl status`, or make it yours with `slurm-rl adopt {run.root}`",
        )


def share_with_group(group: str | None) -> None:
    """What this process makes from now on may be read and changed by the group, if there is one,
    and by nobody else."""
    if group is not None:
        os.umask(0o007)


def hand_to_group(run: RunDir, group: str | None) -> None:
    """Give the run directory to the group; what is made in it belongs to the group too.

    Raises ConfigError for a group that is not there or not the user's.
    """
    if group is None:
        return
    try:
        os.chown(run.root, -1, grp.getgrnam(group).gr_gid)
        os.chmod(run.root, 0o2770)
    except (KeyError, PermissionError) as error:
        raise ConfigError(
            f"run.group = {group}: not a group that you can give files to",
            hint="choose one that `id` lists",
        ) from error
