"""A small HTTP server for tests: it answers what it is told, and can die and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], Any]


class FakeService:
    """Answers each POST with `answer(payload)`: a value as JSON, or a `web.Response`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_healthy = True
        self.payloads: list[tuple[str, dict[str, Any]]] = []
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> FakeService:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.payloads.append((request.path, payload))
        value = self.answer(payload)
        if isinstance(value, Awaitable):
            value = await value
        return value if isinstance(value, web.StreamResponse) else web.json_response(value)


async def later(seconds: float, call: Callable[[], Awaitable[Any]]) -> Any:
    await asyncio.sleep(seconds)
    return await call()
