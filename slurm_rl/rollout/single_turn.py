"""One answer to one prompt: the default way of generating a group, in one request."""

from __future__ import annotations

from slurm_rl.rollout.engine import Engine
from slurm_rl.rollout.groups import Finisher, PlannedGroup
from slurm_rl.rollout.samples import Sample


class SingleTurn:
    """Generates groups on `engine`; the samples have no reward yet."""

    def __init__(self, engine: Engine, finisher: Finisher) -> None:
        self._engine = engine
        self._finisher = finisher

    async def __call__(self, group: PlannedGroup) -> list[Sample]:
        """The samples of `group`; those that were cut off are `aborted`. Raises EngineError."""
        completions = []
        if group.request.seeds:
            completions = await self._engine.generate(group.request, group.sampling)
        return self._finisher.finish(group, completions)
