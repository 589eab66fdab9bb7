"""The core of a gateway: the parts that every request needs, composed, and the tables for features.

    Core(config) ──► for each configured feature: feature.install(core) ──► lifecycle_of(core) ──► app.py

A feature reads the parts that it needs from the core, and adds to these tables:

    extensions, observers    steps in a request's life (`request/extensions.py`), and at its end
    callers                  replaced: identifies the sender of a request
    work                     background work
    gauges                   called before the metrics are read
    parsing.process          `operations`: functions of a feature that run in the parser process
    own_models               models that features serve themselves, for the list of models
    topics                   questions and messages of other processes of the gateway (`cluster/topics.py`)
    control_plane            replaced: executes commands in all processes of the gateway
    endpoints, pages         routes for operators; of the admin listener only
    keepers                  called with each action of an operator
    sockets                  serves WebSockets
    parts                    objects for other features and tests, by their type: `put`, `part`
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway import __version__
from gateway.accounting.meter import Meter
from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget
from gateway.cluster.commands import ControlPlane, LocalControl, SingleProcess
from gateway.cluster.listener_tls import ListenerTls
from gateway.cluster.membership import SourcesOf
from gateway.cluster.process import budget_bytes, connection_limit
from gateway.cluster.topics import Topics
from gateway.config.live import Live
from gateway.config.schema import Config, RoutingConfig
from gateway.config.source import ConfigSource
from gateway.dialects.models.listing import OwnModels
from gateway.dialects.table import Dialects
from gateway.fleet.directory import FIRST_PROBES_S, Fleet
from gateway.parser.parsing import Parsing
from gateway.parser.process import ParserProcess
from gateway.request.attempts import Attempts
from gateway.request.callers import Callers
from gateway.request.delivery import Delivery
from gateway.request.extensions import Extensions
from gateway.request.lifecycle import Lifecycle
from gateway.request.phases.admitting import AdmitPhase
from gateway.request.phases.choosing import ChoosePhase
from gateway.request.phases.ending import EndPhase
from gateway.request.phases.holding import HoldPhase
from gateway.request.phases.objects import ReplicaObjects
from gateway.request.phases.reading import ReadPhases
from gateway.request.phases.replies import Replies
from gateway.request.pulses import Pulses
from gateway.request.resumption import Resumption
from gateway.request.running import RunningRequests
from gateway.request.settle import Observer, observers_of
from gateway.server.access import Access
from gateway.server.actions import Keeper
from gateway.server.endpoints import Endpoints, Pages, Sockets
from gateway.telemetry.loop_lag import LoopLag
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from gateway.upstream.client import UpstreamClient
from gateway.upstream.headers import Address
from gateway.upstream.loop_guard import LoopGuard
from gateway.upstream.pool import Connector
from gateway.upstream.resolver import Resolver
from router import Router
from router.index import trie

T = TypeVar("T")
ControlPlaneOf = Callable[[LocalControl], ControlPlane]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The surroundings of a gateway, outside of its configuration.

    source: of changed configurations, or None. control_plane: reaches the other workers (default: from the features). resolver:
    of the replicas' host names (default: the system's). loops: knows this gateway's id (default: a new one). dials: makes
    connections to replicas (default: over the network). dialects: by path (large bodies are parsed in a process that knows only
    `dialects/table.py`). observers: of settled requests, after the core's. members: makes the member sources of a configuration
    (default: from the features). wall_clock: Unix seconds, for stored objects. first_probes_s: limit of a start's wait for the
    replicas' first answers. late_s: largest delay of an answer's end by a feature that stores it. lasts: the next start is to
    know the learned state of this gateway.
    """

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    source: ConfigSource[Config] | None = None
    control_plane: ControlPlaneOf | None = None
    resolver: Resolver | None = None
    loops: LoopGuard | None = None
    dials: Callable[[Address], Connector] | None = None
    dialects: Dialects = field(default_factory=Dialects)
    observers: Sequence[Observer] = ()
    members: SourcesOf | None = None
    first_probes_s: float = FIRST_PROBES_S
    late_s: float = 1.0
    lasts: bool = False


class Work:
    """Background work, by the time at which it runs.

    starts: before anything else. tasks: from start to end. begins: before the first request. sweeps: every second, with a
    reading of the clock. reloads: after the configuration was read again, changed or not. finishes: after the requests, before
    the tasks end. closes: at the very end.
    """

    def __init__(self) -> None:
        self.starts: list[Callable[[], Awaitable[None]]] = []
        self.tasks: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.begins: list[Callable[[], Awaitable[None]]] = []
        self.sweeps: list[Callable[[float], None]] = []
        self.reloads: list[Callable[[], Awaitable[None]]] = []
        self.finishes: list[Callable[[], Awaitable[None]]] = []
        self.closes: list[Callable[[], Awaitable[None]]] = []


