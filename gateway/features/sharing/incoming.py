"""Takes in the entries that other gateways have written. No I/O: questions and offers wait in queues.

An entry is refused, and counted, if it is of another version or format, or does not decode. Its writer is named in the log
once. An entry can only change the prefix index and the load: the engines' reports correct both, as always.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from gateway.cluster.messages import EVERYTHING_S, EventBatch, MessageError, Reset, Want
from gateway.cluster.replication import Subscriber
from gateway.features.sharing.clock import StoreClock, plausible
from gateway.features.sharing.messages import (
    ALL,
    ENVELOPE_FIELD,
    FORMAT_FIELD,
    GATEWAY_FIELD,
    MAX_ENVELOPE_BYTES,
    VERSION,
    VERSION_FIELD,
    Envelope,
    Item,
    Offer,
    decode_envelope,
)
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.others import ASK_S, DEAD_S, PeerGateway, PeerGateways
from gateway.features.sharing.outbox import Outbox
from gateway.features.sharing.state import RefusedGateway
from gateway.features.sharing.translate import translated
from gateway.features.snapshots.knowledge import MAX_BYTES
from gateway.features.snapshots.snapshot import Snapshot, difference_of
from gateway.telemetry.notices import Notices
from router.events import EventError

log = logging.getLogger("warmroute.sharing")

MAX_WANTS: Final = 64  # that wait to be answered
MAX_OFFERS: Final = 64  # that wait to be taken
MAX_NAMED: Final = 1024  # gateways that were refused, and named in the log
MAX_REFUSED: Final = 64  # that are shown to operators
MARGIN_S: Final = 5.0  # a wanted snapshot begins that long before the loss: requests are booked before they are published


class Routers(Subscriber, Protocol):
    """The routers of this gateway: one, or those of its workers. A source is a router of another gateway."""

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        """See `Knowledge.collect`. Raises KnowledgeError."""

    async def restore(self, snapshot: Snapshot) -> None:
        """See `Knowledge.restore`; what cannot be taken in is logged."""


class Incoming:
    """See the top of this file. wants: (gateway, the moment since which it wants prefixes). offers: (offer, its moment).
    Moments are by this gateway's clock.
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
        metrics: SharingMetrics,
    ) -> None:
        """me: the id of this gateway."""
        self.others = PeerGateways()
        self.wants: deque[tuple[str, float]] = deque(maxlen=MAX_WANTS)
        self.offers: deque[tuple[Offer, float]] = deque(maxlen=MAX_OFFERS)
        self.newcomers = False  # another gateway wants the open bookings
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
            metrics.refused.add((reason,), 0)

    def entry(self, written_at: float, fields: Mapping[bytes, bytes]) -> Iterator[None]:
        """One entry, in steps: between two of them requests may have their turns. written_at: by the store's clock."""
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
        """After some entries: publish the open bookings if another gateway wants them, and ask again after a loss."""
        now = self._clock()
        if self.newcomers and now - self._answered_at >= ASK_S:
            self.newcomers, self._answered_at = False, now
            self._routers.join()
        for other in self.others.alive.values():
            if (since_s := other.ask(now)) is not None:
                self._outbox.add((ALL, Want(other.gateway, since_s)))

    @property
    def refused(self) -> tuple[RefusedGateway, ...]:
        """Gateways that write now, but are not followed."""
        oldest = self._clock() - DEAD_S
        return tuple([refused for at, refused in self._refused.values() if at >= oldest])

    def expire(self, now: float) -> None:
        """Gateways of which nothing was read for long are dead."""
        for gateway in self.others.silent(now):
            self._ended(gateway, "nothing comes from it", silent=True)

    def expire_all(self) -> None:
        """The store is away: whatever the others have open now is not known here."""
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
                if self.others.alive.get(gateway) is not other:  # it has said goodbye: what follows would never be closed
                    break
                for _ in self._item(other, item, shift_s, now):
                    yield
                    if self.others.alive.get(gateway) is not other:  # it was given up meanwhile
                        break
            whole = True
        finally:
            if not whole:  # the reader was stopped
                self._missed(other, MARGIN_S, now)

    def _missed(self, other: PeerGateway, since_s: float, now: float) -> None:
        """Something of this gateway has been lost. Its bookings may be over by now."""
        self._reset(other, ALL)
        other.miss(since_s, now)
        if since_s:
            self._metrics.resyncs.add()
            self._say("missed", "something of another gateway was missed", other)

    def _item(self, other: PeerGateway, item: Item, shift_s: float, now: float) -> Iterator[None]:
        source, message = item
        match message:
            case EventBatch():
                number = self.others.source(other, source)
                if number is None:
                    self._refuse("garbage", other.gateway.encode(), "it has too many routers")
                else:
                    yield from self._published(other, number, message, shift_s, now)
            case Reset(ended) if ended and source == ALL:
                self._ended(other.gateway, "it has ended")
            case Reset():
                self._reset(other, source)
            case Want(of, since_s) if of == self._me:
                self.newcomers = True
                if since_s:
                    self._want(other.gateway, -math.inf if since_s >= EVERYTHING_S else now - since_s)
            case Offer(to) if to in ("", self._me):
                if not any(message.key and message.key == offer.key for offer, _ in self.offers):
                    self.offers.append((message, plausible(message.at + shift_s, now)))

    def _want(self, gateway: str, since: float) -> None:
        """One question of each gateway waits, with the earliest moment."""
        for waiting in [each for each in self.wants if each[0] == gateway]:
            self.wants.remove(waiting)
            since = min(since, waiting[1])
        self.wants.append((gateway, since))

    def _published(self, other: PeerGateway, number: int, batch: EventBatch, shift_s: float, now: float) -> Iterator[None]:
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

    def _reset(self, other: PeerGateway, source: int) -> None:
        """Nothing is open there. A number that is used again gets another one here."""
        for number in self.others.forget(other, source):
            self._routers.leave(number)

    def _say(self, kind: str, text: str, other: PeerGateway, **more: str) -> None:
        self._notices.say(kind, log.info, text, {"gateway": other.gateway, "host": other.host, **more})

    def _refuse(self, reason: str, gateway: bytes, why: str) -> None:
        self._metrics.refused.add((reason,))
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
    """The beginning of a field of an entry, which anybody may have written."""
    return (field or b"")[:100].decode("ascii", "replace")
