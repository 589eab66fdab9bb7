"""JSON that clients read and a strict parser refuses: a byte order mark, NaN and Infinity, half a surrogate pair, bytes that
are no UTF-8.

Only texts that orjson has refused come here: most of them are no JSON at all. O(length). Pure.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

BOM: Final = b"\xef\xbb\xbf"


def read_json(text: bytes) -> Any:
    """The parsed text. NaN and Infinity become None, half a surrogate pair and bytes that are no UTF-8 a replacement character.
    Raises ValueError if it is no JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return orjson.loads(_repaired(text))


def _repaired(text: bytes) -> bytes:
    """Strict JSON with the same values. Raises ValueError."""
    try:
        value = json.loads(text.removeprefix(BOM).decode("utf-8", "replace"), parse_constant=_nothing)
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _nothing(_name: str) -> None:
    return None
