"""Puts a model's own name into a body that has an alias for it: the value of the top-level `model`, and no other byte.

    {"messages": [...], "model": "claude-opus-4-5"}   ->   {"messages": [...], "model": "qwen3-coder"}

Where that value stands is mostly found without a scan of the body: the parsed model is known, so the one that counts is a
member "model" whose value is that. If the bytes have only one such member, on any level, and none that is written with escapes,
it is that one. Bodies of agents have further members "model" (in schemas of tools), but with other values. In all other cases
the body is scanned (`json_edits.py`), a large one in the parser process.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest, NeedsHelper
from gateway.dialects.json_edits import Edit, read_object

SCANNED_AT_ONCE: Final = 1 << 15  # bytes that may be scanned in the event loop

_NAME: Final = b'"model"'
_MEMBER: Final = re.compile(rb'"model"[ \t\r\n]*+:[ \t\r\n]*+')
_ESCAPED: Final = re.compile(rb'"[^"\\]*+\\')  # the beginning of a string with an escape in it
_ESCAPED_LETTER: Final = rb"\u006"  # of any letter of the name
_MOST_LOOKED_AT: Final = 64


def rename(api: ApiRequest, raw: bytes, aliases: Aliases, *, at_once: bool) -> None:
    """If the request's model is an alias: the edit that names the model itself, and all that follows from its name.

    raw: the body before all edits. at_once: raises NeedsHelper if a large body has to be scanned.
    """
    model = aliases.of(api.model)
    if not model or model == api.model:
        return
    start, end = value_of(raw, api.model, SCANNED_AT_ONCE if at_once else len(raw))
    new = orjson.dumps(model)
    longer = len(new) - (end - start)
    api.billing, api.prewarm = _moved(api.billing, end, longer), _moved(api.prewarm, end, longer)  # of the edited body
    if api.diagnosis:
        api.diagnosis.edits = _moved(api.diagnosis.edits, end, longer)
    api.edits = [*api.edits, (start, end, new)]
    api.alias, api.model = api.model, model


def _moved(edits: list[Edit], behind: int, by: int) -> list[Edit]:
    """Those that begin at `behind` or later move."""
    return [(start + by, end + by, text) if start >= behind else (start, end, text) for start, end, text in edits]


def value_of(raw: bytes, model: str, most: int) -> tuple[int, int]:
    """Where the value of the top-level member `model` is, which is known to be this one. O(length), with a small factor.

    most: length of a body that may be scanned; NeedsHelper is raised for a longer one that has to be.
    """
    written = orjson.dumps(model)
    at = _the_only(raw, written)
    if at >= 0:
        return at, at + len(written)
    if len(raw) > most:
        raise NeedsHelper
    return read_object(raw).spans["model"]


def _the_only(raw: bytes, written: bytes) -> int:
    """Where the value is, if only one member of this name may have it; -1 if that takes a scan."""
    if b"\\" in written or raw.find(_ESCAPED_LETTER) >= 0:
        return -1
    found, at, left = -1, raw.find(_NAME), _MOST_LOOKED_AT
    while at >= 0:
        left -= 1
        if left < 0:
            return -1
        # A quote behind a backslash is within a string; any other one that is followed by this begins the string "model".
        member = _MEMBER.match(raw, at) if raw[at - 1 : at] != b"\\" else None
        if member is not None:
            value = member.end()
            if raw.startswith(written, value):
                if found >= 0:
                    return -1
                found = value
            elif _ESCAPED.match(raw, value):
                return -1
        at = raw.find(_NAME, at + len(_NAME))
    return found
