"""State of the exchange with other gateways, for operators.

Structs lose their types in modules compiled by mypyc, so this module is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from gateway.cluster.messages import decode

TOPIC: Final = "sharing"


class OtherGateway(Struct, frozen=True):
    """Another gateway that shares with this one. seen_for_s: since its first envelope; silent_for_s: since its last one."""

    gateway: str
    host: str
    seen_for_s: float
    silent_for_s: float


class RefusedGateway(Struct, frozen=True):
    """A gateway whose entries are refused. reason: the label of the metric. error: the explanation."""

    gateway: str
    reason: str
    error: str


class SharingState(Struct, frozen=True):
    """State of the exchange with other gateways. gateway: the id of this one. problem: why the store is not connected; "" if it
    is, or before the first attempt. gateways: the live ones. refused: gateways whose recent entries were refused.
    """

    gateway: str
    cluster: str
    up: bool
    problem: str
    gateways: tuple[OtherGateway, ...]
    refused: tuple[RefusedGateway, ...]


_STATE: Final = msgspec.msgpack.Decoder(SharingState)


def encode_state(state: SharingState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> SharingState:
    """Raises MessageError."""
    state: SharingState = decode(_STATE, data)
    return state
