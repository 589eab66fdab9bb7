"""The messages between the supervisor's hub and its workers, in both directions.

A worker is named by the number that the hub gave it. The frame (`channel.py`) says which worker a message comes from, or is
for. Questions and messages of features are bytes with a topic (`cluster/topics.py`); the control plane's own topics are below.

    Ask, Execute    worker ──► hub ──► all workers, the asker too    the number is the asker's own
                        asker ◄── hub                                an Answer at once: the workers that are asked
    Answer          worker ──► hub ──► asker                         has the question's number
    Publish         worker ──► hub ──► all other workers

A worker that has joined is a Want of its number, one that has ended a Reset.

Structs lose their types in modules that mypyc compiles: this one is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.cluster.messages import Batch, Command, Reset, Want, decode
from gateway.config.schema import AUTO_ENGINE, KeyConfig, TlsConfig
from gateway.fleet.membership import MAX_WEIGHT

# -- worker -> hub


class Heartbeat(Struct, frozen=True, array_like=True, tag=5):
    """The worker lives. state: SERVING: it accepts requests from now on. STOPPING: it drains: it no longer counts as serving,
    and others take its new connections until its successor serves.
    """

    state: Literal["", "serving", "stopping"] = ""


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


# -- hub -> worker


class Welcome(Struct, frozen=True, array_like=True, tag=6):
    """The first message to a worker, whose number is in the frame. config: as `encode_config` makes it."""

    config: bytes


class Current(Struct, frozen=True, array_like=True, tag=7):
    """What the worker begins with has been sent: a snapshot, if there is one, and the events that it lacks."""


# -- topics: worker -> hub -> workers, and answers back


class Ask(Struct, frozen=True, array_like=True, tag=11):
    """Answer with an Answer of this number."""

    number: int
    topic: str
    question: bytes = b""


class Execute(Struct, frozen=True, array_like=True, tag=12):
    """Likewise, once the command is executed. The hub ignores it later than `until`."""

    number: int
    command: Command
    until: float


class Answer(Struct, frozen=True, array_like=True, tag=13):
    """Of the hub: `encode_answers`. topic: of the question. error: why a command was refused, or None. internal: it failed by
    a bug.
    """

    number: int
    answer: bytes = b""
    topic: str = ""
    error: str | None = None
    internal: bool = False


class Publish(Struct, frozen=True, array_like=True, tag=14):
    """To all other workers; but for those of the topics below."""

    topic: str
    message: bytes = b""


# -- topics of the control plane

COUNTERS: Final = "counters"
"""A snapshot of all counters of a worker (`exposition.pack`): the answer to a question, and published for the hub."""
MEMBERS: Final = "members"
"""For the hub, and for workers that are started later: a `Found`."""
LEAVING: Final = "leaving"
"""Of the hub: the whole gateway will go down, clients should use others."""


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


class Found(Struct, frozen=True, array_like=True):
    """All replicas that a source has found."""

    source: str
    members: tuple[FoundMember, ...]


SnapshotPart = SnapshotBegin | SnapshotChunk | SnapshotEnd
Topical = Ask | Execute | Answer | Publish
FromWorker = Batch | Reset | Heartbeat | Topical | SnapshotPart | SnapshotRestored
FromHub = Batch | Reset | Want | Welcome | Current | Topical | SnapshotPart | CollectSnapshot
Message = FromWorker | FromHub

_ENCODER: Final = msgspec.msgpack.Encoder()
_FROM_WORKER: Final = msgspec.msgpack.Decoder(FromWorker)
_FROM_HUB: Final = msgspec.msgpack.Decoder(FromHub)
_FOUND: Final = msgspec.msgpack.Decoder(Found)
_ANSWERS: Final = msgspec.msgpack.Decoder(dict[int, bytes])


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


def encode_found(found: Found) -> bytes:
    return _ENCODER.encode(found)


def decode_found(data: bytes) -> Found:
    """Raises MessageError."""
    found: Found = decode(_FOUND, data)
    return found


def encode_answers(answers: Mapping[int, bytes]) -> bytes:
    """The hub's own answer as that of HUB; and of each worker that is asked, the answer that counts if it gives none."""
    return _ENCODER.encode(answers)


def decode_answers(data: bytes) -> dict[int, bytes]:
    """Raises MessageError."""
    answers: dict[int, bytes] = decode(_ANSWERS, data)
    return answers
