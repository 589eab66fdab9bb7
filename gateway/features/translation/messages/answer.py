"""A chat completion as a Messages answer, and what its stream has in common with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.json_structure import exceeds, signs
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.prompt.head import short_digest
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from gateway.features.translation.chat_message import in_texts
from gateway.features.translation.messages.echo import Echo
from gateway.features.translation.translation import nameless_call, require_finished, stop_text

MAX_CALLS: Final = 1024  # of tools, in an answer
MAX_NAME: Final = 1024  # characters of a tool's name, or of the id of a call

_MAX_VALUES: Final = 1 << 16  # of an answer, as `json_structure` counts them; as many again in the arguments of its calls
_ID: Final = re.compile(r"[\w-]{1,64}", re.ASCII)
_CALLED: Final = ("stop", "tool_calls", "function_call", "")  # reasons of an answer that ends with calls: engines differ
_REASONS: Final[Mapping[str, str]] = {"length": "max_tokens", "content_filter": "refusal"}


def message_of(body: bytes, echo: Echo) -> bytes:
    """The Messages answer. Raises ReplicaFailure "garbage" if the body is no chat completion. O(length)."""
    answer = _read(body)
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise ReplicaFailure("garbage", "the answer has no message")
    id_ = message_id(answer)
    content = list[Any]()
    if not echo.empty:
        _add_texts(content, in_texts(message))
        called = len(content)
        _add_calls(content, message.get("tool_calls"), id_)
        reason = choice.get("finish_reason")
        has_calls = len(content) > called
        reason = reason if isinstance(reason, str) else ""
        require_finished(reason)
        stop_reason, sequence = ending(reason, stop_text(choice), echo, called=has_calls)
    else:
        stop_reason, sequence = ending("length", "", echo, called=False)
    written = start_of(answer, id_)
    written["content"] = content
    written["stop_reason"], written["stop_sequence"] = stop_reason, sequence
    written["usage"] = counts_of(parse_usage(answer))
    try:
        return orjson.dumps(written)
    except orjson.JSONEncodeError as error:
        raise ReplicaFailure("garbage", "the answer is nested too deeply") from error


def _read(body: bytes) -> dict[str, Any]:
    if exceeds(body, _MAX_VALUES):
        raise ReplicaFailure("garbage", f"the answer has more than {_MAX_VALUES} values")
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ReplicaFailure("garbage", "the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
    return answer


def _add_texts(content: list[Any], message: Mapping[str, Any]) -> None:
    if thought := thought_of(message):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := said_of(message):
        content.append({"type": "text", "text": text})


def _add_calls(content: list[Any], calls: Any, id_: str) -> None:
    """A call with neither name nor arguments is none."""
    if not isinstance(calls, list):
        return
    if len(calls) > MAX_CALLS:
        raise too_many_calls()
    left, used = _MAX_VALUES, set[str]()
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        name, arguments = name_of(function), arguments_of(function)
        if arguments and not name:
            raise nameless_call()
        if name:
            left -= signs(arguments.encode())
            given = _input(arguments) if left >= 0 else {"arguments": arguments}
            called = call_id(call.get("id"), id_, number, used)
            content.append({"type": "tool_use", "id": called, "name": name, "input": given})


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


# -- what a stream needs, too


def start_of(answer: Mapping[str, Any], id_: str) -> dict[str, Any]:
    """A message without its content. answer: a completion, or a chunk of a stream."""
    model = answer.get("model")
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "model": model if isinstance(model, str) else "",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": counts_of(parse_usage(answer)),
    }


def message_id(answer: Mapping[str, Any]) -> str:
    """The engine's id in Anthropic's form."""
    id_ = answer.get("id")
    if not isinstance(id_, str):
        id_ = str(answer.get("created"))
    id_ = id_.removeprefix("chatcmpl-")
    return f"msg_{id_ if _ID.fullmatch(id_) else short_digest(id_.encode())}"


def call_id(id_: Any, message: str, number: int, used: set[str]) -> str:
    """The engine's id, which comes back with the result; one of ours if it has none of a reasonable length, or has given that
    to another call. used: by the calls before; it is added.
    """
    fits = isinstance(id_, str) and 0 < len(id_) <= MAX_NAME and id_ not in used
    found: str = id_ if fits else f"toolu_{message.removeprefix('msg_')}_{number}"
    used.add(found)
    return found


def name_of(function: Mapping[str, Any]) -> str:
    """The name of a called tool, "": it has none. Raises ReplicaFailure for one of unreasonable length."""
    name = function.get("name")
    if not isinstance(name, str):
        return ""
    if len(name) > MAX_NAME:
        raise ReplicaFailure("garbage", f"the name of a tool with more than {MAX_NAME} characters")
    return name


def arguments_of(function: Mapping[str, Any]) -> str:
    """A text of JSON, or a piece of one; some engines give the object."""
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return arguments if isinstance(arguments, str) else ""
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError as error:
        raise ReplicaFailure("garbage", "the arguments of a tool are nested too deeply") from error


def thought_of(message: Mapping[str, Any]) -> str:
    """The reasoning of a message, or of a delta: engines have two names for it, some both."""
    for name in ("reasoning_content", "reasoning"):
        text = message.get(name)
        if isinstance(text, str) and text:
            return text
    return ""


def said_of(message: Mapping[str, Any]) -> str:
    """The text. OpenAI has what a model says when it refuses in a field of its own."""
    for name in ("content", "refusal"):
        text = message.get(name)
        if isinstance(text, str) and text:
            return text
    return ""


def too_many_calls() -> ReplicaFailure:
    return ReplicaFailure("garbage", f"more than {MAX_CALLS} calls of tools in an answer")


def ending(reason: str, stop: str, echo: Echo, *, called: bool) -> tuple[str, str | None]:
    """`stop_reason`, `stop_sequence`. reason: chat's. stop: what the engine names as the text's end. called: it calls tools."""
    if called and reason in _CALLED:
        return "tool_use", None
    if stop and reason == "stop" and stop in echo.stops:
        return "stop_sequence", stop
    return _REASONS.get(reason, "end_turn"), None


def counts_of(usage: Usage | None) -> dict[str, int]:
    """Counts of the cache are there if the engine reports them: missing is not zero."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    counts = {"input_tokens": max(0, usage.prompt - (usage.cached or 0) - usage.written)}
    if usage.cached is not None or usage.written:
        counts["cache_creation_input_tokens"] = usage.written
        counts["cache_read_input_tokens"] = usage.cached or 0
    counts["output_tokens"] = usage.completion
    return counts
