"""Anthropic's messages as finished answers: a body is its blocks, a stream tells each of them in pieces. Pure.

Arguments of calls are objects in a body, and text in a stream: both become the same JSON. Text that is no JSON stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.anthropic.usage import merge, usage_from
from gateway.dialects.events.named import name_of
from gateway.dialects.finished_answer import (
    CALL,
    CONTENT_FILTER,
    LENGTH,
    REASONING,
    SEALED,
    STOP,
    TEXT,
    TOOL_CALLS,
    AnswerAssembler,
    UnreadableAnswerError,
    object_of_event,
    text_in,
)
from gateway.dialects.json_structure import exceeds

_KINDS: Final[Mapping[str, str]] = {"text": TEXT, "thinking": REASONING, "tool_use": CALL, "redacted_thinking": SEALED}
_MEMBERS: Final = ("text", "thinking", "data")  # of a block, which hold what its part says
_PIECES: Final = ("text", "thinking", "partial_json")  # of a delta
_REASONS: Final[Mapping[str, str]] = {
    "end_turn": STOP,
    "stop_sequence": STOP,
    "max_tokens": LENGTH,
    "tool_use": TOOL_CALLS,
    "refusal": CONTENT_FILTER,
}
_MAX_ARGUMENTS: Final = 1 << 14  # values of those that are read


class MessageAssembler(AnswerAssembler):
    """One message."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = dict[str, Any]()

    def event(self, event: bytes) -> None:
        name, data = name_of(event), object_of_event(event)
        if not data:
            return
        if name == "message_start":
            message = data.get("message")
            if isinstance(message, dict):
                self.head(message)
                merge(self._counts, message.get("usage"))
        elif name == "content_block_start":
            self._block(data.get("index"), data.get("content_block"))
        elif name == "content_block_delta":
            self._delta(data.get("index"), data.get("delta"))
        elif name == "message_delta":
            self._ended(data.get("delta"), data.get("usage"))
        elif name == "message_stop":
            self.value.done = True
        elif name == "error":
            self.failed()

    def body(self, answer: dict[str, Any]) -> None:
        content = answer.get("content")
        if not isinstance(content, list):
            raise UnreadableAnswerError
        self.head(answer)
        for index, block in enumerate(content):
            self._block(index, block)
        self._ended(answer, answer.get("usage"))

    def _block(self, index: Any, block: Any) -> None:
        kind = _KINDS.get(text_in(block, "type")) if isinstance(block, dict) else None
        if kind is None or not isinstance(index, int):
            return
        part = self.part(index, 0, kind)
        if kind == CALL:
            part.id, part.name = text_in(block, "id"), text_in(block, "name")
            given = block.get("input")
            self.write(part, orjson.dumps(given).decode() if given else "")
        elif kind != TEXT:
            part.name = text_in(block, "type")
        for name in _MEMBERS:
            self.write(part, block.get(name))

    def _delta(self, index: Any, delta: Any) -> None:
        part = self.found(index) if isinstance(index, int) and isinstance(delta, dict) else None
        if part is not None:
            for name in _PIECES:
                self.write(part, delta.get(name))

    def _ended(self, holder: Any, usage: Any) -> None:
        """holder: has the reason."""
        merge(self._counts, usage)
        value = self.value
        value.usage = usage_from(self._counts)
        reason = text_in(holder, "stop_reason") if isinstance(holder, dict) else ""
        value.finish_reason, value.stop = _REASONS.get(reason, reason), text_in(holder, "stop_sequence") if reason else ""
        for part in self.parts(CALL):
            part.written = _spelled(part.written)


def _spelled(arguments: bytearray) -> bytearray:
    """Arguments as a body has them."""
    if not arguments.strip():
        return bytearray(b"{}")
    if exceeds(bytes(arguments), _MAX_ARGUMENTS):
        return arguments
    try:
        return bytearray(orjson.dumps(orjson.loads(arguments)))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments
