"""Keeps this process's router in step with the routers of others, over any transport.

    Router ──► Journal ──► Replicator ──► ReplicationTransport ──► (other processes)
    Router ◄── Follower ◄── Replicator ◄──────────┘

What is booked here is published in batches, BATCH_S after the first event of each: a system call for every event would cost
more than the decision, and every batch wakes all the others. Each process keeps the whole prefix index and all open leases, so
that choosing a replica needs no other process; the price is that every process books what each of them books.

While the transport does not take what is published, at most about `unsent_bytes` wait there: further events are dropped. When
it takes them again, one snapshot of the open bookings replaces all that was dropped. What only the prefix index would have
learned from the dropped events stays unknown to the other routers.

The workers' hub is one transport, a store the other one, for gateways on other machines: events carry this machine's monotonic
clock, and are translated there.
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
UNSENT_BYTES = 8 << 20
BATCH_BYTES = 64 << 10  # from which on a batch is full
EVENT_BYTES = 64  # about what an event takes beside its keys
UNKNOWN_S = 60.0  # that a replica is booked by others, and unknown here, before the log says so
MAX_UNKNOWN = 256
RESYNC_S = 0.5  # between two checks whether the transport takes events again

CallLater = Callable[[float, Callable[[], None]], object]
"""Seconds, and what to call then (an event loop's `call_later`)."""


class Subscriber(Protocol):
    """Receives what other routers publish. A source is one router, by a number that no other has or had."""

    def receive(self, source: int, batch: EventBatch) -> None:
        """The next events of a router."""

    def leave(self, source: int) -> None:
        """A router has ended, or its events were lost: it has nothing open."""

    def join(self) -> None:
        """A new router does not know the bookings that are open here: publish them."""


class ReplicationTransport(Protocol):
    """Carries batches between routers: those of one source in their order, to every other source, at most once."""

    @property
    def unsent(self) -> int:
        """Bytes that were published and not taken yet."""

    def publish(self, batch: EventBatch) -> None:
        """To all others. Never blocks; nothing happens if there is no connection."""

    def snapshot(self, batch: EventBatch) -> None:
        """Likewise, in place of everything that was published before."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on the others' batches go there. Called once."""


class Learner(Protocol):
    """This process, which learns from other routers' batches."""

    def followed(self, lost: list[str], age_s: float | None) -> None:
        """After each batch: the replicas that it showed to have lost their caches; its age in seconds, None for what had waited
        for `start`.
        """

    def failing(self, replica: str) -> None:
        """Another router's process has seen it fail."""

    def unknown(self, replica: str) -> None:
        """Another router has booked a request on it, and there is no replica of this name here."""


class UnknownReplicas:
    """Names of replicas on which others book, and which no replica has here.

    Processes learn of replicas that come and go at slightly different times. A name that is booked for UNKNOWN_S, and is still
    unknown, is written to the log once: most likely the others have another name for the same replica.
    """

    def __init__(self, router: Router, metrics: Metrics) -> None:
        self._router = router
        self._metrics = metrics
        self._booked: dict[str, tuple[float, float]] = {}  # first, last; at most MAX_UNKNOWN

    def booked(self, name: str, now: float) -> None:
        """A request on a replica of this name. O(1)."""
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
    """See the top of this file. Starts to publish at once, and to follow at `start`: until then batches wait."""

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
        """published: called before each batch of this router, also one that is dropped."""
        self.follower = Follower(router, learner.failing, learner.unknown)
        self.journal = router.journal = Journal(self._schedule)
        self._transport = transport
        self._clock = clock
        self._call_later = call_later
        self._published = published
        self._followed = learner.followed
        self._unsent_bytes = unsent_bytes
        self._since = 0.0  # the first event in the journal
        self._resyncing = False  # events are dropped until the transport has taken what waits
        self._early: list[Callable[[], None]] | None = []  # what came before `start`
        transport.subscribe(self)

    def start(self) -> None:
        """Apply all batches of the others so far, and further ones at once."""
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
        self.journal.take()  # these events are part of the snapshot
        first, *more = _batches(self._clock(), self.journal.still_open()) or [EventBatch(self._clock(), encode([]))]
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
            log.error("another router's events do not decode: what it has open is forgotten", extra={"error": str(error)})
            self.follower.leave(source, self._clock())
            lost = []
        self._followed(lost, self._clock() - batch.since if live else None)

    def __repr__(self) -> str:
        return f"<Replicator, {self.journal!r}, {self.follower!r}>"


def _batches(since: float, events: Sequence[Event]) -> list[EventBatch]:
    """The events in pieces that are applied in some milliseconds each: other processes have requests to answer meanwhile."""
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
