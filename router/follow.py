"""Several processes, one view: what a router books is told to the others, and they do the same.

    Router.choose, Booking.first_token, move, close ──► Journal ──► (some way to the other processes) ──► Follower.apply

Only what was decided is told, never how: a follower books, credits, learns and closes just as the router did that decided, so
that its trie, its ledger and its learned speeds come to be the same, but for what is still on its way. No process waits for
another: two may decide within a few milliseconds without knowing of each other, as two gateways would.

An event is a tuple of numbers, texts and bytes. Times are of a clock that all the processes share (CLOCK_MONOTONIC on one
machine). Whatever refers to a replica or a booking that is not known here is passed over: processes take another configuration
at slightly different moments, and one that joins late has not seen what came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from router.types import Outcome, Prompt

if TYPE_CHECKING:
    from router.booking import Booking
    from router.router import Router

Event = tuple[Any, ...]

OPENED: Final = 0
FIRST_TOKEN: Final = 1
MOVED: Final = 2
CLOSED: Final = 3
RENT: Final = 4


class Journal:
    """What one router books, until it is told to the others.

    events: what is to be told, the oldest first; empty again when they are taken. open: what was told of and is not closed.
    """

    __slots__ = ("_booked", "_wake", "events", "open")

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: is called when there is an event and was none."""
        self.events: list[Event] = []
        self.open: dict[int, Booking] = {}
        self._booked = 0
        self._wake = wake

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def still_open(self) -> list[Event]:
        """For one who may not have heard of it. Its prefill is not to be learned from."""
        return [_opened(booking, silent=True) for booking in self.open.values()]

    def opened(self, booking: Booking) -> None:
        self._booked += 1
        booking.number = self._booked
        self.open[booking.number] = booking
        self._tell(_opened(booking, silent=booking.lease.silent))

    def first_token(self, booking: Booking, now: float) -> None:
        self._tell((FIRST_TOKEN, booking.number, now))

    def moved(self, booking: Booking) -> None:
        lease = booking.lease
        placed = (lease.replica, booking.matched_blocks, lease.prompt_tokens, lease.uncached_tokens, lease.since)
        self._tell((MOVED, booking.number, *placed))

    def closed(self, booking: Booking, outcome: Outcome, now: float) -> None:
        del self.open[booking.number]
        self._tell((CLOSED, booking.number, outcome.ok, outcome.prompt_tokens, outcome.cached_tokens, now))

    def rent(self, prefix: bytes, seconds: float | None) -> None:
        """See `Rents.settle`."""
        self._tell((RENT, prefix, seconds))

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) == 1:
            self._wake()

    def __repr__(self) -> str:
        return f"<Journal of {len(self.open)} open bookings, {len(self.events)} events to tell>"


def _opened(booking: Booking, *, silent: bool) -> Event:
    prompt, lease = booking.prompt, booking.lease
    return (
        OPENED,
        booking.number,
        prompt.keys,
        prompt.units,
        prompt.block_units,
        prompt.scale,
        prompt.client,
        lease.replica,
        booking.matched_blocks,
        lease.prompt_tokens,
        lease.uncached_tokens,
        lease.since,
        silent,
    )


class Follower:
    """Does here what other routers did. A source is one of them, by any number that no other has or had."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._bookings: dict[int, dict[int, Booking]] = {}

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
                router.confirm(booking, event[2])
            elif kind == MOVED:
                self._move(bookings, booking, event)
            elif kind == CLOSED and self._close(bookings, booking, Outcome(event[2], event[3], event[4]), event[5]):
                lost.append(booking.lease.replica)
        return lost

    def gone(self, source: int, now: float) -> None:
        """That router is no more: nothing of what it had booked goes on. What was prefilled by then is held."""
        bookings = self._bookings.pop(source, {})
        for booking in tuple(bookings.values()):
            self._close(bookings, booking, Outcome(booking.lease.decoding), now)

    def _open(self, bookings: dict[int, Booking], event: Event) -> None:
        _, number, keys, units, block_units, scale, client, replica, blocks, tokens, uncached, since, silent = event
        router = self._router
        known = router.known(replica)
        if number in bookings or known is None:
            return
        # By the name as it is here: a dictionary finds what it has itself at once, and has to compare what only looks the same.
        lease = router.ledger.open(known.name, tokens, uncached, since, silent=silent)
        lease.load.elsewhere += 1
        booking = router.book(Prompt(keys, units, block_units, scale, client=client), lease, blocks)
        booking.number = number
        bookings[number] = booking

    def _move(self, bookings: dict[int, Booking], booking: Booking, event: Event) -> None:
        _, _, replica, blocks, tokens, uncached, since = event
        known = self._router.known(replica)
        if known is None:
            self._close(bookings, booking, Outcome(ok=False), since)
            return
        booking.lease.load.elsewhere -= 1
        self._router.rebook(booking, known.name, blocks, tokens, uncached, since)
        booking.lease.load.elsewhere += 1

    def _close(self, bookings: dict[int, Booking], booking: Booking, outcome: Outcome, now: float) -> bool:
        """As `Router.observe`."""
        del bookings[booking.number]
        booking.lease.load.elsewhere -= 1
        return self._router.observe(booking, outcome, now)

    def check(self) -> None:
        """Assert that the counts are those of the open bookings."""
        booked = [booking for bookings in self._bookings.values() for booking in bookings.values()]
        assert not any(booking.lease.closed for booking in booked)
        loads = self._router.ledger.loads
        counted = Counter(booking.lease.replica for booking in booked)
        assert {name: load.elsewhere for name, load in loads.items() if load.elsewhere} == counted

    def __repr__(self) -> str:
        rows = ", ".join(f"{source}: {len(bookings)}" for source, bookings in self._bookings.items())
        return f"<Follower of {rows or 'nobody'}>"
