"""Messages between the processes of a gateway, whatever carries them: commands, configurations, batches of routing events.

All of it is msgpack, decoded into the types below; other bytes are a MessageError. (Never pickle: the same messages are meant
to cross machines, and unpickling executes code.) Configurations go through `encode_config` and `decode_config` only.

Structs lose their types in modules that mypyc compiles: this one is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.config.parse import ConfigError
from gateway.config.schema import AddedReplica, Config


class MessageError(ValueError):
    """These bytes are no message; its text is the reason."""


# -- configurations


def encode_config(config: Config) -> bytes:
    return msgspec.msgpack.encode(config)


def decode_config(data: bytes) -> Config:
    """Raises MessageError."""
    config: Config = decode(_CONFIG, data)
    return config


# -- commands


class Drain(Struct, frozen=True, tag="drain"):
    """A replica gets no new requests, or some again. Nothing happens if there is no such replica."""

    name: str
    on: bool


class Join(Struct, frozen=True, tag="join"):
    """An operator adds a replica to a pool."""

    pool: str
    replica: AddedReplica


class Leave(Struct, frozen=True, tag="leave"):
    """A replica that an operator has added is removed."""

    name: str


class Reconfigure(Struct, frozen=True, tag="reconfigure"):
    """This is the configuration from now on."""

    encoded: bytes

    @classmethod
    def to(cls, config: Config) -> Reconfigure:
        return cls(encode_config(config))

    @property
    def config(self) -> Config:
        """Decoded at each call. Raises MessageError."""
        return decode_config(self.encoded)


class RefreshKeys(Struct, frozen=True, tag="refresh_keys"):
    """An operator has changed a key: read what is new."""


class RejectConfig(Struct, frozen=True, tag="reject_config"):
    """There is another configuration, but it is invalid."""

    why: str


Command = Drain | Join | Leave | Reconfigure | RejectConfig | RefreshKeys


# -- routing


class Batch(Struct, frozen=True, array_like=True):
    """Events of one router in their order (`router.events.encode`). since: when the oldest was booked, by the shared clock."""

    since: float
    events: bytes


# -- sharing


class OtherGateway(Struct, frozen=True):
    """Another gateway that shares with this one. seen_for_s: since its first envelope; silent_for_s: since its last one."""

    gateway: str
    host: str
    seen_for_s: float
    silent_for_s: float


class RefusedGateway(Struct, frozen=True):
    """Writes what is not taken in here. reason: as the metric has it. error: in words."""

    gateway: str
    reason: str
    error: str


class SharingState(Struct, frozen=True):
    """Of the exchange with other gateways. gateway: the id of this one. problem: why it does not reach the store; "" if it does
    or has not tried yet. gateways: the others that are there. refused: those that write now, but are not followed.
    """

    gateway: str
    cluster: str
    up: bool
    problem: str
    gateways: tuple[OtherGateway, ...]
    refused: tuple[RefusedGateway, ...]


_CONFIG: Final = msgspec.msgpack.Decoder(Config)


def decode(decoder: Any, data: bytes) -> Any:
    """By a msgspec decoder. Raises MessageError."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        raise MessageError(str(error)) from error