class Core:
    """The core (see the module). requests: their log."""

    lifecycle: Lifecycle  # set when all features are installed
    local: LocalControl  # set when this process can be controlled
    control: ControlPlane

    def __init__(self, config: Config, requests: RequestLog, metrics: Metrics, around: Surroundings) -> None:
        self.around = around
        self.clock, self.wall_clock = around.clock, around.wall_clock
        self.live, self.metrics, self.requests = Live(config), metrics, requests
        self.loops, chance, routing = around.loops or LoopGuard(), random.Random(), config.routing
        self.router = _router_of(routing, chance)
        self.fleet = Fleet(config, self.router, self.metrics, chance, self.clock)
        self.upstream = UpstreamClient(self.live, around.resolver, self.fleet.connection_closed, self.loops, around.dials)
        self.parsing = Parsing(ParserProcess(), routing.block_bytes, routing.block_tokens, self.clock)
        self.running, self.access = RunningRequests(), Access(self.live)
        self.memory, self.connections = Budget(budget_bytes(config)), ConnectionLimit(connection_limit(config))
        self.meter = Meter(self.live, self.metrics, self.wall_clock)
        self.objects = ReplicaObjects(self.live, self.router, self.clock)
        self.replies = Replies(self.live, self.running, self.access)
        self.pulses = Pulses(self.live, self.replies, self.access, self.clock)
        self.extensions = Extensions()
        self.attempts = Attempts(
            fleet=self.fleet,
            upstream=self.upstream,
            extensions=self.extensions,
            metrics=self.metrics,
            clock=self.clock,
            chance=chance,
        )
        self.observers = [*observers_of(self.fleet, self.meter, self.metrics, requests), *around.observers]
        self.callers = Callers()
        self.work = Work()
        self.work.tasks.append(LoopLag(self.metrics.event_loop_lag_seconds, self.clock).run)
        self.gauges: list[Callable[[], None]] = [self.metrics.set_process_gauges, self._count_dropped_lines]
        self.topics = Topics()
        self.control_plane: ControlPlaneOf = SingleProcess
        self.own_models: list[OwnModels] = []
        self.endpoints: list[Endpoints] = []
        self.pages: list[Pages] = []
        self.tls = ListenerTls(config.tls) if config.tls.on else None
        if self.tls is not None:
            self.work.tasks.append(self.tls.run)
            self.work.reloads.append(self.tls.read_again)
        self.keepers: list[Keeper] = []
        self.sockets: Callable[[Core], Sockets] | None = None
        self.members: SourcesOf = around.members or _no_sources
        self._parts: dict[type[Any], Any] = {}
        self.metrics.set_build(__version__, compiled=not trie.__file__.endswith(".py"))

    @property
    def config(self) -> Config:
        """The present configuration."""
        return self.live.config

    def set_gauges(self) -> None:
        """Set the gauges, before the metrics are read."""
        for set_gauges in self.gauges:
            set_gauges()

    def _count_dropped_lines(self) -> None:
        self.metrics.log_lines_dropped.set((), self.requests.dropped)

    def put(self, part: object) -> None:
        """Publish a part of a feature for others, by its type."""
        self._parts[type(part)] = part

    def part(self, kind: type[T]) -> T | None:
        """The published part of this type; None: its feature is off."""
        return self._parts.get(kind)

    def __getitem__(self, kind: type[T]) -> T:
        """The published part of this type. Raises KeyError if its feature is off."""
        found: T = self._parts[kind]
        return found


def lifecycle_of(core: Core) -> Lifecycle:
    """The lifecycle of the core with its features."""
    live, clock, metrics, extensions, parsing = core.live, core.clock, core.metrics, core.extensions, core.parsing
    choosing = ChoosePhase(live, core.fleet, core.router, core.objects, extensions, metrics, clock)
    resumption = Resumption(live=live, attempts=core.attempts, parsing=parsing, metrics=metrics, clock=clock)
    return Lifecycle(
        dialects=core.around.dialects,
        extensions=extensions,
        callers=core.callers,
        running=core.running,
        reading=ReadPhases(live, parsing, core.objects, core.callers, core.loops, clock),
        admitting=AdmitPhase(live, core.fleet, extensions, metrics, clock),
        choosing=choosing,
        holding=HoldPhase(choosing, metrics, clock),
        attempts=core.attempts,
        delivery=Delivery(
            live=live,
            attempts=core.attempts,
            resumption=resumption,
            meter=core.meter,
            running=core.running,
            audience=core.access,
            clock=clock,
        ),
        ending=EndPhase(core.attempts, core.objects, extensions, core.running, core.observers, clock),
        replies=core.replies,
        pulses=core.pulses,
        live=core.live,
        clock=clock,
    )


def _no_sources(_config: Config) -> Sequence[Any]:
    return ()


def _router_of(routing: RoutingConfig, chance: random.Random) -> Router:
    return Router(
        policy=routing.policy,
        ttl_s=routing.ttl_s,
        memory_bytes=routing.memory_mb << 20,
        chance=chance,
    )
