"""The decision that closes a batch, where several shards have to agree on it.

Owns `CLOSE-<key>.json` in the stage's directory, published once, without replacing: whoever first
sees that the batch can be closed says how, and every shard seals its own part by what stands
there. The key digests what the groups depend on: after a change of settings or code there is
another one.

What a crash leaves: a decision or none. Groups that it admits and that no journal holds any more
are generated again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.errors import CorruptError
from slurm_rl.rollout.fast_json import dumps, loads
from slurm_rl.rollout.ledger import Decision
from slurm_rl.storage.durable import publish, read_published
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import DECISION_PREFIX


@dataclass(frozen=True, slots=True)
class Close:
    """A decision, and where the data goes on after it."""

    decision: Decision
    cursor: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the decision of one stage lies."""

    path: Path
    fs: Fs = POSIX

    def read(self) -> Close | None:
        """The decision, if there is one. Raises CorruptError if something else stands there."""
        data = read_published(self.path, fs=self.fs)
        if data is None:
            return None
        try:
            raw = loads(data)
            return Close(Decision(**raw["decision"]), raw["cursor"])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(f"{self.path}: no decision of a batch ({error})") from error

    def publish(self, close: Close) -> Close:
        """Say how the batch is closed, unless somebody has; what holds then."""
        raw = {"decision": close.decision.as_dict(), "cursor": close.cursor}
        publish(self.path, dumps(raw), fs=self.fs)
        stands = self.read()
        assert stands is not None
        return stands


def find_desk(stage_dir: Path, key: str, *, committed: Iterable[str]) -> Desk:
    """Where the shards agree: where those that have committed did, else where `key` says.

    committed: digests of the decisions that they sealed by.
    """
    sealed_by = set(committed)
    for path in sorted(stage_dir.glob(f"{DECISION_PREFIX}*.json")) if sealed_by else ():
        stands = Desk(path).read()
        if stands is not None and stands.decision.digest in sealed_by:
            return Desk(path)
    return desk_of(stage_dir, key)


def desk_of(stage_dir: Path, key: str, *, fs: Fs = POSIX) -> Desk:
    """The desk of the groups whose keys share `key` (`Planner.made_from`)."""
    return Desk(stage_dir / f"{DECISION_PREFIX}{key.rpartition(':')[2][:16]}.json", fs)
