"""Applies the entries of other gateways. No I/O: requests for snapshots and offered snapshots wait in queues.

An entry of another version or format, or one that does not decode, is refused and counted; its writer is named in the log once.
An entry can change only the beliefs about replicas, and the engines' reports correct these as always.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from gateway.cluster.messages import Batch, MessageError, RefusedGateway
from gateway.features.sharing.clock import StoreClock, plausible
from gateway.features.sharing.messages import (
    ALL,
    ENVELOPE_FIELD,
    EVERYTHING_S,
    FORMAT_FIELD,
    GATEWAY_FIELD,
    MAX_ENVELOPE_BYTES,
    VERSION,
    VERSION_FIELD,
    Envelope,
    Goodbye,
    Item,
    PublishedBatch,
    Reset,
    ResyncRequest,
    SnapshotOffer,
    decode_envelope,
)
from gateway.features.sharing.others import ASK_S, DEAD_S, RemoteGateway, RemoteGateways
from gateway.features.sharing.outbox import Outbox
from gateway.features.sharing.translate import translated
from gateway.features.snapshots.knowledge import MAX_BYTES
from gateway.features.snapshots.snapshot import Snapshot, difference_of
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.notices import Notices
from router.events import EventError

log = logging.getLogger("warmroute.sharing")

MAX_WANTS: Final = 64  # queued resync requests
MAX_OFFERS: Final = 64  # queued offers
MAX_NAMED: Final = 1024  # refused gateways that the log has named
MAX_REFUSED: Final = 64  # refused gateways in the operators' view
MARGIN_S: Final = 5.0  # a resync begins so long before the gap: bookings are published later than they are made


class Routers(Protocol):
    """The routers of this gateway: one, or those of its workers."""

    def receive(self, source: int, batch: Batch) -> None:
        """Apply the next events of another gateway's router."""

    def leave(self, source: int) -> None:
        """Close the open bookings of another gateway's router: it has ended, or events of it were lost."""

    def join(self) -> None:
        """Publish the open bookings, which another gateway does not know."""

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        """See `Knowledge.collect`. Raises KnowledgeError."""

    async def restore(self, snapshot: Snapshot) -> None:
        """See `Knowledge.restore`; a snapshot that cannot be restored is logged."""


