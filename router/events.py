"""Messages of the replication log: one router's decisions, which other routers apply (`replication_log.py`, `follower.py`).

Numbers count the bookings of one router. Times are seconds of a clock that all routers share (CLOCK_MONOTONIC on one machine).
Events are encoded as msgpack arrays that begin with the event's kind. Decoding checks types and that no count is negative, so
that events can be applied without further checks.

Structs lose their types in modules compiled by mypyc: this module is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from router.types import MOST_SEQUENCES

Count = Annotated[int, Meta(ge=0)]
Number = Annotated[int, Meta(ge=1)]
MAX_ADAPTER_CHARS: Final = 256


class BookingOpened(Struct, frozen=True, array_like=True, gc=False, tag=0):
    """A prompt was booked. Fields from `keys` to `breakpoints`, images, parent_key, adapter and sequences: see `Prompt`; from
    `replica` to `silent`: see `Lease`; unseen: see `Booking`.
    """

    number: Number
    keys: bytes
    units: Count
    block_units: Number
    scale: str
    client: int
    origin: int
    session_key: int
    breakpoints: tuple[tuple[Number, Count], ...]
    replica: str
    matched_blocks: Count
    prompt_tokens: Count
    uncached_tokens: Count
    since: float
    silent: bool
    unseen: Count
    images: Count
    parent_key: int = 0
    adapter: Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)] = ""
    sequences: Annotated[int, Meta(ge=1, le=MOST_SEQUENCES)] = 1


class BookingFirstToken(Struct, frozen=True, array_like=True, gc=False, tag=1):
    """The replica has computed the prompt."""

    number: Number
    now: float


class BookingMoved(Struct, frozen=True, array_like=True, gc=False, tag=2):
    """The prompt was booked on another replica, because the first one failed, or did not hold its match any more."""

    number: Number
    replica: str
    matched_blocks: Count
    prompt_tokens: Count
    uncached_tokens: Count
    since: float
    unseen: Count


class BookingClosed(Struct, frozen=True, array_like=True, gc=False, tag=3):
    """End of a request; fields: see `Outcome`."""

    number: Number
    ok: bool
    prompt_tokens: Count | None
    cached_tokens: Count | None
    now: float
    shown: bool
    countable: bool


class Rent(Struct, frozen=True, array_like=True, gc=False, tag=4):
    """Rent paid for a missing copy of a prefix, in seconds; None: the copy was made (`Rents.record`)."""

    prefix: bytes
    seconds: float | None


class CacheLost(Struct, frozen=True, array_like=True, gc=False, tag=5):
    """A replica has lost its cache: it has restarted, or left."""

    replica: str


class ObjectStored(Struct, frozen=True, array_like=True, gc=False, tag=6):
    """A replica stores an object that later requests may name (`Objects.put`)."""

    object: int
    replica: str
    model: str
    now: float


class ReplicaFailing(Struct, frozen=True, array_like=True, gc=False, tag=7):
    """A replica has failed a request or its probes. Each router's owner finds out itself if it is down."""

    replica: str


Event = BookingOpened | BookingFirstToken | BookingMoved | BookingClosed | Rent | CacheLost | ObjectStored | ReplicaFailing


class EventError(ValueError):
    """These bytes are not a list of events."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[Event])


def encode(events: Sequence[Event]) -> bytes:
    """About 0.1 us an event."""
    return _ENCODER.encode(events)


def decode(data: bytes) -> list[Event]:
    """About 0.3 us an event. Raises EventError."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EventError(f"not a list of events: {error}") from error
