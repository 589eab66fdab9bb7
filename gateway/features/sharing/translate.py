"""Converts events of another machine's router to this machine's clock, and drops impossible ones.

Anybody with access to the store could write anything. Decoding checks the types. Here numbers are bounded, so that computations
are safe, and events out of bounds are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from gateway.cluster.messages import EventBatch
from gateway.features.sharing.clock import plausible
from router.events import (
    BookingClosed,
    BookingFirstToken,
    BookingMoved,
    BookingOpened,
    Event,
    ObjectStored,
    Rent,
    decode,
    encode,
)
from router.replication_log import MAX_BLOCKS, MAX_TOKENS
from router.types import KEY_BYTES

MAX_KEY_BYTES: Final = MAX_BLOCKS * KEY_BYTES
MAX_NAME_CHARS: Final = 1024
MAX_BREAKPOINTS: Final = 16  # a request has at most four
MAX_RENT_S: Final = 1e6
EVENTS_PER_PIECE: Final = 64  # events per piece, which take some milliseconds to apply unless their prompts are very long


def translated(batch: EventBatch, shift_s: float, now: float) -> tuple[Iterator[EventBatch], int]:
    """(the batch in pieces of EVENTS_PER_PIECE events, number of dropped events). shift_s: this machine's clock minus the
    writer's. Raises EventError.
    """

    def local(time: float) -> float:
        return plausible(time + shift_s, now)

    events = decode(batch.events)
    good = [_local(event, local) for event in events if is_possible(event)]
    since = local(batch.since)
    pieces = (EventBatch(since, encode(good[at : at + EVENTS_PER_PIECE])) for at in range(0, len(good), EVENTS_PER_PIECE))
    return pieces, len(events) - len(good)


def _local(event: Event, local: Callable[[float], float]) -> Event:
    if isinstance(event, BookingOpened | BookingMoved):
        return replace(event, since=local(event.since))
    if isinstance(event, BookingFirstToken | BookingClosed | ObjectStored):
        return replace(event, now=local(event.now))
    return event


def is_possible(event: Event) -> bool:
    """True if its numbers are within the bounds of real requests."""
    if isinstance(event, BookingOpened):
        lengths_ = event.units, event.block_units, event.matched_blocks
        counts = (*lengths_, event.prompt_tokens, event.uncached_tokens, event.unseen)
        names = len(event.scale) <= MAX_NAME_CHARS and len(event.replica) <= MAX_NAME_CHARS
        lengths = len(event.keys) <= MAX_KEY_BYTES and len(event.breakpoints) <= MAX_BREAKPOINTS
        places = all(blocks <= MAX_TOKENS and seconds <= MAX_TOKENS for blocks, seconds in event.breakpoints)
        return names and lengths and places and max(counts) <= MAX_TOKENS
    if isinstance(event, BookingMoved):
        counts_ = (event.matched_blocks, event.prompt_tokens, event.uncached_tokens, event.unseen)
        return len(event.replica) <= MAX_NAME_CHARS and max(counts_) <= MAX_TOKENS
    if isinstance(event, Rent):
        return len(event.prefix) <= KEY_BYTES and (event.seconds is None or 0 <= event.seconds <= MAX_RENT_S)  # nor NaN
    if isinstance(event, ObjectStored):
        return len(event.replica) <= MAX_NAME_CHARS and len(event.model) <= MAX_NAME_CHARS
    if isinstance(event, BookingClosed):
        return (event.prompt_tokens or 0) <= MAX_TOKENS and (event.cached_tokens or 0) <= MAX_TOKENS
    return True
