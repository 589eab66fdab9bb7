"""Messages in the store: msgpack, decoded into the types below.

Each gateway writes envelopes into one stream. The entry's fields contain the version and format, so that a reader refuses
another version and does not misread it, and the writer's id. Times are of the writer's monotonic clock; a reader converts them
by `sent` and the store's time of the entry (`clock.py`).

Structs lose their types in modules that mypyc compiles: this one is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from gateway.cluster.messages import Batch, decode

VERSION: Final = b"1"  # raise it when the meaning of an envelope or an event changes
MAX_ENVELOPE_BYTES: Final = 2 << 20
MAX_ITEMS: Final = 4096
EVERYTHING_S: Final = 1e9  # period of a complete snapshot

ALL: Final = 0  # no router has this number

VERSION_FIELD: Final = b"v"
FORMAT_FIELD: Final = b"f"  # `snapshots.snapshot.format_of`
GATEWAY_FIELD: Final = b"g"
ENVELOPE_FIELD: Final = b"e"

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Source = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # a router of that gateway


class PublishedBatch(Struct, frozen=True, array_like=True, tag=1):
    """The next events of a router."""

    source: Source
    batch: Batch


class Reset(Struct, frozen=True, array_like=True, tag=2):
    """Closes the published bookings of a router, which has ended or whose events were lost. ALL: of each router."""

    source: Source


class ResyncRequest(Struct, frozen=True, array_like=True, tag=3):
    """Asks gateway `of` to publish its open bookings, and to offer a snapshot of the last since_s seconds (0: none)."""

    of: Id
    since_s: Annotated[float, Meta(ge=0, le=EVERYTHING_S)]


class SnapshotOffer(Struct, frozen=True, array_like=True, tag=4):
    """Announces a snapshot in the store. key: of the store; "": the sender knows nothing. to: the gateway that asked; "": all.
    at: time of the snapshot. first: it is complete, for the start of the other gateway.
    """

    to: Annotated[str, Meta(max_length=64)]
    key: Annotated[str, Meta(max_length=256)]
    at: float
    first: bool = False


class Goodbye(Struct, frozen=True, array_like=True, tag=5):
    """Announces the end of the gateway."""


Item = PublishedBatch | Reset | ResyncRequest | SnapshotOffer | Goodbye


class Envelope(Struct, frozen=True, array_like=True):
    """Items of one gateway. seq: number of the envelope, from 1. host: for people. Without items it is a heartbeat."""

    seq: Annotated[int, Meta(ge=1)]
    sent: float
    host: Annotated[str, Meta(max_length=256)]
    items: Annotated[tuple[Item, ...], Meta(max_length=MAX_ITEMS)]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    return _ENCODER.encode(envelope)


def decode_envelope(data: bytes) -> Envelope:
    """Raises MessageError."""
    envelope: Envelope = decode(_DECODER, data)
    return envelope
