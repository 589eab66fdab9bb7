"""Answers in the format of each API, whole and as events, as recorded from vLLM.

A stream is `opening` (before the prompt is computed), `first`, `piece` for each piece of the text, `ending`. The APIs report
usage differently. Chat counts all prompt tokens and, separately, the cached ones. Messages splits them in uncached, created and
read ones, but counts all of them in the first event of a stream (llama.cpp does the opposite: split in the first event, no
counts in the last). Responses is like chat, in the last event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Event = dict[str, Any]


class Usage(NamedTuple):
    """Tokens. prompt: all prompt tokens."""

    prompt: int
    cached: int
    created: int
    output: int


class Call(NamedTuple):
    identity: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class About:
    """The request of an answer. body: of the request. splits_first: Messages reports usage like llama.cpp."""

    identity: str
    body: Mapping[str, Any]
    created: int
    splits_first: bool = False

    @property
    def model(self) -> str:
        return str(self.body.get("model"))


class Writer(Protocol):
    """Writes one answer."""

    def opening(self) -> Iterator[bytes]: ...
    def first(self, usage: Usage) -> Iterator[bytes]: ...
    def piece(self, text: str) -> Iterator[bytes]: ...
    def ending(self, text: str, call: Call | None, usage: Usage) -> Iterator[bytes]: ...
    def whole(self, text: str, call: Call | None, usage: Usage) -> Event: ...


def data(event: Event) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def named(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\n" + data(event)


class Chat:
    def __init__(self, about: About) -> None:
        self._about = about
        self._usage = bool((about.body.get("stream_options") or {}).get("include_usage"))

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def first(self, usage: Usage) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> Iterator[bytes]:
        yield self._chunk({"content": text})

    def ending(self, text: str, call: Call | None, usage: Usage) -> Iterator[bytes]:
        if call:
            yield self._chunk({"tool_calls": [{"index": 0, **self._call(call)}]})
        yield self._chunk({}, "tool_calls" if call else "stop")
        if self._usage:
            yield data({**self._head("chat.completion.chunk"), "choices": [], "usage": self._count(usage)})
        yield b"data: [DONE]\n\n"

    def whole(self, text: str, call: Call | None, usage: Usage) -> Event:
        message = {"role": "assistant", "content": text} | ({"tool_calls": [self._call(call)]} if call else {})
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop", "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._count(usage)}

    def _head(self, kind: str) -> Event:
        return {"id": self._about.identity, "object": kind, "created": self._about.created, "model": self._about.model}

    def _chunk(self, delta: Event, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return data({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _call(self, call: Call) -> Event:
        return {"id": call.identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _count(self, usage: Usage) -> Event:
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.output,
            "total_tokens": usage.prompt + usage.output,
            "prompt_tokens_details": {"cached_tokens": usage.cached, "created_cache_tokens": usage.created},
        }


class Messages:
    def __init__(self, about: About) -> None:
        self._about = about

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def first(self, usage: Usage) -> Iterator[bytes]:
        told = self._prompt(usage) if self._about.splits_first else {"input_tokens": usage.prompt}
        message = {**self._head(), "content": [], "stop_reason": None, "usage": {**told, "output_tokens": 0}}
        yield named({"type": "message_start", "message": message})
        yield named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})

    def piece(self, text: str) -> Iterator[bytes]:
        yield named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})

    def ending(self, text: str, call: Call | None, usage: Usage) -> Iterator[bytes]:
        yield named({"type": "content_block_stop", "index": 0})
        if call:
            yield named({"type": "content_block_start", "index": 1, "content_block": self._call(call, {})})
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            yield named({"type": "content_block_delta", "index": 1, "delta": delta})
            yield named({"type": "content_block_stop", "index": 1})
        told = {} if self._about.splits_first else self._prompt(usage)
        delta = {"stop_reason": self._reason(call), "stop_sequence": None}
        yield named({"type": "message_delta", "delta": delta, "usage": {**told, "output_tokens": usage.output}})
        yield named({"type": "message_stop"})

    def whole(self, text: str, call: Call | None, usage: Usage) -> Event:
        content = [{"type": "text", "text": text}] + ([self._call(call, json.loads(call.arguments))] if call else [])
        count = {**self._prompt(usage), "output_tokens": usage.output}
        return {**self._head(), "content": content, "stop_reason": self._reason(call), "usage": count}

    def _head(self) -> Event:
        return {
            "id": self._about.identity,
            "type": "message",
            "role": "assistant",
            "model": self._about.model,
            "stop_sequence": None,
        }

    @staticmethod
    def _reason(call: Call | None) -> str:
        return "tool_use" if call else "end_turn"

    @staticmethod
    def _call(call: Call, arguments: Event) -> Event:
        return {"type": "tool_use", "id": call.identity, "name": call.name, "input": arguments}

    def _prompt(self, usage: Usage) -> Event:
        if self._about.splits_first:
            return {"input_tokens": usage.prompt - usage.cached, "cache_read_input_tokens": usage.cached}
        return {
            "input_tokens": usage.prompt - usage.cached - usage.created,
            "cache_creation_input_tokens": usage.created,
            "cache_read_input_tokens": usage.cached,
        }


class Responses:
    def __init__(self, about: About) -> None:
        self._about = about
        self._item = about.identity.replace("resp_", "msg_")
        self._number = 0

    def opening(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def first(self, usage: Usage) -> Iterator[bytes]:
        item = {**self._message(""), "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place(), part=self._part(""))

    def piece(self, text: str) -> Iterator[bytes]:
        yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def ending(self, text: str, call: Call | None, usage: Usage) -> Iterator[bytes]:
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=self._part(text))
        yield self._event("response.output_item.done", output_index=0, item=self._message(text))
        if call:
            item = self._call(call)
            begun = {**item, "arguments": "", "status": "in_progress"}
            place = {"item_id": item["id"], "output_index": 1}
            yield self._event("response.output_item.added", output_index=1, item=begun)
            yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
            yield self._event("response.function_call_arguments.done", **place, arguments=call.arguments, name=call.name)
            yield self._event("response.output_item.done", output_index=1, item=item)
        yield self._event("response.completed", response=self.whole(text, call, usage))

    def whole(self, text: str, call: Call | None, usage: Usage) -> Event:
        output = [self._message(text), *([self._call(call)] if call else [])]
        return {**self._response("completed"), "output": output, "usage": self._count(usage)}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named({**fields, "sequence_number": self._number - 1, "type": kind})

    def _place(self) -> Event:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    @staticmethod
    def _part(text: str) -> Event:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, text: str) -> Event:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [self._part(text)],
        }

    def _call(self, call: Call) -> Event:
        identity = self._about.identity.replace("resp_", "fc_")
        item = {"type": "function_call", "id": identity, "call_id": call.identity, "name": call.name}
        return {**item, "arguments": call.arguments, "status": "completed"}

    def _response(self, status: str) -> Event:
        """With all that vLLM repeats of the request."""
        body = self._about.body
        return {
            "id": self._about.identity,
            "object": "response",
            "created_at": self._about.created,
            "status": status,
            "model": self._about.model,
            "output": [],
            "instructions": body.get("instructions"),
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "metadata": body.get("metadata"),
            "temperature": 1.0,
            "top_p": 1.0,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    @staticmethod
    def _count(usage: Usage) -> Event:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.created},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.output,
        }
