"""Applies other routers' decisions to this router (`replication_log.py`).

Events of unknown replicas or bookings are ignored: routers reload at slightly different times, and a router that joins late has
missed earlier events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from router.booking import Booking
from router.events import (
    BookingClosed,
    BookingFirstToken,
    BookingMoved,
    BookingOpened,
    CacheLost,
    Event,
    ObjectStored,
    Rent,
    ReplicaFailing,
)
from router.router import Router
from router.types import KEY_BYTES, Outcome, Prompt

MAX_OPEN: Final = 1 << 18  # bookings of all other routers
MAX_OPEN_BYTES: Final = 1 << 29  # of the bookings' keys
MAX_MOVES: Final = 64  # per booking: a move costs as much as a booking


class Follower:
    """Applies events of other routers to this one. source: the unique number of another router.

    Bookings beyond MAX_OPEN and MAX_OPEN_BYTES are ignored, because other routers may be faulty or hostile.
    """

    def __init__(
        self,
        router: Router,
        failing: Callable[[str], None] = lambda _replica: None,
        unknown: Callable[[str], None] = lambda _replica: None,
        most_open: int = MAX_OPEN,
        most_bytes: int = MAX_OPEN_BYTES,
    ) -> None:
        """failing: called with each replica that another router's owner has seen fail. unknown: called with the replica of each
        booking that is ignored because this router does not know the replica. most_open, most_bytes: see MAX_OPEN.
        """
        self._router = router
        self._failing = failing
        self._unknown = unknown
        self._most_open = most_open
        self._most_bytes = most_bytes
        self._bookings: dict[int, dict[int, Booking]] = {}
        self._open_bookings = 0
        self._open_bytes = 0

    def apply(self, source: int, events: Iterable[Event], *, past: bool = False) -> list[str]:
        """Apply one router's events, in order. Returns the replicas whose caches they showed to be lost.

        past: the events are older than this router, so it has not noticed later cache losses itself, and their CacheLost events
        count. (A router that noticed the loss itself ignores the event, which may come late and would purge newer entries. An
        event that is applied may purge too much in the same way. A loss that others noticed only after this router began stays
        unknown until a miss.)
        """
        bookings = self._bookings.setdefault(source, {})
        lost = list[str]()
        for event in events:
            if isinstance(event, BookingOpened):
                self._open(bookings, event)
                continue
            if isinstance(event, Rent | ObjectStored | CacheLost | ReplicaFailing):
                self._learn(event, past=past)
                continue
            booking = bookings.get(event.number)
            if booking is None:
                continue
            if isinstance(event, BookingFirstToken):
                self._router.computed(booking, event.now)
            elif isinstance(event, BookingMoved):
                self._move(bookings, booking, event)
            elif self._close(bookings, booking, _outcome(event), event.now):
                lost.append(booking.lease.replica)
        return lost

    def _learn(self, event: Rent | ObjectStored | CacheLost | ReplicaFailing, *, past: bool) -> None:
        """Apply an event without a booking."""
        router = self._router
        if isinstance(event, Rent):
            router.rents.record(event.prefix, event.seconds)
        elif isinstance(event, ObjectStored):
            router.objects.put(event.object, event.replica, event.model, event.now)
        elif isinstance(event, CacheLost):
            if past:
                router.purge(event.replica)
        elif not past and router.known(event.replica) is not None:
            self._failing(event.replica)

    def leave(self, source: int, now: float) -> None:
        """A router has exited: close its open bookings. Prefilled prompts count as held."""
        bookings = self._bookings.pop(source, {})
        for booking in tuple(bookings.values()):
            self._close(bookings, booking, Outcome(booking.lease.decoding), now)

    def _open(self, bookings: dict[int, Booking], event: BookingOpened) -> None:
        router = self._router
        known = router.known(event.replica)
        if known is None:
            self._unknown(event.replica)
            return
        if event.number in bookings or len(event.keys) % KEY_BYTES:
            return
        if self._open_bookings >= self._most_open or self._open_bytes + len(event.keys) > self._most_bytes:
            return
        self._open_bookings += 1
        self._open_bytes += len(event.keys)
        # This router's own string object: dictionaries find an identical key without comparing.
        lease = router.ledger.open(
            known.name, event.prompt_tokens, event.uncached_tokens, event.since, silent=event.silent, remote=True
        )
        client, session = event.client, event.session_key
        prompt = Prompt(event.keys, event.units, event.block_units, event.scale, client=client, session_key=session)
        prompt.origin, prompt.breakpoints, prompt.images = event.origin, event.breakpoints, event.images
        prompt.parent_key, prompt.adapter, prompt.sequences = event.parent_key, event.adapter, event.sequences
        booking = router.book(prompt, lease, event.matched_blocks, event.unseen)
        booking.number = event.number
        bookings[event.number] = booking

    def _move(self, bookings: dict[int, Booking], booking: Booking, event: BookingMoved) -> None:
        if booking.moves >= MAX_MOVES:
            return
        booking.moves += 1
        known = self._router.known(event.replica)
        if known is None:
            self._close(bookings, booking, Outcome(ok=False), event.since)
            return
        booking.unseen = event.unseen
        self._router.rebook(booking, known.name, event.matched_blocks, event.prompt_tokens, event.uncached_tokens, event.since)

    def _close(self, bookings: dict[int, Booking], booking: Booking, outcome: Outcome, now: float) -> bool:
        """Close a booking; see `Router.observe`."""
        del bookings[booking.number]
        self._open_bookings -= 1
        self._open_bytes -= len(booking.prompt.keys)
        return self._router.observe(booking, outcome, now)

    def check(self) -> None:
        """Raises AssertionError if the counts differ from the open bookings."""
        booked = [booking for bookings in self._bookings.values() for booking in bookings.values()]
        assert not any(booking.lease.closed for booking in booked)
        assert self._open_bookings == len(booked)
        assert self._open_bytes == sum(len(booking.prompt.keys) for booking in booked)
        loads = self._router.ledger.loads
        counted = Counter(booking.lease.replica for booking in booked)
        assert {name: load.remote_inflight for name, load in loads.items() if load.remote_inflight} == counted

    def __repr__(self) -> str:
        rows = ", ".join(f"{source}: {len(bookings)}" for source, bookings in self._bookings.items())
        return f"<Follower of {rows or 'no router'}>"


def _outcome(event: BookingClosed) -> Outcome:
    return Outcome(event.ok, event.prompt_tokens, event.cached_tokens, shown=event.shown, countable=event.countable)
