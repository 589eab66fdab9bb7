"""Keeps this process's router in step with other routers, over any transport.

    Router ──► Journal ──► Replicator ──► ReplicationTransport ──► (other processes)
    Router ◄── Follower ◄── Replicator ◄──────────┘

Local bookings are published in batches, BATCH_S after the first event of each: a system call for every event would cost more
than the decision, and every batch wakes all other processes. Each process has the whole prefix index and all open leases, so
that choosing a replica needs no other process; the price is that every process repeats the bookings of all others.

While the transport is blocked, at most about `unsent_bytes` wait for it, and further batches are dropped. When it continues,
one snapshot of the open bookings replaces all of them. Their contribution to the prefix indexes of other routers is lost.

One transport is the workers' hub, another one a store, for gateways on other machines. Events carry this machine's monotonic
clock, which the store's transport translates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from gateway.cluster.messages import EventBatch
from gateway.telemetry.metrics import Metrics
from router import Router
from router.events import BookingOpened, Event, EventError, decode, encode
from router.follower import Follower
from router.replication_log import Journal

log = logging.getLogger("warmroute.workers")

BATCH_S = 0.02
FEW = 8  # other gateways; with more, each writes and reads more rarely in proportion
UNSENT_BYTES = 8 << 20
BATCH_BYTES = 64 << 10  # size at which a batch is full
EVENT_BYTES = 64  # approximate size of an event without its keys
UNKNOWN_S = 60.0  # time for which others book an unknown replica before the log reports it
MAX_UNKNOWN = 256
RESYNC_S = 0.5  # between two checks of a blocked transport

CallLater = Callable[[float, Callable[[], None]], object]
"""Calls a function after some seconds (an event loop's `call_later`)."""


def pause_s(others: int) -> float:
    """Seconds between two writes of a gateway to the values it shares with `others` gateways, and between two reads: a reader
    then gets FEW / BATCH_S envelopes a second at most.
    """
    return BATCH_S * max(1.0, others / FEW)


class Subscriber(Protocol):
    """Receives the batches of other routers. A source is one router, by a number that is never reused."""

    def receive(self, source: int, batch: EventBatch) -> None:
        """The next events of a router."""

    def leave(self, source: int) -> None:
        """A router has ended, or its events were lost: all its bookings are closed."""

    def join(self) -> None:
        """A new router does not know the open bookings of this process: publish them."""


class ReplicationTransport(Protocol):
    """Carries batches between routers: from each source in order, to every other source, at most once."""

    @property
    def unsent(self) -> int:
        """Bytes that were published and are still to be sent."""

    def publish(self, batch: EventBatch) -> None:
        """Send to all others. Never blocks; without a connection nothing happens."""

    def snapshot(self, batch: EventBatch) -> None:
        """Send to all others, in place of everything unsent. Never blocks."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """Deliver the others' batches to this subscriber. Called once."""


class Learner(Protocol):
    """The part of this process that learns from other routers' batches."""

    def followed(self, lost: list[str], age_s: float | None) -> None:
        """Called after each batch. lost: replicas whose caches it reported as lost. age_s: its age in seconds, None for a batch
        that had waited for `start`.
        """

    def failing(self, replica: str) -> None:
        """Another router's process has seen a failure of this replica."""

    def unknown(self, replica: str) -> None:
        """Another router has booked a request on a replica of this name, which is unknown here."""


class UnknownReplicas:
    """Names of replicas that other routers book, and that are unknown here.

    Processes learn of replicas that come and go at slightly different times. If a name is booked for UNKNOWN_S, and is still
    unknown, the log reports it once: most likely the others use another name for the same replica.
    """

    def __init__(self, router: Router, metrics: Metrics) -> None:
        self._router = router
        self._metrics = metrics
        self._booked: dict[str, tuple[float, float]] = {}  # times of first and last booking; at most MAX_UNKNOWN

    def booked(self, name: str, now: float) -> None:
        """Count a booking on a replica of this name. O(1)."""
        self._metrics.sharing_unknown_replicas.add()
        first, last = self._booked.pop(name, (now, now))
        if now - last > UNKNOWN_S and first < math.inf:
            first = now
        if now - first > UNKNOWN_S:
            about = {"replica": name[:256], "known": ", ".join(islice(self._router.replicas, 5))}
            log.warning("other gateways send requests to a replica that is unknown here", extra=about)
            first = math.inf
        self._booked[name] = first, now
        if len(self._booked) > MAX_UNKNOWN:
            del self._booked[next(iter(self._booked))]

    def __repr__(self) -> str:
        return f"<UnknownReplicas: {', '.join(self._booked) or 'none'}>"


class Replicator:
    """Connects a router to a transport (see the module). Publishes at once, and applies batches from `start` on; until then
    they wait.
    """

    def __init__(
        self,
        router: Router,
        transport: ReplicationTransport,
        *,
        clock: Callable[[], float],
        call_later: CallLater,
        published: Callable[[], None],
        learner: Learner,
        unsent_bytes: int = UNSENT_BYTES,
    ) -> None:
        """published: called before each batch of this router, also if it is dropped."""
        self.follower = Follower(router, learner.failing, learner.unknown)
        self.journal = router.journal = Journal(self._schedule)
        self._transport = transport
        self._clock = clock
        self._call_later = call_later
        self._published = published
        self._followed = learner.followed
        self._unsent_bytes = unsent_bytes
        self._since = 0.0  # time of the first event in the journal
        self._resyncing = False  # events are dropped until the transport continues
        self._early: list[Callable[[], None]] | None = []  # calls from before `start`
        transport.subscribe(self)

    def start(self) -> None:
        """Apply all batches received so far, and further ones at once."""
        early, self._early = self._early or [], None
        for step in early:
            step()

    # -- publishing

    def _schedule(self) -> None:
        self._since = self._clock()
        self._call_later(BATCH_S, self.flush)

    def flush(self) -> None:
        """Publish the events in the journal."""
        self._published()
        events = self.journal.take()
        if self._resyncing or not events:
            return
        if self._transport.unsent > self._unsent_bytes:
            unsent = {"unsent_bytes": self._transport.unsent}
            log.warning("the transport does not take routing events: they are dropped", extra=unsent)
            self._resyncing = True
            self._call_later(RESYNC_S, self._resync)
            return
        for batch in _batches(self._since, events):
            self._transport.publish(batch)

    def _resync(self) -> None:
        if self._transport.unsent:
            self._call_later(RESYNC_S, self._resync)
            return
        self._resyncing = False
        events = self.journal.take_ended() + self.journal.still_open()
        first, *more = _batches(self._clock(), events) or [EventBatch(self._clock(), encode([]))]
        self._transport.snapshot(first)
        for batch in more:
            self._transport.publish(batch)

    # -- following

    def receive(self, source: int, batch: EventBatch) -> None:
        """See Subscriber."""
        live = self._early is None
        self._when_started(lambda: self._apply(source, batch, live=live))

    def leave(self, source: int) -> None:
        """See Subscriber."""

        def step() -> None:
            self.follower.leave(source, self._clock())
            self._followed([], None)

        self._when_started(step)

    def join(self) -> None:
        """See Subscriber."""
        if not self._resyncing:
            for batch in _batches(self._clock(), self.journal.still_open()):
                self._transport.publish(batch)

    def _when_started(self, step: Callable[[], None]) -> None:
        if self._early is None:
            step()
        else:
            self._early.append(step)

    def _apply(self, source: int, batch: EventBatch, *, live: bool) -> None:
        try:
            lost = self.follower.apply(source, decode(batch.events), past=not live)
        except EventError as error:
            log.error("another router's events do not decode: its open bookings are dropped", extra={"error": str(error)})
            self.follower.leave(source, self._clock())
            lost = []
        self._followed(lost, self._clock() - batch.since if live else None)

    def __repr__(self) -> str:
        return f"<Replicator, {self.journal!r}, {self.follower!r}>"


def _batches(since: float, events: Sequence[Event]) -> list[EventBatch]:
    """The events in batches that take a few milliseconds each to apply: other processes have requests to answer meanwhile."""
    batches, piece, size = [], list[Event](), 0
    for event in events:
        piece.append(event)
        size += EVENT_BYTES + (len(event.keys) if isinstance(event, BookingOpened) else 0)
        if size >= BATCH_BYTES:
            batches.append(EventBatch(since, encode(piece)))
            piece, size = [], 0
    if piece:
        batches.append(EventBatch(since, encode(piece)))
    return batches
