"""Any answer of the three APIs: which types and which grammar it has to keep to, by its path and status."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, get_args

from anthropic.types import ErrorObject as MessagesError
from anthropic.types import MessageTokensCount
from openai.types import ErrorObject
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter

from tests.clients.sdk.grammar.chat import COMPLETION, completion_of
from tests.clients.sdk.grammar.messages import MESSAGE, message_of
from tests.clients.sdk.grammar.responses import RESPONSE, response_of, typed

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TYPES: Final[dict[str, TypeAdapter[Any]]] = {
    CHAT: COMPLETION,
    MESSAGES: MESSAGE,
    RESPONSES: RESPONSE,
    MESSAGES + "/count_tokens": TypeAdapter(MessageTokensCount),
    RESPONSES + "/input_tokens": TypeAdapter(InputTokenCountResponse),
}
STREAMS: Final[dict[str, Callable[..., dict[str, Any] | None]]] = {
    CHAT: completion_of,
    MESSAGES: message_of,
    RESPONSES: response_of,
}
# Anthropic's documentation has the last one, the SDK's types do not.
ERROR_TYPES: Final = {get_args(one.model_fields["type"].annotation)[0] for one in get_args(get_args(MessagesError)[0])}
ERROR_TYPES.add("request_too_large")
OPENAI_ERROR: Final[TypeAdapter[ErrorObject]] = TypeAdapter(ErrorObject)


def check_answer(path: str, status: int, kind: str, body: bytes, request: bytes, *, foreign: bool = False) -> Any:
    """The value of a good answer, of a stream the sum of its events; None: an error. Fails where it is neither."""
    asked = json.loads(request)
    if status != 200:
        assert kind == "application/json"
        check_error(path, body)
        return None
    assert kind == ("text/event-stream" if asked.get("stream") else "application/json")
    if asked.get("stream"):
        return STREAMS[path](frames_of(body), foreign=foreign)
    answer = json.loads(body)
    known = typed(answer) if path == RESPONSES else answer
    TYPES[path].validate_json(json.dumps(known), strict=True, extra="allow" if foreign or path == CHAT else "forbid")
    return answer


def check_error(path: str, body: bytes) -> None:
    """In the form of the path's API."""
    answer = json.loads(body)
    error = answer["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if path.startswith(MESSAGES):
        assert answer["type"] == "error"
        assert error["type"] in ERROR_TYPES
    else:  # vLLM's code is a number
        code = error.get("code")
        OPENAI_ERROR.validate_python(
            {"param": None, **error, "code": str(code) if isinstance(code, int) else code}, strict=True
        )


def frames_of(body: bytes) -> list[tuple[str, bytes]]:
    """(event, data) of every event; both dialects write one line of data in each. Comments are left out."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == "", "the last event is whole"
    found = list[tuple[str, bytes]]()
    for part in parts:
        lines = [line for line in part.split("\n") if line and not line.startswith(":")]
        if lines:
            named = {name: value.removeprefix(" ") for name, _, value in (line.partition(":") for line in lines)}
            assert len(named) == len(lines), part
            found.append((named.get("event", ""), named["data"].encode()))
    return found
