"""Applies entries that other gateways have written. No I/O: questions and offers are queued.

An undecodable entry, or an entry of another version or format, is refused and counted. Its writer is logged once. An entry
can only change the prefix index and the load, both of which the engines' reports correct.
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
from gateway.features.sharing.outbox import Outbox
from gateway.features.sharing.peer_gateways import ASK_S, DEAD_S, PeerGateway, PeerGateways
from gateway.features.sharing.state import RefusedGateway
from gateway.features.sharing.translate import translated
from gateway.features.snapshots.knowledge import MAX_BYTES
from gateway.features.snapshots.snapshot import Snapshot, difference_of
from gateway.telemetry.notices import Notices
from router.events import EventError

log = logging.getLogger("warmroute.sharing")

MAX_WANTS: Final = 64  # unanswered wants
MAX_OFFERS: Final = 64  # offers not fetched yet
MAX_NAMED: Final = 1024  # refused gateways named in the log
MAX_REFUSED: Final = 64  # refused gateways shown to operators
# A wanted snapshot begins earlier than the loss by this time, because requests are published after their booking.
MARGIN_S: Final = 5.0


class Routers(Subscriber, Protocol):
    """The routers of this gateway: one, or those in its workers. A source is a router of another gateway."""

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        """See `Knowledge.collect`. Raises KnowledgeError."""

    async def restore(self, snapshot: Snapshot) -> None:
        """See `Knowledge.restore`. Failures are logged."""


class EntryReader:
    """wants: (gateway, start of the wanted prefixes). offers: (offer, its time). Times are of this gateway's clock."""

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
        self.peers = PeerGateways()
        self.wants: deque[tuple[str, float]] = deque(maxlen=MAX_WANTS)
        self.offers: deque[tuple[Offer, float]] = deque(maxlen=MAX_OFFERS)
        self.open_bookings_wanted = False  # by another gateway
        self._me = me
        self._format = format.encode()
        self._routers = routers
        self._outbox = outbox
        self._store_clock = store_clock
        self._clock = clock
        self._metrics = metrics
        self._named: set[bytes] = set()
        self._refused: dict[bytes, tuple[float, RefusedGateway]] = {}  # the latest is last
        self._answered_at = -math.inf
        self._notices = Notices(clock)
        for reason in ("version", "format", "garbage"):
            metrics.refused.add((reason,), 0)

    def entry(self, written_at: float, fields: Mapping[bytes, bytes]) -> Iterator[None]:
        """Applies one entry in steps, between which requests may run. written_at: by the store's clock."""
        gateway = fields.get(GATEWAY_FIELD, b"")
        if gateway == self._me.encode():
            return
        if fields.get(VERSION_FIELD) != VERSION:
            theirs = _text(fields.get(VERSION_FIELD))
            why = f"its release writes version {theirs!r}, this one {_text(VERSION)!r}: both must write the same version"
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
        """To be called after some entries: publishes the open bookings if wanted, and asks again after a loss."""
        now = self._clock()
        if self.open_bookings_wanted and now - self._answered_at >= ASK_S:
            self.open_bookings_wanted, self._answered_at = False, now
            self._routers.join()
        for peer in self.peers.alive.values():
            if (since_s := peer.ask(now)) is not None:
                self._outbox.add((ALL, Want(peer.gateway, since_s)))

    @property
    def refused(self) -> tuple[RefusedGateway, ...]:
        """Gateways whose recent entries were refused."""
        oldest = self._clock() - DEAD_S
        return tuple([refused for at, refused in self._refused.values() if at >= oldest])

    def expire(self, now: float) -> None:
        """Removes gateways without entries for DEAD_S."""
        for gateway in self.peers.silent(now):
            self._ended(gateway, "no entries from it", silent=True)

    def expire_all(self) -> None:
        """Removes all gateways, because the store is unavailable and their open bookings are unknown."""
        for gateway in tuple(self.peers.alive):
            self._ended(gateway, "the store is away", silent=True)

    # -- one envelope

    def _envelope(self, gateway: str, envelope: Envelope, written_at: float) -> Iterator[None]:
        now = self._clock()
        new = gateway not in self.peers.alive
        found = self.peers.receive(gateway, envelope.host, envelope.seq, now)
        if found is None:
            return
        peer, missed_since = found
        if new:
            self._say("there", "another gateway is there", peer)
        if missed_since is not None:
            self._missed(peer, 0.0 if missed_since == now else now - missed_since + MARGIN_S, now)
        shift_s = self._store_clock.local(written_at, now) - envelope.sent
        complete = False
        try:
            for item in envelope.items:
                if self.peers.alive.get(gateway) is not peer:  # it has ended: later bookings would never be closed
                    break
                for _ in self._item(peer, item, shift_s, now):
                    yield
                    if self.peers.alive.get(gateway) is not peer:  # it was removed in the meantime
                        break
            complete = True
        finally:
            if not complete:  # the reader was cancelled
                self._missed(peer, MARGIN_S, now)

    def _missed(self, peer: PeerGateway, since_s: float, now: float) -> None:
        """Entries of this gateway were lost. Its bookings may have been closed since."""
        self._reset(peer, ALL)
        peer.miss(since_s, now)
        if since_s:
            self._metrics.resyncs.add()
            self._say("missed", "entries of another gateway were missed", peer)

    def _item(self, peer: PeerGateway, item: Item, shift_s: float, now: float) -> Iterator[None]:
        source, message = item
        match message:
            case EventBatch():
                number = self.peers.source(peer, source)
                if number is None:
                    self._refuse("garbage", peer.gateway.encode(), "it has too many routers")
                else:
                    yield from self._published(peer, number, message, shift_s, now)
            case Reset(ended) if ended and source == ALL:
                self._ended(peer.gateway, "it has ended")
            case Reset():
                self._reset(peer, source)
            case Want(of, since_s) if of == self._me:
                self.open_bookings_wanted = True
                if since_s:
                    self._want(peer.gateway, -math.inf if since_s >= EVERYTHING_S else now - since_s)
            case Offer(to) if to in ("", self._me):
                if not any(message.key and message.key == offer.key for offer, _ in self.offers):
                    self.offers.append((message, plausible(message.at + shift_s, now)))

    def _want(self, gateway: str, since: float) -> None:
        """Keeps one want per gateway, with the earliest time."""
        for want in [each for each in self.wants if each[0] == gateway]:
            self.wants.remove(want)
            since = min(since, want[1])
        self.wants.append((gateway, since))

    def _published(self, peer: PeerGateway, number: int, batch: EventBatch, shift_s: float, now: float) -> Iterator[None]:
        try:
            pieces, dropped = translated(batch, shift_s, now)
        except EventError as error:
            self._refuse("garbage", peer.gateway.encode(), str(error))
            self._routers.leave(number)
            return
        if dropped:
            self._refuse("garbage", peer.gateway.encode(), f"{dropped} events are out of bounds")
        for piece in pieces:
            self._routers.receive(number, piece)
            yield

    def _ended(self, gateway: str, why: str, *, silent: bool = False) -> None:
        peer = self.peers.leave(gateway, silent=silent)
        if peer is not None:
            self._say("gone", "another gateway is gone", peer, reason=why)
            self._reset(peer, ALL)

    def _reset(self, peer: PeerGateway, source: int) -> None:
        """Closes all bookings of the source. If it is seen again, it gets another number here."""
        for number in self.peers.forget(peer, source):
            self._routers.leave(number)

    def _say(self, kind: str, text: str, peer: PeerGateway, **more: str) -> None:
        self._notices.say(kind, log.info, text, {"gateway": peer.gateway, "host": peer.host, **more})

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
            log.error("entries of another gateway are refused", extra=about)


def _text(field: bytes | None) -> str:
    """The beginning of a field of an entry, which may have been written by anybody."""
    return (field or b"")[:100].decode("ascii", "replace")
