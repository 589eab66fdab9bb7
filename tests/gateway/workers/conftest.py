"""Workers without processes: gateways in this loop, joined by a real hub over real socket pairs."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from gateway.app import Gateway, compose, make_runner
from gateway.config import Config, load
from gateway.everywhere import Local
from gateway.workers.channel import SERVING, Channel
from gateway.workers.hub import Hub
from gateway.workers.peers import Peers, part_of
from tests.fakes import FakeReplica
from tests.gateway.conftest import LOGGED, Running, eventually, serving_runner


async def pair() -> tuple[Channel, Channel]:
    """Both ends of a channel."""
    loop = asyncio.get_running_loop()
    ends = [await loop.create_unix_connection(Channel, sock=sock) for sock in socket.socketpair()]
    return ends[0][1], ends[1][1]


async def closed(*channels: Channel) -> None:
    for channel in channels:
        channel.close()
        await channel.closed.wait()


@dataclass(slots=True)
class Worker:
    """who: its number at the hub."""

    who: int
    run: Running
    peers: Peers
    channel: Channel

    @property
    def gateway(self) -> Gateway:
        return self.run.gateway


class Star:
    """A hub and its workers."""

    def __init__(self, config: Config) -> None:
        self.served: list[int] = []
        self.hub = Hub(config, time.monotonic, self.served.append)
        self.stack = contextlib.AsyncExitStack()

    async def join(self) -> Worker:
        """One more worker, as `worker.py` starts it."""
        ours, its = await pair()
        who = self.hub.join(ours)
        self.stack.push_async_callback(self._end, who, ours, its)
        _, me, _, payload = await its.first()
        whole = pickle.loads(payload)
        made: list[Peers] = []

        def everywhere(local: Local) -> Peers:
            made.append(Peers(local, its, lambda: None))
            return made[0]

        gateway = compose(part_of(whole), LOGGED, everywhere=everywhere)
        run = await self.stack.enter_async_context(serving_runner(gateway, make_runner(gateway)))
        await gateway.everywhere.ready()
        its.send(SERVING)
        await eventually(lambda: who in self.served)
        assert me == who
        return Worker(who, run, made[0], its)

    async def _end(self, who: int, ours: Channel, its: Channel) -> None:
        """As the supervisor does when a worker has ended: what it did not come to tell is over for the others."""
        await closed(ours, its)
        if who in self.hub.members:
            self.hub.leave(who)


@contextlib.asynccontextmanager
async def star(*replicas: FakeReplica, workers: int = 2, **config: Any) -> AsyncIterator[tuple[Star, list[Worker]]]:
    """A gateway of several workers. At the end nothing may be left open anywhere."""
    raw = {"health": {"interval_s": 60}, "workers": workers, **config}
    pools = [{"replicas": [replica.url for replica in replicas], **raw.pop("pool", {})}]
    made = Star(load(None, {"pools": pools, **raw}, env={}))
    async with made.stack:
        yield made, [await made.join() for _ in range(workers)]
