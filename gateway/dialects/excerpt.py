"""An engine's error message as one short line for the log. Pure.

A replica may send any body: at most MAX_READ bytes of it are read, and the result has at most MAX_EXCERPT printable characters.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import orjson

from gateway.dialects.log_names import without_names
from gateway.errors import GatewayError

MAX_READ: Final = 8 << 10  # bytes of a body
MAX_EXCERPT: Final = 200  # characters


def excerpt(body: bytes) -> str:
    """The message of an error body, or the beginning of its text if it is not JSON or longer than MAX_READ; "" for an empty
    body.
    """
    if len(body) > MAX_READ:
        return one_line(body[:MAX_READ].decode("utf-8", "replace"))
    try:
        message = message_of(orjson.loads(body))
    except orjson.JSONDecodeError:
        message = ""
    return one_line(message or body.decode("utf-8", "replace"))


def replica_error(status: int, body: bytes, *, whole: bool = False) -> GatewayError:
    """The error that a replica has answered with. body: of the answer, or its beginning. whole: with all members of the error
    in it.
    """
    answer: Any = None
    with contextlib.suppress(orjson.JSONDecodeError):
        answer = orjson.loads(body)
    error = answer.get("error") if isinstance(answer, dict) else None
    flat = answer if isinstance(answer, dict) and isinstance(answer.get("message"), str) else {}  # as SGLang writes it
    told: dict[str, Any] = error if isinstance(error, dict) else flat
    code, param = (value if isinstance(value := told.get(name), str) else None for name in ("code", "param"))
    text = message_of(answer) or excerpt(body) or f"The replica answered {status}."
    members = {name: value for name, value in told.items() if name != "message"} if whole else None
    return GatewayError(status, code or "replica_error", text, param=param, members=members or None)


def one_line(text: str) -> str:
    """At most MAX_EXCERPT characters of a text. Unprintable characters, line ends included, become spaces; names of
    prompt logs are left out.
    """
    begin = without_names(text[: 4 * MAX_EXCERPT])  # some of it may be white space
    line = " ".join("".join([char if char.isprintable() else " " for char in begin]).split())
    return line if len(line) <= MAX_EXCERPT else f"{line[: MAX_EXCERPT - 3]}..."


def message_of(answer: Any) -> str:
    """The message of an error as OpenAI, vLLM, SGLang, TGI, llama.cpp and FastAPI write it; "" in any other form."""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error")
    holder = error if isinstance(error, dict) else answer
    for found in (error, holder.get("message"), holder.get("detail")):
        if isinstance(found, str) and found:
            return found
    return ""
