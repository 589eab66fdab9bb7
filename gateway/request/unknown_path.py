"""Recognises answers of replicas that do not know the path, and so do not speak the dialect.

A 404 may also concern the model, or an object that the body names. So only the messages that web frameworks have for unknown
paths count: FastAPI's, llama.cpp's, aiohttp's, Go's, our replica's, and anything that is not JSON.
"""

from __future__ import annotations

from typing import Final

import orjson

MOST_READ: Final = 4096  # bytes; such an answer is short
_NO_PATH: Final = frozenset([404, 405, 501])
_WORDS: Final = frozenset(["not found", "file not found", "404 page not found", "404: not found", "method not allowed"])

_OURS: Final = "unknown path /"  # begins the message of `warmroute replica`, which goes on with its known paths


def may_be(status: int) -> bool:
    return status in _NO_PATH


def is_unknown_path(status: int, body: bytes) -> bool:
    """True if the answer shows an unknown path. body: its first MOST_READ bytes, or all of it."""
    if status != 404:
        return status in _NO_PATH
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return not body.lstrip().startswith((b"{", b"["))  # JSON that was cut is a long error message, and not of a framework
    if not isinstance(answer, dict):
        return True
    error = answer.get("error")
    holder = error if isinstance(error, dict) else answer
    for text in (error, holder.get("message"), holder.get("detail")):
        if isinstance(text, str):
            said = text.strip().rstrip(".").lower()
            return said in _WORDS or said.startswith(_OURS)
    return False
