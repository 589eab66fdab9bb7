"""Translates a chat completion to a Messages answer, with functions that streams need, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.json_structure import signs
from gateway.dialects.openai.chat_answer import ChatCall, ChatPiece
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.prompt.head import short_digest
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from gateway.features.translation.messages.echo import Echo
from gateway.features.translation.translation import WholeChat

_MAX_VALUES: Final = 1 << 16  # in the arguments of an answer's calls, as `json_structure` counts them
_ID: Final = re.compile(r"[\w-]{1,64}", re.ASCII)
_CALLED: Final = ("stop", "tool_calls", "function_call", "")  # reasons of an answer that ends with calls: engines differ
_REASONS: Final[Mapping[str, str]] = {"length": "max_tokens", "content_filter": "refusal"}


def message_of(body: bytes, echo: Echo, estimate: int = 0) -> bytes:
    """The Messages answer. Raises ReplicaFailure "garbage" if the body is no chat completion. O(length)."""
    chat = WholeChat(body)
    id_, message, content = message_id(chat.answer), chat.message, list[Any]()
    if echo.empty:
        stop_reason, sequence = ending("length", "", echo, called=False)
    else:
        if message.reasoning:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if text := text_of(message):
            content.append({"type": "text", "text": text})
        _add_calls(content, message, id_)
        stop_reason, sequence = ending(chat.reason, chat.stop, echo, called=bool(message.calls))
    written = start_of(chat.answer, id_, estimate)
    written["content"] = content
    written["stop_reason"], written["stop_sequence"] = stop_reason, sequence
    try:
        return orjson.dumps(written)
    except orjson.JSONEncodeError as error:
        raise ReplicaFailure("garbage", "the answer is nested too deeply") from error


def _add_calls(content: list[Any], message: ChatPiece, id_: str) -> None:
    left, used = _MAX_VALUES, set[str]()
    for call, arguments in message.calls:
        left -= signs(arguments.encode())
        given = _input(arguments) if left >= 0 else {"arguments": arguments}
        content.append({"type": "tool_use", "id": call_id(call, id_, used), "name": call.name, "input": given})


def _input(arguments: str) -> Any:
    """The arguments as an object, number by number as they stand there. A text that is none (a model may write one, or be cut
    off in it) is the value of `arguments`: so the client, and with the tool's error the model, can see it.
    """
    if not arguments.strip():
        return {}
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        given = None
    return orjson.Fragment(arguments.encode()) if isinstance(given, dict) else {"arguments": arguments}


# -- also for streams


def start_of(answer: dict[str, Any], id_: str, estimate: int) -> dict[str, Any]:
    """A message without its content. answer: a completion, or a chunk of a stream, which rarely has the usage yet: until then
    the estimate counts, because clients decide by it when to compact.
    """
    model = answer.get("model")
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "model": model if isinstance(model, str) else "",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": counts_of(parse_usage(answer), estimate),
    }


def message_id(answer: Mapping[str, Any]) -> str:
    """The engine's id in Anthropic's form."""
    id_ = answer.get("id")
    if not isinstance(id_, str):
        id_ = str(answer.get("created"))
    id_ = id_.removeprefix("chatcmpl-")
    return f"msg_{id_ if _ID.fullmatch(id_) else short_digest(id_.encode())}"


def call_id(call: ChatCall, message: str, used: set[str]) -> str:
    """The engine's id, which the client returns with the result. A new id if the engine has none, or another call has it. used:
    ids of earlier calls; the id is added.
    """
    found = call.id if call.id and call.id not in used else f"toolu_{message.removeprefix('msg_')}_{call.number}"
    used.add(found)
    return found


def text_of(piece: ChatPiece) -> str:
    """The text. In OpenAI's format a refusal is in a separate field."""
    return piece.text or piece.refusal


def ending(reason: str, stop: str, echo: Echo, *, called: bool) -> tuple[str, str | None]:
    """`stop_reason`, `stop_sequence`. reason: of chat. stop: the end of the text, as reported by the engine. called: it has
    tool calls.
    """
    if called and reason in _CALLED:
        return "tool_use", None
    if stop and reason == "stop" and stop in echo.stops:
        return "stop_sequence", stop
    return _REASONS.get(reason, "end_turn"), None


def counts_of(usage: Usage | None, estimate: int) -> dict[str, int]:
    """Counts of the cache are there if the engine reports them: missing is not zero. estimate: of the prompt's tokens."""
    if usage is None:
        return {"input_tokens": estimate, "output_tokens": 0}
    counts = {"input_tokens": max(0, usage.prompt - (usage.cached or 0) - usage.written)}
    if usage.cached is not None or usage.written:
        counts["cache_creation_input_tokens"] = usage.written
        counts["cache_read_input_tokens"] = usage.cached or 0
    counts["output_tokens"] = usage.completion
    return counts
