"""A discrete-event fleet: replays a workload through a router and measures the latency for its users.

A replica prefills its queue one prompt after the other (first come, first served) at `prefill_rate`, if fewer than
`batch_limit` sequences run; then the sequence decodes at `decode_rate` by itself. Its KV cache stores prompts block-wise and
evicts the least recently used leaves first. The cache is looked up when a prefill begins, as in engines; the router gets the
result only with the complete answer. With `apart` it is looked up when the request arrives, and stores a prompt once it is
prefilled: prompts that arrive together share nothing in flight. Then requests wait for their leads, as in the gateway
(`router/leading.py`), if the router knows it. With `reports_s` the engines report their load. Foreign requests come from
others, not through the router.

It uses the production `Router`, which predicts, learns and expires as in the gateway. The two bounds share one cache and one
queue between all replicas.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.booking import Booking
from router.index.trie import RadixTrie
from router.leading import Lead
from router.learning.adapters import SLOTS, LoadedAdapters
from router.learning.rates import HALF_LIFE_TOKENS
from router.router import Router
from router.simulation.workloads import SimulatedRequest, WorkloadSource
from router.types import TOKEN_WEIGHT, Outcome, Replica

_FOREVER, _UNBOUNDED = float("inf"), 1 << 62


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The simulated replicas. Rates in tokens per second (decode: per sequence), kv_tokens: one replica's cache."""

    replicas: int = 8
    kv_tokens: int = 1_000_000
    prefill_rate: float = 10_000.0
    decode_rate: float = 50.0
    batch_limit: int = 64
    speeds: tuple[float, ...] = ()  # a factor for each replica; empty: all 1
    learned_rate: float = 0.0  # the prefill rate that the router knows at the start; 0: none
    apart: bool = False  # the engines do not share prefixes in flight
    waits: bool = True  # the router knows that, and requests wait for their leads
    prefillers: int = 0  # of the replicas, how many only compute prompts for the others (`split.py`)
    transfer_rate: float = 100_000.0  # tokens per second, from a prefiller
    reports_s: float = 0.0  # between two reports of the engines' load; 0: they report none
    load_s: float = 0.0  # of an adapter, before the prefill; each replica keeps `SLOTS` loaded
    latency_s: float = 0.0  # of every first token, in addition to the replica's work: network, gateway, an engine's fixed costs

    @property
    def names(self) -> list[str]:
        return [f"r{index}" for index in range(self.replicas)]


@dataclass(slots=True)
class ServedRequest:
    """One request's history. Times in seconds of the simulation."""

    request: SimulatedRequest
    arrived: float
    handle: Any = None
    foreign: bool = False
    replica: int = -1
    cached_tokens: int = 0
    first_token: float = 0.0
    finished: float = 0.0


Foreign = tuple[float, int, SimulatedRequest]
"""Time of arrival, a replica's number, and a request of others."""

Held = tuple[int, SimulatedRequest]
"""A replica's number (modulo their count), and a request that it has computed before the run."""


class RequestPlacement(Protocol):
    """Decides where requests go, and receives their outcomes. `place` returns a replica's number and a handle."""

    def place(self, request: SimulatedRequest, now: float) -> tuple[int, Any]: ...

    def booking_of(self, handle: Any) -> Booking | None: ...

    def first_token(self, handle: Any, now: float) -> None: ...

    def finished(self, handle: Any, outcome: Outcome, now: float) -> None: ...

    def reported(self, replica: int, running: int, waiting: int, now: float) -> None: ...


