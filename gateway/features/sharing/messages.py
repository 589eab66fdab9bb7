"""Messages between gateways through the store, encoded as msgpack.

Each gateway writes envelopes into one stream, with the same messages about routers as the workers of a gateway exchange. The
fields of an entry contain its version and format, so that another version is refused and not misread, and the gateway that
wrote it. Times are of the writer's monotonic clock. With `sent`, and the store's time of the entry, a reader converts them
(`clock.py`).

Structs lose their types in modules compiled by mypyc, so this module is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from gateway.cluster.messages import EventBatch, Reset, Want, decode

VERSION: Final = b"2"  # to be incremented when the meaning of an envelope or an event changes
MAX_ENVELOPE_BYTES: Final = 2 << 20
MAX_ITEMS: Final = 4096

ALL: Final = 0  # the source number of the gateway itself; no router has it

VERSION_FIELD: Final = b"v"
FORMAT_FIELD: Final = b"f"  # `snapshots.snapshot.format_of`
GATEWAY_FIELD: Final = b"g"
ENVELOPE_FIELD: Final = b"e"

Source = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # a router of the writing gateway


class Offer(Struct, frozen=True, array_like=True, tag=18):
    """A snapshot in the store. key: its key; "": the gateway knows no prefixes. to: the gateway that wanted it; "": for all.
    at: the time of the snapshot. first: it answers a want of everything, at a start.
    """

    to: Annotated[str, Meta(max_length=64)]
    key: Annotated[str, Meta(max_length=256)]
    at: float
    first: bool = False


Kind = EventBatch | Reset | Want | Offer
Item = tuple[Source, Kind]
"""A message of a router or, with source ALL, of the gateway. A Reset with ALL concerns all its routers; with `ended`, the
gateway has ended.
"""


class Envelope(Struct, frozen=True, array_like=True):
    """A batch of messages. seq: number of the envelope, from 1, per gateway. Without items it is a heartbeat. host: host name,
    for operators.
    """

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
