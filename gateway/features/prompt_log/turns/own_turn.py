"""The part of a log that a body has: the names after it, and its bytes as they are stored. Pure. O(length).

messages: [ leading turns of the system │ own turns ]        both are stored as they were sent, without cache markers:
          in the frame                  │ in the turn        in a replay they would pile up
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.dialects.json_edits import Members, read_list, read_object
from gateway.features.prompt_log.naming.chain import digest_of, frame_name, linked
from gateway.features.prompt_log.naming.entries import MARKERS, OpenCalls
from gateway.features.prompt_log.naming.forms import CHAT, FORMS, LATEST, MESSAGES, RESPONSES, object_of
from gateway.features.prompt_log.naming.frame import OPTIONS

LISTS: Final[Mapping[str, str]] = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
"""The member with the turns, by form."""

_FRAMES: Final[Mapping[str, tuple[str, ...]]] = {
    CHAT: ("tools", *OPTIONS),
    MESSAGES: ("system", "tools", *OPTIONS),
    RESPONSES: ("instructions", "tools", *OPTIONS),
}
_NAMING: Final = ("previous_response_id",)  # members that name the base; it is given beside the body
_MARKS: Final = tuple(b'"%b"' % name.encode() for name in sorted(MARKERS))
_NULLS: Final = (b"null", b"[]", b"{}", b'""')


@dataclass(frozen=True, slots=True)
class OwnTurn:
    """The part of a log that a body has. base: the index of the base that it goes on from. frame: its name. framed: the members
    of the frame (JSON); b"": an empty frame, or a frame given by its name. stored: the own elements, JSON joined by
    commas, without cache markers. begin, end: of the own elements in the body. leading: the elements in the frame, JSON joined
    by commas. chain: after its entries; latest: the chains after the last LATEST of them. digests: of its entries. open: ids of
    the calls without a result after it. sealed: the chains after its last LATEST entries with sealed parts.
    """

    base: int
    frame: str
    framed: bytes
    stored: bytes
    begin: int
    end: int
    leading: bytes
    chain: bytes
    latest: tuple[bytes, ...]
    digests: bytes
    open: tuple[str, ...]
    sealed: tuple[bytes, ...] = ()

    def sent(self, body: bytes) -> bytes:
        """The own elements as they are in the body, JSON joined by commas."""
        own = body[self.begin : self.end]
        return own if own.startswith(b"{") else self.stored

    @property
    def fields(self) -> tuple[Any, ...]:
        """For another process."""
        return tuple(getattr(self, name) for name in self.__slots__)


def frame_members(form: str) -> tuple[str, ...]:
    """The members of a body that are in its frame, as a whole."""
    return _FRAMES[form]


def own_turn(body: bytes, form: str, chain: bytes, bases: Sequence[Sequence[str]], *, named: bool) -> OwnTurn:
    """The part of a log that a body has after a log with this chain. bases: ids of the calls without a result in each turn with
    this chain, the newest first. named: the frame is given by its name.

    Raises NoNameError.
    """
    found = object_of(body)
    for name in _NAMING:
        found.pop(name, None)
    base = _best(_results(found, form), bases)
    calls = OpenCalls(bases[base] if bases else ())
    log = FORMS[form](found, calls, named=named)
    digests, latest, sealed = list[bytes](), deque[bytes](maxlen=LATEST), deque[bytes](maxlen=LATEST)
    for entry in log.entries:
        digests.append(digest_of(entry))
        chain = linked(chain, digests[-1])
        latest.append(chain)
        if "sealed" in entry:
            sealed.append(chain)
    members, elements = _members(body, LISTS[form])
    begin, end, leading = _elements(members, LISTS[form], elements, log.leading)
    stored = _stored(body[begin:end], form)
    framed = _framed(members, form, leading, found) if log.frame else b""
    return OwnTurn(
        *(base, frame_name(log.frame), framed, stored, begin, end, leading),
        *(chain, tuple(latest), b"".join(digests), tuple(calls.ids), tuple(sealed)),
    )


def _members(body: bytes, name: str) -> tuple[Members, Mapping[int, list[tuple[int, int]]]]:
    """The members of a body, and the elements of a list by its offset: nearly all of a body is in it, and is scanned once."""
    lists = dict[int, list[tuple[int, int]]]()

    def end_of(member: str, at: int) -> int:
        if member != name or body[at : at + 1] != b"[":
            return 0  # not known
        lists[at], end = read_list(body, at)
        return end

    return read_object(body, known=end_of), lists


def _elements(members: Members, name: str, lists: Mapping[int, list[tuple[int, int]]], leading: int) -> tuple[int, int, bytes]:
    """(begin, end) of the own elements of a list, and the elements before them."""
    span = members.spans.get(name)
    if span is None:
        return members.end - 1, members.end - 1, b""
    if span[0] not in lists:
        return *span, b""
    elements, end = lists[span[0]], span[1]
    own = elements[leading:]
    before = b",".join(members.raw[start:stop] for start, stop in elements[:leading])
    return (own[0][0], own[-1][1], before) if own else (end - 1, end - 1, before)


def _stored(own: bytes, form: str) -> bytes:
    """The own elements as they are stored."""
    if form == RESPONSES and own.startswith(b'"'):
        return b'{"type":"message","role":"user","content":%b}' % own
    if own == b"null":
        return b""
    if not any(mark in own for mark in _MARKS):
        return own
    return _unmarked_list(b"[%b]" % own, 2)[1:-1]


def _unmarked_list(raw: bytes, depth: int) -> bytes:
    elements = (raw[start:end] for start, end in read_list(raw, 0)[0])
    return b"[%b]" % b",".join(_unmarked(each, depth) if any(mark in each for mark in _MARKS) else each for each in elements)


def _unmarked(element: bytes, depth: int) -> bytes:
    """An element (JSON) without the markers of its own and of its blocks. No other value changes: engines see its spelling."""
    if not element.startswith(b"{"):
        return element
    spans = read_object(element).spans
    kept = {name: element[start:end] for name, (start, end) in spans.items() if name not in MARKERS}
    if depth and kept.get("content", b"").startswith(b"["):
        kept["content"] = _unmarked_list(kept["content"], depth - 1)
    return b"{%b}" % b",".join(b"%b:%b" % (orjson.dumps(name), value) for name, value in kept.items())


def _framed(members: Members, form: str, leading: bytes, found: dict[str, Any]) -> bytes:
    """The members of a body's frame."""
    raw, parts = members.raw, list[bytes]()
    if leading:
        parts.append(b'"%b":[%b]' % (LISTS[form].encode(), leading))
    for name in _FRAMES[form]:
        span = members.spans.get(name)
        if span is not None and (value := raw[span[0] : span[1]]) not in _NULLS:
            parts.append(b'"%b":%b' % (name.encode(), value))
    reasoning = found.get("reasoning") if form == RESPONSES else None
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        parts.append(b'"reasoning":%b' % orjson.dumps({"effort": reasoning["effort"]}))
    return b"{%b}" % b",".join(parts)


def _best(results: set[str], bases: Sequence[Sequence[str]]) -> int:
    """The first of the bases with the most of these open calls."""
    if len(bases) < 2 or not results:
        return 0
    scores = [len(results.intersection(ids)) for ids in bases]
    return scores.index(max(scores))


def _results(body: dict[str, Any], form: str) -> set[str]:
    """The ids of the calls that have results in a body."""
    found, elements = set[Any](), body.get(LISTS[form])
    for element in elements if isinstance(elements, list) else ():
        if not isinstance(element, dict):
            continue
        content = element.get("content")
        if form == MESSAGES:
            blocks = content if isinstance(content, list) else ()
            found |= {block["tool_use_id"] for block in blocks if isinstance(block, dict) and _is_id(block.get("tool_use_id"))}
        elif _is_id(id_ := element.get("tool_call_id" if form == CHAT else "call_id")):
            found.add(id_)
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and value != ""