@dataclass(slots=True)
class Cache:
    """A replica's KV cache: exact, least recently used leaves first, no TTL."""

    capacity_tokens: int
    reserved: float = 0.0
    trie: RadixTrie = field(default_factory=lambda: RadixTrie(_FOREVER, _UNBOUNDED))

    def take(self, request: SimulatedRequest, now: float) -> int:
        """Look a prompt up and store it; returns the cached tokens (at least one is always computed)."""
        self._reserve(request.running_tokens)
        cached = self.look_up(request, now)
        self.store(request, now)
        return cached

    def take_known(self, request: SimulatedRequest) -> None:
        """A prompt that was looked up before begins."""
        self._reserve(request.running_tokens)

    def look_up(self, request: SimulatedRequest, now: float) -> int:
        """The cached tokens of a prompt."""
        return request.cached(self.trie.match(request.prompt.keys, now).get("", 0))

    def store(self, request: SimulatedRequest, now: float) -> None:
        self.trie.insert("", request.prompt.keys, now, weight=_weight(request))

    def release(self, request: SimulatedRequest, now: float) -> None:
        """End of a request: its blocks were in use until now, and its answer's blocks are stored, as far as they are known."""
        self._reserve(-request.running_tokens)
        self.trie.insert("", request.kept, now, weight=_weight(request))

    def drop(self, request: SimulatedRequest) -> None:
        """End of a request that generates nothing here."""
        self._reserve(-request.running_tokens)

    def hold(self, request: SimulatedRequest) -> None:
        """Store a request that was computed before the run."""
        self._reserve(0.0)
        self.trie.insert("", request.kept, 0.0, weight=_weight(request))

    def _reserve(self, tokens: float) -> None:
        """Reserve room for running requests beside stored blocks. At least half of the cache stays for blocks."""
        self.reserved += tokens
        room = max(self.capacity_tokens - self.reserved, self.capacity_tokens / 2)
        self.trie.add_replica("", int(room * TOKEN_WEIGHT))


def _weight(request: SimulatedRequest) -> int:
    """The weight of one block."""
    return int(request.block_tokens * TOKEN_WEIGHT + 0.5) or 1


class _Replica:
    def __init__(self, number: int, spec: FleetSpec, cache: Cache, queue: deque[ServedRequest]) -> None:
        speed = spec.speeds[number] if spec.speeds else 1.0
        self.number = number
        self.prefill_rate = spec.prefill_rate * speed
        self.decode_rate = spec.decode_rate * speed
        self.batch_limit = spec.batch_limit
        self.cache = cache
        self.queue = queue
        self.running = 0
        self.prefilling = False
        self.busy_s = 0.0
        self.adapters = LoadedAdapters(SLOTS)
        self.load_s = spec.load_s

    @property
    def may_prefill(self) -> bool:
        return bool(self.queue) and not self.prefilling and self.running < self.batch_limit

    def load(self, request: SimulatedRequest) -> float:
        """Load the adapter of a request that begins. Returns the seconds that it takes."""
        adapter = request.prompt.adapter
        if not adapter:
            return 0.0
        load_s = 0.0 if self.adapters.holds(adapter) else self.load_s
        self.adapters.use(adapter)
        return load_s


def _running(replica: _Replica) -> int:
    return replica.running


