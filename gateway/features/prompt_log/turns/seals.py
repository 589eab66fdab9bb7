"""Sealed parts: bytes for the pool that made them. They are stored and sent verbatim; endpoints show their digests. Pure."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

import orjson

REDACTED, ENCRYPTED = "redacted_thinking", "encrypted_content"
_MARKS: Final = (REDACTED.encode(), ENCRYPTED.encode())


def may_have_seals(elements: bytes) -> bool:
    """False: none of these elements has a sealed part. O(length)."""
    return any(mark in elements for mark in _MARKS)


def shown(elements: list[bytes]) -> list[bytes]:
    """The elements with digest and length in place of the bytes of sealed parts."""
    return [_shown(element) for element in elements]


def _shown(element: bytes) -> bytes:
    found = orjson.loads(element)
    if isinstance(found, dict):
        _mask(found, ENCRYPTED)
        content = found.get("content")
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type") == REDACTED:
                _mask(block, "data")
    return orjson.dumps(found)


def _mask(holder: dict[str, Any], name: str) -> None:
    text = holder.get(name)
    if isinstance(text, str):
        raw = text.encode()
        holder[name] = {"sha256": sha256(raw).hexdigest(), "bytes": len(raw)}
