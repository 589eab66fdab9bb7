"""A small Kubernetes Service: clients use one address, and each new connection goes to a random endpoint.

As with kube-proxy, existing connections stay with their gateway, even if it is removed from the endpoints. An endpoint is a
gateway whose /ready answers 200 and that is not being deleted; clients learn of a change `delay_s` later.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Sequence

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from bench.fleet.stage import GatewayProcess

ADDRESS = "http://warmroute.service"
LOOK_S = 0.1


class Service(AbstractResolver):
    """deleted: gateways that are being deleted."""

    def __init__(self, gateways: Sequence[GatewayProcess], delay_s: float, chance: random.Random) -> None:
        self.deleted: set[int] = set()
        self._gateways = gateways
        self._delay_s = delay_s
        self._chance = chance
        self._endpoints = [each.port for each in gateways]
        self._changed = asyncio.Event()

    def session(self) -> aiohttp.ClientSession:
        """A client of its own, that keeps one connection."""
        connector = aiohttp.TCPConnector(resolver=self, use_dns_cache=False, limit=1, keepalive_timeout=60)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120))

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        """aiohttp's name for: where does the next connection go?"""
        if not self._endpoints:
            raise OSError("the Service has no endpoint")
        chosen = self._chance.choice(self._endpoints)
        address = {"hostname": host, "host": "127.0.0.1", "port": chosen, "family": socket.AF_INET, "proto": 0}
        return [ResolveResult(**address, flags=socket.AI_NUMERICHOST)]  # type: ignore[typeddict-item]

    async def close(self) -> None:
        """Nothing is held."""

    async def until(self, port: int, *, endpoint: bool) -> None:
        """Wait until clients know that it is an endpoint, or is none."""
        while (port in self._endpoints) != endpoint:
            self._changed.clear()
            await self._changed.wait()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follow what the gateways' /ready answers."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(2)) as session:
            while True:
                good = await asyncio.gather(*(self._is_ready(session, each) for each in self._gateways))
                endpoints = [each.port for each, ready in zip(self._gateways, good, strict=True) if ready]
                loop.call_later(self._delay_s, self._set, [port for port in endpoints if port not in self.deleted])
                await asyncio.sleep(LOOK_S)

    async def _is_ready(self, session: aiohttp.ClientSession, gateway: GatewayProcess) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{gateway.url}/ready", headers={"Connection": "close"}) as answer:
                return answer.status == 200
        return False

    def _set(self, endpoints: list[int]) -> None:
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            self._changed.set()
