"""What has to happen in every process of this gateway, and what all of them together have counted.

A gateway is one process (`Alone`), or several workers that hear of each other (`workers/peers.py`). Who commands or asks does
not know which: it says so to `Everywhere`, and each process does and tells its part as `Local`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.config import Config, ReplicaConfig
from gateway.exposition import Shared, render
from gateway.metrics import Metrics
from gateway.reload import Reload
from gateway.replicas import Fleet
from gateway.request_log import RequestLog
from gateway.tallies import Page
from router import Router


@dataclass(frozen=True, slots=True)
class Drain:
    """A replica gets no new requests, or some again. Nothing happens if there is no such replica."""

    name: str
    on: bool


@dataclass(frozen=True, slots=True)
class Join:
    """A replica joins a pool until the next reload."""

    pool: int
    replica: ReplicaConfig


@dataclass(frozen=True, slots=True)
class Take:
    """This is the configuration from now on."""

    config: Config


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is another configuration, but it is invalid."""

    why: str


Command = Drain | Join | Take | Refuse


class Local:
    """This process. reads: what brings gauges up to date."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        reload: Reload,
        router: Router,
        metrics: Metrics,
        requests: RequestLog,
        reads: Sequence[Callable[[], None]],
        clock: Callable[[], float],
    ) -> None:
        self.fleet = fleet
        self.reload = reload
        self.router = router
        self.metrics = metrics
        self.requests = requests
        self.reads = reads
        self.clock = clock

    async def do(self, command: Command) -> None:
        """Raises ConfigError if that cannot be done."""
        match command:
            case Drain(name, on):
                if state := self.fleet.named(name):
                    self.fleet.drain(state, on=on)
            case Join(pool, replica):
                await self.reload.add(pool, replica)
            case Take(config):
                await self.reload.take(config)
            case Refuse(why):
                self.reload.refuse(why)

    async def replay(self, commands: Iterable[Drain | Join]) -> None:
        """What operators have done before this process started. Takes FIRST_PROBES_S at most, whatever replicas were added."""
        commands = tuple(commands)
        await self.reload.readd([(each.pool, each.replica) for each in commands if isinstance(each, Join)])
        for each in commands:
            if isinstance(each, Drain):
                await self.do(each)

    def page(self) -> Page:
        """All that is counted here, with gauges that are up to date."""
        self.metrics.read(self.router)
        for read in self.reads:
            read()
        self.fleet.show(self.metrics, self.clock())
        self.metrics.log_lines_dropped.set((), self.requests.dropped)
        return self.metrics.page


class Everywhere(Protocol):
    async def do(self, command: Command) -> None:
        """In all processes. Returns when they have done it; raises ConfigError if it cannot be done."""

    async def page(self) -> bytes:
        """The metrics of all of them, in Prometheus' text format."""

    async def run(self) -> None:
        """Whatever has to go on beside the requests, until it is cancelled."""

    async def ready(self) -> None:
        """Wait until this process knows what it needs for its first request."""


class Alone:
    """A gateway of one process."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._pages = Shared(lambda: render(local.page()))

    async def do(self, command: Command) -> None:
        await self._local.do(command)

    async def page(self) -> bytes:
        return await self._pages.get()

    async def run(self) -> None:
        return

    async def ready(self) -> None:
        return
