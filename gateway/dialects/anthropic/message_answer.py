"""Anthropic's messages as finished answers: a body is its blocks, a stream tells each of them in pieces. Pure.

Arguments of calls are objects in a body, and text in a stream: both become the same JSON. Text that is no JSON stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects import finished_answer as form
from gateway.dialects.anthropic.usage import merge, usage_from
from gateway.dialects.events.named import name_of
from gateway.dialects.finished_answer import AnswerAssembler, UnreadableAnswerError
from gateway.dialects.json_structure import exceeds

# By a block's type: the kind of its part, and the member of its deltas.
_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "text": (form.TEXT, "text"),
    "thinking": (form.REASONING, "thinking"),
    "tool_use": (form.CALL, "partial_json"),
    "redacted_thinking": (form.SEALED, "data"),
}
_DELTAS: Final[Mapping[str, str]] = dict(_KINDS.values())
_REASONS: Final[Mapping[str, str]] = {
    "end_turn": form.STOP,
    "stop_sequence": form.STOP,
    "max_tokens": form.LENGTH,
    "tool_use": form.TOOL_CALLS,
    "refusal": form.CONTENT_FILTER,
}
_MAX_ARGUMENTS: Final = 1 << 14  # values of the arguments that are read


class MessageAssembler(AnswerAssembler):
    """One message."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = dict[str, Any]()

    def event(self, event: bytes) -> None:
        name, data = name_of(event), form.object_of_event(event)
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
            raise form.UnreadableAnswerError
        self.head(answer)
        for index, block in enumerate(content):
            self._block(index, block)
        self._ended(answer, answer.get("usage"))

    def _block(self, index: Any, block: Any) -> None:
        type_ = form.text_in(block, "type") if isinstance(block, dict) else ""
        if type_ not in _KINDS or not isinstance(index, int):
            self.value.foreign = True
            return
        kind, member = _KINDS[type_]
        part = self.part(index, 0, kind)
        if kind == form.CALL:
            self.name(part, form.text_in(block, "id"), form.text_in(block, "name"))
            given = block.get("input")
            self.write(part, _json(given) if given else "")
        else:
            self.name(part, "", "" if kind == form.TEXT else type_)
            self.write(part, block.get(member))
            part.signature = form.text_in(block, "signature")
            self.hold(len(part.signature))

    def _delta(self, index: Any, delta: Any) -> None:
        part = self._parts.get((index, 0)) if isinstance(index, int) and isinstance(delta, dict) else None
        if part is not None:
            self.write(part, delta.get(_DELTAS[part.kind]))
            if signature := form.text_in(delta, "signature"):
                part.signature += signature
                self.hold(len(signature))

    def _ended(self, holder: Any, usage: Any) -> None:
        """holder: has the reason."""
        merge(self._counts, usage)
        value = self.value
        value.usage = usage_from(self._counts)
        reason = form.text_in(holder, "stop_reason") if isinstance(holder, dict) else ""
        if not reason or value.finish_reason:  # a delta with usage only, or repeated
            return
        self.end(_REASONS.get(reason, reason), form.text_in(holder, "stop_sequence"))
        for part in self.parts(form.CALL):
            part.written = _spelled(part.written)


def _json(value: Any) -> str:
    """Raises UnreadableAnswerError for half a surrogate pair."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise UnreadableAnswerError from error


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
