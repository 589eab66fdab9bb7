"""Stored objects, and the errors of reading them. Without I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.database.failures import StoreError
from gateway.features.histories.conversation_fields import ConversationFields
from gateway.features.histories.references import Reference

# Statuses of a stored response.
QUEUED: Final = "queued"
IN_PROGRESS: Final = "in_progress"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
RUNNING: Final = frozenset([QUEUED, IN_PROGRESS])
TURN: Final = "turn_"  # the ids of turns of other forms begin with it
RESPONSES: Final = "responses"  # the form of ordinary responses
UNANSWERED: Final = frozenset([QUEUED, IN_PROGRESS, FAILED, CANCELLED])  # without an answer to continue


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnNames:
    """The names of a turn of a prompt log; the defaults belong to an ordinary response. head, input_head: of the log with
    and without the answer. form: the dialect of its input and output. frame: its name. after_input: it goes on from its
    parent's input. issuer: the pool that made its sealed parts. digests: of its entries, 32 bytes each. open: ids of the calls
    without a result, after the input and after the output, JSON.
    """

    head: str = ""
    input_head: str = ""
    form: str = RESPONSES
    frame: str = ""
    after_input: bool = False
    issuer: str = ""
    digests: bytes = b""
    open: bytes = b""


NO_NAMES: Final = TurnNames()


@dataclass(frozen=True, slots=True)
class TurnOutline:
    """A turn without its contents. input_size, output_size: their bytes."""

    log: TurnNames
    input_size: int
    output_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response. owner: the tenant or key; ids are unique per owner. parent: the previous response, or "". conversation: its
    conversation, or "". created_at: Unix seconds. input, output: the new items of the request, and the items of the model:
    elements of a JSON list, joined by commas, b"" for none. response: the object for the client, JSON. names: ids of the items
    in the output, for references to them. log: its names in a prompt log. request_id: of the request of a turn. A response that
    is read has no `names`, and no `request_id`.
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
    log: TurnNames = NO_NAMES
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """A turn with a wanted head. at_input: its input has that head, not its answer. open: ids of the calls without a result
    there, JSON. expires_at: Unix seconds.
    """

    id: str
    form: str
    at_input: bool
    open: bytes
    expires_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A turn that answers a log, or goes on from it. head: with its answer. request_id: of the request that has stored it, "":
    unknown.
    """

    head: str
    status: str
    created_at: float
    request_id: str


@dataclass(slots=True)
class RefMove:
    """A ref that goes with a turn to its head, if it is at one of the heads `bases`, or does not exist. moved: set by the store
    with the turn.
    """

    name: str
    bases: Collection[str]
    moved: bool = False


@dataclass(frozen=True, slots=True)
class StoredRef:
    """A name of a head. expires_at: Unix seconds."""

    name: str
    head: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a background run: the changed values of its StoredResponse."""

    status: str
    output: bytes
    response: bytes
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """A conversation. created_at: Unix seconds. metadata: a JSON object."""

    owner: str
    id: str
    created_at: float
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a conversation. item: a JSON object with this id."""

    id: str
    item: bytes


class UnknownObjectError(StoreError):
    """The object does not exist, has another owner, or was deleted."""

    def __init__(self, id_: str) -> None:
        super().__init__(id_)
        self.id = id_


class ExpiredObjectError(StoreError):
    """The object has expired. ttl_s: lifetime after the last use, in seconds. at: Unix seconds."""

    def __init__(self, id_: str, ttl_s: float, at: float = 0.0) -> None:
        super().__init__(id_, ttl_s)
        self.id = id_
        self.ttl_s = ttl_s
        self.at = at


class HistoryTooLargeError(StoreError):
    """The history has too many bytes or turns to be replayed."""

    def __init__(self, size: int, turns: int) -> None:
        super().__init__(size, turns)
        self.size = size
        self.turns = turns


class StoreFullError(StoreError):
    """The stored objects have reached their maximum of bytes. of_owner: the objects of the owner; else all objects."""

    def __init__(self, max_bytes: int, *, of_owner: bool) -> None:
        whose, key = ("of one owner", "owner_mb") if of_owner else ("of all owners", "max_mb")
        super().__init__(f"the stored objects {whose} have {max_bytes:,} bytes, their maximum (state.{key})")
        self.of_owner = of_owner


class RefMovedError(StoreError):
    """The ref is at another head. head: the present one; "": the ref does not exist."""

    def __init__(self, head: str) -> None:
        super().__init__(head)
        self.head = head


class TooManyRefsError(StoreError):
    """The owner has the maximum of refs."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.most = most


@dataclass(frozen=True, slots=True)
class ItemRange:
    """A range of a conversation's items: the first `limit`, after the item `after` if given. descending: from the end."""

    limit: int
    after: str = ""
    descending: bool = False


Charge = Callable[[int], None]
"""Charges bytes of memory to the request, before they are read. Raises GatewayError 413 or 503."""


def free(_size: int) -> None:
    """A Charge without a bound."""


class ItemReader(Protocol):
    """Reads stored items without blocking the event loop (`features/histories/items.py`). client: the unit of fairness."""

    async def picked(self, joined: bytes, ids: Collection[str], places: Mapping[str, int], client: str) -> dict[str, bytes]: ...
    async def conversation_fields(self, body: bytes, client: str) -> ConversationFields: ...
    async def listed(self, joined: bytes, max_items: int, client: str) -> list[tuple[str, bytes]] | None: ...
    async def input_items(self, turns: Sequence[tuple[str, bytes, bytes]], query: Mapping[str, str], client: str) -> bytes: ...
    async def references(self, body: bytes, client: str) -> list[Reference]: ...
