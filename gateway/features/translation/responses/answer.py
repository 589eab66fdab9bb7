"""The JSON of which responses and their events consist.

The fields that repeat the request come first, the output and the usage last: clients and proxies that look at the end of a long
response find its usage there.

Texts are handed on as the inside of a JSON string, so that a stream's text is escaped once and copied as bytes.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.json_structure import exceeds
from gateway.dialects.prompt.head import short_digest
from gateway.dialects.usage import Usage, token_count
from gateway.features.translation.responses.tools import INPUT, ToolName

MAX_STRUCTURE: Final = 100_000  # brackets and commas of the arguments of a custom tool

OUTPUT_TEXT, REFUSAL = "output_text", "refusal"
_MAX_TIME: Final = 1 << 40
_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


def inside(text: str) -> bytes:
    """A text as the inside of a JSON string."""
    return orjson.dumps(text)[1:-1]


class Identity:
    """The ids of one response and its parts. The same answer to the same request has the same ids. The engine's ids are not
    sufficient, because some engines count from 1 after each start, or give all answers the same id, and stored objects are
    looked up by id.
    """

    __slots__ = ("created", "key")

    def __init__(self, answer: dict[str, Any], seed: str = "") -> None:
        created = answer.get("created")
        number = isinstance(created, int) and not isinstance(created, bool) and 0 <= created < _MAX_TIME
        self.created: int = created if isinstance(created, int) and number else 0
        name = answer.get("id")
        self.key = short_digest(f"{name if isinstance(name, str) else ''} {self.created} {seed}".encode()).encode()

    def item(self, kind: bytes, index: int) -> bytes:
        """kind: msg, rs, fc, ctc. index: of the output."""
        return b"%b_%b%04x" % (kind, self.key, index)


def part_json(kind: str, text: bytes) -> bytes:
    """A part of a message or of a reasoning. kind: output_text, refusal, reasoning_text."""
    if kind == OUTPUT_TEXT:
        return b'{"type":"output_text","text":"%b","annotations":[],"logprobs":[]}' % text
    if kind == REFUSAL:
        return b'{"type":"refusal","refusal":"%b"}' % text
    return b'{"type":"reasoning_text","text":"%b"}' % text


def message_json(name: bytes, parts: bytes, status: bytes) -> bytes:
    """parts: joined by commas."""
    form = b'{"id":"%b","type":"message","role":"assistant","status":"%b","content":[%b]}'
    return form % (name, status, parts)


def reasoning_json(name: bytes, parts: bytes, status: bytes) -> bytes:
    return b'{"id":"%b","type":"reasoning","status":"%b","summary":[],"content":[%b]}' % (name, status, parts)


class CallHead:
    """A call but for its arguments. function: its name in chat. call_id: the engine's, or one made of the item's."""

    __slots__ = ("call_id", "item_id", "tool")

    def __init__(self, identity: Identity, index: int, function: str, call_id: str, tools: dict[str, ToolName]) -> None:
        self.tool = tools.get(function) or ToolName(function)
        self.item_id = identity.item(b"ctc" if self.tool.custom else b"fc", index)
        self.call_id = orjson.dumps(call_id or f"call_{self.item_id.decode()}")

    def json(self, arguments: bytes, status: bytes) -> bytes:
        """arguments: for a custom tool, its input."""
        name, space = orjson.dumps(self.tool.name), b""
        if self.tool.namespace:
            space = b',"namespace":' + orjson.dumps(self.tool.namespace)
        kind, field = (b"custom_tool_call", b"input") if self.tool.custom else (b"function_call", b"arguments")
        form = b'{"id":"%b","type":"%b","status":"%b","call_id":%b,"name":%b%b,"%b":"%b"}'
        return form % (self.item_id, kind, status, self.call_id, name, space, field, arguments)


def input_of(arguments: bytes) -> bytes:
    """The input of a custom tool in the arguments of its function; all of them if they have another form."""
    text: str = orjson.loads(b'"%b"' % arguments)
    raw = text.encode()
    if exceeds(raw, MAX_STRUCTURE):
        return arguments
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return arguments
    value = found.get(INPUT) if isinstance(found, dict) else None
    return inside(value) if isinstance(value, str) else arguments


def usage_json(usage: Usage | None, reasoning: int) -> bytes:
    """OpenAI's clients require all of these fields. Unreported counts are 0."""
    if usage is None:
        return b"null"
    form = (
        b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":%d},'
        b'"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}'
    )
    total = usage.prompt + usage.completion
    return form % (usage.prompt, usage.cached or 0, usage.written, usage.completion, reasoning, total)


def reasoning_tokens(usage: Any) -> int:
    """The reasoning tokens in a chat usage; 0 if missing or invalid."""
    details = usage.get("completion_tokens_details") if isinstance(usage, dict) else None
    return (token_count(details.get("reasoning_tokens")) or 0) if isinstance(details, dict) else 0


def status_of(reason: str) -> str:
    """reason: chat's `finish_reason`."""
    return "incomplete" if reason in _REASONS else "completed"


class ResponseForm:
    """The common part of all objects of one response. `json` writes the object in a given state."""

    __slots__ = ("_echo", "identity")

    def __init__(self, identity: Identity, echo: bytes) -> None:
        self.identity = identity
        self._echo = echo[:-1] + b"," if len(echo) > 2 else b"{"

    def json(self, status: str, output: bytes = b"", usage: bytes = b"null", reason: str = "", error: bytes = b"null") -> bytes:
        """output: items joined by commas. reason: chat's `finish_reason`. error: JSON."""
        why = _REASONS.get(reason)
        details = b'{"reason":"%b"}' % why.encode() if why else b"null"
        form = (
            b'%b"id":"resp_%b","object":"response","created_at":%d,"status":"%b","error":%b,"incomplete_details":%b,'
            b'"output":[%b],"usage":%b}'
        )
        who = self.identity
        return form % (self._echo, who.key, who.created, status.encode(), error, details, output, usage)
