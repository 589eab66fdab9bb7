"""OpenAI's responses as finished answers. Pure.

A stream tells each item in pieces, then the whole item, then the whole response: what comes later is believed. So a stream that
is cut has what came before, and engines that write no pieces are read, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects import finished_answer as form
from gateway.dialects.events.named import ERRORS, name_of
from gateway.dialects.finished_answer import AnswerAssembler
from gateway.dialects.responses.stream import QUIET
from gateway.dialects.responses.usage import parse_usage

# Kinds of deltas, by the events' names: of a part of an item, or of its call.
_DELTAS: Final[Mapping[str, str]] = {
    "response.output_text.delta": form.TEXT,
    "response.refusal.delta": form.REFUSAL,
    "response.reasoning_text.delta": form.REASONING,
    "response.reasoning_summary_text.delta": form.REASONING,
    "response.function_call_arguments.delta": form.CALL,
    "response.custom_tool_call_input.delta": form.CALL,
}
_PARTS: Final[Mapping[str, str]] = {
    "output_text": form.TEXT,
    "refusal": form.REFUSAL,
    "reasoning_text": form.REASONING,
    "summary_text": form.REASONING,
}
_CALLS: Final = ("function_call", "custom_tool_call")
_ITEM: Final = ("response.output_item.added", "response.output_item.done")
_ENDS: Final = ("response.completed", "response.incomplete")
_REASONS: Final[Mapping[str, str]] = {"max_output_tokens": form.LENGTH, "content_filter": form.CONTENT_FILTER}
_SUMMARY: Final = 1 << 20  # parts of a summary are numbered from here on: their indexes overlap with those in the content
_SEALED: Final = -1


class ResponseAssembler(AnswerAssembler):
    """One response."""

    def event(self, event: bytes) -> None:
        name = name_of(event)
        kind = _DELTAS.get(name)
        if not (kind or name in _ITEM or name in _ENDS or name in QUIET or name in ERRORS):
            return
        data = form.object_of_event(event)
        index, response = data.get("output_index"), data.get("response")
        if name in ERRORS:
            self.failed()
        elif isinstance(response, dict):
            self.head(response)
            if name in _ENDS:
                self._ended(response, response.get("output"))
                self.value.done = True
        elif isinstance(index, int):
            if kind is None:
                self._item(index, data.get("item"))
            else:
                number = data.get("content_index")
                if not isinstance(number, int):
                    number = data.get("summary_index")
                    number = number + _SUMMARY if isinstance(number, int) else 0
                self.write(self.part(index, number, kind), data.get("delta"))

    def body(self, answer: dict[str, Any]) -> None:
        output = answer.get("output")
        if not isinstance(output, list):
            raise form.UnreadableAnswerError
        if answer.get("status") == "failed":
            self.failed()
        self.head(answer)
        self._ended(answer, output)

    def _ended(self, response: dict[str, Any], output: Any) -> None:
        """The whole response. Some engines leave its output out where they have streamed it."""
        if isinstance(output, list) and output:
            self.forget()
            for index, item in enumerate(output):
                self._item(index, item)
        value, details = self.value, response.get("incomplete_details")
        value.usage = parse_usage(response)
        reason = form.text_in(details, "reason") if isinstance(details, dict) else ""
        self.end(_REASONS.get(reason, reason) or (form.TOOL_CALLS if self.parts(form.CALL) else form.STOP))

    def _item(self, index: int, item: Any) -> None:
        """An item as it is by now."""
        if not isinstance(item, dict):
            return
        self.forget(index)
        if form.text_in(item, "type") in _CALLS:
            call = self.part(index, 0, form.CALL)
            self.name(call, form.text_in(item, "call_id"), form.text_in(item, "name"))
            self.write(call, item.get("arguments") or item.get("input"))
        for name, first in (("content", 0), ("summary", _SUMMARY)):
            parts = item.get(name)
            for number, part in enumerate(parts if isinstance(parts, list) else ()):
                kind = _PARTS.get(form.text_in(part, "type")) if isinstance(part, dict) else None
                if kind:
                    self.write(self.part(index, first + number, kind), part.get("refusal" if kind == form.REFUSAL else "text"))
        if sealed := form.text_in(item, "encrypted_content"):
            part = self.part(index, _SEALED, form.SEALED)
            part.name = "encrypted_content"
            self.write(part, sealed)
