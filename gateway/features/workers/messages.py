"""The messages between the supervisor's hub and its workers, in both directions.

A worker is named by the number that the hub gave it. A question (Execute, Scrape, Examine) has a number of its asker's own; an
answer brings it back. The frame (`channel.py`) says which worker a message comes from, or is for.

Structs lose their types in modules that mypyc compiles: this one is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gateway.cluster.messages import Batch, Command, SharingState, decode
from gateway.config.schema import AUTO_ENGINE, KeyConfig, TlsConfig
from gateway.fleet.membership import MAX_WEIGHT

# -- worker -> hub -> the other workers


class Publish(Struct, frozen=True, array_like=True, tag=1):
    """A router's events."""

    batch: Batch


class Replace(Struct, frozen=True, array_like=True, tag=2):
    """Events of a router were dropped; these are its open bookings, and it has no others."""

    batch: Batch


class Spent(Struct, frozen=True, array_like=True, tag=30):
    """Totals of what keys have used, of the process of this name (`features/keys/limits/limiter.py`). whole: all of them, from or
    for a new worker.
    """

    process: str
    whole: bool
    totals: tuple[tuple[str, int, int, int, tuple[tuple[int, int], ...]], ...]


# -- worker -> hub


class Counters(Struct, frozen=True, array_like=True, tag=3):
    """A snapshot of all counters of a worker (`exposition.pack`)."""

    page: bytes


class Serving(Struct, frozen=True, array_like=True, tag=4):
    """The worker accepts requests."""


class Stopping(Struct, frozen=True, array_like=True, tag=15):
    """The worker drains: it no longer counts as serving, and others take its new connections until its successor does."""


class Alive(Struct, frozen=True, array_like=True, tag=5):
    """A heartbeat."""


class FoundMember(Struct, frozen=True, array_like=True):
    """As `fleet.membership.Member` has it."""

    name: str
    url: str
    pool: str
    capacity_tokens: int | None
    draining: bool
    instance: str
    key: KeyConfig | None = None
    tls: TlsConfig | None = None
    engine: str = AUTO_ENGINE
    model: str = ""
    weight: int = MAX_WEIGHT
    addresses: tuple[str, ...] = ()


# -- a snapshot: hub -> worker, to be restored; worker -> hub, if that asked with CollectSnapshot, whose number it has then


class SnapshotBegin(Struct, frozen=True, array_like=True, tag=17):
    """Its chunks follow, and SnapshotEnd. header: `encode_header`. at: its moment, by the machine's clock. source: as in
    `Snapshot`.
    """

    number: int
    header: bytes
    at: float
    source: str = ""


class SnapshotChunk(Struct, frozen=True, array_like=True, tag=18):
    """The next chunk."""

    number: int
    chunk: bytes


class SnapshotEnd(Struct, frozen=True, array_like=True, tag=19):
    """It is complete. known: False if the worker has nothing to be kept. error: why it could not be collected, or None."""

    number: int
    known: bool = True
    error: str | None = None


class CollectSnapshot(Struct, frozen=True, array_like=True, tag=20):
    """Hub -> worker: send a snapshot of what was used in the last since_s seconds. An earlier one is not wanted any more."""

    number: int
    since_s: float
    most_bytes: int


class SnapshotRestored(Struct, frozen=True, array_like=True, tag=24):
    """Worker -> hub: the snapshot of this number is restored, or was of no use."""

    number: int


# -- worker -> hub -> workers that are started later


class Found(Struct, frozen=True, array_like=True, tag=16):
    """All replicas that a source has found."""

    source: str
    members: tuple[FoundMember, ...]


# -- hub -> worker


class Welcome(Struct, frozen=True, array_like=True, tag=6):
    """The first message to a worker, whose number is in the frame. config: as `encode_config` makes it."""

    config: bytes


class Current(Struct, frozen=True, array_like=True, tag=7):
    """What the worker begins with has been sent: a snapshot, if there is one, and the events that it lacks."""


class Joined(Struct, frozen=True, array_like=True, tag=8):
    """A worker has joined, and does not know what the others have open. Its number is in the frame."""


