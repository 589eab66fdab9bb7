"""Answers as the documentation of the two APIs shows them (thoughts and their signatures, reasoning, refusals, several calls),
written down in the APIs' own events, and the same in the words of chat, in pieces as engines stream them.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tests.gateway.dialects.events.test_named import named
from tests.support.fakes import DONE, usage

THOUGHT: Final = "27 * 453 is 27 * 400 + 27 * 53."
SIGNATURE: Final = "EqQBCgIYAhIM1gbcDa9GJwZA2b3hGgxBdjrkzLoky3dl1pkiMOYds"
TEXT: Final = "27 * 453 = 12,231"
REDACTED: Final = "EmwKAhgBEgy3va3pzix/LafPsn4aDFIT2Xlxh0L5L8rLVyIwxtE3rAFBa8cr3qpP"
CALLS: Final = [("get_weather", {"location": "Paris"}), ("get_time", {"zone": "Europe/Paris"})]
COUNTS: Final = {"input_tokens": 40, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 60, "output_tokens": 12}


def pieces(text: str) -> list[str]:
    """In pieces of a few characters, as tokens are."""
    return [text[at : at + 5] for at in range(0, len(text), 5)]


def thinking_message() -> bytes:
    """Extended thinking, a redacted thought, a text and two calls, as Anthropic streams them, with a ping."""
    head: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
    }
    out = named("message_start", message={**head, "stop_sequence": None, "usage": {**COUNTS, "output_tokens": 1}})
    out += named("content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""})
    out += named("ping")
    for piece in pieces(THOUGHT):
        out += named("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": piece})
    out += named("content_block_delta", index=0, delta={"type": "signature_delta", "signature": SIGNATURE})
    out += named("content_block_stop", index=0)
    out += named("content_block_start", index=1, content_block={"type": "redacted_thinking", "data": REDACTED})
    out += named("content_block_stop", index=1)
    out += named("content_block_start", index=2, content_block={"type": "text", "text": ""})
    for piece in pieces(TEXT):
        out += named("content_block_delta", index=2, delta={"type": "text_delta", "text": piece})
    out += named("content_block_stop", index=2)
    for at, (name, given) in enumerate(CALLS, 3):
        block = {"type": "tool_use", "id": f"toolu_{at}", "name": name, "input": {}}
        out += named("content_block_start", index=at, content_block=block)
        for piece in ["", *pieces(json.dumps(given))]:
            out += named("content_block_delta", index=at, delta={"type": "input_json_delta", "partial_json": piece})
        out += named("content_block_stop", index=at)
    out += named("message_delta", delta={"stop_reason": "tool_use", "stop_sequence": None}, usage=COUNTS)
    return out + named("message_stop")


def chat_stream(*deltas: Any, reason: str = "stop", reasoning: int = 0) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    counts: dict[str, Any] = {
        **usage(prompt=100, completion=12, cached=60),
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    said = [{"index": 0, "delta": delta, "finish_reason": None} for delta in ({"role": "assistant", "content": ""}, *deltas)]
    rows: list[dict[str, Any]] = [{**head, "choices": [choice]} for choice in said]
    rows.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    rows.append({**head, "choices": [], "usage": counts})
    return b"".join(b"data: " + json.dumps(row).encode() + b"\n\n" for row in rows) + DONE


def thinking_chat(field: str = "reasoning_content") -> bytes:
    """The same in chat: engines have two names for the thought."""
    deltas: list[Any] = [{field: piece} for piece in pieces(THOUGHT)]
    deltas += [{"content": piece} for piece in pieces(TEXT)]
    for at, (name, given) in enumerate(CALLS):
        begun = {"index": at, "id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [begun]})
        deltas += [{"tool_calls": [{"index": at, "function": {"arguments": piece}}]} for piece in pieces(json.dumps(given))]
    return chat_stream(*deltas, reason="tool_calls", reasoning=7)


def chat_whole(message: dict[str, Any], reason: str = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return json.dumps({**head, "choices": [choice], "usage": usage(prompt=100, completion=12, cached=60)}).encode()


def reasoning_response() -> bytes:
    """A reasoning with two summaries, and a refusal, as OpenAI streams them."""
    frame: dict[str, Any] = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "parallel_tool_calls": True}
    frame |= {"tool_choice": "auto", "tools": [], "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str, dict[str, Any]]] = [("created", {"response": frame}), ("in_progress", {"response": frame})]
    item: dict[str, Any] = {"id": "rs_1", "type": "reasoning", "summary": []}
    events.append(("output_item.added", {"output_index": 0, "item": item}))
    summaries = [{"type": "summary_text", "text": text} for text in ("First I think.", "Then I doubt.")]
    for at, part in enumerate(summaries):
        place = {"item_id": "rs_1", "output_index": 0, "summary_index": at}
        events.append(("reasoning_summary_part.added", {**place, "part": {**part, "text": ""}}))
        events += [("reasoning_summary_text.delta", {**place, "delta": piece}) for piece in pieces(part["text"])]
        events.append(("reasoning_summary_text.done", {**place, "text": part["text"]}))
        events.append(("reasoning_summary_part.done", {**place, "part": part}))
    thought = {**item, "summary": summaries, "encrypted_content": "gAAA"}
    events.append(("output_item.done", {"output_index": 0, "item": thought}))
    message: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    events.append(("output_item.added", {"output_index": 1, "item": message}))
    place = {"item_id": "msg_1", "output_index": 1, "content_index": 0}
    refusal = {"type": "refusal", "refusal": "I cannot help with that."}
    events.append(("content_part.added", {**place, "part": {**refusal, "refusal": ""}}))
    events += [("refusal.delta", {**place, "delta": piece}) for piece in pieces(refusal["refusal"])]
    events.append(("refusal.done", {**place, "refusal": refusal["refusal"]}))
    events.append(("content_part.done", {**place, "part": refusal}))
    said = {**message, "status": "completed", "content": [refusal]}
    events.append(("output_item.done", {"output_index": 1, "item": said}))
    counts = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 0}, "output_tokens": 12}
    counts |= {"output_tokens_details": {"reasoning_tokens": 7}, "total_tokens": 112}
    done = {**frame, "status": "completed", "output": [thought, said], "usage": counts}
    events.append(("completed", {"response": done}))
    return b"".join(named(f"response.{kind}", **data, sequence_number=at) for at, (kind, data) in enumerate(events))