class EntryReceiver:
    """See the top of this file. wants: queued resync requests (gateway, begin of the gap). offers: queued (offer, its time).
    Times are of this gateway's clock.
    """

    def __init__(
        self,
        *,
        me: str,
        format: str,  # noqa: A002  (of block keys)
        routers: Routers,
        outbox: Outbox,
        store_clock: StoreClock,
        clock: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        """me: the id of this gateway."""
        self.others = RemoteGateways()
        self.wants: deque[tuple[str, float]] = deque(maxlen=MAX_WANTS)
        self.offers: deque[tuple[SnapshotOffer, float]] = deque(maxlen=MAX_OFFERS)
        self.newcomers = False  # another gateway has asked for the open bookings
        self._me = me
        self._format = format.encode()
        self._routers = routers
        self._outbox = outbox
        self._store_clock = store_clock
        self._clock = clock
        self._metrics = metrics
        self._named: set[bytes] = set()
        self._refused: dict[bytes, tuple[float, RefusedGateway]] = {}  # the latest last
        self._answered_at = -math.inf
        self._notices = Notices(clock)
        for reason in ("version", "format", "garbage"):
            metrics.sharing_refused.add((reason,), 0)

    def entry(self, written_at: float, fields: Mapping[bytes, bytes]) -> Iterator[None]:
        """Apply an entry in steps; requests may be served between two steps. written_at: by the store's clock."""
        gateway = fields.get(GATEWAY_FIELD, b"")
        if gateway == self._me.encode():
            return
        if fields.get(VERSION_FIELD) != VERSION:
            theirs = _text(fields.get(VERSION_FIELD))
            why = f"its release writes version {theirs!r}, this one {_text(VERSION)!r}: both have to write the same"
            self._refuse("version", gateway, why)
        elif fields.get(FORMAT_FIELD) != self._format:
            self._refuse("format", gateway, difference_of(_text(fields.get(FORMAT_FIELD)), _text(self._format)))
        else:
            try:
                data = fields.get(ENVELOPE_FIELD, b"")
                if len(data) > MAX_ENVELOPE_BYTES or not 0 < len(gateway) <= 64:
                    raise MessageError("it is too large")
                envelope = decode_envelope(data)
                name = gateway.decode("ascii")
            except (MessageError, UnicodeDecodeError) as error:
                self._refuse("garbage", gateway, str(error))
            else:
                yield from self._envelope(name, envelope, written_at)

    def answer(self) -> None:
        """Publish the open bookings if a gateway has asked for them, and send due resync requests. Call it after entries."""
        now = self._clock()
        if self.newcomers and now - self._answered_at >= ASK_S:
            self.newcomers, self._answered_at = False, now
            self._routers.join()
        for other in self.others.alive.values():
            if (since_s := other.ask(now)) is not None:
                self._outbox.add(ResyncRequest(other.gateway, since_s))

    @property
    def refused(self) -> tuple[RefusedGateway, ...]:
        """Gateways whose recent entries were refused."""
        oldest = self._clock() - DEAD_S
        return tuple([refused for at, refused in self._refused.values() if at >= oldest])

    def expire(self, now: float) -> None:
        """Remove silent gateways."""
        for gateway in self.others.silent(now):
            self._ended(gateway, "nothing comes from it", silent=True)

    def expire_all(self) -> None:
        """Remove all gateways: the store is away, and their open bookings are no longer known."""
        for gateway in tuple(self.others.alive):
            self._ended(gateway, "the store is away", silent=True)

    # -- one envelope

    def _envelope(self, gateway: str, envelope: Envelope, written_at: float) -> Iterator[None]:
        now = self._clock()
        new = gateway not in self.others.alive
        found = self.others.receive(gateway, envelope.host, envelope.seq, now)
        if found is None:
            return
        other, missed_since = found
        if new:
            self._say("there", "another gateway is there", other)
        if missed_since is not None:
            self._missed(other, 0.0 if missed_since == now else now - missed_since + MARGIN_S, now)
        shift_s = self._store_clock.local(written_at, now) - envelope.sent
        whole = False
        try:
            for item in envelope.items:
                if self.others.alive.get(gateway) is not other:  # it has ended: later bookings would never be closed
                    break
                for _ in self._item(other, item, shift_s, now):
                    yield
                    if self.others.alive.get(gateway) is not other:  # it was removed meanwhile
                        break
            whole = True
        finally:
            if not whole:  # the reading task was cancelled
                self._missed(other, MARGIN_S, now)

    def _missed(self, other: RemoteGateway, since_s: float, now: float) -> None:
        """Handle a gap in a gateway's envelopes: close its bookings, which may have ended, and request a resync."""
        self._reset(other, ALL)
        other.miss(since_s, now)
        if since_s:
            self._metrics.sharing_resyncs.add()
            self._say("missed", "something of another gateway was missed", other)

    def _item(self, other: RemoteGateway, item: Item, shift_s: float, now: float) -> Iterator[None]:
        match item:
            case PublishedBatch(source, batch):
                number = self.others.source(other, source)
                if number is None:
                    self._refuse("garbage", other.gateway.encode(), "it has too many routers")
                else:
                    yield from self._published(other, number, batch, shift_s, now)
            case Reset(source):
                self._reset(other, source)
            case ResyncRequest(of, since_s):
                if of == self._me:
                    self.newcomers = True
                    if since_s:
                        self._want(other.gateway, -math.inf if since_s >= EVERYTHING_S else now - since_s)
            case SnapshotOffer(to):
                if to in ("", self._me) and not any(item.key and item.key == offer.key for offer, _ in self.offers):
                    self.offers.append((item, plausible(item.at + shift_s, now)))
            case Goodbye():
                self._ended(other.gateway, "it has ended")

    def _want(self, gateway: str, since: float) -> None:
        """Queue a resync request. A gateway has one in the queue: with the earliest begin."""
        for waiting in [each for each in self.wants if each[0] == gateway]:
            self.wants.remove(waiting)
            since = min(since, waiting[1])
        self.wants.append((gateway, since))

    def _published(self, other: RemoteGateway, number: int, batch: Batch, shift_s: float, now: float) -> Iterator[None]:
        try:
            pieces, dropped = translated(batch, shift_s, now)
        except EventError as error:
            self._refuse("garbage", other.gateway.encode(), str(error))
            self._routers.leave(number)
            return
        if dropped:
            self._refuse("garbage", other.gateway.encode(), f"{dropped} events are out of bounds")
        for piece in pieces:
            self._routers.receive(number, piece)
            yield

    def _ended(self, gateway: str, why: str, *, silent: bool = False) -> None:
        other = self.others.leave(gateway, silent=silent)
        if other is not None:
            self._say("gone", "another gateway is gone", other, reason=why)
            self._reset(other, ALL)

    def _reset(self, other: RemoteGateway, source: int) -> None:
        """Close the open bookings of a router, or of all. If its number is used again, it gets a new number here."""
        for number in self.others.forget(other, source):
            self._routers.leave(number)

    def _say(self, kind: str, text: str, other: RemoteGateway, **more: str) -> None:
        self._notices.say(kind, log.info, text, {"gateway": other.gateway, "host": other.host, **more})

    def _refuse(self, reason: str, gateway: bytes, why: str) -> None:
        self._metrics.sharing_refused.add((reason,))
        who = reason.encode() + gateway[:64]
        refused = RefusedGateway(_text(gateway[:64]), reason, why)
        self._refused.pop(who, None)
        self._refused[who] = self._clock(), refused
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        if who not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(who)
            about = {"gateway": refused.gateway, "reason": reason, "error": why}
            log.error("what another gateway has written into the store is not taken in", extra=about)


def _text(field: bytes | None) -> str:
    """The beginning of an entry's field as text; its content is not trusted."""
    return (field or b"")[:100].decode("ascii", "replace")
