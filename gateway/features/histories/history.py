"""Requests that refer to a stored history: the fields of the body, and the same request with the history written out.

    {"input": "and then?", "previous_response_id": "resp_1"}   ->   {"input": [all items before, the new one], "store":false}

The model's prompt is the same either way, so any replica can answer the second form, with the help of its prefix cache. Edits
of bytes: nothing else in the body changes. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.dialects.json_edits import Edit, Members
from gateway.dialects.responses.ids import MAX_ID_CHARS, is_id
from gateway.errors import bad_request
from gateway.features.histories.references import Reference, replaced

PREVIOUS: Final = "previous_response_id"
CONVERSATION: Final = "conversation"
_LIST: Final = ord("[")


class History:
    """The fields of a body about its history.

    previous, conversation: ids, or "". store: the client wants the answer stored. background: it does not wait for the answer.
    own: the new items of this request, JSON, joined by commas; b"" without any. stream: it wants a stream. resolved: `own` has
    the full items in place of item ids.
    """

    __slots__ = ("background", "conversation", "members", "own", "previous", "resolved", "store", "stream")

    def __init__(self, members: Members) -> None:
        """members: of a body that `Responses.parse` has accepted. Raises GatewayError 400 that names the field. O(length)."""
        self.members = members
        self.previous = _id(_value(members, PREVIOUS), PREVIOUS)
        conversation = _value(members, CONVERSATION)
        self.conversation = _id(conversation.get("id") if isinstance(conversation, dict) else conversation, CONVERSATION)
        if self.previous and self.conversation:
            raise bad_request(f"'{PREVIOUS}' and '{CONVERSATION}' cannot be combined: a response has one history.", PREVIOUS)
        self.store = _value(members, "store") is not False
        self.background = _value(members, "background") is True
        self.stream = _value(members, "stream") is True
        self.own = _own(members)
        self.resolved = False

    def referring(self, references: Sequence[Reference], items: Mapping[str, bytes]) -> tuple[bytes, list[Edit]]:
        """The list of items, and the edits that replace its references. references: all in the list. items: JSON, by id."""
        start, end = self.members.spans["input"]
        edits = [(first - start, last - start, new) for first, last, new in replaced(references, items)]
        return self.members.raw[start:end], edits

    def resolve(self, written: bytes) -> None:
        """Takes the new items. written: the list of `referring`, edited."""
        self.own = written[1:-1].strip()
        self.resolved = True

    def __repr__(self) -> str:
        return f"<History {self.previous or self.conversation or 'none'}, {len(self.own)} bytes of its own>"


def written_out(history: History, before: Sequence[bytes], *, keeps: bool = False) -> list[Edit]:
    """The edits that put the whole history into `input`, for a server that stores nothing.

    before: the items of the history, oldest first, in pieces joined by commas; b"" has none. keeps: the server may store the
    answer, as the body says.
    """
    members = history.members
    values = {PREVIOUS: b"null", CONVERSATION: b"null", "background": b"false"}
    values = {name: value for name, value in values.items() if name in members.spans}
    if not keeps:
        values["store"] = b"false"
    if history.resolved or any(before):
        values["input"] = b"[" + b",".join(piece for piece in (*before, history.own) if piece) + b"]"
    return members.put_all(values)


def _value(members: Members, name: str) -> Any:
    span = members.spans.get(name)
    return orjson.loads(members.raw[span[0] : span[1]]) if span else None


def _id(value: object, name: str) -> str:
    if value is None:
        return ""
    if not is_id(value):
        raise bad_request(f"'{name}' must be an id: a string of 1 to {MAX_ID_CHARS} printable characters.", name)
    return value


def _own(members: Members) -> bytes:
    span = members.spans.get("input")
    if span is None:
        return b""
    raw = members.raw[span[0] : span[1]]
    if raw[0] == _LIST:
        return raw[1:-1].strip()
    return b"" if raw == b"null" else b'{"type":"message","role":"user","content":' + raw + b"}"
