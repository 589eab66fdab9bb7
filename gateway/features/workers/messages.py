"""The messages between the supervisor's hub and its workers, in both directions.

A worker is identified by its number at the hub. The frame (`channel.py`) contains the sender or the receiver of a message.
Questions and messages of features are bytes with a topic (`cluster/topics.py`); the control plane's own topics are below.

    Ask, Execute    worker ──► hub ──► all workers, the asker too    the number is the asker's
                        asker ◄── hub                                at once a TopicAnswer: the workers that are asked
    TopicAnswer     worker ──► hub ──► asker                         has the question's number
    Publish         worker ──► hub ──► all other workers

A new worker is announced by a Want with its number, an ended one by a Reset.

Structs lose their types in modules compiled by mypyc, so this module is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.cluster.messages import Command, EventBatch, Reset, Want, decode
from gateway.config.kinds import MAX_WEIGHT
from gateway.config.schema import AUTO_ENGINE, KeyConfig, TlsConfig

# -- worker -> hub


class Heartbeat(Struct, frozen=True, array_like=True, tag=5):
    """The worker is alive. state: SERVING: it accepts requests from now on. STOPPING: it drains. It no longer counts as
    serving, and other workers take its new connections until its successor serves.
    """

    state: Literal["", "serving", "stopping"] = ""


class SnapshotPart(Struct, frozen=True, array_like=True, tag=17):
    """The next frame of a snapshot (`features/snapshots/frames.py`). number: of the Ask that it answers, or a number of the
    hub: then the worker restores the snapshot, and sends a TopicAnswer.
    """

    number: int
    frame: bytes


# -- hub -> worker


class Welcome(Struct, frozen=True, array_like=True, tag=6):
    """The first message to a worker, whose number is in the frame. config: by `encode_config`."""

    config: bytes


class CatchUpEnd(Struct, frozen=True, array_like=True, tag=7):
    """The worker is up to date: a snapshot, if there is one, and the events since then have been sent."""


# -- topics: worker -> hub -> workers, and answers back


class Ask(Struct, frozen=True, array_like=True, tag=11):
    """A question, to be answered by a TopicAnswer with this number."""

    number: int
    topic: str
    question: bytes = b""


class Execute(Struct, frozen=True, array_like=True, tag=12):
    """A command, to be executed and answered by a TopicAnswer with this number. The hub ignores it after `until`."""

    number: int
    command: Command
    until: float


class TopicAnswer(Struct, frozen=True, array_like=True, tag=13):
    """The answer to a question or a command. The hub's answer has, by number, the default answer of each worker if it sends
    none, and its own answer under HUB. topic: of the question. error: why a command was refused, or None. internal: it failed
    because of a bug.
    """

    number: int
    answer: bytes = b""
    topic: str = ""
    error: str | None = None
    internal: bool = False


class Publish(Struct, frozen=True, array_like=True, tag=14):
    """A message to all other workers, except for the topics below."""

    topic: str
    message: bytes = b""


# -- topics of the control plane

COUNTERS: Final = "counters"
"""A snapshot of all counters of a worker (`exposition.pack`): the answer to a question, and published for the hub."""
MEMBERS: Final = "members"
"""For the hub, and for workers that start later: `SourceMembers`."""
SNAPSHOT: Final = "snapshot"
"""A question of the hub: (since_s, most_bytes) of `Knowledge.collect`. The answer is a series of SnapshotParts, or a
TopicAnswer if there is no snapshot. It cancels an earlier question."""
LEAVING: Final = "leaving"
"""Published by the hub: the whole gateway will shut down, and clients should use others."""


class SourceMember(Struct, frozen=True, array_like=True):
    """A `fleet.membership.Member`."""

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


class SourceMembers(Struct, frozen=True, array_like=True):
    """All replicas found by a source."""

    source: str
    members: tuple[SourceMember, ...]


Topical = Ask | Execute | TopicAnswer | Publish
FromWorker = EventBatch | Reset | Heartbeat | Topical | SnapshotPart
FromHub = EventBatch | Reset | Want | Welcome | CatchUpEnd | Topical | SnapshotPart
Message = FromWorker | FromHub

_ENCODER: Final = msgspec.msgpack.Encoder()
_FROM_WORKER: Final = msgspec.msgpack.Decoder(FromWorker)
_FROM_HUB: Final = msgspec.msgpack.Decoder(FromHub)
_FOUND: Final = msgspec.msgpack.Decoder(SourceMembers)
_ANSWERS: Final = msgspec.msgpack.Decoder(dict[int, bytes])
_WANTED: Final = msgspec.msgpack.Decoder(tuple[float, int])


def encode(message: object) -> bytes:
    """A message, or the content of a message."""
    return _ENCODER.encode(message)


def from_worker(data: bytes) -> Message:
    """A message that the hub receives. Raises MessageError."""
    message: Message = decode(_FROM_WORKER, data)
    return message


def from_hub(data: bytes) -> Message:
    """A message that a worker receives. Raises MessageError."""
    message: Message = decode(_FROM_HUB, data)
    return message


def decode_members(data: bytes) -> SourceMembers:
    """Raises MessageError."""
    found: SourceMembers = decode(_FOUND, data)
    return found


def decode_answers(data: bytes) -> dict[int, bytes]:
    """Raises MessageError."""
    answers: dict[int, bytes] = decode(_ANSWERS, data)
    return answers


def decode_wanted(data: bytes) -> tuple[float, int]:
    """Raises MessageError."""
    wanted: tuple[float, int] = decode(_WANTED, data)
    return wanted
