"""The answer to a Messages request: whole, or as the events that Anthropic's clients combine.

A stream is `message_start`, then for each block `content_block_start`, its deltas and `content_block_stop`, then
`message_delta` with the stop reason and the total usage, and `message_stop`. A text and each call are a block of their own.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from replica.api.generation import AnswerContext, Counts
from replica.api.messages.cache_control import CacheMarks
from replica.api.messages.errors import error_body
from replica.api.validation import ApiError
from replica.output.generation import Delta, TokenUsage
from replica.output.tool_calls import Part, ToolCallReader, ToolCallText, parts_of


class MessageAnswer:
    """An `Encoder`. `tools`: calls are parsed from the text. `silent`: the prompt was only to be cached, and there is no
    answer.
    """

    def __init__(self, cache: CacheMarks, context: AnswerContext, *, tools: bool = False, silent: bool = False) -> None:
        self._cache, self._context, self._silent = cache, context, silent
        self._id = f"msg_{secrets.token_hex(12)}"
        self._reader = ToolCallReader() if tools else None
        self._begun = False
        self._blocks = 0  # begun
        self._writing = False  # the last block is an unfinished text
        self._called = False
        self._last = Delta("")

    def whole(self, answers: Sequence[Delta], usage: TokenUsage) -> bytes:
        self._last = answers[0]
        parts = parts_of(self._last.text) if self._reader else [self._last.text]
        content = [] if self._silent else [self._block(part) for part in parts if part]
        return orjson.dumps(self._message(content, self._usage(usage)) | self._reasons())

    def delta(self, index: int, delta: Delta, counts: Counts) -> bytes:
        out = b""
        if not self._begun:
            self._begun = True
            usage = {**self._usage(counts.usage()), "output_tokens": 0}
            out = _event("message_start", message=self._message([], usage) | {"stop_reason": None, "stop_sequence": None})
        self._last = delta
        return out + b"".join(self._part(part) for part in self._parts(delta))

    def end(self, counts: Counts) -> bytes:
        usage = self._usage(counts.usage())
        usage.pop("cache_creation", None)
        return self._stop() + _event("message_delta", delta=self._reasons(), usage=usage) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return _event("error", **error_body(error))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._context.model}
        return head | {"content": content, "usage": usage}

    def _parts(self, delta: Delta) -> list[Part]:
        if self._silent:
            return []
        if self._reader is None:
            return [delta.text] if delta.text else []
        return self._reader.push(delta.text) + (self._reader.finish() if delta.finish is not None else [])

    def _part(self, part: Part) -> bytes:
        if isinstance(part, ToolCallText):
            out = self._stop() + self._start(self._block(part) | {"input": {}})
            json = {"type": "input_json_delta", "partial_json": part.arguments}
            return out + _event("content_block_delta", index=self._blocks - 1, delta=json) + self._stop()
        out = b"" if self._writing else self._start({"type": "text", "text": ""})
        return out + _event("content_block_delta", index=self._blocks - 1, delta={"type": "text_delta", "text": part})

    def _start(self, block: dict[str, Any]) -> bytes:
        self._blocks, self._writing = self._blocks + 1, True
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _stop(self) -> bytes:
        if not self._writing:
            return b""
        self._writing = False
        return _event("content_block_stop", index=self._blocks - 1)

    def _block(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        self._called = True
        call = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.name}
        return call | {"input": orjson.loads(part.arguments)}

    def _reasons(self) -> dict[str, Any]:
        """The stop reason of the answer."""
        last = self._last
        if self._silent or last.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "tool_use" if self._called else "end_turn", "stop_sequence": None}

    def _usage(self, usage: TokenUsage) -> dict[str, Any]:
        """Three parts of the prompt: found in the cache; computed, up to the last breakpoint, in whole blocks; the rest."""
        read = usage.cached_tokens or 0
        size = self._context.block_size
        written = {"1h": 0, "5m": 0}
        until = read
        for ttl, position in zip(self._cache.ttls, self._context.marks, strict=True):
            written[ttl] += max(0, position // size * size - until)
            until = max(until, position // size * size)
        body: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens - until,
            "cache_creation_input_tokens": until - read,
            "cache_read_input_tokens": read,
            "output_tokens": 0 if self._silent else usage.completion_tokens,
        }
        if self._cache.ttls:
            body["cache_creation"] = {f"ephemeral_{ttl}_input_tokens": written[ttl] for ttl in ("5m", "1h")}
        return body


def _event(name: str, /, **data: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **data}) + b"\n\n"
