"""The replication log: a router's bookings, for other routers in front of the same replicas.

    Router.choose, Booking.first_token, move, close ──► Journal ──► (transport) ──► Follower.apply, in each other router

The log has decisions, not their reasons: a follower books, credits, learns and closes as the deciding router did, so that its
index, ledger and learned speeds converge to the same state (a request in line is credited when it is booked, and by its router
when it is sent). Each router learns from its own owner that a replica has restarted
or left; the log repeats it for routers that begin later. No router waits for another: two may decide within a few milliseconds
without knowing each other's decision, as two gateways would.
"""

from __future__ import annotations

from collections.abc import Callable
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
from router.types import KEY_BYTES, Outcome

MAX_TOKENS: Final = 1 << 50
_OF_BOOKING: Final = BookingOpened, BookingFirstToken, BookingMoved, BookingClosed
MAX_BLOCKS: Final = 1 << 17  # of a prompt in the log; only the deciding router knows blocks beyond it


class Journal:
    """One router's unpublished events. Operations are O(1), except `still_open` and `take_ended`.

    events: oldest first. open: the open bookings, by number.
    """

    __slots__ = ("_booked", "_on_first", "events", "open")

    def __init__(self, on_first: Callable[[], None]) -> None:
        """on_first: called when an event is added to an empty journal."""
        self.events: list[Event] = []
        self.open: dict[int, Booking] = {}
        self._booked = 0
        self._on_first = on_first

    def take(self) -> list[Event]:
        """Remove and return the events."""
        events, self.events = self.events, []
        return events

    def take_ended(self) -> list[Event]:
        """Remove the events, and return the events of no open booking: outcomes, rents, objects. O(events)."""
        return [event for event in self.take() if not isinstance(event, _OF_BOOKING) or event.number not in self.open]

    def still_open(self) -> list[Event]:
        """The open bookings, for a router that may have missed them; it learns nothing from their prefills. O(open)."""
        return [_opened(booking, silent=True) for booking in self.open.values()]

    def opened(self, booking: Booking) -> None:
        self._booked += 1
        booking.number = self._booked
        self.open[booking.number] = booking
        self._add(_opened(booking, silent=booking.lease.silent))

    def first_token(self, booking: Booking, now: float) -> None:
        self._add(BookingFirstToken(booking.number, now))

    def moved(self, booking: Booking) -> None:
        lease = booking.lease
        self._add(
            BookingMoved(
                booking.number,
                lease.replica,
                min(booking.matched_blocks, MAX_BLOCKS),
                lease.prompt_tokens,
                lease.uncached_tokens,
                lease.since,
                booking.unseen,
            )
        )

    def closed(self, booking: Booking, outcome: Outcome, now: float) -> None:
        del self.open[booking.number]
        prompt, cached = _count(outcome.prompt_tokens), _count(outcome.cached_tokens)
        self._add(BookingClosed(booking.number, outcome.ok, prompt, cached, now, outcome.shown, outcome.countable))

    def rent(self, prefix: bytes, seconds: float | None) -> None:
        """See `Rents.record`."""
        self._add(Rent(prefix, seconds))

    def stored(self, number: int, replica: str, model: str, now: float) -> None:
        """See `Objects.put`."""
        self._add(ObjectStored(number, replica, model, now))

    def cache_lost(self, replica: str) -> None:
        self._add(CacheLost(replica))

    def failing(self, replica: str) -> None:
        self._add(ReplicaFailing(replica))

    def _add(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) == 1:
            self._on_first()

    def __repr__(self) -> str:
        return f"<Journal of {len(self.open)} open bookings, {len(self.events)} events to publish>"


def _count(tokens: int | None) -> int | None:
    """An engine's count; None for an implausible one, which is ignored anyway."""
    return tokens if tokens is not None and 0 <= tokens <= MAX_TOKENS else None


def _opened(booking: Booking, *, silent: bool) -> BookingOpened:
    prompt, lease = booking.prompt, booking.lease
    return BookingOpened(
        booking.number,
        prompt.keys[: MAX_BLOCKS * KEY_BYTES],
        prompt.units,
        prompt.block_units,
        prompt.scale,
        prompt.client,
        prompt.origin,
        prompt.session_key,
        prompt.breakpoints,
        lease.replica,
        min(booking.matched_blocks, MAX_BLOCKS),
        lease.prompt_tokens,
        lease.uncached_tokens,
        lease.since,
        silent,
        booking.unseen,
        prompt.images,
        prompt.parent_key,
        prompt.adapter,
        prompt.sequences,
    )
