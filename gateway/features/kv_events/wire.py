"""Batches of cache events on the wire: msgpack of vLLM, SGLang and our replica, in all forms that they have had.

A batch is `[seconds, events, rank]`, or a map with these names. An event is a map with its type, or an array that begins with
it. Unknown types, keys and further elements are skipped, missing elements at the end are null. Block hashes are opaque:
integers, signed or not, or bytes, of which the low 64 bits count. An event that cannot be a run of full blocks is dropped.

Other bytes than events may come, too. A tree of two million lists takes a third of a second to decode, while no other thread
runs. So a batch is decoded event by event, and a large event member by member, each by its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Raw
from msgspec.msgpack import Decoder

from router import token_bytes

GPU, HOST, DISK = 0, 1, 2
TIERS: Final = ("gpu", "cpu", "disk")
DENSE: Final = frozenset(["", "full_attention", "mla_attention", "sink_full_attention"])  # kinds of layers that read all tokens
MAX_BLOCK: Final = 1 << 16  # tokens
MAX_GROUP: Final = 64
MAX_NAME: Final = 4096  # characters of an adapter or a salt
MAX_EVENTS: Final = 1 << 16  # in a batch
LARGE: Final = 256 << 10  # bytes of an event, or of one of its members
_LOW: Final = (1 << 64) - 1
_HOST_MEDIA: Final = ("cpu", "host")
_STORED: Final = (
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED: Final = ("type", "block_hashes", "medium", "group_idx")
_KNOWN: Final = frozenset([*_STORED, "cache_salt", "remaining_copy_counts"])


class BlocksStored(NamedTuple):
    """Blocks that an engine stores, each the parent of the next. parent: hash of the block before the first one, None: the
    first one begins a prompt. data: their token ids, 4 bytes each; b"": the event has only hashes. size: tokens of a block.
    adapter, salt: of a first block. extras: further contents that distinguish blocks (images), by position.
    """

    hashes: list[int]
    parent: int | None
    data: bytes
    size: int
    tier: int
    group: int
    adapter: str
    salt: str
    extras: dict[int, bytes] | None


class BlocksRemoved(NamedTuple):
    """Copies of blocks that an engine no longer has. left: remaining copies of each, if the engine counts them."""

    hashes: list[int]
    tier: int
    group: int
    left: list[int] | None


class CacheCleared(NamedTuple):
    """The engine has emptied its cache."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class CacheEventBatch(NamedTuple):
    """The events of one step of an engine. dropped: number of events that were not understood, or do not count."""

    events: list[CacheEvent]
    dropped: int


class WireError(ValueError):
    """These bytes are not a batch of events."""


_Parts = Annotated[list[Raw], Meta(max_length=64)] | Annotated[dict[str, Raw], Meta(max_length=64)]

_parts: Final = Decoder(_Parts).decode
_events: Final = Decoder(Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]).decode
_decode: Final = Decoder().decode
_kind: Final = Decoder(str).decode
_integers: Final = Decoder(list[int] | None).decode
_LISTS: Final[Mapping[str, Callable[[Raw], Any]]] = {
    "block_hashes": Decoder(list[int | bytes]).decode,
    "token_ids": _integers,
    "remaining_copy_counts": _integers,
}


def read(payload: bytes) -> CacheEventBatch:
    """A batch. Raises WireError."""
    try:
        body = _parts(payload)
        raws = _events(body["events"] if isinstance(body, dict) else body[1])
    except (msgspec.DecodeError, ValueError, LookupError, RecursionError, OverflowError) as error:
        raise WireError(str(error)) from error
    events, dropped = list[CacheEvent](), 0
    for raw in raws:
        try:
            event = _event(_decode(raw) if len(memoryview(raw)) < LARGE else _large(raw))
        except (TypeError, ValueError, OverflowError, LookupError, msgspec.MsgspecError, RecursionError):
            event = None
        if event is None:
            dropped += 1
        else:
            events.append(event)
    return CacheEventBatch(events, dropped)


def _large(raw: Raw) -> Mapping[str, Any]:
    """The known members of a large event."""
    parts = _parts(raw)
    if isinstance(parts, list):
        parts = dict(zip(_REMOVED if _kind(parts[0]) == "BlockRemoved" else _STORED, parts, strict=False))
    known = {name: part for name, part in parts.items() if name in _KNOWN}
    if any(len(memoryview(part)) > LARGE for name, part in known.items() if name not in _LISTS):
        raise ValueError("too large a member")
    return {name: _LISTS.get(name, _decode)(part) for name, part in known.items()}


