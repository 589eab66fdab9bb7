"""Pods that come and go, the processes in them, and what is true of them at any time.

    Place: an address, with a model server's process or none ── at most one running pod at a time
    Pod:   what the cluster has of it: ready, deleting, at a place

A process notes each request that arrives after its pod was marked (deleted, or not ready), and when that was sent. Whether a
request came too late is decided at the end, when all outages are known.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from bench.measure.ports import free_port
from tests.support.fakes import DONE, STREAM_HEAD, FakeReplica, FakeRequest, answers, chunk, event, models

TOKENS, TOKEN_S = 5, 0.03  # of a stream


@dataclass(eq=False)
class Pod:
    """uid: may be the cluster's choice. marked_at: when it was sent that it gets no more requests; well_since: since when it is
    ready and its process runs. None: not at present.
    """

    name: str
    uid: str
    pool: str
    place: Place
    ready: bool = False
    deleting: bool = False
    marked_at: float | None = None
    well_since: float | None = None
    busy: bool = False  # something is happening to it

    @property
    def address(self) -> tuple[str, int]:
        return self.place.host, self.place.port

    @property
    def serving(self) -> bool:
        """Whether it should get requests, by what the cluster has of it."""
        return self.ready and not self.deleting


@dataclass(frozen=True)
class Arrival:
    """A request at a pod that was marked before. at: when it arrived."""

    pod: str
    marked_at: float
    at: float


class Place:
    """An address. pod: whose process runs there."""

    def __init__(self, host: str, port: int, model: str, clock: Callable[[], float]) -> None:
        self.host = host
        self.pod: Pod | None = None
        self.requests = 0
        self.arrivals: list[Arrival] = []
        self._clock = clock
        self._replica = FakeReplica([self._answer], models(model), port=port, host=host)
        self._runs = False

    @property
    def port(self) -> int:
        return self._replica.port

    @property
    def runs(self) -> bool:
        return self._runs

    async def start(self, pod: Pod) -> None:
        self.pod = pod
        await self._replica.__aenter__()
        self._runs = True

    async def stop(self) -> None:
        """Connections are refused and reset from now on."""
        if self._runs:
            self._runs = False
            await self._replica.stop()

    async def _answer(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        self._replica.requests.clear()  # there are many
        self.requests += 1
        assert self.pod
        if self.pod.marked_at is not None:
            self.arrivals.append(Arrival(self.pod.name, self.pod.marked_at, self._clock()))
        if not request.json.get("stream"):
            await asyncio.sleep(TOKEN_S)
            return await answers()(request, writer)
        writer.write(STREAM_HEAD)
        for number in range(TOKENS):
            writer.write(chunk(event("x", "stop" if number == TOKENS - 1 else None)))
            await writer.drain()
            await asyncio.sleep(TOKEN_S)
        writer.write(chunk(DONE) + b"0\r\n\r\n")
        return None


def at_addresses(number: int, model: str, clock: Callable[[], float], chance: Random) -> Sequence[Place]:
    """Places with addresses of their own, and one port."""
    net, port = f"127.{chance.randint(1, 254)}.{chance.randint(0, 255)}", free_port()
    return [Place(f"{net}.{last}", port, model, clock) for last in range(1, number + 1)]


def at_ports(number: int, model: str, clock: Callable[[], float]) -> Sequence[Place]:
    """Places at one address, each with a port."""
    return [Place("127.0.0.1", free_port(), model, clock) for _ in range(number)]


@dataclass
class Outages:
    """When the gateway could not know what is true. spans: begin of each, and when the gateway knew all again. Infinity: it
    does not yet.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)

    def begin(self, at: float) -> None:
        self.spans.append((at, math.inf))

    def over(self, at: float) -> None:
        self.spans[-1] = self.spans[-1][0], at

    def due(self, at: float, within_s: float) -> float:
        """When the gateway has to know what was sent then: within that time, or at the end of an outage that came between."""
        due = at + within_s
        for begin, end in self.spans:
            if begin <= due and end >= at:
                due = max(due, end)
        return due


class Truth:
    """All pods, and what was true of them before. late_s: how long requests may still go to a marked pod; known_s: how long a
    pod that is well may get none.
    """

    def __init__(self, clock: Callable[[], float], late_s: float, known_s: float) -> None:
        self.clock = clock
        self.outages = Outages()
        self.pods: list[Pod] = []  # that the cluster has
        self.changes = 0
        self._late_s = late_s
        self._known_s = known_s
        self._crashes = deque[tuple[str, float]](maxlen=1000)

    def note(self, pod: Pod) -> None:
        """The cluster has just been given this state of it, or its process has just begun or ended."""
        now = self.clock()
        self.changes += 1
        if pod.serving:
            pod.marked_at = None
        elif pod.marked_at is None:
            pod.marked_at = now
        well = pod.serving and pod.place.runs and pod.place.pod is pod
        if well and pod.well_since is None:
            pod.well_since = now
        elif not well and pod.well_since is not None:
            pod.well_since = None

    def ends(self, pod: Pod) -> None:
        """Its process is about to end. If the gateway need not know that it gets no more requests, streams may be cut."""
        if pod.marked_at is None or self.clock() < self.outages.due(pod.marked_at, self._late_s) + TOKENS * TOKEN_S:
            self._crashes.append((pod.pool, self.clock()))
        pod.well_since = None

    def known(self, pool: str) -> list[Pod]:
        """Pods that are well, and that the gateway has to know by now."""
        return [pod for pod in self.pods if pod.pool == pool and self._knows(pod.well_since, self.clock())]

    def could_answer(self, pool: str, begun: float) -> bool:
        """Whether a pod of the pool was well since then, and known before."""
        return any(pod.pool == pool and self._knows(pod.well_since, begun) for pod in self.pods)

    def crashed_since(self, pool: str, begun: float) -> bool:
        """Whether a process has crashed since then."""
        return any(where == pool and at >= begun for where, at in self._crashes)

    def _knows(self, since: float | None, at: float) -> bool:
        return since is not None and self.outages.due(since, self._known_s) <= at

    def late(self, places: Iterable[Place]) -> tuple[list[Arrival], float]:
        """Requests that came too late, and after how many seconds the latest came where no outage was in its way."""
        found = [(each, self.outages.due(each.marked_at, self._late_s)) for place in places for each in place.arrivals]
        usual = [each.at - each.marked_at for each, due in found if due == each.marked_at + self._late_s]
        return [each for each, due in found if each.at > due], max(usual, default=0.0)
