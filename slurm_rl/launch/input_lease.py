"""The lease of an attempt on what it reads: its inputs, and earlier attempts at its own slot.

The inputs of a stage without a commit are safe anyway. What the lease keeps is what a zombie
reads: an attempt that goes on after its slot was taken over, or its timeline set aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from slurm_rl.chain.needs import CONTENT_ROLES
from slurm_rl.errors import PrunedError, StorageError
from slurm_rl.storage.control import Control
from slurm_rl.storage.leases import LEASE_S, Lease, check_lease, drop_lease, take_lease
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import check_there
from slurm_rl.types import Slot, StageRef

logger = logging.getLogger(__name__)

_RENEW_S = LEASE_S / 4


@dataclass
class InputLease:
    """Held from before the inputs are looked at until the attempt ends.

    clock: of the run's file system. monotonic: the holder's own; it says when to renew.
    """

    run: RunDir
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    _lease: Lease | None = None
    _inputs: list[Slot] = field(default_factory=list)
    _renew_at: float = 0.0

    def take(self, own: Slot, inputs: dict[str, StageRef], control: Control) -> None:
        """Take it, then look for tombstones. Raises PrunedError if an input is going or gone.

        inputs: role -> stage. A full disk must not keep a stage from its work: then there is no
        lease.
        """
        self._renew_at = self.monotonic() + _RENEW_S
        self._inputs = [
            Slot(ref.iteration, ref.kind, control.timeline_of(ref))
            for role, ref in inputs.items()
            if role not in CONTENT_ROLES
        ]
        try:
            slots = [own, *self._inputs]
            self._lease = take_lease(self.run, slots, holder=str(own), now=self.clock())
        except (OSError, StorageError) as error:
            logger.warning("no lease on the inputs: %s", error)
        for slot in self._inputs:
            check_there(self.run, slot)

    def beat(self) -> None:
        """Renew it when it is time to."""
        if self._lease is None or self.monotonic() < self._renew_at:
            return
        self._renew_at = self.monotonic() + _RENEW_S
        try:
            self._lease = check_lease(self.run, self._lease, self._inputs, now=self.clock())
        except PrunedError as error:
            logger.warning("%s: the lease had run out; going on with what is read", error)
            self._lease = None
        except (OSError, StorageError) as error:
            logger.warning("the lease on the inputs is not renewed: %s", error)

    def drop(self) -> None:
        if self._lease is not None:
            drop_lease(self.run, self._lease)
            self._lease = None
