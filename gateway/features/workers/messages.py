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

from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.cluster.messages import Command, EventBatch, Reset, Want, decode
from gateway.config.schema import AUTO_ENGINE, KeyConfig, TlsConfig
from gateway.fleet.membership import MAX_WEIGHT

# -- worker -> hub


class Heartbeat(Struct, frozen=True, array_like=True, tag=5):
    """The worker lives. state: SERVING: it accepts requests from now on. STOPPING: it drains: it no longer counts as serving,
    and others take its new connections until its successor serves.
    """

    state: Literal["", "serving", "stopping"] = ""


class Part(Struct, frozen=True, array_like=True, tag=17):
    """The next frame of a snapshot (`features/snapshots/frames.py`). number: of the Ask that it answers, or the hub's own: then
    the worker restores the snapshot, and gives an Answer.
    """

    number: int
    frame: bytes


# -- hub -> worker


class Welcome(Struct, frozen=True, array_like=True, tag=6):
    """The first message to a worker, whose number is in the frame. config: as `encode_config` makes it."""

    config: bytes


class Current(Struct, frozen=True, array_like=True, tag=7):
    """The worker is up to date: a snapshot, if there is one, and the events since then have been sent."""


# -- topics: worker -> hub -> workers, and answers back


class Ask(Struct, frozen=True, array_like=True, tag=11):
    """Answer with an Answer of this number."""

    number: int
    topic: str
    question: bytes = b""


class Execute(Struct, frozen=True, array_like=True, tag=12):
    """Execute a command, then answer with an Answer of this number. The hub ignores it later than `until`."""

    number: int
    command: Command
    until: float


class TopicAnswer(Struct, frozen=True, array_like=True, tag=13):
    """The answer to a question or a command. That of the hub has, by number, each worker's answer that counts if it gives
    none, and as HUB's its own. topic: of the question. error: the reason why a command was refused, or None. internal: it
    failed by a bug.
    """

    number: int
    answer: bytes = b""
    topic: str = ""
    error: str | None = None
    internal: bool = False


class Publish(Struct, frozen=True, array_like=True, tag=14):
    """A message for all other workers, but for the topics below."""

    topic: str
    message: bytes = b""


# -- topics of the control plane

COUNTERS: Final = "counters"
"""A snapshot of all counters of a worker (`exposition.pack`): the answer to a question, and published for the hub."""
MEMBERS: Final = "members"
"""For the hub, and for workers that are started later: `FoundMembers`."""
SNAPSHOT: Final = "snapshot"
"""Asked by the hub: (since_s, most_bytes) of `Knowledge.collect`. The answer are Parts; an Answer if there is no snapshot. An
earlier question is over."""
LEAVING: Final = "leaving"
"""Published by the hub: the whole gateway will go down, clients should use others."""


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


class FoundMembers(Struct, frozen=True, array_like=True):
    """All replicas that a source has found."""

    source: str
    members: tuple[FoundMember, ...]


Topical = Ask | Execute | TopicAnswer | Publish
FromWorker = EventBatch | Reset | Heartbeat | Topical | Part
FromHub = EventBatch | Reset | Want | Welcome | Current | Topical | Part
Message = FromWorker | FromHub

_ENCODER: Final = msgspec.msgpack.Encoder()
_FROM_WORKER: Final = msgspec.msgpack.Decoder(FromWorker)
_FROM_HUB: Final = msgspec.msgpack.Decoder(FromHub)
_FOUND: Final = msgspec.msgpack.Decoder(FoundMembers)
_ANSWERS: Final = msgspec.msgpack.Decoder(dict[int, bytes])
_WANTED: Final = msgspec.msgpack.Decoder(tuple[float, int])


def encode(message: object) -> bytes:
    """A message, or the content of one."""
    return _ENCODER.encode(message)


def from_worker(data: bytes) -> Message:
    """A message that the hub receives. Raises MessageError."""
    message: Message = decode(_FROM_WORKER, data)
    return message


def from_hub(data: bytes) -> Message:
    """A message that a worker receives. Raises MessageError."""
    message: Message = decode(_FROM_HUB, data)
    return message


def decode_found(data: bytes) -> FoundMembers:
    """Raises MessageError."""
    found: FoundMembers = decode(_FOUND, data)
    return found


def decode_answers(data: bytes) -> dict[int, bytes]:
    """Raises MessageError."""
    answers: dict[int, bytes] = decode(_ANSWERS, data)
    return answers


def decode_wanted(data: bytes) -> tuple[float, int]:
    """Raises MessageError."""
    wanted: tuple[float, int] = decode(_WANTED, data)
    return wanted
