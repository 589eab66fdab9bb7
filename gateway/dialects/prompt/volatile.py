"""Volatile texts in a prompt: times, ids and random tokens, which differ in the next request.

A prefix match ends at the first byte that differs. The cause can be found without the text: each volatile text is replaced by a
mark (`masked`). If two texts differ and are equal once they are masked, they differ in a volatile text, and the list of these,
with a digest of each, shows the first one.

    Today is 2026-11-27, run 8f3ab2.     ->     Today is <time>, run <nonce>.

Only tokens with a digit (or names of weekdays) count, so words are never masked. Kinds: a TIME is a date, a time of day or
seconds since 1970; a PATH is a token of a file's path; an ID is a UUID, a number, or a token behind a word such as `id` or
`session`; any other token is a NONCE. A false mark does no harm: it counts only if two texts differ there. Pure.
O(length): about 20 ms a MiB of plain text.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import xxhash

TIME: Final = "time"
ID: Final = "id"
NONCE: Final = "nonce"
PATH: Final = "path"

MAX_MASKED: Final = 256 << 10  # bytes of a text that are masked; the rest stays as it is
MAX_LISTED: Final = 64  # listed volatile texts of a text; all are masked
_CONTEXT: Final = 24  # bytes before a token that may name it

_MONTH: Final = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_DAY: Final = rb"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_CLOCK: Final = rb"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?[AaPp]\.?[Mm]\b)?(?: ?(?:Z|UTC|GMT)\b)?(?: ?[+-]\d{2}:?\d{2})?"
_TIME: Final = b"|".join(
    (
        rb"\d{4}[-/]\d{2}[-/]\d{2}(?:[T ]" + _CLOCK + rb")?",
        rb"\d{1,2}[./]\d{1,2}[./]\d{2,4}(?![.\w])",
        rb"(?:" + _DAY + rb",? )?\d{1,2}(?:st|nd|rd|th)? (?:of )?" + _MONTH + rb"\.?,? \d{4}(?:,? " + _CLOCK + rb")?",
        rb"(?:" + _DAY + rb",? )?" + _MONTH + rb"\.? \d{1,2}(?:st|nd|rd|th)?(?:,? \d{4})?(?:,? " + _CLOCK + rb"(?: \d{4})?)?",
        _CLOCK,
        rb"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b",
        rb"1[4-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d{1,9})?(?!\w)",
    )
)
_UUID: Final = rb"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
# Long tokens of base64 and the like, with their signs; else a word with a digit. Without backtracking: a text of letters only
# is given up at its 33rd.
_TOKEN: Final = rb"(?=[A-Za-z_+/=-]{0,32}+\d)[\w+/=-]{16,}+|[A-Za-z_]{0,32}+\d\w*+"
_VOLATILE: Final = re.compile(
    rb"(?<![0-9A-Za-z_])(?:(?P<time>" + _TIME + rb")|(?P<uuid>" + _UUID + rb")|(?P<token>" + _TOKEN + rb"))"
)
_NAMES_ID: Final = re.compile(
    rb"(?:id|no|number|user|session|request|trace|conversation|thread|account|customer|tenant|ticket|order)"
    rb"[\"'>)\]]{0,2}(?: is)?[ \t]?[:=#-]?[ \t]?[\"'<(\[#]{0,2}\Z",
    re.IGNORECASE,
)
_IN_PATH: Final = re.compile(rb"[/\\][\w.-]{0,32}\Z")


class VolatileText(NamedTuple):
    """A volatile text. kind: TIME, ID, NONCE or PATH. at: its offset in bytes."""

    kind: str
    at: int
    digest: int


def masked(text: bytes) -> tuple[int, tuple[VolatileText, ...]]:
    """The digest of a text without its volatile texts, and the first MAX_LISTED of these. O(length)."""
    begin, found = text[:MAX_MASKED], list[VolatileText]()
    pieces, last = list[bytes](), 0
    for match in _VOLATILE.finditer(begin):
        start, end = match.span()
        kind = _kind(match, begin, start)
        pieces.append(begin[last:start])
        pieces.append(b"\0v")  # the same mark for all kinds: a number may look like a time in only one of two requests
        last = end
        if len(found) < MAX_LISTED:
            found.append(VolatileText(kind, start, xxhash.xxh3_64_intdigest(match[0])))
    pieces.append(begin[last:])
    pieces.append(text[MAX_MASKED:])
    return xxhash.xxh3_64_intdigest(b"".join(pieces)), tuple(found)


def _kind(match: re.Match[bytes], text: bytes, start: int) -> str:
    name = match.lastgroup
    if name == "time":
        return TIME
    if match[0].startswith(b"/") or _IN_PATH.search(text, max(0, start - _CONTEXT), start):
        return PATH
    if name == "uuid" or match[0].isdigit() or _NAMES_ID.search(text, max(0, start - _CONTEXT), start):
        return ID
    return NONCE
