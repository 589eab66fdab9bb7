"""The answer to a Responses request: whole, or as OpenAI's events in OpenAI's order, numbered from 0.

    response.created, response.in_progress
      for each item: response.output_item.added
        a message: response.content_part.added, response.output_text.delta ..., response.output_text.done,
                   response.content_part.done
        a call: response.function_call_arguments.delta, response.function_call_arguments.done
      response.output_item.done
    response.completed, or response.incomplete at the token limit, or error and response.failed

A text and each call are an item of their own.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from replica.api.generation import AnswerContext, Counts
from replica.api.validation import ApiError
from replica.output.generation import Delta, TokenUsage
from replica.output.tool_calls import Part, ToolCallReader, ToolCallText, parts_of

Item = dict[str, Any]


class ResponseAnswer:
    """An `Encoder`. `echo`: the fields of the response that repeat the request. `tools`: calls are parsed from the text."""

    def __init__(self, echo: Mapping[str, Any], context: AnswerContext, *, tools: bool = False) -> None:
        self._echo, self._context = echo, context
        self._id = f"resp_{secrets.token_hex(16)}"
        self._reader = ToolCallReader() if tools else None
        self._events = 0
        self._output: list[Item] = []  # complete items
        self._text: list[str] | None = None  # of the message that is being written
        self._message_id = ""
        self._finish: str | None = None

    def whole(self, answers: Sequence[Delta], usage: TokenUsage) -> bytes:
        self._finish = answers[0].finish
        parts = parts_of(answers[0].text) if self._reader else [answers[0].text]
        parts = [part for part in parts if part]
        for at, part in enumerate(parts):
            cut = self._finish == "length" and at == len(parts) - 1
            status = "incomplete" if cut else "completed"
            self._output.append(_call(part) if isinstance(part, ToolCallText) else _message(_new_id("msg"), part, status))
        return orjson.dumps(self._response(self._status(), usage))

    def delta(self, index: int, delta: Delta, counts: Counts) -> bytes:
        out = b""
        if not self._events:
            out = b"".join(self._lifecycle(name, "in_progress") for name in ("created", "in_progress"))
        self._finish = delta.finish
        return out + b"".join(self._part(part) for part in self._parts(delta))

    def end(self, counts: Counts) -> bytes:
        status = self._status()
        return self._end_message(status) + self._lifecycle(status, status, counts.usage())

    def failed(self, error: ApiError) -> bytes:
        out = self._end_message("incomplete")
        out += self._event("error", code=error.code or "server_error", message=error.message, param=error.param)
        # A response's error has a code of OpenAI's list.
        return out + self._lifecycle("failed", "failed", error={"code": "server_error", "message": error.message})

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, usage: TokenUsage | None = None, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        context = self._context
        head = {"id": self._id, "object": "response", "created_at": context.created, "status": status, "model": context.model}
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        body = {**head, "error": error, "incomplete_details": incomplete, "output": list(self._output), **self._echo}
        return body | {"usage": _usage(usage) if usage else None}

    def _parts(self, delta: Delta) -> list[Part]:
        if self._reader is None:
            return [delta.text] if delta.text else []
        return self._reader.push(delta.text) + (self._reader.finish() if delta.finish is not None else [])

    def _part(self, part: Part) -> bytes:
        if isinstance(part, ToolCallText):
            return self._end_message("completed") + self._call(part)
        out = b""
        if self._text is None:
            self._text, self._message_id = [], _new_id("msg")
            begun = _message(self._message_id, "", "in_progress")
            out = self._item("added", begun | {"content": []})
            out += self._content("response.content_part.added", part=begun["content"][0])
        self._text.append(part)
        return out + self._content("response.output_text.delta", delta=part, logprobs=[])

    def _end_message(self, status: str) -> bytes:
        if self._text is None:
            return b""
        text, self._text = "".join(self._text), None
        item = _message(self._message_id, text, status)
        out = self._content("response.output_text.done", text=text, logprobs=[])
        out += self._content("response.content_part.done", part=item["content"][0])
        return out + self._done(item)

    def _call(self, call: ToolCallText) -> bytes:
        item = _call(call)
        out = self._item("added", item | {"arguments": "", "status": "in_progress"})
        place = {"item_id": item["id"], "output_index": len(self._output)}
        out += self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        out += self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        return out + self._done(item)

    def _done(self, item: Item) -> bytes:
        out = self._item("done", item)
        self._output.append(item)
        return out

    def _item(self, what: str, item: Item) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._output), item=item)

    def _content(self, name: str, **data: Any) -> bytes:
        place = {"item_id": self._message_id, "output_index": len(self._output), "content_index": 0}
        return self._event(name, **place, **data)

    def _lifecycle(
        self, name: str, status: str, usage: TokenUsage | None = None, error: Mapping[str, Any] | None = None
    ) -> bytes:
        return self._event(f"response.{name}", response=self._response(status, usage, error))

    def _event(self, name: str, /, **data: Any) -> bytes:
        body = {"type": name, "sequence_number": self._events, **data}
        self._events += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


def _message(name: str, text: str, status: str) -> Item:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": [content]}


def _call(call: ToolCallText) -> Item:
    ids = {"id": _new_id("fc"), "type": "function_call", "status": "completed", "call_id": _new_id("call")}
    return {**ids, "name": call.name, "arguments": call.arguments}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
