"""Replaces an alias in a body by the model's own name: the value of the top-level `model` changes, and no other byte.

    {"messages": [...], "model": "claude-opus-4-5"}   ->   {"messages": [...], "model": "qwen3-coder"}

Most bodies need no scan. The parsed value of the top-level `model` is known. If the bytes have only one member "model" with
this value, on any level, and no name written with escapes, that member is the top-level one. Bodies of agents have further
members "model" (in schemas of tools), but with other values. All other bodies are scanned (`json_edits.py`), large ones in the
parser process.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest, NeedsHelper
from gateway.dialects.json_edits import moved, read_object

SCANNED_AT_ONCE: Final = 1 << 15  # bytes that the event loop may scan

_NAME: Final = b'"model"'
_MEMBER: Final = re.compile(rb'"model"[ \t\r\n]*+:[ \t\r\n]*+')
_ESCAPED: Final = re.compile(rb'"[^"\\]*+\\')  # the beginning of a string with an escape in it
_ESCAPED_LETTER: Final = rb"\u006"  # of any letter of the name
_MOST_LOOKED_AT: Final = 64


def rename(api: ApiRequest, raw: bytes, aliases: Aliases, *, at_once: bool) -> None:
    """If the request's model is an alias, replace it by the model's own name, in the body's edits and in `api`.

    raw: the body before all edits. at_once: raises NeedsHelper if a large body has to be scanned.
    """
    model = aliases.of(api.model)
    if not model or model == api.model:
        return
    start, end = value_of(raw, api.model, SCANNED_AT_ONCE if at_once else len(raw))
    new = orjson.dumps(model)
    longer = len(new) - (end - start)
    api.billing, api.prewarm = moved(api.billing, end, longer), moved(api.prewarm, end, longer)  # of the edited body
    if api.diagnosis:
        api.diagnosis.edits = moved(api.diagnosis.edits, end, longer)
    api.edits = [*api.edits, (start, end, new)]
    api.alias, api.model = api.model, model


def value_of(raw: bytes, model: str, most: int) -> tuple[int, int]:
    """The (start, end) of the top-level member `model`, whose value is known. O(length), with a small factor.

    most: maximum bytes of a body to be scanned; NeedsHelper is raised if a longer one needs a scan.
    """
    written = orjson.dumps(model)
    at = _the_only(raw, written)
    if at >= 0:
        return at, at + len(written)
    if len(raw) > most:
        raise NeedsHelper
    return read_object(raw).spans["model"]


def _the_only(raw: bytes, written: bytes) -> int:
    """The offset of the value if only one member of this name can have it; -1 if a scan is needed."""
    if b"\\" in written or raw.find(_ESCAPED_LETTER) >= 0:
        return -1
    found, at, left = -1, raw.find(_NAME), _MOST_LOOKED_AT
    while at >= 0:
        left -= 1
        if left < 0:
            return -1
        # A quote behind a backslash is within a string; any other quote followed by `model"` begins the string "model".
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
