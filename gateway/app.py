"""The composition root: the core with its configured features, the server, and the program around them.

Core (`core.py`) ──► features (`features/table.py`) ──► lifecycle ──► this process and its control plane ──► served
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from typing import Protocol

from gateway.cluster.commands import LocalControl
from gateway.cluster.listeners import addresses_of, open_listeners, refuse_new, url_of
from gateway.cluster.membership import Membership
from gateway.cluster.process import warn_of_connections
from gateway.cluster.reload import Parts, Reload
from gateway.cluster.side_sockets import NO_SIDES, SideSockets
from gateway.config.schema import Config
from gateway.core import Core, Surroundings, lifecycle_of
from gateway.features.table import install_all, new_metrics
from gateway.server.actions import Actions
from gateway.server.endpoints import SHUTDOWN_S, ServedParts, clients_runner, side_runner
from gateway.server.http.accept import Acceptor
from gateway.server.http.connections import ClientServer
from gateway.server.models import Models
from gateway.server.operator import Operator
from gateway.server.side_listeners import serving
from gateway.server.status import Status
from gateway.tasks import unless
from gateway.telemetry.request_log import RequestLog

_SWEEP_S = 1.0
_SLICE_S = 0.01  # pause between slices of a longer sweep, so that requests go first


class Closable(Protocol):
    """Anything that ends when it is closed."""

    def close(self) -> None: ...


class Gateway(Core):
    """One running gateway: its core with its features, the parts that its server serves, and its background work.

    Tests inspect it.
    """

    served: ServedParts

    def begin_leaving(self) -> None:
        """The gateway will go down; until then it serves all requests."""
        self.running.begin_leaving()

    @asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Runs the background work: probes, sweeps, reloads, member sources, the exchange with the other workers.

        Begins with the first probes, and the first answers of the sources, so that the first requests find their replicas.
        """
        first_probes = asyncio.create_task(self.fleet.probe_all(self.upstream))
        if (await asyncio.wait([first_probes], timeout=self.around.first_probes_s))[0]:
            first_probes.result()  # raises only if there is a bug
        work = self.work
        for start in work.starts:
            await start()
        own = [self.fleet.run(self.upstream), self._sweep(), self.local.run(), self.control.run()]
        tasks = [first_probes, *map(asyncio.create_task, [*own, *(task() for task in work.tasks)])]
        try:
            await self.local.membership.first_found(self.around.first_probes_s)
            for begin in work.begins:
                await begin()
            yield
        finally:
            for finish in work.finishes:
                await finish()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.upstream.close()
            for close in work.closes:
                await close()
            await self.parsing.process.close()

    async def _sweep(self) -> None:
        """Remove expired entries even without requests, and replicas that have left."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            while not self.local.beginning and self.router.sweep(self.clock()):  # noqa: ASYNC110  (no event to wait for)
                await asyncio.sleep(_SLICE_S)
            for sweep in self.work.sweeps:
                sweep(self.clock())
            for url in self.fleet.forget_departed():
                self.upstream.forget(url)


def compose(config: Config, requests: RequestLog, around: Surroundings | None = None) -> Gateway:
    gateway = Gateway(config, requests, new_metrics(), around or Surroundings())
    install_all(gateway)
    gateway.lifecycle = lifecycle_of(gateway)
    gateway.local = _local_of(gateway)
    gateway.control = (gateway.around.control_plane or gateway.control_plane)(gateway.local)
    gateway.served = _served_of(gateway)
    return gateway


def _served_of(gateway: Gateway) -> ServedParts:
    live, fleet, running, access = gateway.live, gateway.fleet, gateway.running, gateway.access
    local, control = gateway.local, gateway.control
    operator = Operator(
        live=live,
        local=local,
        dialects=gateway.around.dialects,
        parsing=gateway.parsing,
        control=control,
        access=access,
        extensions=gateway.extensions,
    )
    return ServedParts(
        live=live,
        lifecycle=gateway.lifecycle,
        models=Models(live=live, fleet=fleet, loops=gateway.loops, callers=gateway.callers, own=gateway.own_models),
        operator=operator,
        endpoints=[route for endpoints in gateway.endpoints for route in endpoints(operator, local, control)],
        pages=gateway.pages,
        sockets=partial(gateway.sockets, gateway) if gateway.sockets is not None else None,
        status=Status(fleet=fleet, running=running, control=control, access=access),
        actions=Actions(gateway.wall_clock, gateway.keepers),
        tls=gateway.tls,
        running=running,
        memory=gateway.memory,
        connections=gateway.connections,
    )


def _local_of(core: Core) -> LocalControl:
    """The parts of this process that operators, reloads and sources change."""
    live, fleet, clock, metrics = core.live, core.fleet, core.clock, core.metrics
    parts = Parts(fleet=fleet, upstream=core.upstream, router=core.router, memory=core.memory, connections=core.connections)
    membership = Membership(
        live=live, fleet=fleet, upstream=core.upstream, sources_of=core.members, first_wait_s=core.around.first_probes_s
    )
    local = LocalControl(
        live=live,
        parts=parts,
        membership=membership,
        reload=Reload(
            live=live,
            source=core.around.source,
            membership=membership,
            parts=parts,
            metrics=metrics,
            further=core.work.reloads,
        ),
        metrics=metrics,
        topics=core.topics,
        clock=clock,
    )
    local.begin_leaving, local.before_page = core.running.begin_leaving, core.set_gauges
    return local


async def serve(
    gateway: Gateway,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    started: Callable[[str], None],
    listeners: Sequence[socket.socket] = (),
    sides: SideSockets = NO_SIDES,
    accepting: Sequence[Callable[[ClientServer], Closable]] = (),
) -> None:
    """Runs until `stop` is set: then stops accepting, lets running requests finish for `limits.drain_timeout_s`, and ends.
    (`limits.drain_accept_s` is between the signal and `stop`: `commands/ending.py`.)

    hurry: ends all waiting. started: called with the base URL once requests are answered. listeners: the supervisor's sockets
    for clients (default: new ones, on the configured address). sides: sockets for operators and for Prometheus, which are
    served to the end. accepting: further sources of connections for the server, each until it is
    closed. Raises OSError if the address is unavailable.
    """
    warn_of_connections(gateway.config)
    if not listeners:
        addresses_of(*gateway.config.address)  # a port in use is reported before anything begins
    async with gateway.background(), _shut_down(clients_runner(gateway.served)) as server:
        await unless(stop, gateway.control.ready())
        if stop.is_set():  # no request has been served
            await unless(hurry, gateway.control.stop())
            return
        with ExitStack() as stack:
            async with serving(sides, partial(side_runner, gateway.served)):
                opened = () if listeners else open_listeners(*gateway.config.address)
                listeners = listeners or opened
                acceptors = [stack.enter_context(closing(Acceptor(each, server, server.tls))) for each in listeners]
                for accept in accepting:
                    stack.enter_context(closing(accept(server)))
                started(url_of(listeners[0].getsockname(), secure=server.tls is not None))
                await stop.wait()
                gateway.served.running.drain()
                for own in opened:  # the supervisor's are its own matter
                    refuse_new(own)
                await asyncio.gather(*(acceptor.finish() for acceptor in acceptors))
                await gateway.served.running.wait(gateway.config.limits.drain_timeout_s, hurry, server.close_idle)
                await unless(hurry, gateway.control.stop())


@asynccontextmanager
async def _shut_down(server: ClientServer) -> AsyncIterator[ClientServer]:
    """Shuts the server down at the end."""
    try:
        yield server
    finally:
        await server.shutdown(SHUTDOWN_S)
