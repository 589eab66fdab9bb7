"""An engine whose answer is a digest of all that it was sent: equal answers show equal conversations. Streams, three APIs."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from aiohttp import web

from tests.clients.watching import FORMS, name_of

_PIECES: Final = 20
_ids = itertools.count()  # of responses, which are stored by their ids


async def _answer(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    text = f"{name_of(request.path, body)} "
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    events = {"chat": _chat, "messages": _messages, "responses": _responses}[FORMS[request.path]]
    for event in events(text, len(body) // 4):
        await answer.write(event)
    await answer.write_eof()
    return answer


def _event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def _chat(text: str, tokens: int) -> Iterator[bytes]:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    for at in range(_PIECES):
        reason = "stop" if at == _PIECES - 1 else None
        yield _event({**chunk, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})
    counts = {"prompt_tokens": tokens, "completion_tokens": _PIECES, "total_tokens": tokens + _PIECES}
    yield _event({**chunk, "choices": [], "usage": counts})
    yield b"data: [DONE]\n\n"


def _messages(text: str, tokens: int) -> Iterator[bytes]:
    begun = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    yield _event({"type": "message_start", "message": {**begun, "usage": {"input_tokens": tokens, "output_tokens": 0}}})
    yield _event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    for _ in range(_PIECES):
        yield _event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
    yield _event({"type": "content_block_stop", "index": 0})
    usage = {"input_tokens": tokens, "output_tokens": _PIECES}
    yield _event({"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage})
    yield _event({"type": "message_stop"})


def _responses(text: str, tokens: int) -> Iterator[bytes]:
    made: dict[str, Any] = {"id": f"resp_{next(_ids)}", "object": "response", "created_at": 1, "model": "m"}
    made |= {"status": "in_progress", "output": [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    item: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": []}
    number = iter(range(1_000_000))

    def event(kind: str, **more: Any) -> bytes:
        return _event({"type": kind, "sequence_number": next(number), **more})

    yield event("response.created", response=made)
    yield event("response.output_item.added", item=item, output_index=0)
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    yield event("response.content_part.added", part=part, **place)
    for _ in range(_PIECES):
        yield event("response.output_text.delta", delta=text, logprobs=[], **place)
    whole = {**part, "text": text * _PIECES}
    yield event("response.output_text.done", text=whole["text"], logprobs=[], **place)
    yield event("response.content_part.done", part=whole, **place)
    done = {**item, "status": "completed", "content": [whole]}
    yield event("response.output_item.done", item=done, output_index=0)
    usage = {"input_tokens": tokens, "output_tokens": _PIECES, "total_tokens": tokens + _PIECES}
    details: dict[str, Any] = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    yield event("response.completed", response={**made, "status": "completed", "output": [done], "usage": usage | details})


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "bench"}]})


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """Yields the base URL."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", _models)
    for path in FORMS:
        app.router.add_post(path, _answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
