"""The outline of a body: its names, and the places between its turns at which it can be cut. Pure. O(length): hashes of the
elements that are remembered, a scan and the naming of new ones.

    messages: [ system │ user │ assistant with calls │ result │ user ]
    places             0      1                      2        3

A place has the chain of the turns before it, and a digest of the ids of the calls without a result there: the results behind it
name calls by their ids, which are not in the chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple

from gateway.dialects.json_edits import Edit, Members, read_object
from gateway.features.prompt_log.delta.digests import DigestMemo, ElementDigests, RecordedCalls, element_of, key_of, kind_in
from gateway.features.prompt_log.delta.scanning import BodyScan
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import EMPTY, chains_of, extended, frame_name
from gateway.features.prompt_log.naming.entries import MAX_ENTRIES, OpenCalls
from gateway.features.prompt_log.naming.forms import FORMS, RESPONSES, object_of
from gateway.features.prompt_log.naming.frame import OPTIONS
from gateway.features.prompt_log.naming.responses import AnswerBounds, item_entries
from gateway.features.prompt_log.turns.own_turn import LISTS

MAX_OPEN: Final = 64  # calls without a result at a place; there is no place with more
_ELEMENT, _FRAME = 1, 2  # added to the seed, for values in each form
_NUMBERS: Final = {form: 2 * at for at, form in enumerate(FORMS)}
SEEDS_APART: Final = 16  # seeds of several owners are multiples of it
NO_MAXIMUM: Final = 1 << 62
_ELEMENT_BYTES: Final = 128  # an element costs as much as so many new bytes
_IN_FRAME: Final = ("system", "instructions", "tools", *OPTIONS)
_OUTSIDE: Final = ("previous_response_id", "conversation", "prompt")
_NULLS: Final = (b"null", b"[]", b"{}", b'""')
_ID_BYTES: Final = 16
_EMPTY_FRAME: Final = frame_name({})


class CutPlace(NamedTuple):
    """A place between two elements. at: the offset of the element behind it. chain: of the log before it. open: a digest of the
    ids of the open calls, b"" for none. system: the element behind it is a text of the system.
    """

    at: int
    chain: bytes
    open: bytes
    system: bool


@dataclass(frozen=True, slots=True)
class BodyOutline:
    """frame: the name. framed: the edits that take its members out of the body. list_at: the offset of the
    first element; elements before the first place are in the frame. places: the first one is before the own turns; none is
    behind the last element. chain, length: of the whole log. open: ids of the calls without a result.
    """

    frame: str
    framed: tuple[Edit, ...]
    list_at: int
    places: tuple[CutPlace, ...]
    chain: bytes
    length: int
    open: tuple[str, ...]

    @property
    def fields(self) -> tuple[Any, ...]:
        """For another process."""
        return self.frame, self.framed, self.list_at, self.places, self.chain, self.length, self.open


class _Piece(NamedTuple):
    """One or more elements with entries of their own."""

    start: int
    end: int
    key: tuple[int, int]


class ScannedBody:
    """A body with the offsets of its pieces. seed, most: as in `BodyScan`. Raises NoNameError, or TooManyNewError."""

    def __init__(self, body: bytes, form: str, memo: DigestMemo, seed: int, most: int = NO_MAXIMUM) -> None:
        self.body = body
        self.form = form
        self._memo = memo
        self._seed = seed + _NUMBERS[form]
        self._view = memoryview(body)
        try:
            scan = BodyScan(body, LISTS[form], memo, seed, most, most // _ELEMENT_BYTES)
        except ValueError:
            raise NoNameError("the body is not an object") from None
        self.members, self.elements, self.new = scan.members, scan.elements, scan.new
        _require_inside(self.members, form)
        each = (self._piece((start, end)) for start, end, _ in self.elements)
        self.pieces = list(self._gathered() if form == RESPONSES else each)

    def outline(self) -> BodyOutline:
        """Raises NoNameError."""
        calls, chain, length = RecordedCalls(), EMPTY, 0
        leading, places = self._leading(), list[CutPlace]()
        for at, piece in enumerate(self.pieces[leading:], leading):
            known = self._memo.get(piece.key)
            open_, count = open_digest(calls.ids) if calls.count <= MAX_OPEN else b"", calls.count
            element, digests = element_of(self._raw(piece), self.form, calls, known)
            if known is None and element.is_small:
                self._memo.put(piece.key, element)
            if count <= MAX_OPEN and (places or at == leading):
                places.append(CutPlace(piece.start, chain, open_, element.system))
            *_, chain = chain, *chains_of(digests, chain)
            length += len(digests) // len(EMPTY)
        if text := self._text():
            chain, length = extended(EMPTY, item_entries([{"role": "user", "content": text}], calls)), 1
        if length > MAX_ENTRIES:
            raise NoNameError(f"there are more than {MAX_ENTRIES:,} entries")
        frame, framed = self._frame(leading)
        list_at = self.elements[0][0] if self.elements else 0
        return BodyOutline(frame, framed, list_at, tuple(places), chain, length, tuple(calls.ids))

    def _text(self) -> str:
        """The text that stands for a list of items in Responses; "": there is a list."""
        span = self.members.spans.get(LISTS[self.form])
        if self.form != RESPONSES or span is None or self.body[span[0] : span[0] + 1] != b'"':
            return ""
        found: str = object_of(b'{"text":%b}' % self.body[span[0] : span[1]])["text"]
        return found

    def _leading(self) -> int:
        """The number of pieces in the frame."""
        for at, piece in enumerate(self.pieces):
            known: ElementDigests | None = self._memo.get(piece.key)
            if known is None:
                known, _ = element_of(self._raw(piece), self.form, RecordedCalls(), None)
                if known.is_small:
                    self._memo.put(piece.key, known)
            if not known.system:
                return at
        return len(self.pieces)

    def _frame(self, leading: int) -> tuple[str, tuple[Edit, ...]]:
        """The frame's name, and the edits that take its members out. Raises NoNameError."""
        raw, spans = self.body, self.members.spans
        edits, parts = list[Edit](), list[bytes]()
        for name in _IN_FRAME:
            if (span := spans.get(name)) is not None and raw[span[0] : span[1]] not in _NULLS:
                edits.append((*span, b"null"))
                parts.append(b'"%b":%b' % (name.encode(), raw[span[0] : span[1]]))
        if self.form == RESPONSES and (span := spans.get("reasoning")) is not None and raw[span[0] : span[0] + 1] == b"{":
            effort = read_object(raw, span[0]).spans.get("effort")
            if effort is not None:
                edits.append((*effort, b"null"))
                parts.append(b'"reasoning":{"effort":%b}' % raw[effort[0] : effort[1]])
        before = b",".join(self._raw(piece) for piece in self.pieces[:leading])
        if before:
            parts.append(b'"%b":[%b]' % (LISTS[self.form].encode(), before))
        if not parts:
            return _EMPTY_FRAME, ()
        whole = b"{%b}" % b",".join(parts)
        key = key_of(whole, self._seed + _FRAME)
        name = self._memo.get(key)
        if name is None:
            name = _named(whole, self.form)
            self._memo.put(key, name)
        return name, tuple(edits)

    def _gathered(self) -> Iterator[_Piece]:
        """The items of each answer as one piece, and each other item."""
        bounds, begun = AnswerBounds(), (-1, -1)
        for start, end, seen in self.elements:
            kind = seen.kind = seen.kind or kind_in(self.body[start:end])
            if bounds.ends_before(kind):
                yield self._piece(begun)
                begun = -1, -1
            if bounds.begun:
                begun = start if begun[0] < 0 else begun[0], end
            else:
                yield self._piece((start, end))
        if bounds.begun:
            yield self._piece(begun)

    def _piece(self, span: tuple[int, int]) -> _Piece:
        return _Piece(*span, key_of(self._view[span[0] : span[1]], self._seed + _ELEMENT))

    def _raw(self, piece: _Piece) -> bytes:
        return self.body[piece.start : piece.end]


def open_digest(ids: Sequence[str]) -> bytes:
    """A digest of the ids of open calls; b"" for none."""
    joined = "\0".join([str(len(ids)), *ids])
    return sha256(joined.encode("utf-8", "surrogatepass")).digest()[:_ID_BYTES] if ids else b""


def _require_inside(members: Members, form: str) -> None:
    """Raises NoNameError for a body whose log is not all in it, or that runs in the background."""
    outside = [*_OUTSIDE, "background"] if form == RESPONSES else []
    for name in outside:
        if (span := members.spans.get(name)) is not None and members.raw[span[0] : span[1]] not in (b"null", b"false"):
            raise NoNameError("the body names turns that it does not have", name)


def _named(whole: bytes, form: str) -> str:
    """The name of a frame that stands alone. Raises NoNameError if a part of it is a turn."""
    log = FORMS[form](object_of(whole), OpenCalls())
    if log.entries:
        raise NoNameError("a turn of the system is not only texts")
    return frame_name(log.frame)
