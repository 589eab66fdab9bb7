"""Messages between gateways through the store. All of it is msgpack, decoded into the types below.

Each gateway writes envelopes into one stream, with the same messages about routers that the workers of a gateway exchange. The
entry's fields say which version and format it has, so that one of another version is refused and not misread, and which
gateway wrote it. Times are of the writer's monotonic clock; with `sent`, and the store's time of the entry, a reader translates
them (`clock.py`).

Structs lose their types in modules that mypyc compiles: this one is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from gateway.cluster.messages import EventBatch, Reset, Want, decode

VERSION: Final = b"2"  # to be raised when an envelope or an event changes its meaning
MAX_ENVELOPE_BYTES: Final = 2 << 20
MAX_ITEMS: Final = 4096

ALL: Final = 0  # the gateway itself: no router has this number

VERSION_FIELD: Final = b"v"
FORMAT_FIELD: Final = b"f"  # `snapshots.snapshot.format_of`
GATEWAY_FIELD: Final = b"g"
ENVELOPE_FIELD: Final = b"e"

Source = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # a router of that gateway


class Offer(Struct, frozen=True, array_like=True, tag=18):
    """A snapshot is in the store. key: its own; "": there is nothing to be known. to: the gateway that wanted it; "": it is for
    all. at: its moment. first: everything was wanted, to begin with.
    """

    to: Annotated[str, Meta(max_length=64)]
    key: Annotated[str, Meta(max_length=256)]
    at: float
    first: bool = False


Kind = EventBatch | Reset | Want | Offer
Item = tuple[Source, Kind]
"""A message of a router, or of the gateway: then the source is ALL. A Reset of ALL is of all its routers; if it says that they
have ended, so has the gateway.
"""


class Envelope(Struct, frozen=True, array_like=True):
    """seq: counts the envelopes of a gateway, from 1; one without items is a heartbeat. host: for people."""

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
