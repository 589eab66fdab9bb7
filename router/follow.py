"""Several processes, one view: what a router books is told to the others, and they do the same.

    Router.choose, Booking.first_token, move, close ──► journal ──► (some way to the other processes) ──► Follower.apply

Only what was decided is told, never how: a follower books, credits, learns and closes just as the router did that decided, so
that its trie, its ledger and its learned speeds come to be the same, but for what is still on its way. No process waits for
another: two may decide within a few milliseconds without knowing of each other, as two gateways would.

An event is a tuple of numbers, texts and bytes. Times are of a clock that all the processes share (CLOCK_MONOTONIC on one
machine). Whatever refers to a replica or a booking that is not known here is passed over: processes take another configuration
at slightly different moments, and one that joins late has not seen what came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from router.types import Outcome, Placement, Prompt

if TYPE_CHECKING:
    from router.router import Booking, Router

Event = tuple[Any, ...]
Journal = Callable[[Event], None]

OPENED: Final = 0
FIRST_TOKEN: Final = 1
MOVED: Final = 2
CLOSED: Final = 3
RENT: Final = 4


def opened(booking: Booking) -> Event:
    prompt, lease = booking.prompt, booking.lease
    told = (prompt.keys, prompt.units, prompt.block_units, prompt.scale)
    return (OPENED, booking.number, *told, *_placed(booking), lease.silent, lease.since)


def first_token(booking: Booking, now: float) -> Event:
    return (FIRST_TOKEN, booking.number, now)


def moved(booking: Booking) -> Event:
    return (MOVED, booking.number, *_placed(booking), booking.lease.since)


def closed(booking: Booking, outcome: Outcome, now: float) -> Event:
    return (CLOSED, booking.number, outcome.ok, outcome.prompt_tokens, outcome.cached_tokens, now)


def rent(prefix: bytes, seconds: float | None) -> Event:
    """See `Rents.settle`."""
    return (RENT, prefix, seconds)


def still_open(told: tuple[Event, ...]) -> Iterator[Event]:
    """What was told of a booking that is open, for one who may not have heard it. Its prefill is not to be learned from."""
    for event in told:
        yield (*event[:-2], True, event[-1]) if event[0] == OPENED else event


def _placed(booking: Booking) -> tuple[str, int, int, int, int]:
    """As `Placement` takes them."""
    placed = booking.placed
    return placed.replica, placed.matched_blocks, placed.matched_tokens, placed.uncached_tokens, placed.prompt_tokens


class Follower:
    """Does here what other routers did. A source is one of them, by any number that no other has or had.

    inflight: their open bookings, by replica.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._bookings: dict[int, dict[int, Booking]] = {}
        self.inflight: dict[str, int] = {}

    def apply(self, source: int, events: Iterable[Event]) -> list[str]:
        """What one of them did, in its order. Returns the replicas that this showed to have lost their cache."""
        bookings = self._bookings.setdefault(source, {})
        router, lost = self._router, []
        for event in events:
            kind: int = event[0]
            if kind == OPENED:
                self._open(bookings, event)
                continue
            if kind == RENT:
                router.rents.settle(event[1], event[2])
                continue
            booking = bookings.get(event[1])
            if booking is None:
                continue
            if kind == FIRST_TOKEN:
                booking.lease.first_token(event[2])
            elif kind == MOVED:
                self._move(bookings, booking, event)
            elif kind == CLOSED:
                if router.observe(booking, Outcome(event[2], event[3], event[4]), event[5]):
                    lost.append(booking.placed.replica)
                self._forget(bookings, booking)
        return lost

    def gone(self, source: int, now: float) -> None:
        """That router is no more: nothing of what it had booked goes on. What was prefilled by then is held."""
        bookings = self._bookings.pop(source, {})
        for booking in tuple(bookings.values()):
            self._router.observe(booking, Outcome(booking.lease.decoding), now)
            self._forget(bookings, booking)

    def _open(self, bookings: dict[int, Booking], event: Event) -> None:
        _, number, keys, units, block_units, scale, replica, blocks, matched, uncached, tokens, silent, since = event
        known = self._router.replicas.get(replica)
        if number in bookings or known is None:
            return
        # By the name as it is here: a dictionary finds what it has itself at once, and has to compare what only looks the same.
        placed = Placement(known.name, blocks, matched, uncached, tokens)
        booking = self._router.book(Prompt(keys, units, block_units, scale), placed, since, silent=silent)
        booking.number = number
        bookings[number] = booking
        self._count(known.name, 1)

    def _move(self, bookings: dict[int, Booking], booking: Booking, event: Event) -> None:
        _, _, replica, blocks, matched, uncached, tokens, since = event
        if replica not in self._router.replicas:
            self._router.observe(booking, Outcome(ok=False), since)
            self._forget(bookings, booking)
            return
        self._count(booking.placed.replica, -1)
        self._router.rebook(booking, Placement(replica, blocks, matched, uncached, tokens), since)
        self._count(replica, 1)

    def _forget(self, bookings: dict[int, Booking], booking: Booking) -> None:
        del bookings[booking.number]
        self._count(booking.placed.replica, -1)

    def _count(self, replica: str, change: int) -> None:
        self.inflight[replica] = self.inflight.get(replica, 0) + change

    def check(self) -> None:
        """Assert that the counts are those of the open bookings."""
        booked = [booking for bookings in self._bookings.values() for booking in bookings.values()]
        assert not any(booking.lease.closed for booking in booked)
        assert +Counter(self.inflight) == Counter(booking.placed.replica for booking in booked)

    def __repr__(self) -> str:
        rows = ", ".join(f"{source}: {len(bookings)}" for source, bookings in self._bookings.items())
        return f"<Follower of {rows or 'nobody'}>"
