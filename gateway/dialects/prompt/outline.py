"""The outline of a prompt: digests of its segments, so that two prompts can be compared part by part without their texts.

    canonical prompt:   tools and other fields of the head, then turns          (canonical.py)
    outline:            segment, segment, ...: each tool, each field, each turn; of a plain text its paragraphs

The segments' sizes add up to the prompt's length, so each offset in the prompt belongs to a segment. Beside the digest of its
bytes, a segment has a digest of its text with times, ids and random tokens masked (`volatile.py`), and a list of those. A
prompt of more than MAX_SEGMENTS ends in one large segment. Each request of a conversation repeats the turns of the last one, so
`Outliner` caches the latest segments. Pure.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import orjson
import xxhash

from gateway.dialects.prompt.canonical import FIELD, HEAD, TURN
from gateway.dialects.prompt.head import head_field
from gateway.dialects.prompt.segments import FIELDS, TEXT, TOOL, TURNS, Outline, Segment
from gateway.dialects.prompt.volatile import masked

MAX_SEGMENTS: Final = 1024
MAX_NAME: Final = 64  # characters of a segment's name
REST: Final = "rest"  # the name of the last segment of a prompt with more of them
MAX_REMEMBERED: Final = 4096  # segments in the cache
MAX_REMEMBERED_VOLATILE: Final = 1 << 16  # volatile texts of all segments in the cache
_PARAGRAPH: Final = 4096  # bytes of plain text; a longer paragraph is cut at its next line
_PIECE: Final = 1 << 16  # at most
_READ_AT: Final = 2000  # bytes at the start of a turn that are searched for the words of a summary

# The beginning of a field of the head, or of a turn: a separator with a name behind it, because texts and digests may have the
# separator's byte, too.
_CUT: Final = re.compile(rb"\x1c(?=[a-z_]{1,32}[\[{\"0-9tfn-])|\x1e(?=[^\x00-\x1f]{1,128}\x1f)")
# First words of clients that have replaced a conversation by its summary.
_SUMMARY: Final = re.compile(
    rb"continued from a previous conversation|previous conversation (?:that )?ran out of context|<summary>|"
    rb"summary of (?:the|our|this|my) (?:\w+ )?(?:conversation|session|work|discussion|task)|"
    rb"(?:conversation|history|context) (?:so far )?(?:has been |was |is )?(?:summari[sz]ed|compacted)|"
    rb"(?:handoff|conversation|compacted) summary|another language model started to solve",
    re.IGNORECASE,
)


Piece = tuple[str, str, bytes, int]
"""kind, name, text, and the number of bytes of the prompt that it covers: a tool's text lacks the comma."""


class Outliner:
    """Makes outlines and caches their segments. on: parsed requests need outlines (`parser/`)."""

    def __init__(self, most: int = MAX_REMEMBERED, most_volatile: int = MAX_REMEMBERED_VOLATILE) -> None:
        """most: maximum number of segments in the cache. most_volatile: maximum number of their volatile texts."""
        self._most = most
        self._most_volatile = most_volatile
        self._known = OrderedDict[tuple[str, str, int, int], Segment]()
        self._volatile_texts = 0
        self.on = False

    def clear(self) -> None:
        """Clear the cache."""
        self._known.clear()
        self._volatile_texts = 0

    def outline(self, prompt: bytes) -> Outline:
        """The outline of a canonical prompt, or of a plain text. O(length); about 20 ms a MiB of new text, 1 ms of
        cached text.
        """
        return tuple([self._segment(*piece) for piece in pieces(prompt)])

    def _segment(self, kind: str, name: str, text: bytes, size: int) -> Segment:
        digest = xxhash.xxh3_64_intdigest(text)
        key = kind, name, size, digest
        known = self._known.get(key)
        if known is None:
            loose, found = masked(text)
            summary = kind in (TURNS, TEXT) and _SUMMARY.search(text, 0, _READ_AT) is not None
            known = Segment(kind, name, size, digest, loose, found, summary)
            self._known[key] = known
            self._volatile_texts += len(found)
            while len(self._known) > self._most or self._volatile_texts > self._most_volatile:
                _, dropped = self._known.popitem(last=False)
                self._volatile_texts -= len(dropped.volatile)
        else:
            self._known.move_to_end(key)
        return known

    def check(self) -> None:
        """For tests: raises AssertionError if the counts are inconsistent."""
        assert self._volatile_texts == sum(len(segment.volatile) for segment in self._known.values())
        assert len(self._known) <= self._most
        assert self._volatile_texts <= self._most_volatile

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Outliner, {len(self)} segments known>"


def pieces(prompt: bytes) -> list[Piece]:
    """The segments of a prompt, MAX_SEGMENTS at most; their sizes add up to the length of the prompt."""
    found = list[Piece]()
    rest = len(prompt)
    for piece in _all_pieces(prompt):
        if len(found) == MAX_SEGMENTS - 1:
            found.append((piece[0], REST, prompt[len(prompt) - rest :], rest))
            break
        found.append(piece)
        rest -= piece[3]
    return found


def _all_pieces(prompt: bytes) -> Iterator[Piece]:
    if not prompt.startswith((HEAD, TURN)):
        yield from _paragraphs(prompt)
        return
    starts = [match.start() for match in _CUT.finditer(prompt)]
    if not starts or starts[0]:
        starts.insert(0, 0)
    for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True):
        text = prompt[start:end]
        if text.startswith(HEAD):
            yield from _fields(text)
        else:
            role = text[1:].partition(FIELD)[0].partition(b"@")[0]
            yield TURNS, _name(role), text, len(text)


def _fields(part: bytes) -> Iterator[Piece]:
    """The pieces of a head field: one for each tool in the list of tools, else the whole field."""
    name, value = head_field(part)
    if name == "tools" and (tools := _tools(value)):
        rest = len(part)
        for number, (title, text) in enumerate(tools, 1):
            size = rest if number == len(tools) else min(rest, len(text) + 1)
            yield TOOL, title, text, size
            rest -= size
    else:
        yield FIELDS, name[:MAX_NAME], part, len(part)


def _tools(value: bytes) -> list[tuple[str, bytes]]:
    """(name, JSON) of each tool; none if the value is no list of objects, or too long a list."""
    try:
        tools = orjson.loads(value)
    except orjson.JSONDecodeError:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_SEGMENTS // 2 or not all(isinstance(tool, dict) for tool in tools):
        return []
    named = list[tuple[str, bytes]]()
    for tool in tools:
        function = tool.get("function")
        name = (function.get("name") if isinstance(function, dict) else None) or tool.get("name") or tool.get("type")
        named.append((str(name)[:MAX_NAME], orjson.dumps(tool)))
    return named


def _paragraphs(text: bytes) -> Iterator[Piece]:
    at = 0
    while at < len(text):
        end = text.find(b"\n\n", at, at + _PARAGRAPH) + 2
        if end < 2:
            end = text.find(b"\n", at + _PARAGRAPH, at + _PIECE) + 1 or min(at + _PIECE, len(text))
        yield TEXT, TEXT, text[at:end], end - at
        at = end


def _name(text: bytes) -> str:
    return text[: 4 * MAX_NAME].decode("utf-8", "replace")[:MAX_NAME]
