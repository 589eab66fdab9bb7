"""The members of a body and the elements of its list of turns, without a scan of values that were scanned before. Pure.

Each value is remembered by its bytes, with the length of the element that came behind it. So the end of the next element is
guessed, and the guess is right if the bytes up to there are a remembered value. A body that goes on from the one before costs
hashes of its elements (0.1 ms a MiB), and a scan of the new ones.
"""

from __future__ import annotations

from typing import Final

from gateway.dialects.json_edits import Members, read_list, read_object, value_end
from gateway.features.prompt_log.delta.digests import DigestMemo, Key, SeenValue, key_of

_DELIMITED: Final = (b'"', b"{", b"[")  # no such value is the beginning of another one
_REST: Final = 4  # times the wished maximum: the rest of a body may be one value


class TooManyNewError(Exception):
    """More bytes than wished would have to be scanned."""


class BodyScan:
    """members: of the body. elements: (start, end, remembered value) of each element of the list. new: bytes that were scanned.

    seed: of the values' keys in the memo. most: maximum of `new`; TooManyNewError beyond it, before much more is scanned.
    most_elements: likewise, of all elements. Raises ValueError for a body that is no object.
    """

    def __init__(self, body: bytes, list_name: str, memo: DigestMemo, seed: int, most: int, most_elements: int) -> None:
        self.new = 0
        self._most, self._most_elements = most, most_elements
        self._body, self._memo, self._seed, self._list_name = body, memo, seed, list_name
        self._view = memoryview(body)
        self._lists = dict[int, list[tuple[int, int]]]()  # by their offsets
        self._seen = dict[int, SeenValue]()  # by the offsets of elements
        self._before: SeenValue | None = None
        self.members: Members = read_object(body, known=self._member_end)
        span = self.members.spans.get(list_name)
        spans = self._lists.get(span[0], []) if span is not None else []
        self.elements = [(start, end, self._seen[start]) for start, end in spans]

    def _member_end(self, name: str, at: int) -> int:
        if name == self._list_name and self._body[at : at + 1] == b"[":
            self._before = self._named(b"[")
            self._lists[at], end = read_list(self._body, at, self._element_end)
            return end
        return self._value(self._named(name.encode("utf-8", "surrogatepass")), at)[1]

    def _element_end(self, _name: str, at: int) -> int:
        assert self._before is not None
        if len(self._seen) >= self._most_elements:
            raise TooManyNewError
        self._before, end = self._value(self._before, at)
        self._seen[at] = self._before
        return end

    def _named(self, name: bytes) -> SeenValue:
        """A value that stands for a name, so that the length of what follows is remembered with it."""
        return self._remembered(key_of(b"\0" + name, self._seed))

    def _value(self, before: SeenValue, at: int) -> tuple[SeenValue, int]:
        """The value that begins at an offset, and its end."""
        raw, end = self._body, at + before.following
        if raw[at : at + 1] not in _DELIMITED:
            return SeenValue(), value_end(raw, at)
        if before.following and end <= len(raw):
            found: SeenValue | None = self._memo.get(key_of(self._view[at:end], self._seed))
            if found is not None:
                return found, end
        if self.new > self._most or len(raw) - at > _REST * self._most:
            raise TooManyNewError
        end = value_end(raw, at)
        self.new += end - at
        before.following = end - at
        return self._remembered(key_of(self._view[at:end], self._seed)), end

    def _remembered(self, key: Key) -> SeenValue:
        found: SeenValue | None = self._memo.get(key)
        if found is None:
            found = SeenValue()
            self._memo.put(key, found)
        return found
