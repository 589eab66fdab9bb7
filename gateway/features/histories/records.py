"""What is kept, and why it may not be had. No database in here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.database.failures import StoreError
from gateway.dialects.responses.conversation import Given


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response. owner: whose it is; an id says nothing without it. parent: the response that it goes on with, conversation:
    the one that it belongs to, "" without one. created_at: Unix seconds. input, output: the items that were new in its request,
    and those that the model has made: elements of a JSON list, joined by commas, b"" for none. response: the whole object as
    the client has it, JSON. names: ids of items in the output, by which they are found; they are written only.
    """

    owner: str
    id: str
    parent: str = ""
    conversation: str = ""
    created_at: float
    status: str
    input: bytes
    output: bytes
    response: bytes
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run in the background ends: what of its StoredResponse is known then."""

    status: str
    output: bytes
    response: bytes
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """created_at: Unix seconds. metadata: a JSON object."""

    owner: str
    id: str
    created_at: float
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Item:
    """Of a conversation. item: a JSON object with this id."""

    id: str
    item: bytes


class Unknown(StoreError):
    """There is no such object, or it is not this owner's, or it was deleted."""

    def __init__(self, id_: str) -> None:
        super().__init__(id_)
        self.id = id_


class Expired(StoreError):
    """kept_s: seconds for which it was kept after its last use."""

    def __init__(self, id_: str, kept_s: float) -> None:
        super().__init__(id_, kept_s)
        self.id = id_
        self.kept_s = kept_s


class TooLarge(StoreError):
    """A history of so many bytes, or turns, is not replayed."""

    def __init__(self, size: int, turns: int) -> None:
        super().__init__(size, turns)
        self.size = size
        self.turns = turns


@dataclass(frozen=True, slots=True)
class Part:
    """Of a conversation's items the first `limit`, after the item of an id, if one is given. descending: from the end."""

    limit: int
    after: str = ""
    descending: bool = False


Charge = Callable[[int], None]
"""So many bytes of memory to the request, before they are read. Raises GatewayError 413 or 503."""


def free(_size: int) -> None:
    """A Charge that counts nothing."""


class ItemReader(Protocol):
    """Reads items of what is kept, without holding up the loop (`features/histories/items.py`). client: the unit of fairness."""

    async def picked(self, joined: bytes, ids: Collection[str], places: Mapping[str, int], client: str) -> dict[str, bytes]: ...
    async def given(self, body: bytes, client: str) -> Given: ...
    async def listed(self, joined: bytes, most: int, client: str) -> list[tuple[str, bytes]] | None: ...
    async def input_items(self, turns: Sequence[tuple[str, bytes, bytes]], query: Mapping[str, str], client: str) -> bytes: ...
