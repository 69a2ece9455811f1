"""What rewards that are more than a look at a text need: processes, servers, the settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slurm_rl.config.rollout_schema import Service
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError
from slurm_rl.rollout.rewards.workers import Workers
from slurm_rl.rollout.services import Client, Clients

#: The names under which rewards know the addresses that are no entry of `services`.
SCORE, RM_URL = "score", "rm_url"
#: The score stage's own server does not come back after that.
SERVER_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Means:
    """Handed to the built-in rewards that need it.

    score_url: of the server that the score stage started; None where there is none.
    tokenize:  of the served reward model, `async messages -> token ids`.
    """

    settings: Settings
    workers: Workers
    clients: Clients
    score_url: str | None = None
    tokenize: Callable[[list[dict[str, Any]]], Awaitable[list[int]]] | None = None

    def remote_client(self) -> Client:
        """Of the service that `remote_rm` asks, or of the address `rm_url`."""
        rollout = self.settings.rollout
        if rollout.rm_service is not None:
            service = self.settings.services.get(rollout.rm_service)
            if service is None:
                raise ConfigError(
                    f"rollout.rm_service = {rollout.rm_service!r} is no entry of services"
                )
            return self.clients.get(rollout.rm_service, service)
        if rollout.rm_url is None:
            raise ConfigError("remote_rm needs rollout.rm_url or rollout.rm_service")
        timeout_s = min(Service().timeout_s, rollout.reward_timeout_s)
        service = Service(url=rollout.rm_url, timeout_s=timeout_s)
        return self.clients.get(RM_URL, service, has_health=False)

    def score_client(self) -> Client:
        """Of the score stage's own server."""
        if self.score_url is None:
            raise ConfigError(
                "served_rm and judge ask the score stage's server, and there is none here",
                hint="set score.server, so that these rewards are given in the score stage",
            )
        timeout_s = self.settings.rollout.reward_timeout_s
        service = Service(url=self.score_url, timeout_s=timeout_s, down_after_s=SERVER_PATIENCE_S)
        return self.clients.get(SCORE, service)
