"""The records of a snapshot, and their encoding: msgpack arrays that begin with the record's kind.

Replicas are numbered from 0 in the order of their `LearnedRecord`s; prefixes from 1 in the order of their `HeldRecord`s. Times
are ages, in seconds before the moment of the snapshot: they mean the same by every clock. Decoding checks types and bounds;
`restore.py` checks the references between records.

Structs lose their types in modules compiled by mypyc: this module is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from router.learning.objects import MAX_OBJECTS
from router.learning.promises import MAX_PROMISES
from router.learning.scales import MAX_SCALES
from router.learning.sessions import MAX_CLIENTS, MAX_HOLDERS, MAX_NEW, MAX_RETURNED
from router.pricing.replication import MAX_PREFIXES
from router.types import KEY_BYTES

MAX_REPLICAS: Final = 1 << 16
MAX_HELD: Final = 1 << 20
MAX_PATH_BLOCKS: Final = 1 << 20
MAX_AT_ONCE: Final = 1024  # records encoded together: some milliseconds
MAX_TOTAL: Final = MAX_REPLICAS + MAX_HELD + MAX_OBJECTS + MAX_PROMISES + MAX_SCALES + MAX_NEW + MAX_RETURNED + MAX_PREFIXES + 1
MAX_TEXT: Final = 1024  # characters of a name
MAX_AGE_S: Final = 1e9
LEAST, MOST = 1e-9, 1e15  # of a learned sum

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Blocks = Annotated[int, Meta(ge=0, le=MAX_PATH_BLOCKS)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
Age = Annotated[float, Meta(ge=0, le=MAX_AGE_S)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Keys = Annotated[bytes, Meta(max_length=MAX_PATH_BLOCKS * KEY_BYTES)]


class LearnedRecord(Struct, frozen=True, array_like=True, gc=False, tag=0):
    """The learned state of a replica. rate: the two sums of `ReplicaLoad.rate`, None without bookings. answered, answered_age:
    of `ReplicaLoad`. capacity, held, hits: of `Evidence`.
    """

    name: Text
    rate: tuple[Positive, Positive] | None
    answered: Amount
    answered_age: Age
    capacity: Annotated[int, Meta(ge=1, le=1 << 60)] | None
    held: Count
    hits: bool


class HeldRecord(Struct, frozen=True, array_like=True, gc=False, tag=1):
    """A replica holds a prefix: the first `shared` blocks of prefix number `base` (0: of none), and then `keys`.

    weight: of a block.
    """

    replica: Count
    base: Count
    shared: Blocks
    keys: Keys
    weight: Annotated[int, Meta(ge=1, le=1 << 60)]
    age: Age


class ScaleRecord(Struct, frozen=True, array_like=True, gc=False, tag=2):
    """The two sums of a model's scale (`Scales`)."""

    name: Text
    units: Positive
    tokens: Positive


class SessionEntry(Struct, frozen=True, array_like=True, gc=False, tag=3):
    """holders: (replica, units, age), as in `Session`. share: (unseen, found)."""

    number: int
    returned: bool
    holders: Annotated[tuple[tuple[Count, Count, Age], ...], Meta(min_length=1, max_length=MAX_HOLDERS)]
    share: tuple[Amount, Amount] | None


class PromiseEntry(Struct, frozen=True, array_like=True, gc=False, tag=4):
    """A promise (`Promise`). left_s: until its end."""

    number: int
    replica: Count
    blocks: Annotated[int, Meta(ge=1, le=MAX_PATH_BLOCKS)]
    age: Age
    left_s: Age


class ObjectEntry(Struct, frozen=True, array_like=True, gc=False, tag=5):
    """An object (`Objects`)."""

    number: int
    replica: Count
    model: Text
    age: Age


class RentEntry(Struct, frozen=True, array_like=True, gc=False, tag=6):
    """Rent of a prefix (`Rents`)."""

    prefix: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    seconds: Amount


class GeneralRecord(Struct, frozen=True, array_like=True, gc=False, tag=7):
    """turn_gap: `Ledger.turn_gap`. shares: `Sessions.clients`. lifetime: the two sums of `RadixTrie.lifetime`, and its
    half-life.
    """

    turn_gap: Positive
    shares: Annotated[tuple[tuple[int, Amount, Amount], ...], Meta(max_length=MAX_CLIENTS)]
    lifetime: tuple[Positive, Positive, Positive] | None


Record = LearnedRecord | HeldRecord | ScaleRecord | SessionEntry | PromiseEntry | ObjectEntry | RentEntry | GeneralRecord


class RecordError(ValueError):
    """These bytes are not the records of a snapshot; the text is the reason."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Annotated[list[Record], Meta(max_length=MAX_AT_ONCE)])


def encode(records: Sequence[Record]) -> bytes:
    return _ENCODER.encode(records)


def decode(data: bytes) -> list[Record]:
    """The records. Raises RecordError."""
    try:
        records: list[Record] = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordError(f"not a list of records: {error}") from error
    return records
