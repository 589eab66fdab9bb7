"""A chat completion as a response, and the JSON of which responses and their events consist.

The fields that repeat the request come first, the output and the usage last: clients and proxies that look at the end of a long
response find its usage there.

Texts are handed on as the inside of a JSON string, so that a stream's text is escaped once and copied as bytes.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.json_structure import exceeds
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.prompt.head import short_digest
from gateway.dialects.usage import Usage, token_count
from gateway.errors import ReplicaFailure
from gateway.features.translation.chat_message import in_texts
from gateway.features.translation.responses.tools import INPUT, ToolName, tool_names
from gateway.features.translation.translation import nameless_call, require_finished

MAX_STRUCTURE: Final = 100_000  # brackets and commas of a whole answer, or of the arguments of a custom tool
MAX_NAME: Final = 1024  # characters of a call's name or id

OUTPUT_TEXT, REFUSAL = "output_text", "refusal"
_MAX_TIME: Final = 1 << 40
_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


def inside(text: str) -> bytes:
    """A text as the inside of a JSON string."""
    return orjson.dumps(text)[1:-1]


class Identity:
    """What the parts of one response are called. The same answer to the same request has the same ids; the engine's alone would
    not do: some count from 1 after each start, or call all answers the same, and what is kept is found by its id.
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
    """OpenAI's clients require all of these fields: what an engine does not report is 0 there."""
    if usage is None:
        return b"null"
    form = (
        b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":%d},'
        b'"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}'
    )
    total = usage.prompt + usage.completion
    return form % (usage.prompt, usage.cached or 0, usage.written, usage.completion, reasoning, total)


def reasoning_tokens(usage: Any) -> int:
    """Of a chat usage; 0: it has none that make sense."""
    details = usage.get("completion_tokens_details") if isinstance(usage, dict) else None
    return (token_count(details.get("reasoning_tokens")) or 0) if isinstance(details, dict) else 0


def status_of(reason: str) -> str:
    """reason: chat's `finish_reason`."""
    return "incomplete" if reason in _REASONS else "completed"


class ResponseForm:
    """What all objects of one response have in common: `json` writes it as it is at a time."""

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


def response_of(body: bytes, echo: bytes, seed: str = "") -> bytes:
    """A whole chat completion as a response. Raises ReplicaFailure "garbage" if it is none."""
    if exceeds(body, MAX_STRUCTURE):
        raise ReplicaFailure("garbage", "the answer has too many values")
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ReplicaFailure("garbage", "the answer is not JSON") from error
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise ReplicaFailure("garbage", "the answer is no chat completion")
    reason = choice.get("finish_reason")
    reason = reason if isinstance(reason, str) else ""
    require_finished(reason)
    identity = Identity(answer, seed)
    output = _items(in_texts(message), identity, tool_names(echo), status_of(reason).encode())
    usage = usage_json(parse_usage(answer), reasoning_tokens(answer.get("usage")))
    return ResponseForm(identity, echo).json(status_of(reason), b",".join(output), usage, reason)


def _items(message: dict[str, Any], identity: Identity, tools: dict[str, ToolName], status: bytes) -> list[bytes]:
    """status: of the last item; those before it are complete."""
    parts, calls = list[bytes](), message.get("tool_calls")
    for kind, text in ((OUTPUT_TEXT, message.get("content")), (REFUSAL, message.get("refusal"))):
        if isinstance(text, str) and text:
            parts.append(part_json(kind, inside(text)))
    found = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    thought, items, done = reasoning_text(message), list[bytes](), b"completed"
    if thought:
        last = done if parts or found else status
        items.append(reasoning_json(identity.item(b"rs", 0), part_json("", inside(thought)), last))
    if parts:
        items.append(message_json(identity.item(b"msg", len(items)), b",".join(parts), done if found else status))
    seen = set[str]()
    for number, call in enumerate(found, 1):
        function, call_id = call.get("function"), call.get("id")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise nameless_call()
        call_id = checked(call_id) if isinstance(call_id, str) and call_id not in seen else ""
        seen.add(call_id)
        head = CallHead(identity, len(items), checked(name), call_id, tools)
        items.append(head.json(_arguments(function, head), status if number == len(found) else done))
    return items


def _arguments(function: dict[str, Any], head: CallHead) -> bytes:
    given = function.get("arguments")
    arguments = inside(given) if isinstance(given, str) else object_arguments(given or {})
    return input_of(arguments) if head.tool.custom else arguments


def object_arguments(given: Any) -> bytes:
    """Arguments that an engine gives as an object, as the inside of a JSON string. Raises ReplicaFailure "garbage"."""
    try:
        return inside(orjson.dumps(given).decode())
    except orjson.JSONEncodeError as error:
        raise ReplicaFailure("garbage", "the arguments of a tool are nested too deeply") from error


def checked(name: str) -> str:
    """The name or id of a call. Raises ReplicaFailure "garbage" if it is longer than any model writes."""
    if len(name) > MAX_NAME:
        raise ReplicaFailure("garbage", f"a tool call with a name or id of more than {MAX_NAME} characters")
    return name


def reasoning_text(message: dict[str, Any]) -> str:
    """Of a message or a delta. Engines that are changing its name write it twice."""
    for name in ("reasoning_content", "reasoning"):
        text = message.get(name)
        if isinstance(text, str) and text:
            return text
    return ""