def _event(raw: object) -> CacheEvent | None:
    """An event; None if it is unknown, or of layers that do not count."""
    if isinstance(raw, list):
        names = _REMOVED if raw[0] == "BlockRemoved" else _STORED
        fields: Mapping[str, Any] = dict(zip(names, raw, strict=False))
    elif isinstance(raw, dict):
        fields = raw
    else:
        return None
    kind = fields.get("type")
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        left = fields.get("remaining_copy_counts")
        hashes = _hashes(fields["block_hashes"])
        known = isinstance(left, list) and len(left) == len(hashes) and all(type(each) is int for each in left)
        return BlocksRemoved(hashes, _tier(fields.get("medium")), _group(fields.get("group_idx")), left if known else None)
    return CacheCleared() if kind == "AllBlocksCleared" else None


def _stored(fields: Mapping[str, Any]) -> BlocksStored | None:
    if (fields.get("kv_cache_spec_kind") or "") not in DENSE or fields.get("kv_cache_spec_sliding_window"):
        return None
    hashes, parent, tokens, size = _hashes(fields["block_hashes"]), fields.get("parent_block_hash"), fields.get("token_ids"), 0
    tier, group = _tier(fields.get("medium")), _group(fields.get("group_idx"))
    adapter, salt, extras, data = _adapter(fields), "", None, b""
    if tokens:
        size = fields["block_size"]
        if type(size) is not int or not 0 < size <= MAX_BLOCK or len(tokens) != len(hashes) * size:
            return None  # a part of a block, or sparse blocks
        data = token_bytes(tokens)
        name = fields.get("lora_name")
        if isinstance(name, dict):  # SGLang, July to September 2026
            salt = _text(name.get("cache_salt"))
        salt = _text(fields.get("cache_salt")) or salt
        if keys := fields.get("extra_keys"):
            salt, extras = _extras(keys, len(hashes), adapter, salt, first=parent is None)
    return BlocksStored(hashes, None if parent is None else _hash(parent), data, size, tier, group, adapter, salt, extras)


def _extras(keys: Sequence[Any], blocks: int, adapter: str, salt: str, *, first: bool) -> tuple[str, dict[int, bytes] | None]:
    """(the salt, further contents by block), from the extra hash keys of each block. first: the first block begins a prompt,
    so that it may have a salt.
    """
    extras = dict[int, bytes]()
    if len(keys) != blocks:
        raise ValueError("extra keys are one for each block")
    for at, each in enumerate(keys):
        if not each:
            continue
        left = [key for key in each if key != adapter] if isinstance(each, list) else [each]
        if first and not at and len(left) == 1 and isinstance(left[0], str):
            salt = left[0]
        elif left:
            extras[at] = msgspec.msgpack.encode(left)
    return salt, extras or None


def _adapter(fields: Mapping[str, Any]) -> str:
    name, number = fields.get("lora_name"), fields.get("lora_id")
    if isinstance(name, str) and name:
        return _text(name)
    return "" if number is None else f"\0{number:d}"  # of an engine that does not name it: equal to no name


def _hashes(raw: Sequence[Any]) -> list[int]:
    if not raw or isinstance(raw, (str, bytes)):
        raise ValueError("no hashes")
    if type(raw[0]) is int:
        return [each & _LOW for each in raw]
    return [_hash(each) for each in raw]


def _hash(raw: Any) -> int:
    return int.from_bytes(raw[-8:], "big") if isinstance(raw, bytes) else raw & _LOW


def _text(raw: object) -> str:
    if isinstance(raw, str) and len(raw) > MAX_NAME:
        raise ValueError("too long a name")
    return raw if isinstance(raw, str) else ""


def _group(raw: object) -> int:
    if raw is None:
        return 0
    if type(raw) is not int or not 0 <= raw < MAX_GROUP:
        raise ValueError("not the number of a group")
    return raw


def _tier(medium: object) -> int:
    """The memory that a medium stands for. "": none is named."""
    name = medium.lower() if isinstance(medium, str) else ""
    if name in ("", "gpu"):
        return GPU
    return HOST if name.startswith(_HOST_MEDIA) else DISK
