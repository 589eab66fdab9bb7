"""The forms in which clients send a conversation: chat, Messages plainly and as Claude Code, Responses with all items (plainly
and as Codex) and with previous ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.agents.dialogues import Assistant, Dialogue, Entry, Head, Result, User
from bench.agents.rendering import BILLING

MODEL = "m"
Json = dict[str, Any]
Body = tuple[Json, dict[str, str]]
"""And the headers."""


@dataclass(frozen=True, slots=True)
class Kind:
    """write: makes the next request from (dialogue, head, answer's tokens, chance)."""

    name: str
    path: str
    write: Callable[[Dialogue, Head, int, random.Random], Body]


def _chat(dialogue: Dialogue, head: Head, most: int, chance: random.Random) -> Body:
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        for name, text, schema in head.tools
    ]
    messages: list[Json] = [{"role": "system", "content": "".join(head.system)}]
    for entry in dialogue.entries:
        match entry:
            case User(parts):
                messages.append({"role": "user", "content": _content(parts, "text")})
            case Assistant(text, call):
                function = {"name": call.name, "arguments": call.arguments} if call else {}
                calls = [{"id": call.identity, "type": "function", "function": function}] if call else []
                messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
            case Result(identity, text):
                messages.append({"role": "tool", "tool_call_id": identity, "content": text})
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": most, **streamed}, {}


def _content(parts: Sequence[str], kind: str) -> str | list[Json]:
    return parts[0] if len(parts) == 1 else [{"type": kind, "text": part} for part in parts]


# -- Messages


def _messages(dialogue: Dialogue, head: Head, most: int, chance: random.Random) -> Body:
    body = {
        "model": MODEL,
        "max_tokens": most,
        "stream": True,
        "system": [{"type": "text", "text": piece} for piece in head.system],
        "tools": [{"name": name, "description": text, "input_schema": schema} for name, text, schema in head.tools],
        "messages": _turns(dialogue.entries),
    }
    return body, {"anthropic-version": "2023-06-01", "x-api-key": "none"}


def _turns(entries: Sequence[Entry]) -> list[Json]:
    """Results and what follows them are one message."""
    turns: list[Json] = []
    for entry in entries:
        role = "assistant" if isinstance(entry, Assistant) else "user"
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"] += _blocks(entry)
    return turns


def _blocks(entry: Entry) -> list[Json]:
    match entry:
        case User(parts):
            return [{"type": "text", "text": part} for part in parts]
        case Assistant(text, call):
            use = (
                {"type": "tool_use", "id": call.identity, "name": call.name, "input": json.loads(call.arguments)}
                if call
                else None
            )
            return [{"type": "text", "text": text}, *([use] if use else [])]
        case Result(identity, text):
            return [{"type": "tool_result", "tool_use_id": identity, "content": text}]


def _claude_code(dialogue: Dialogue, head: Head, most: int, chance: random.Random) -> Body:
    body, headers = _messages(dialogue, head, most, chance)
    return as_claude_code(body, headers, dialogue.session, chance)


def as_claude_code(body: Json, headers: Mapping[str, str], session: str, chance: random.Random) -> Body:
    """Its billing header, new in every request, its markers on what is newest, its session's id in a header and in metadata."""
    mark = {"cache_control": {"type": "ephemeral"}}
    body["system"] = [{"type": "text", "text": billing(chance)}, *body["system"]]
    body["system"][-1] = body["system"][-1] | mark
    for message in [message for message in body["messages"] if message["role"] == "user"][-2:]:
        message["content"][-1] = message["content"][-1] | mark
    user = {"device_id": "d" * 64, "account_uuid": "", "session_id": session}
    more = {"metadata": {"user_id": json.dumps(user)}}
    own = {"x-claude-code-session-id": session, "anthropic-beta": "claude-code-20250219", "user-agent": "claude-cli/2.1.177"}
    return body | more, {**headers, **own}


def billing(chance: random.Random) -> str:
    return (
        f"{BILLING} cc_version=2.1.177.{chance.getrandbits(12):03x}; cc_entrypoint=sdk-cli; cch={chance.getrandbits(20):05x};"
    )


# -- Responses


def _sdk(dialogue: Dialogue, head: Head, most: int, chance: random.Random) -> Body:
    """All items each time, those of answers with their ids, as programs do that send back what they were sent."""
    return _responses(head, most, list(_with_ids(_items(dialogue.entries), dialogue.number))) | {"store": False}, {}


def _with_ids(items: Sequence[Json], conversation: int) -> Iterator[Json]:
    for number, item in enumerate(items):
        given = item["type"] == "function_call" or item.get("role") == "assistant"
        prefix = "fc" if item["type"] == "function_call" else "msg"
        yield {**item, "id": f"{prefix}_{conversation:08x}{number:08x}", "status": "completed"} if given else item


def _codex(dialogue: Dialogue, head: Head, most: int, chance: random.Random) -> Body:
    """Codex keeps no state at the server: all items each time, without ids. The keys of its metadata are in another order each
    time.
    """
    session = dialogue.session
    metadata = {
        "session_id": session,
        "thread_id": session,
        "turn_id": f"turn-{dialogue.turn}",
        "cwd": "/src",
        "sandbox": "none",
    }
    shuffled = dict(chance.sample(sorted(metadata.items()), len(metadata)))
    body = _responses(head, most, _items(dialogue.entries)) | {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": session,
        "client_metadata": shuffled,
    }
    headers = {
        "session-id": session,
        "thread-id": session,
        "x-client-request-id": session,
        "x-codex-window-id": f"{session}:0",
        "x-codex-turn-metadata": json.dumps(shuffled),
        "user-agent": "codex_exec/0.169.0",
    }
    return body, headers


def _previous(dialogue: Dialogue, head: Head, most: int, chance: random.Random) -> Body:
    """The new items only; instructions are not carried over."""
    body = _responses(head, most, _items(dialogue.entries[dialogue.sent :])) | {"store": True}
    return body | ({"previous_response_id": dialogue.previous} if dialogue.previous else {}), {}


def _responses(head: Head, most: int, items: list[Json]) -> Json:
    tools = [
        {"type": "function", "name": name, "description": text, "strict": False, "parameters": schema}
        for name, text, schema in head.tools
    ]
    limits = {"max_output_tokens": most, "stream": True, "tool_choice": "auto", "parallel_tool_calls": False}
    return {"model": MODEL, "instructions": "".join(head.system), "input": items, "tools": tools, **limits}


def _items(entries: Sequence[Entry]) -> list[Json]:
    items: list[Json] = []
    for entry in entries:
        match entry:
            case User(parts):
                items.append(
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": part} for part in parts]}
                )
            case Assistant(text, call):
                said = {"type": "output_text", "text": text, "annotations": []}
                items.append({"type": "message", "role": "assistant", "content": [said]})
                if call:
                    called = {"name": call.name, "arguments": call.arguments, "call_id": call.identity}
                    items.append({"type": "function_call", **called})
            case Result(identity, text):
                items.append({"type": "function_call_output", "call_id": identity, "output": text})
    return items


KINDS: Sequence[Kind] = (
    Kind("chat", "/v1/chat/completions", _chat),
    Kind("messages", "/v1/messages", _messages),
    Kind("messages-claude-code", "/v1/messages", _claude_code),
    Kind("responses", "/v1/responses", _sdk),
    Kind("responses-list", "/v1/responses", _codex),
    Kind("responses-previous", "/v1/responses", _previous),
)