class Simulation:
    """One run. `run()` yields the requests in the order in which they finish."""

    def __init__(
        self,
        spec: FleetSpec,
        source: WorkloadSource,
        placement: RequestPlacement,
        *,
        shared: bool = False,
        held: Iterable[Held] = (),
        foreign: Iterable[Foreign] = (),
    ) -> None:
        """held: the replicas' caches at the start. foreign: requests of others, in order of arrival."""
        self._source = source
        self._placement = placement
        self._shared = shared
        self._apart = spec.apart
        self._names = spec.names
        self._now = 0.0
        self._latency_s = spec.latency_s
        one_cache, one_queue = Cache(spec.kv_tokens * spec.replicas), deque[ServedRequest]()
        self._replicas = [
            _Replica(number, spec, one_cache if shared else Cache(spec.kv_tokens), one_queue if shared else deque())
            for number in range(spec.replicas)
        ]
        for number, request in held:
            self._replicas[number % spec.replicas].cache.hold(request)
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self._done: list[ServedRequest] = []
        self._foreign = iter(foreign)
        self._reports_s = spec.reports_s
        if self._reports_s:
            self._at(0.0, self._report, None)
        self._foreign_comes(None, 0.0)

    def run(self) -> Iterator[ServedRequest]:
        known = self._source.begin()
        coming = next(known, None)
        while coming or len(self._events) > (self._reports_s > 0):
            if coming and (not self._events or coming[0] <= self._events[0][0]):
                self._now = coming[0]
                self._arrive(coming[1], self._now)
                coming = next(known, None)
            else:
                self._now, _, event, argument = heapq.heappop(self._events)
                event(argument, self._now)
            yield from self._done
            self._done.clear()

    @property
    def busy_s(self) -> list[float]:
        """Seconds of prefill of each replica."""
        return [replica.busy_s for replica in self._replicas]

    def _at(self, time: float, event: Callable[..., None], argument: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), event, argument))

    def _arrive(self, request: SimulatedRequest, now: float) -> None:
        served = ServedRequest(request, now)
        served.replica, served.handle = self._placement.place(request, now)
        self._wait(served, now)

    def _wait(self, served: ServedRequest, now: float) -> None:
        """Send the request, once its lead has its first token if it has one."""
        booking = self._placement.booking_of(served.handle)
        if booking is not None and (lead := booking.lead) is not None:
            lead.watch(lambda: self._at(self._now, self._release, (served, lead)))
            self._at(now + lead.most_s, self._release, (served, lead))
        else:
            self._send(served, now)

    def _foreign_comes(self, served: ServedRequest | None, now: float) -> None:
        """A request of others arrives; the next one is known then."""
        if served is not None:
            self._send(served, now)
        if following := next(self._foreign, None):
            at, number, request = following
            self._at(at, self._foreign_comes, ServedRequest(request, at, foreign=True, replica=number))

    def _report(self, _: None, now: float) -> None:
        for replica in self._replicas:
            self._placement.reported(replica.number, replica.running, len(replica.queue), now)
        self._at(now + self._reports_s, self._report, None)

    def _release(self, waited: tuple[ServedRequest, Lead], now: float) -> None:
        """The lead has its first token, or the time is up. Idempotent."""
        served, lead = waited
        booking = self._placement.booking_of(served.handle)
        if booking is None or booking.lead is not lead:
            return
        if booking.release(now):
            booking.move(self._names, now)
            served.replica = self._names.index(booking.lease.replica)
            self._wait(served, now)
        else:
            self._send(served, now)

    def _send(self, served: ServedRequest, now: float) -> None:
        number = served.replica
        self._replicas[number].queue.append(served)
        if self._apart:
            served.cached_tokens = self._replicas[number].cache.look_up(served.request, now)
        free = sorted(self._replicas, key=_running) if self._shared else [self._replicas[number]]
        for replica in free:
            self._start(replica, now)

    def _start(self, replica: _Replica, now: float) -> None:
        if not replica.may_prefill:
            return
        served = replica.queue.popleft()
        served.replica = replica.number
        if self._apart:
            replica.cache.take_known(served.request)
        else:
            served.cached_tokens = replica.cache.take(served.request, now)
        replica.prefilling = True
        replica.running += 1
        seconds = replica.load(served.request) + self._seconds(served, replica.prefill_rate)
        replica.busy_s += seconds
        self._at(now + seconds, self._prefilled, served)

    def _seconds(self, served: ServedRequest, rate: float) -> float:
        """The duration of a prefill."""
        return (served.request.tokens - served.cached_tokens) / rate

    def _prefilled(self, served: ServedRequest, now: float) -> None:
        replica = self._replicas[served.replica]
        replica.prefilling = False
        if self._apart:
            replica.cache.store(served.request, now)
        served.first_token = now + self._latency_s
        if not served.foreign:
            self._placement.first_token(served.handle, now)
        self._at(now + served.request.output_tokens / replica.decode_rate, self._finished, served)
        self._start(replica, now)

    def _finished(self, served: ServedRequest, now: float) -> None:
        replica = self._replicas[served.replica]
        replica.running -= 1
        replica.cache.release(served.request, now)
        served.finished = now
        if not served.foreign:
            self._placement.finished(served.handle, self._outcome(served), now)
            self._done.append(served)
            if following := self._source.after(served.request, now):
                self._at(following[0], self._arrive, following[1])
        self._start(replica, now)  # also with a shared queue: while it is not empty, no other replica is free

    def _outcome(self, served: ServedRequest) -> Outcome:
        return Outcome(True, served.request.tokens, served.cached_tokens)


