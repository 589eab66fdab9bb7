"""Whether a replica's answer shows that it does not know the path: then it does not speak the dialect.

A 404 may as well be about the model, or about an object that the body names. So of a 404 only those words count that web
frameworks have for a path: FastAPI's, llama.cpp's, aiohttp's, Go's, our replica's, and anything that is not JSON.
"""

from __future__ import annotations

from typing import Final

import orjson

MOST_READ: Final = 4096  # bytes; such an answer is short
_NO_PATH: Final = frozenset([404, 405, 501])
_WORDS: Final = frozenset(["not found", "file not found", "404 page not found", "404: not found", "method not allowed"])

_OURS: Final = "unknown path /"  # `warmroute replica`'s, which goes on with what it serves


def may_be(status: int) -> bool:
    return status in _NO_PATH


def is_unknown_path(status: int, body: bytes) -> bool:
    """body: its first MOST_READ bytes, or all of it."""
    if status != 404:
        return status in _NO_PATH
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return not body.lstrip().startswith((b"{", b"["))  # else it is long: an error in words of its own
    if not isinstance(answer, dict):
        return True
    error = answer.get("error")
    holder = error if isinstance(error, dict) else answer
    for text in (error, holder.get("message"), holder.get("detail")):
        if isinstance(text, str):
            said = text.strip().rstrip(".").lower()
            return said in _WORDS or said.startswith(_OURS)
    return False
