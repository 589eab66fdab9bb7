"""Reads a streamed answer as a client: text, call, usage, and its completeness."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from bench.agents.answers import Call
from bench.agents.dialogues import Assistant

Json = Mapping[str, Any]


class Failed(Exception):
    """The answer is an error or incomplete. The message says how, without ids, so that equal ones can be counted."""


@dataclass(slots=True)
class Reply:
    """One answer so far. usage: prompt tokens, cached ones; first: the time of the first text."""

    identity: str = ""
    text: str = ""
    first: float = 0.0
    usage: tuple[int, int] | None = None
    done: bool = False
    _call: dict[str, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    @property
    def entry(self) -> Assistant:
        call = self._call
        return Assistant(self.text, Call(call["id"], call["name"], call.get("arguments", "")) if call else None)

    def feed(self, event: Json) -> None:
        """An event of any of the APIs. Raises Failed."""
        kind = event.get("type")
        if "error" in event and kind in (None, "error"):
            raise Failed(f"in mid-stream: {_message(event)}")
        if kind is None:
            self._chat(event)
        elif str(kind).startswith("response."):
            self._responses(str(kind), event)
        else:
            self._messages(str(kind), event)

    def _chat(self, event: Json) -> None:
        self.identity = event.get("id") or self.identity
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            self.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                self._more_call(call.get("id"), function.get("name"), function.get("arguments"))
            self.done = self.done or choice.get("finish_reason") is not None
        if usage := event.get("usage"):
            self.usage = usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _messages(self, kind: str, event: Json) -> None:
        if kind == "message_start":
            self.identity = event["message"]["id"]
            self._count(event["message"].get("usage"))
        elif kind == "message_delta":
            self._count(event.get("usage"))
        elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            self._more_call(event["content_block"]["id"], event["content_block"]["name"], "")
        elif kind == "content_block_delta":
            self.text += event["delta"].get("text") or ""
            if partial := event["delta"].get("partial_json"):
                self._more_call(None, None, partial)
        elif kind == "message_stop":
            self.done = True

    def _count(self, usage: Any) -> None:
        """Merged field by field; all that was not cached before is the rest."""
        self._counts |= {key: value for key, value in (usage or {}).items() if isinstance(value, int)}
        read = self._counts.get("cache_read_input_tokens", 0)
        created = self._counts.get("cache_creation_input_tokens", 0)
        self.usage = self._counts.get("input_tokens", 0) + created + read, read

    def _responses(self, kind: str, event: Json) -> None:
        if kind == "response.output_text.delta":
            self.text += event["delta"]
        elif kind == "response.output_item.done" and event["item"]["type"] == "function_call":
            self._more_call(event["item"]["call_id"], event["item"]["name"], event["item"]["arguments"])
        elif kind == "response.failed":
            raise Failed(f"in mid-stream: {_message(event['response'])}")
        elif kind in ("response.completed", "response.incomplete"):
            response, self.done = event["response"], True
            self.identity = response["id"]
            if usage := response.get("usage"):
                self.usage = usage["input_tokens"], (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0

    def _more_call(self, identity: str | None, name: str | None, arguments: str | None) -> None:
        self._call |= {key: value for key, value in (("id", identity), ("name", name)) if value}
        self._call["arguments"] = self._call.get("arguments", "") + (arguments or "")


async def read(response: aiohttp.ClientResponse, now: Any) -> Reply:
    """All of an answer. Raises Failed."""
    if response.status != 200:
        raise Failed(f"{response.status} {_refusal(await response.read())}".strip())
    reply = Reply()
    async for event in _events(response):
        reply.feed(event)
        if reply.text and not reply.first:
            reply.first = now()
    if not reply.done:
        raise Failed("the answer ends before its end")
    return reply


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    buffer = b""
    async for chunk in response.content.iter_any():
        whole, found, buffer = (buffer + chunk).rpartition(b"\n\n")
        if found:
            for event in _data(whole):
                yield event


def _data(text: bytes) -> Iterator[Json]:
    for line in text.split(b"\n"):
        if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
            event = orjson.loads(payload)
            if isinstance(event, dict):
                yield event


def _refusal(raw: bytes) -> str:
    try:
        return _message(orjson.loads(raw))
    except orjson.JSONDecodeError:
        return raw[:120].decode("utf-8", "replace")


def _message(event: Any) -> str:
    error = event.get("error") if isinstance(event, dict) else None
    text = error.get("message") if isinstance(error, dict) else error or event
    return " ".join("ID" if any(map(str.isdigit, word)) and len(word) > 15 else word for word in str(text)[:180].split())