# -- placements and results


class RouterPlacement:
    """The production router, used as in the gateway."""

    def __init__(self, router: Router, spec: FleetSpec) -> None:
        self.router = router
        self._names = spec.names
        self._numbers = {name: number for number, name in enumerate(self._names)}
        for name in self._names:
            router.add(Replica(name, spec.kv_tokens, shares_inflight=not (spec.apart and spec.waits)))
            if spec.learned_rate:
                router.ledger.restore(name, (HALF_LIFE_TOKENS, HALF_LIFE_TOKENS / spec.learned_rate), 0.0, 0.0)
        router.ledger.rates.refresh()

    def place(self, request: SimulatedRequest, now: float) -> tuple[int, Booking]:
        booking = self.router.choose(request.prompt, self._names, now)
        return self._numbers[booking.chosen.replica], booking

    def booking_of(self, handle: Booking) -> Booking | None:
        return handle

    def first_token(self, handle: Booking, now: float) -> None:
        handle.first_token(now)

    def finished(self, handle: Booking, outcome: Outcome, now: float) -> None:
        handle.close(outcome, now)

    def reported(self, replica: int, running: int, waiting: int, now: float) -> None:
        name = self._names[replica]
        self.router.reported(name, running, waiting, self.router.ledger.of(name).sent_sequences, now)


def remember(router: Router, spec: FleetSpec, held: Iterable[Held]) -> None:
    """Tells a router the requests that replicas have computed before the run, as if it had routed them."""
    names = spec.names
    for number, request in held:
        prompt, name = request.prompt, names[number % len(names)]
        router.scales.learn(prompt.scale, prompt.units, request.tokens)
        weight = prompt.block_weight(router.units_per_token(prompt.scale))
        router.trie.insert(name, prompt.keys, 0.0, weight=weight)
        if prompt.session_key:
            router.sessions.answered(prompt.session_key, name, prompt.units, 0.0)


class SharedQueue:
    """The placement of the bounds: the first free replica takes the next request."""

    def place(self, request: SimulatedRequest, now: float) -> tuple[int, None]:
        return 0, None

    def booking_of(self, handle: None) -> Booking | None:
        return None

    def first_token(self, handle: None, now: float) -> None:
        """Nothing to learn."""

    def finished(self, handle: None, outcome: Outcome, now: float) -> None:
        """Nothing to learn."""

    def reported(self, replica: int, running: int, waiting: int, now: float) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class Result:
    """Latency and cache hits of one run. Times in seconds; load_skew: the busiest replica's prefill over the mean."""

    policy: str
    replicas: int
    kv_tokens: int
    requests: int
    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    load_skew: float


Compared = Callable[[Sequence[ServedRequest]], tuple[Sequence[ServedRequest], Sequence[ServedRequest]]]
"""From all requests, the ones whose waits count, and the ones whose hits count. Neither may be empty."""


def everything(served: Sequence[ServedRequest]) -> tuple[Sequence[ServedRequest], Sequence[ServedRequest]]:
    return served, served


def summary(
    policy: str, spec: FleetSpec, served: Sequence[ServedRequest], busy_s: Sequence[float], compared: Compared = everything
) -> Result:
    """The result of a run. Raises ValueError for a run without requests."""
    if not served:
        raise ValueError("the workload has no request")
    waited, reported = compared(served)
    ttft = sorted(one.first_token - one.arrived for one in waited)
    return Result(
        policy=policy,
        replicas=spec.replicas,
        kv_tokens=spec.kv_tokens,
        requests=len(served),
        hit_ratio=sum(one.cached_tokens for one in reported) / sum(one.request.tokens for one in reported),
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p50_s=quantile(ttft, 0.50),
        ttft_p90_s=quantile(ttft, 0.90),
        ttft_p99_s=quantile(ttft, 0.99),
        e2e_mean_s=sum(one.finished - one.arrived for one in waited) / len(waited),
        load_skew=max(busy_s) * len(busy_s) / (sum(busy_s) or 1.0),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
