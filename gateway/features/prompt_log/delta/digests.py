"""Digests of the elements of bodies, remembered by a hash of their bytes: a conversation is sent again with each request, and
only its new elements are parsed.

The hash has a seed of its own in each process, so no client can make two elements with one hash; and for each owner, so that
no time that a request takes tells what another owner has sent. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from xxhash import xxh3_128_intdigest

from gateway.features.prompt_log.naming.chain import digest_of
from gateway.features.prompt_log.naming.chat import message_entry
from gateway.features.prompt_log.naming.entries import Entry, OpenCalls
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES, object_of
from gateway.features.prompt_log.naming.frame import is_plain_system
from gateway.features.prompt_log.naming.messages import message_entries
from gateway.features.prompt_log.naming.responses import item_entries, kind_of

MOST: Final = 1 << 16
"""Weights of the values that are remembered, two for each element without calls: about 20 MiB."""
MOST_IDS: Final = 1024  # characters of the ids of a remembered element, and calls
_MOST_CONTEXTS: Final = 8  # sets of indices for which an element's digests are remembered

Key = tuple[int, int]
"""The hash and the length of an element."""


@dataclass(slots=True)
class ElementDigests:
    """The entries of an element. calls: its calls (True) and results, each with its id, in their order. system: it has only
    texts of the system. digests: of its entries, joined, by the indices of the calls that its results answer (`OpenCalls`).
    """

    calls: tuple[tuple[bool, str], ...]
    system: bool
    digests: dict[tuple[int, ...], bytes] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        """True if it may be remembered."""
        return sum(len(id_) + 1 for _, id_ in self.calls) <= MOST_IDS

    @property
    def weight(self) -> int:
        """Its memory in units of about 400 bytes: a call or a result takes as much as an element without them."""
        return 1 + len(self.calls)


@dataclass(slots=True)
class SeenValue:
    """A JSON value. kind: of an item of Responses, once it is known. following: the length of the element that came behind it
    last.
    """

    kind: str = ""
    following: int = 0


class DigestMemo:
    """Remembers elements, and other values, by their bytes. The least recently used half is forgotten. All operations are O(1),
    and a hash. most: maximum of the values' weights, which are 1 but for elements.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._weight = 0  # of the recent ones
        self._recent = dict[Key, Any]()
        self._older = dict[Key, Any]()

    def get(self, key: Key) -> Any:
        """The value; None if it is not remembered."""
        found = self._recent.get(key)
        if found is None:
            found = self._older.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Key, value: Any) -> None:
        weight = value.weight if isinstance(value, ElementDigests) else 1
        if self._weight + weight > self._most // 2:
            self._older, self._recent, self._weight = self._recent, {}, 0
        self._weight += weight
        self._recent[key] = value

    def __iter__(self) -> Iterator[tuple[Key, Any]]:
        """The remembered values with their keys."""
        yield from {**self._older, **self._recent}.items()

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def __repr__(self) -> str:
        return f"<DigestMemo of {len(self)} values>"


def key_of(raw: bytes | memoryview, seed: int) -> Key:
    """The key of a value. seed: of the hash; sets values of several kinds, and of several owners, apart."""
    return xxh3_128_intdigest(raw, seed), len(raw)


class RecordedCalls(OpenCalls):
    """Open calls that note each call and result. noted, indices: since the last `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0  # of open calls
        self.noted = list[tuple[bool, str]]()
        self.indices = list[int]()

    def add(self, id_: Any) -> None:
        super().add(id_)
        self.count += 1
        self.noted.append((True, id_ if isinstance(id_, str) else ""))

    def answer(self, id_: Any) -> int:
        index = super().answer(id_)
        self.count = max(0, self.count - 1)
        self.noted.append((False, id_ if isinstance(id_, str) else ""))
        self.indices.append(index)
        return index

    def take(self) -> tuple[tuple[tuple[bool, str], ...], tuple[int, ...]]:
        """(noted, indices), which begin anew."""
        taken = tuple(self.noted), tuple(self.indices)
        self.noted, self.indices = [], []
        return taken

    def repeat(self, noted: tuple[tuple[bool, str], ...]) -> tuple[int, ...]:
        """The same calls and results once more. Returns the indices."""
        for is_call, id_ in noted:
            if is_call:
                self.add(id_)
            else:
                self.answer(id_)
        return self.take()[1]


class _GivenCalls(OpenCalls):
    """Results get these indices."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        super().__init__()
        self._indices = iter(indices)

    def answer(self, id_: Any) -> int:
        return next(self._indices)


def element_of(raw: bytes, form: str, calls: RecordedCalls, known: ElementDigests | None) -> tuple[ElementDigests, bytes]:
    """(the element, the digests of its entries). raw: the element, in Responses also the items of one answer, joined by commas.
    calls: open before it, and afterwards those after it. known: the remembered element, or None. Raises NoNameError.
    """
    if known is None:
        entries = _entries(raw, form, calls)
        noted, indices = calls.take()
        known = ElementDigests(noted, all(map(is_plain_system, entries)))
    else:
        indices = calls.repeat(known.calls)
        if indices in known.digests:
            return known, known.digests[indices]
        entries = _entries(raw, form, _GivenCalls(indices))
    if len(known.digests) >= _MOST_CONTEXTS:
        known.digests.clear()
    known.digests[indices] = digests = b"".join(map(digest_of, entries))
    return known, digests


def kind_in(raw: bytes) -> str:
    """The kind of an item of Responses. Raises NoNameError."""
    return kind_of(object_of(raw))


def _entries(raw: bytes, form: str, calls: OpenCalls) -> list[Entry]:
    if form == CHAT:
        return [message_entry(object_of(raw), calls)]
    if form == MESSAGES:
        return message_entries(object_of(raw), calls)
    items: list[Any] = object_of(b'{"items":[%b]}' % raw)["items"]
    return item_entries(items, calls)
