"""The composition root: the one place that knows all parts and puts them together, and the program around them.

config -> metrics, router -> fleet, upstream -> attempts, delivery -> lifecycle -> reload -> operators, status -> served
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial

from gateway.accounting.ledger.ledger import Ledger
from gateway.accounting.meter import Meter
from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget
from gateway.cluster.commands import ControlPlane, LocalControl, SingleProcess, Telemetry
from gateway.cluster.listeners import addresses_of, open_listeners, url_of
from gateway.cluster.membership import Membership, SourcesOf
from gateway.cluster.process import budget_bytes, connection_limit, warn_of_connections
from gateway.cluster.reload import Parts, Reload
from gateway.cluster.side_sockets import NO_SIDES, SideSockets
from gateway.cluster.snapshots.knowledge import Knowledge
from gateway.cluster.workers.handover import Receiver
from gateway.config.listen import OFF
from gateway.config.live import Live
from gateway.config.schema import Config, RoutingConfig
from gateway.config.source import Source
from gateway.dialects.table import Dialects
from gateway.fleet.directory import FIRST_PROBES_S, Fleet
from gateway.fleet.sources.table import sources_of
from gateway.identity.keys import Keys
from gateway.identity.tokens.fetching import Fetcher
from gateway.identity.tokens.tokens import Tokens
from gateway.observing import Observing
from gateway.parser.items import KeptItems
from gateway.parser.parsing import Parsing
from gateway.parser.process import ParserProcess
from gateway.request.attempts import Attempts
from gateway.request.background.event_log import LOGS_SHARE, MAX_LOGS, Logs
from gateway.request.background.following import Followers
from gateway.request.background.runs import Runs
from gateway.request.delivery import Delivery
from gateway.request.fallback.fallbacks import Fallbacks
from gateway.request.kept.diagnoses import Diagnoses
from gateway.request.kept.recall import Recall
from gateway.request.lifecycle import Lifecycle
from gateway.request.phases.callers import Callers
from gateway.request.resumption import Resumption
from gateway.request.running import Running
from gateway.request.settle import Observer
from gateway.server.access import Access
from gateway.server.endpoints import SHUTDOWN_S, Served, clients_runner, side_runner
from gateway.server.http.accept import Acceptor
from gateway.server.http.connections import ClientServer
from gateway.server.identity.endpoints import KeyEndpoints
from gateway.server.models import Models
from gateway.server.operator import Operator
from gateway.server.shutdown import stop_accepting
from gateway.server.side_listeners import serving
from gateway.server.status import Status
from gateway.server.ui.broadcast import Broadcast
from gateway.server.ui.live import LiveEndpoints
from gateway.state.histories import Histories
from gateway.state.lazy import LazyStore
from gateway.tasks import unless
from gateway.telemetry.loop_lag import LoopLag
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.tracing.exporter import Exporter
from gateway.upstream.client import UpstreamClient
from gateway.upstream.headers import Address
from gateway.upstream.loop_guard import LoopGuard
from gateway.upstream.pool import Connector
from gateway.upstream.resolver import Resolver
from router import Router

_SWEEP_S = 1.0
_SLICE_S = 0.01  # from one slice of a longer sweep to the next: requests go first


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a gateway gets from outside of its configuration.

    source: where a changed configuration comes from, if there is any. control_plane: reaches the other workers. resolver: of
    the replicas' host names (default: the system's). loops: knows this gateway's id (default: a new one). dials: makes
    connections to replicas (default: over the network). dialects: by path (large bodies are parsed in a process that knows
    those of `dialects/table.py` only). observers: of the end of requests, after our own. members: the sources of replicas that
    a configuration asks for. wall_clock: Unix seconds, of what is kept. first_probes_s: how long a start waits for the
    replicas' first answers.
    """

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    source: Source[Config] | None = None
    control_plane: Callable[[LocalControl], ControlPlane] = SingleProcess
    resolver: Resolver | None = None
    loops: LoopGuard | None = None
    dials: Callable[[Address], Connector] | None = None
    dialects: Dialects = field(default_factory=Dialects)
    observers: Sequence[Observer] = ()
    members: SourcesOf = sources_of
    first_probes_s: float = FIRST_PROBES_S


