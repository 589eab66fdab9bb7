"""The tokens in the events of a stream that ends before its usage.

Engines mostly write an event for each token. With speculative decoding, or if they are configured so, they write several tokens
in one event. So some events are kept (the first, the second, the fourth, ...), and the length of their texts shows which.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

_BYTES_PER_TOKEN: Final = 4
_SEVERAL: Final = 2  # tokens in an event, by its length, from which on it is believed to have several
MAX_SAMPLE: Final = 4096  # bytes of each sample


def texts_in(*names: str) -> re.Pattern[bytes]:
    """Finds the texts of members with these names; the last one may be cut."""
    return re.compile(rb'"(?:%b)"\s*+:\s*+("(?:[^"\\]|\\.)*+"?)' % b"|".join(name.encode() for name in names))


class EventSamples:
    """Samples of one stream. next: number of events at which `add` is to be called. O(log events) memory."""

    __slots__ = ("_parts", "next")

    def __init__(self) -> None:
        self._parts = list[bytes]()
        self.next = 1

    def add(self, events: int, data: bytes) -> None:
        """data: with the last of so many events."""
        self._parts.append(data[:MAX_SAMPLE])
        self.next = 2 * events

    def tokens(self, events: int, mark: bytes, texts: re.Pattern[bytes]) -> int:
        """The tokens of so many events. mark: once in each event. O(bytes of the samples)."""
        counted = sum([part.count(mark) for part in self._parts])
        if not counted:
            return events
        length = sum([_length(text) for part in self._parts for text in texts.findall(part)])
        each = length / counted / _BYTES_PER_TOKEN
        return int(events * each) if each > _SEVERAL else events

    def __repr__(self) -> str:
        return f"<EventSamples {len(self._parts)}>"


def _length(text: bytes) -> int:
    """The bytes of a JSON string in UTF-8."""
    try:
        return len(orjson.loads(text).encode())
    except orjson.JSONDecodeError:  # half of a surrogate pair, or cut
        return len(text)
