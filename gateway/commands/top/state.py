"""What is known of a gateway, as its feed tells it: `hello` has all, each `frame` what is new. Synchronous, and bounded.

Bounds: KEPT_REQUESTS rows of requests, KEPT_POINTS steps of time, MOST_NAMES models and as many tenants. Requests are counted
by model and tenant when they have ended, once each, whatever is sent again after a reconnection.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from gateway.commands.top.rows import MOST_POOLS, MOST_REPLICAS, Point, Pool, Replica, Request
from gateway.commands.top.values import Json, amount, inside, number, objects, share, text

KEPT_REQUESTS: Final = 200
KEPT_POINTS: Final = 450  # 15 minutes of steps of 2 s
MOST_NAMES: Final = 64
MOST_COUNTED: Final = 2000  # keys of requests that are remembered as counted
KEPT_FRAMES: Final = 60  # of which the share of requests that have a row is told
OTHERS: Final = "(others)"
NOBODY: Final = "(none)"


@dataclass(slots=True)
class Sum:
    """Of the requests of one model or tenant."""

    requests: int = 0
    failed: int = 0
    prompt: float = 0.0
    cached: float = 0.0
    cost: float = 0.0
    saved: float = 0.0

    def add(self, row: Request) -> None:
        self.requests += 1
        self.failed += row.failed
        if row.prompt is not None and not row.guessed:
            self.prompt += row.prompt
            self.cached += min(row.cached or 0.0, row.prompt)
        self.cost += row.cost_usd or 0.0
        self.saved += row.saved_usd or 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Of some of the last steps. seconds: how long they are."""

    seconds: float
    requests: float
    errors: float
    refused: float
    prompt: float
    cached: float
    cost: float
    saved: float

    @property
    def hits(self) -> float | None:
        return share(self.cached, self.prompt)


@dataclass(slots=True)
class Live:
    """See the top of this file. revision: grows with every change."""

    revision: int = 0
    now: float | None = None
    version: str = ""
    policy: str = ""
    workers: int = 0
    step_s: float = 2.0
    replicas: list[Replica] = field(default_factory=list)
    further_replicas: float = 0.0
    pools: list[Pool] = field(default_factory=list)
    index: Json = field(default_factory=dict)
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=KEPT_POINTS))
    requests: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    models: dict[str, Sum] = field(default_factory=dict)
    tenants: dict[str, Sum] = field(default_factory=dict)
    sampled: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_FRAMES))
    problem: str = ""
    _counted: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def take(self, event: str, value: object) -> None:
        """O(rows in it). What is no event of a feed changes nothing."""
        found = inside(value)
        if event == "problem":
            self.problem = text(found.get("problem"), 300) or "the workers cannot be asked"
        elif event in ("hello", "frame"):
            self.problem = ""
            if event == "hello":
                self.points.clear()
                self.requests.clear()
                self.sampled.clear()
            self._state(found)
            self._add(found)
        self.revision += 1

    def _state(self, found: Json) -> None:
        index = inside(found.get("index"))
        evicted = inside(index.get("evicted"))
        self.now = number(found.get("now"))
        self.version, self.policy = text(found.get("version"), 40), text(found.get("policy"), 40)
        self.workers = int(amount(found.get("workers")))
        self.step_s = max(0.1, amount(found.get("step_s")) or 2.0)
        self.replicas = [Replica.of(row) for row in objects(found.get("replicas"), MOST_REPLICAS)]
        self.further_replicas = amount(found.get("further_replicas"))
        self.pools = [Pool.of(row) for row in objects(found.get("pools"), MOST_POOLS)]
        self.index = {name: amount(index.get(name)) for name in ("bytes", "most_bytes", "blocks")}
        self.index["evicted"] = sum(amount(each) for each in list(evicted.values())[:16])

    def _add(self, found: Json) -> None:
        self.points.extend([Point.of(row) for row in objects(found.get("points"), KEPT_POINTS)])
        self.sampled.append((amount(found.get("ended")), amount(found.get("hidden"))))
        rows = found.get("requests")
        for row in objects(rows[-KEPT_REQUESTS:] if isinstance(rows, list) else None, KEPT_REQUESTS):
            request = Request.of(row)
            self.requests[request.key] = request
            if request.ended:
                self._count(request)
        while len(self.requests) > KEPT_REQUESTS:
            self.requests.popitem(last=False)

    def _count(self, request: Request) -> None:
        if request.key in self._counted:
            return
        self._counted[request.key] = None
        if len(self._counted) > MOST_COUNTED:
            self._counted.popitem(last=False)
        for sums, name in ((self.models, request.model), (self.tenants, request.tenant)):
            known = sums.get(name or NOBODY)
            if known is None:
                known = sums.setdefault((name or NOBODY) if len(sums) < MOST_NAMES - 1 else OTHERS, Sum())
            known.add(request)

    # -- sums

    def totals(self, seconds: float) -> Totals:
        """Of the last steps. O(points)."""
        most = max(1, round(seconds / self.step_s))
        points = list(self.points)[-most:]
        return Totals(
            len(points) * self.step_s,
            sum([point.requests for point in points]),
            sum([point.errors for point in points]),
            sum([point.refused for point in points]),
            sum([point.prompt_tokens for point in points]),
            sum([point.cached_tokens for point in points]),
            sum([point.cost_usd for point in points]),
            sum([point.saved_usd for point in points]),
        )

    @property
    def last(self) -> Point | None:
        return self.points[-1] if self.points else None

    @property
    def shown_share(self) -> float:
        """Of the requests that have ended lately: those that have a row."""
        ended, hidden = sum(each[0] for each in self.sampled), sum(each[1] for each in self.sampled)
        return 1.0 if hidden <= 0 else max(0.0, 1 - hidden / max(ended, hidden, 1.0))

    def check(self) -> None:
        """Raises AssertionError if a bound is broken."""
        assert len(self.requests) <= KEPT_REQUESTS
        assert len(self.points) <= KEPT_POINTS
        assert len(self._counted) <= MOST_COUNTED
        assert max(len(self.models), len(self.tenants)) <= MOST_NAMES
        assert len(self.replicas) <= MOST_REPLICAS

    def __repr__(self) -> str:
        return f"<Live {len(self.replicas)} replicas, {len(self.requests)} requests, {len(self.points)} points>"
