"""Workers without processes: gateways in this loop, joined by a real hub over real socket pairs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from gateway.app import Gateway, compose
from gateway.cluster.commands import LocalControl
from gateway.cluster.messages import decode_config
from gateway.config.schema import Config
from gateway.core import Surroundings
from gateway.features.table import WholeConfig
from gateway.features.workers.channel import Channel
from gateway.features.workers.hub import Hub
from gateway.features.workers.hub_knowledge import HISTORY_BYTES
from gateway.features.workers.messages import Heartbeat, Message, Welcome, from_hub, from_worker
from gateway.features.workers.peers import Peers, connect, worker_share
from gateway.features.workers.questions import PEER_LIMITS, PeerLimits
from gateway.fleet.directory import FIRST_PROBES_S
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, Running, eventually, serving_runner
from tests.support.configs import load
from tests.support.fakes import FakeReplica


async def pair() -> tuple[Channel, Channel]:
    """Both ends of a channel: the hub's, and a worker's."""

    async def end(sock: socket.socket, decode: Callable[[bytes], Message]) -> Channel:
        _, channel = await asyncio.get_running_loop().create_unix_connection(lambda: Channel(decode), sock=sock)
        return channel

    ours, its = socket.socketpair()
    return await end(ours, from_worker), await end(its, from_hub)


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
    """A hub and its workers. peer_limits, first_probes_s: of every worker. history_bytes: of the hub."""

    def __init__(
        self,
        config: Config,
        peer_limits: PeerLimits = PEER_LIMITS,
        first_probes_s: float = FIRST_PROBES_S,
        history_bytes: int = HISTORY_BYTES,
    ) -> None:
        self.peer_limits = peer_limits
        self.first_probes_s = first_probes_s
        self.served: list[int] = []
        self.hub = Hub(config, time.monotonic, self.served.append, history_bytes)
        self.stack = contextlib.AsyncExitStack()

    async def join(self) -> Worker:
        """One more worker, as `worker.py` starts it."""
        ours, its = await pair()
        who = self.hub.join(ours)
        self.stack.push_async_callback(self._end, who, ours, its)
        me, welcome = await its.first()
        assert isinstance(welcome, Welcome)
        made: list[Peers] = []

        def control_plane(local: LocalControl) -> Peers:
            made.append(connect(local, its, lambda: None, self.peer_limits))
            return made[0]

        around = Surroundings(control_plane=control_plane, first_probes_s=self.first_probes_s)
        gateway = compose(worker_share(decode_config(WholeConfig, welcome.config)), LOGGED, around)
        run = await self.stack.enter_async_context(serving_runner(gateway, clients_runner(gateway.served)))
        await gateway.control.ready()
        its.send(Heartbeat("serving"))
        await eventually(lambda: who in self.served)
        assert me == who
        return Worker(who, run, made[0], its)

    async def _end(self, who: int, ours: Channel, its: Channel) -> None:
        """As the supervisor does when a worker has ended: what it could not report any more is over for the others."""
        await closed(ours, its)
        if who in self.hub.workers:
            self.hub.leave(who)


@contextlib.asynccontextmanager
async def star(
    *replicas: FakeReplica,
    workers: int = 2,
    peer_limits: PeerLimits = PEER_LIMITS,
    first_probes_s: float = FIRST_PROBES_S,
    history_bytes: int = HISTORY_BYTES,
    **config: Any,
) -> AsyncIterator[tuple[Star, list[Worker]]]:
    """A gateway of several workers. At the end nothing may be left open anywhere."""
    raw = {"health": {"interval_s": 60}, "workers": workers, **config}
    pools = [{"replicas": [replica.url for replica in replicas], **raw.pop("pool", {})}]
    made = Star(load(None, {"pools": pools, **raw}, env={}), peer_limits, first_probes_s, history_bytes)
    async with made.stack:
        yield made, [await made.join() for _ in range(workers)]