class Gone(Struct, frozen=True, array_like=True, tag=9):
    """A worker has ended. Its number is in the frame."""


class Forwarded(Struct, frozen=True, array_like=True, tag=10):
    """Question `number` has gone to these workers. snapshots: their last counters, empty where there are none yet."""

    number: int
    snapshots: dict[int, bytes]


class Leaving(Struct, frozen=True, array_like=True, tag=23):
    """The whole gateway will go down: clients should use others."""


# -- worker -> hub, and back


class AskSharing(Struct, frozen=True, array_like=True, tag=21):
    """Answer with a Sharing."""

    number: int


class Sharing(Struct, frozen=True, array_like=True, tag=22):
    """How the exchange with other gateways goes; None: there is to be none."""

    number: int
    state: SharingState | None


# -- worker -> hub -> all workers, the asker too


class Scrape(Struct, frozen=True, array_like=True, tag=11):
    """Answer with a Scraped."""

    number: int


class Record(Struct, frozen=True, array_like=True, tag=25):
    """Answer with a Recorded. cursors, share: as in `Recording.page`."""

    number: int
    cursors: dict[str, int]
    share: float


class Examine(Struct, frozen=True, array_like=True, tag=27):
    """Answer with an Examined, and watch from now on."""

    number: int


class Look(Struct, frozen=True, array_like=True, tag=41):
    """Answer with a Looked. question: of a watcher, as in `LiveView.answer`."""

    number: int
    question: bytes


class Execute(Struct, frozen=True, array_like=True, tag=12):
    """Answer with an Executed. The hub ignores it later than `until`."""

    number: int
    command: Command
    until: float


# -- worker -> hub -> the asker, whose number is in the frame on its way to the hub; after it, that of the worker


class Scraped(Struct, frozen=True, array_like=True, tag=13):
    """The counters, as in Counters."""

    number: int
    page: bytes


class Executed(Struct, frozen=True, array_like=True, tag=14):
    """error: why the command was refused, or None. internal: it failed by a bug."""

    number: int
    error: str | None = None
    internal: bool = False


class Recorded(Struct, frozen=True, array_like=True, tag=26):
    """The next rows, as `Page.encode` makes them."""

    number: int
    page: bytes


class Examined(Struct, frozen=True, array_like=True, tag=28):
    """What the doctor's watch has seen (`Watched`)."""

    number: int
    since: float | None
    records: Sequence[tuple[float, bytes]]


class Looked(Struct, frozen=True, array_like=True, tag=42):
    """The answer of `LiveView`."""

    number: int
    answer: bytes


SnapshotPart = SnapshotBegin | SnapshotChunk | SnapshotEnd
FromWorker = (
    Publish
    | Spent
    | Replace
    | Counters
    | Serving
    | Stopping
    | Alive
    | Found
    | AskSharing
    | Scrape
    | Record
    | Examine
    | Look
    | Execute
    | Scraped
    | Recorded
    | Examined
    | Looked
    | Executed
    | SnapshotPart
    | SnapshotRestored
)
FromHub = (
    Publish
    | Spent
    | Replace
    | Welcome
    | Current
    | Joined
    | Gone
    | Leaving
    | Forwarded
    | Sharing
    | Found
    | Scrape
    | Record
    | Examine
    | Look
    | Execute
    | Scraped
    | Recorded
    | Examined
    | Looked
    | Executed
    | SnapshotPart
    | CollectSnapshot
)
Message = FromWorker | FromHub

_ENCODER: Final = msgspec.msgpack.Encoder()
_FROM_WORKER: Final = msgspec.msgpack.Decoder(FromWorker)
_FROM_HUB: Final = msgspec.msgpack.Decoder(FromHub)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def from_worker(data: bytes) -> Message:
    """A message that the hub receives. Raises MessageError."""
    message: Message = decode(_FROM_WORKER, data)
    return message


def from_hub(data: bytes) -> Message:
    """A message that a worker receives. Raises MessageError."""
    message: Message = decode(_FROM_HUB, data)
    return message
