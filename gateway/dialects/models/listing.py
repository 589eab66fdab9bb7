"""The list of models for clients, in two forms: OpenAI's, and Anthropic's for requests with the header `anthropic-version`.

The models of replicas come first, then the gateway's own models, then the aliases of all these. A name that is both is listed
as an alias. An alias that ends with a star is listed, and may be requested, in that form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from gateway.config.aliases import Aliases
from gateway.errors import bad_request

DEFAULT_LIMIT: Final = 20  # Anthropic's
MAX_LIMIT: Final = 1000
_LATEST: Final = 253402300799  # the last second of the year 9999
_DIGITS: Final = 4


class OwnModels:
    """The models that one feature serves itself. entries: OpenAI's JSON by id; replaced, never changed."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: Mapping[str, bytes] = {}


class Listing:
    """The list of models. entries: OpenAI's JSON by id. answer: the whole list as JSON."""

    __slots__ = ("_ids", "_places", "answer", "entries")

    def __init__(self, entries: Mapping[str, bytes], aliases: Aliases | None) -> None:
        """entries: all models. O(entries and aliases)."""
        self.entries = dict(entries) if aliases is None else _with_aliases(entries, aliases)
        self.answer = b'{"object":"list","data":[%b]}' % b",".join(self.entries.values())
        self._ids = list(self.entries)
        self._places: dict[str, int] = {}

    def page(self, after: str, before: str, limit: str) -> bytes:
        """One page of the list in Anthropic's form. after, before: the id next to the page, "" for none. limit: maximum number
        of ids.

        Raises GatewayError 400. O(limit), the first time O(entries).
        """
        if after and before:
            raise bad_request("Only one of 'after_id' and 'before_id' is possible.", "before_id")
        most = _limit(limit)
        ids = self._ids
        if before:
            end = self._place(before, "before_id")
            first = max(0, end - most)
            more = first > 0
        else:
            first = self._place(after, "after_id") + 1 if after else 0
            end = min(len(ids), first + most)
            more = end < len(ids)
        return _page([_described(name, self.entries[name]) for name in ids[first:end]], more)

    def _place(self, name: str, parameter: str) -> int:
        if not self._places:
            self._places = {each: place for place, each in enumerate(self._ids)}
        place = self._places.get(name)
        if place is None:
            raise bad_request(f"'{parameter}' must be the id of a model that GET /v1/models lists.", parameter)
        return place

    def __repr__(self) -> str:
        return f"<Listing of {len(self.entries)} models>"


def alias_entry(alias: str, model: str, entry: bytes) -> bytes:
    """An alias in OpenAI's form. entry: its model's, which may have further fields."""
    whole = _object(entry)
    created, owner, length = whole.get("created"), whole.get("owned_by"), whole.get("max_model_len")
    made: dict[str, Any] = {"id": alias, "object": "model", "created": created if type(created) is int else 0}
    made["owned_by"] = owner if isinstance(owner, str) else ""
    made["root"] = model
    if type(length) is int:
        made["max_model_len"] = length
    return orjson.dumps(made)


def anthropic_entry(name: str, entry: bytes) -> bytes:
    """A model in Anthropic's form. entry: the same in OpenAI's form."""
    return orjson.dumps(_described(name, entry))


def _with_aliases(entries: Mapping[str, bytes], aliases: Aliases) -> dict[str, bytes]:
    shown = dict[str, bytes]()
    for name in [*entries, *(alias for alias in aliases.names if alias not in entries)]:
        model = aliases.of(name) or name
        if model == name:
            if name in entries:
                shown[name] = entries[name]
        elif model in entries:
            shown[name] = alias_entry(name, model, entries[model])
    return shown


def _limit(limit: str) -> int:
    number = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= _DIGITS else 0 if limit else DEFAULT_LIMIT
    if not 0 < number <= MAX_LIMIT:
        raise bad_request(f"'limit' must be a number from 1 to {MAX_LIMIT}.", "limit")
    return number


def _page(data: Sequence[Mapping[str, Any]], more: bool) -> bytes:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return orjson.dumps({"data": data, "has_more": more, "first_id": first, "last_id": last})


def _described(name: str, entry: bytes) -> dict[str, Any]:
    whole = _object(entry)
    created, length = whole.get("created"), whole.get("max_model_len")
    seconds = created if type(created) is int and 0 <= created <= _LATEST else 0
    made_at = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    described: dict[str, Any] = {"type": "model", "id": name, "display_name": name, "created_at": made_at}
    described["lifecycle"] = "active"
    described["max_input_tokens"] = length if type(length) is int else None
    return described


def _object(entry: bytes) -> dict[str, Any]:
    whole = orjson.loads(entry)
    return whole if isinstance(whole, dict) else {}
