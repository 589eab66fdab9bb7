"""Messages between the processes of a gateway, for any transport: commands, configurations, batches of routing events.

All messages are msgpack, decoded into the types below; other bytes are a MessageError. (Never pickle: the same messages are
meant to cross machines, and unpickling executes code.) Configurations go through `encode_config` and `decode_config` only.

Structs lose their types in modules compiled by mypyc: this module is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from gateway.config.parse import ConfigError
from gateway.config.schema import AddedReplica, Config

EVERYTHING_S: Final = 1e9  # longer than any gateway's index has existed


class MessageError(ValueError):
    """These bytes are no valid message; the text is the reason."""


# -- configurations


def encode_config(config: Config) -> bytes:
    return msgspec.msgpack.encode(config)


def decode_config(kind: type[Config], data: bytes) -> Config:
    """kind: as the sender has it. Raises MessageError."""
    config: Config = decode(msgspec.msgpack.Decoder(kind), data)
    return config


# -- commands


class Drain(Struct, frozen=True, tag="drain"):
    """Stop or resume new requests to a replica. Nothing happens if there is no such replica."""

    name: str
    on: bool


class Join(Struct, frozen=True, tag="join"):
    """An operator adds a replica to a pool."""

    pool: str
    replica: AddedReplica


class Leave(Struct, frozen=True, tag="leave"):
    """An operator removes an added replica."""

    name: str


class Reconfigure(Struct, frozen=True, tag="reconfigure"):
    """Set the configuration."""

    encoded: bytes

    @classmethod
    def to(cls, config: Config) -> Reconfigure:
        return cls(encode_config(config))

    def config(self, kind: type[Config]) -> Config:
        """Raises MessageError."""
        return decode_config(kind, self.encoded)


class Perform(Struct, frozen=True, tag="perform"):
    """A feature executes a command of its own (`Topics.executes`)."""

    topic: str
    argument: bytes = b""


class RejectConfig(Struct, frozen=True, tag="reject_config"):
    """Report a new configuration that is invalid."""

    why: str


Command = Drain | Join | Leave | Reconfigure | RejectConfig | Perform


# -- routing events: of one router, named by the frame or the envelope


class EventBatch(Struct, frozen=True, array_like=True, tag=1):
    """Events of one router in their order (`router.events.encode`). since: booking time of the oldest, by the shared clock."""

    since: float
    events: bytes


class Reset(Struct, frozen=True, array_like=True, tag=2):
    """All published bookings of a router are closed: its events were lost, or it has ended."""

    ended: bool = False


class Want(Struct, frozen=True, array_like=True, tag=3):
    """A router lacks the open bookings of others: they should publish them. of: the gateway that is asked, "": all processes of
    this one. since_s: ask for a snapshot of these last seconds, too; 0: none.
    """

    of: Annotated[str, Meta(max_length=64)] = ""
    since_s: Annotated[float, Meta(ge=0, le=EVERYTHING_S)] = 0.0


def decode(decoder: Any, data: bytes) -> Any:
    """Decodes with a msgspec decoder. Raises MessageError."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        raise MessageError(str(error)) from error
