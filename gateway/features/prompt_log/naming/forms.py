"""The forms of a log, one for each dialect, and the names of a body. Pure. O(length): about 3 ms of CPU a MiB."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import EMPTY, chains_of, digests_of, frame_name
from gateway.features.prompt_log.naming.chat import chat_log
from gateway.features.prompt_log.naming.entries import Log, OpenCalls
from gateway.features.prompt_log.naming.messages import messages_log
from gateway.features.prompt_log.naming.responses import responses_log


class LogOf(Protocol):
    """The log of a body. calls: open before it. named: the frame is given by its name. Raises NoNameError."""

    def __call__(self, body: dict[str, Any], calls: OpenCalls, *, named: bool = False) -> Log: ...


CHAT, MESSAGES, RESPONSES = "chat", "messages", "responses"
FORMS: Final[Mapping[str, LogOf]] = {
    CHAT: chat_log,
    MESSAGES: messages_log,
    RESPONSES: responses_log,
}
LATEST: Final = 256  # positions of a log whose chains are kept
_BLOCKS: Final = frozenset(["tool_use", "tool_result", "thinking", "redacted_thinking", "document"])


@dataclass(frozen=True, slots=True)
class LogNames:
    """The names of a log. length: its entries. chain: of all entries. latest: the chains after the last LATEST entries, the
    oldest first. digests: of its entries.
    """

    frame: str
    length: int
    chain: bytes
    latest: tuple[bytes, ...]
    digests: bytes


def log_in(body: bytes, form: str) -> Log:
    """The log of a body. Raises NoNameError."""
    return FORMS[form](object_of(body), OpenCalls())


def object_of(body: bytes) -> dict[str, Any]:
    """The object that a body is. Raises NoNameError."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = _read_slowly(body)
    if not isinstance(found, dict):
        raise NoNameError("the body is not an object")
    return found


def names_in(body: bytes, form: str) -> LogNames:
    """The names of a body's log. Raises NoNameError."""
    log = log_in(body, form)
    digests = digests_of(log.entries)
    latest = deque(chains_of(digests), maxlen=LATEST)
    return LogNames(frame_name(log.frame), len(log.entries), latest[-1] if latest else EMPTY, tuple(latest), digests)


def form_of(body: dict[str, Any]) -> str:
    """The form in which a body is probably written."""
    if "messages" not in body:
        return RESPONSES
    tools, messages = body.get("tools"), body["messages"]
    if body.get("system") or any("input_schema" in tool for tool in _objects(tools)):
        return MESSAGES
    blocks = (block for message in _objects(messages) for block in _objects(message.get("content")))
    return MESSAGES if any("source" in block or str(block.get("type")) in _BLOCKS for block in blocks) else CHAT


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _read_slowly(body: bytes) -> Any:
    """A body that orjson refuses: with half a surrogate pair, with a number beyond all doubles, or no JSON. Raises
    NoNameError.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise NoNameError("the body is nested too deeply") from None
    except ValueError:
        raise NoNameError("the body is not JSON") from None
