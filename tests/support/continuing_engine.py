"""A small engine that generates one fixed text, token by token, and continues at the end of a request's partial answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from tests.support.fakes import DONE, STREAM_HEAD, Behaviour, FakeRequest, chunk, dies_now

# One entry is one token: spaces at both ends, line ends, characters of many bytes, what JSON has to escape, what SSE splits at.
STORY = [
    "Once",
    " upon",
    " a",
    " time",
    ",",
    "\n\n",
    " 水の",
    "é",
    " ",
    '"said"',
    " \\",
    "the\r",
    "\u2028",
    " data:",
    " [DONE]",
    " 🦀",
    ".",
]
TEXT = "".join(STORY)
PROMPT_TOKENS = 10
CACHED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Style:
    """How an engine streams. roles: a first event without text. apart: the finish reason is in a separate event."""

    roles: bool = True
    apart: bool = True


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "A story: ", "stream": True, "max_tokens": 100, **fields}


def partial_answer(body: dict[str, Any]) -> str:
    """The text at the end of a request's prompt. Fails if the request does not ask for its continuation."""
    if "prompt" in body:
        assert body["prompt"].startswith("A story: ")
        return str(body["prompt"].removeprefix("A story: "))
    if not body.get("continue_final_message"):
        return ""
    assert body["add_generation_prompt"] is False
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"]
    return str(body["messages"][-1]["content"])


def events(body: dict[str, Any], name: str = "c-1", style: Style = Style()) -> list[bytes]:
    """The whole stream that answers a request."""
    is_chat, before = "messages" in body, partial_answer(body)
    skipped = next(count for count in range(len(STORY) + 1) if "".join(STORY[:count]) == before)
    limit = body.get("max_tokens") or 1000
    rest = STORY[skipped : skipped + limit]
    finish = "length" if limit <= len(STORY) - skipped else "stop"
    options = body.get("stream_options") or {}

    def usage(done: int) -> dict[str, Any]:
        prompt = PROMPT_TOKENS + skipped
        return {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}

    def event(text: str | None, finish: str | None, done: int, **more: str) -> bytes:
        content = {} if text is None else {"content": text}
        inner = {"delta": {**more, **content}} if is_chat else {"text": text or ""}
        answer = {"id": name, "object": "o", "created": skipped, "model": "m"}
        answer["choices"] = [{"index": 0, **inner, "logprobs": None, "finish_reason": finish}]  # type: ignore[assignment]
        if options.get("continuous_usage_stats"):
            answer["usage"] = usage(done)  # type: ignore[assignment]
        return line(answer)

    out = [event("", None, 0, role="assistant")] if style.roles and is_chat else []
    for done, piece in enumerate(rest, 1):
        out.append(event(piece, finish if done == len(rest) and not style.apart else None, done))
    if style.apart or not rest:
        out.append(event("" if is_chat else None, finish, len(rest)))
    if options.get("include_usage"):
        counts = {**usage(len(rest)), "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS}}
        out.append(line({"id": name, "object": "o", "created": skipped, "model": "m", "choices": [], "usage": counts}))
    return [*out, DONE]


def line(answer: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(answer, ensure_ascii=False).encode() + b"\n\n"


ENGINE_ERROR = line({"error": {"message": "out of memory", "type": "InternalServerError", "param": None, "code": 500}}) + DONE
ENDS = ("reset", "eof", "error", "no_done", "silence")


def generates(*, until: int | None = None, end: str = "reset", name: str = "c-1", style: Style = Style()) -> Behaviour:
    """Streams the answer. until: number of events before it breaks off. end: how, in the middle of the next event."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        all_events = events(request.json, name, style)
        writer.write(STREAM_HEAD)
        for event in all_events[:until]:
            writer.write(chunk(event))
        if until is None or until >= len(all_events):
            writer.write(b"0\r\n\r\n")
            return
        if end == "error":
            writer.write(chunk(ENGINE_ERROR) + b"0\r\n\r\n")
            return
        if end == "no_done":
            writer.write(b"0\r\n\r\n")
            return
        writer.write(chunk(all_events[until][:30]))
        await writer.drain()
        if end == "eof":
            writer.write_eof()
        elif end == "silence":
            await asyncio.Event().wait()
        elif end == "reset":
            dies_now(writer)

    return behave
