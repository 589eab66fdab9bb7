"""Items of stored responses and conversations: found by their ids or positions, and in the form of lists, each with an id and
messages in their long form. Pure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl
from uuid import uuid4

import orjson

from gateway.dialects.responses.ids import is_id
from gateway.errors import GatewayError, bad_request

MAX_LIMIT: Final = 100
DEFAULT_LIMIT: Final = 20
MAX_FIELDS: Final = 32  # of a query
INCLUDABLE: Final = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)

_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_PLACE: Final = re.compile(r"[a-z]{1,10}_(in|out)(\d{1,7})_(.+)")
_TEXTS: Final = {"assistant": "output_text"}


def items_of(joined: bytes) -> list[dict[str, Any]]:
    """The elements of a JSON list, joined by commas. Elements that are no objects are omitted."""
    return [item for item in orjson.loads(b"[" + joined + b"]") if isinstance(item, dict)]


def picked(joined: bytes, ids: Collection[str], places: Mapping[str, int]) -> dict[str, bytes]:
    """Items of `items_of` as JSON, by id: the last item with each of these ids, then the items at these positions.

    Missing items, and items nested too deeply, are omitted. O(length).
    """
    items = items_of(joined)
    found = {id_: item for item in items if isinstance(id_ := item.get("id"), str) and id_ in ids}
    for id_, at in places.items():
        if at < len(items):
            found.setdefault(id_, items[at])
    out = dict[str, bytes]()
    for id_, item in found.items():
        with contextlib.suppress(orjson.JSONEncodeError):
            out[id_] = orjson.dumps(item)
    return out


def listed(joined: bytes, most: int) -> list[tuple[str, bytes]] | None:
    """(id, JSON) of all `items_of`, in the form of lists. None: more than `most`, or nested too deeply. O(length)."""
    items = items_of(joined)
    if len(items) > most:
        return None
    try:
        return [(item["id"], orjson.dumps(item)) for item in map(shown, items)]
    except orjson.JSONEncodeError:
        return None


def input_items(joined: bytes, ids: Sequence[str], sizes: Sequence[int], query: Mapping[str, str]) -> bytes:
    """A page of the items of several responses. joined: input and output of each, of these sizes. query: as for `Paging`.

    Raises GatewayError 400. O(length).
    """
    items, at = list[tuple[dict[str, Any], str]](), 0
    for number, size in enumerate(sizes):
        id_, made = ids[number // 2], number % 2 == 1
        items += [(item, name_at(id_, place, made=made)) for place, item in enumerate(items_of(joined[at : at + size]))]
        at += size
    try:
        return Paging(query).of(items)
    except orjson.JSONEncodeError:
        raise too_deep() from None


def too_deep() -> GatewayError:
    return bad_request("An item is nested too deeply.", code="invalid_json")


def shown(item: dict[str, Any], name: str = "") -> dict[str, Any]:
    """An item in the form of lists. name: its id if it has none (`name_at`); "": a new one."""
    kind = item.get("type") or "message"
    out: dict[str, Any] = {"type": kind, "id": item.get("id"), **{key: item[key] for key in item if key not in ("type", "id")}}
    out["id"] = _id_of(item, name)
    if kind == "message":
        out.setdefault("status", "completed")
        content = out.get("content")
        if isinstance(content, str):
            out["content"] = [{"type": _TEXTS.get(str(out.get("role")), "input_text"), "text": content}]
    return out


def _id_of(item: dict[str, Any], name: str) -> str:
    found = item.get("id")
    return found if is_id(found) else f"{_PREFIXES.get(str(item.get('type') or 'message'), 'item')}_{name or uuid4().hex}"


def name_at(response: str, at: int, *, made: bool) -> str:
    """The id of the item at this position in the input of a response (made: in its output). `place_of` parses it."""
    return f"{'out' if made else 'in'}{at}_{response}"


def place_of(id_: str) -> tuple[str, bool, int] | None:
    """(response, made, position) of an id in the form of `name_at`, None for other ids."""
    found = _PLACE.fullmatch(id_)
    return (found[3], found[1] == "out", int(found[2])) if found else None


def page(items: Sequence[tuple[str, bytes]], *, more: bool) -> bytes:
    """A page as OpenAI's list. items: (id, JSON) of each."""
    first, last = (items[0][0], items[-1][0]) if items else (None, None)
    end = orjson.dumps({"first_id": first, "last_id": last, "has_more": more})
    return b'{"object":"list","data":[%b],%b' % (b",".join([item for _, item in items]), end[1:])


def require_includes(query: str) -> None:
    """Raises GatewayError 400 for an unknown `include`. Known values change nothing, because everything from the engine is
    stored.
    """
    try:
        fields = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise bad_request(f"The query has more than {MAX_FIELDS} fields.") from None
    for name, value in fields:
        if name in ("include", "include[]") and value not in INCLUDABLE:
            known = ", ".join(f"'{each}'" for each in INCLUDABLE)
            raise bad_request(f"Invalid value: {value[:100]!r}. Supported values are: {known}.", "include", "invalid_value")


class Paging:
    """The paging of a query: limit, order, after. Raises GatewayError 400."""

    __slots__ = ("after", "descending", "limit")

    def __init__(self, query: Mapping[str, str]) -> None:
        limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT):
            raise bad_request(f"'limit' must be a number from 1 to {MAX_LIMIT}.", "limit")
        if order not in ("asc", "desc"):
            raise bad_request("'order' must be asc or desc.", "order")
        self.limit = int(limit)
        self.descending = order == "desc"
        self.after = query.get("after", "")

    def of(self, items: Sequence[tuple[dict[str, Any], str]]) -> bytes:
        """A page of these items, each with the name that `shown` takes, the oldest first.

        Raises GatewayError 400 if no item has the id `after`.
        """
        ordered = list(reversed(items)) if self.descending else list(items)
        if self.after:
            # If an id occurs twice, the last one counts: else the pages would never end.
            at = max((at for at, item in enumerate(ordered) if _id_of(*item) == self.after), default=-1)
            if at < 0:
                raise bad_request(f"'after' is the id of no item here: {self.after[:100]!r}.", "after")
            ordered = ordered[at + 1 :]
        listed_ = [shown(*item) for item in ordered[: self.limit]]
        return page([(item["id"], orjson.dumps(item)) for item in listed_], more=len(ordered) > self.limit)