@dataclass(frozen=True, slots=True)
class Gateway:
    """One running gateway: what its server serves, and what goes on beside the requests. Tests look inside through it."""

    around: Surroundings
    live: Live
    metrics: Metrics
    router: Router
    fleet: Fleet
    upstream: UpstreamClient
    parsing: Parsing
    attempts: Attempts
    recall: Recall
    keys: Keys | None
    local: LocalControl
    control: ControlPlane
    served: Served
    observing: Observing

    @property
    def clock(self) -> Callable[[], float]:
        return self.around.clock

    @property
    def ledger(self) -> Ledger | None:
        return self.observing.ledger

    @property
    def exporter(self) -> Exporter | None:
        """Of traces; None: there are none."""
        return self.observing.exporter

    @property
    def state(self) -> LazyStore | None:
        return self.recall.store

    @property
    def runs(self) -> Runs:
        return self.recall.runs

    @property
    def config(self) -> Config:
        """The one in force."""
        return self.live.config

    def begin_leaving(self) -> None:
        """It will go down; until then it serves whatever comes."""
        self.served.running.begin_leaving()

    @asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """What goes on beside the requests: probes, sweeps, reloads, member sources, the exchange with the other workers.

        Begins with the first probes, and the first answers of the sources, so that the first requests find their replicas.
        """
        first_probes = asyncio.create_task(self.fleet.probe_all(self.upstream))
        if (await asyncio.wait([first_probes], timeout=self.around.first_probes_s))[0]:
            first_probes.result()  # it raises nothing but a bug
        late = LoopLag(self.metrics.event_loop_lag_seconds, self.clock)
        work = [self.fleet.run(self.upstream), self._sweep(), self.local.run(), self.control.run(), late.run()]
        if self.state:
            work += [self.state.run(), self.runs.run()]
        if self.ledger:
            work.append(self.ledger.run())
        if self.keys:
            await self.keys.begin()
            work.append(self.keys.run())
            if self.keys.tokens is not None:
                work += [issuer.run() for issuer in self.keys.tokens.issuers]
        tasks = [first_probes, *map(asyncio.create_task, work)]
        if self.exporter:
            self.exporter.start()
        try:
            await self._begun()
            yield
        finally:
            await self.runs.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.upstream.close()
            if self.state:
                await self.state.close()
            if self.ledger:
                await self.ledger.close()
            if self.keys:
                await self.keys.close()
            await self.parsing.process.close()
            if self.exporter:
                await self.exporter.close()

    async def _begun(self) -> None:
        """What the first requests need is there, or has had its time."""
        await self.local.membership.first_found(self.around.first_probes_s)
        if self.ledger:
            await self.ledger.begun()

    async def _sweep(self) -> None:
        """Forget what is past its time also while no request comes, and replicas that have left."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.local.watch.expire(self.clock())
            while not self.local.beginning and self.router.sweep(self.clock()):  # noqa: ASYNC110  (there is no event: it is to go on slowly)
                await asyncio.sleep(_SLICE_S)
            self.local.recording.sweep(self.clock())
            self.observing.live_view.sweep(self.clock())
            for url in self.fleet.forget_departed():
                self.upstream.forget(url)


def compose(config: Config, requests: RequestLog, around: Surroundings | None = None) -> Gateway:
    around = around or Surroundings()
    clock, loops = around.clock, around.loops or LoopGuard()
    live, metrics, chance, routing = Live(config), Metrics(), random.Random(), config.routing
    router = _router_of(routing, chance)
    fleet = Fleet(config, router, metrics, chance, clock)
    upstream = UpstreamClient(live, around.resolver, fleet.connection_closed, loops, around.dials)
    parsing = Parsing(ParserProcess(), routing.block_bytes, routing.block_tokens)
    running, access = Running(), Access(live)
    memory, connections = Budget(budget_bytes(config)), ConnectionLimit(connection_limit(config))
    attempts = Attempts(fleet=fleet, upstream=upstream, parsing=parsing, metrics=metrics, clock=clock, chance=chance)
    resumption = Resumption(live=live, attempts=attempts, parsing=parsing, metrics=metrics, clock=clock)
    observing = Observing(live, metrics, requests, fleet, router, around.wall_clock, around.observers)
    watch = observing.watch(parsing.outliner, fleet)
    recall = _recall_of(around, live, metrics, parsing, running)
    keys = _keys_of(around, live, metrics)
    lifecycle = Lifecycle(
        live=live,
        dialects=around.dialects,
        parsing=parsing,
        fleet=fleet,
        router=router,
        attempts=attempts,
        fallbacks=Fallbacks(fleet=fleet, parsing=parsing, metrics=metrics, clock=clock),
        delivery=_delivery_of(live, attempts, resumption, observing.meter, running, access, clock),
        recall=recall,
        diagnoses=Diagnoses(),
        observers=observing.observers,
        running=running,
        audience=access,
        callers=Callers(keys, metrics, required=config.keys.required),
        limiting=observing.limits(keys),
        loops=loops,
        metrics=metrics,
        clock=clock,
        counterfactual=observing.counterfactual,
        tracer=observing.tracer,
        watch=observing.live_requests,
    )
    parts = Parts(fleet=fleet, upstream=upstream, router=router, memory=memory, connections=connections)
    local = _local_of(around, parts, live, Telemetry(metrics, requests, observing.recording))
    local.begin_leaving, local.before_page = running.begin_leaving, observing.set_gauges
    local.watch, local.keys, local.live_view = watch, keys, observing.live_view
    control = around.control_plane(local)
    served = _served_of(around, lifecycle, local, control, access, memory, connections)
    return Gateway(
        around, live, metrics, router, fleet, upstream, parsing, attempts, recall, keys, local, control, served, observing
    )


def _delivery_of(
    live: Live,
    attempts: Attempts,
    resumption: Resumption,
    meter: Meter,
    running: Running,
    audience: Access,
    clock: Callable[[], float],
) -> Delivery:
    return Delivery(
        live=live,
        attempts=attempts,
        resumption=resumption,
        meter=meter,
        running=running,
        audience=audience,
        clock=clock,
    )


def _served_of(
    around: Surroundings,
    lifecycle: Lifecycle,
    local: LocalControl,
    control: ControlPlane,
    access: Access,
    memory: Budget,
    connections: ConnectionLimit,
) -> Served:
    live, fleet, running = lifecycle.live, lifecycle.fleet, lifecycle.running
    operator = _operator_of(around, lifecycle, local, control, access)
    broadcast = Broadcast(local, control, around.wall_clock)
    running.tell(broadcast.close)
    return Served(
        live=live,
        lifecycle=lifecycle,
        models=Models(live=live, fleet=fleet, loops=lifecycle.loops, callers=lifecycle.callers),
        operator=operator,
        keys=KeyEndpoints(local.keys, operator, control),
        watched=LiveEndpoints(operator, local, broadcast),
        status=Status(fleet=fleet, running=running, control=control, access=access),
        running=running,
        memory=memory,
        connections=connections,
    )


def _local_of(around: Surroundings, parts: Parts, live: Live, telemetry: Telemetry) -> LocalControl:
    """What operators, reloads and sources change in this process, and what it keeps of it."""
    fleet, clock, metrics = parts.fleet, around.clock, telemetry.metrics
    membership = Membership(
        live=live, fleet=fleet, upstream=parts.upstream, sources_of=around.members, first_wait_s=around.first_probes_s
    )
    return LocalControl(
        parts=parts,
        membership=membership,
        reload=Reload(live=live, source=around.source, membership=membership, parts=parts, metrics=metrics),
        knowledge=Knowledge(live=live, router=parts.router, fleet=fleet, metrics=metrics, clock=clock),
        telemetry=telemetry,
        clock=clock,
    )


def _operator_of(
    around: Surroundings, lifecycle: Lifecycle, local: LocalControl, control: ControlPlane, access: Access
) -> Operator:
    return Operator(
        live=lifecycle.live,
        local=local,
        dialects=around.dialects,
        parsing=lifecycle.parsing,
        control=control,
        access=access,
        kept=lifecycle.kept,
    )


def _recall_of(around: Surroundings, live: Live, metrics: Metrics, parsing: Parsing, running: Running) -> Recall:
    """What the gateway keeps, and what runs in the background."""
    state, wall_clock = live.config.state, around.wall_clock
    file_lost = metrics.state_file_lost.add
    store = None if state.url == OFF else LazyStore(state.url, state.ttl_s, file_lost, wall_clock, around.clock)
    histories = Histories(store, KeptItems(parsing), metrics.responses_kept, metrics.histories, wall_clock)
    logs = Logs(most_of_all=min(MAX_LOGS, budget_bytes(live.config) // LOGS_SHARE))
    runs = Runs(histories, running, metrics.background_runs, wall_clock, around.clock, logs)
    return Recall(live, parsing, histories, runs, Followers(runs, histories, running), wall_clock)


def _keys_of(around: Surroundings, live: Live, metrics: Metrics) -> Keys | None:
    """None: they are off."""
    config = live.config
    if not config.keys.on:
        return None
    keys = Keys(config, metrics, around.wall_clock, around.clock)
    if config.keys.oidc:
        keys.tokens = Tokens(config.keys.oidc, Fetcher(live, around.resolver).fetch, around.clock, metrics.keys_failures.add)
    return keys


def _router_of(routing: RoutingConfig, chance: random.Random) -> Router:
    return Router(
        policy=routing.policy,
        ttl_s=routing.ttl_s,
        memory_bytes=routing.memory_mb << 20,
        promise_wait_s=routing.breakpoint_wait_s,
        chance=chance,
    )


async def serve(
    gateway: Gateway,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    started: Callable[[str], None],
    listeners: Sequence[socket.socket] = (),
    sides: SideSockets = NO_SIDES,
    handed: socket.socket | None = None,
) -> None:
    """Run until `stop` is set: then stop accepting, let running requests finish for `limits.drain_timeout_s`, and end.
    (`limits.drain_accept_s` is between the signal and `stop`: `commands/ending.py`.)

    hurry: do not wait any longer. started: called with the base URL once requests are answered. listeners: the supervisor's
    sockets to accept clients on (default: new ones, on the configured address). sides: those for operators and for Prometheus,
    who are answered to the end. handed: brings connections that the supervisor has accepted (`handover.py`). Raises OSError if
    the address cannot be had.
    """
    warn_of_connections(gateway.config)
    if not listeners:
        addresses_of(*gateway.config.address)  # a port that is taken is told before anything begins
    async with gateway.background(), _shut_down(clients_runner(gateway.served)) as server:
        await unless(stop, gateway.control.ready())
        if stop.is_set():  # nobody has been served
            await unless(hurry, gateway.control.stop())
            return
        with ExitStack() as stack:
            async with serving(sides, partial(side_runner, gateway.served)):
                shared = bool(listeners)
                listeners = listeners or open_listeners(*gateway.config.address)
                acceptors = [stack.enter_context(closing(Acceptor(each, server))) for each in listeners]
                if handed:
                    stack.enter_context(closing(Receiver(handed, server)))
                started(url_of(listeners[0].getsockname()))
                await stop.wait()
                gateway.served.running.drain()
                await stop_accepting(listeners, hurry, shared=shared)
                for acceptor in acceptors:
                    acceptor.close()
                await gateway.served.running.wait(gateway.config.limits.drain_timeout_s, hurry, server.close_idle)
                await unless(hurry, gateway.control.stop())


@asynccontextmanager
async def _shut_down(server: ClientServer) -> AsyncIterator[ClientServer]:
    """At the end."""
    try:
        yield server
    finally:
        await server.shutdown(SHUTDOWN_S)
