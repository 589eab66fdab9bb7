"""Adapts a chat request for an engine that accepts only texts, and crashes at values of other types.

    body ── adapted ──► {"messages": [{"role", "content"}], "stream": true, "max_tokens", "seed", "temperature"}; the gateway
                        does the rest: stop strings, and the form of the answer

The body is written anew from checked values only. Text parts are joined. A field that cannot be expressed and would change the
answer is a GatewayError 400 that names the field. Only sampling options that the engine does not offer (`top_p`, penalties) are
ignored. The engine always gets a streaming request, because only then it notices that the client has left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.body import json_object
from gateway.dialects.json_structure import exceeds
from gateway.errors import GatewayError, bad_request

MAX_BODY: Final = 1 << 19  # more text than its context; a larger body would block the event loop
MAX_VALUES: Final = 1 << 13
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
_MAX_INT: Final = (1 << 31) - 1

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields for features that the engine lacks, unless they have one of these values.
_UNFIT: Final[Mapping[str, tuple[Any, ...]]] = {
    "tools": (None, []),
    "functions": (None, []),
    "n": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
}
_FORMS: Final = (
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "grammar",
)


class PlainChat:
    """An adapted request. body: for the engine. stops: for the gateway. model, stream, max_tokens (0: no limit): of the
    client's request.
    """

    __slots__ = ("body", "max_tokens", "model", "stops", "stream")

    def __init__(self, body: bytes, stops: tuple[str, ...], model: str, max_tokens: int, *, stream: bool) -> None:
        self.body = body
        self.stops = stops
        self.model = model
        self.max_tokens = max_tokens
        self.stream = stream


def adapted(raw: bytes) -> PlainChat:
    """Raises GatewayError 400. O(length)."""
    if len(raw) > MAX_BODY or exceeds(raw, MAX_VALUES):
        raise bad_request(
            f"The engine behind this model takes chat requests of {MAX_BODY >> 10} KiB and {MAX_VALUES} values at most."
        )
    body = json_object(raw)
    for name, allowed in _UNFIT.items():
        if name in body and body[name] not in allowed:
            raise _cannot(name)
    for name in _FORMS:
        value = body.get(name)
        if value is not None and not (isinstance(value, dict) and value.get("type") == "text"):
            raise _cannot(name)
    written: dict[str, Any] = {"messages": _messages(body.get("messages")), "stream": True}
    limit = _limit(body)
    if limit:
        written["max_tokens"] = limit
    seed = body.get("seed")
    if seed is not None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise bad_request("'seed' must be an integer.", "seed")
        written["seed"] = seed & _MAX_INT
    temperature = body.get("temperature")
    if temperature is not None:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= 100:
            raise bad_request("'temperature' must be a number from 0 to 100.", "temperature")
        written["temperature"] = float(temperature)
    model = body.get("model")
    name = model if isinstance(model, str) else ""
    return PlainChat(orjson.dumps(written), _stops(body.get("stop")), name, limit, stream=body.get("stream") is True)


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a list with at least one message.", "messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, at: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise bad_request(f"'{at}' must be an object.", at)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(
            f"'{at}.role' must be one of {', '.join(_ROLES)}: the engine behind this model knows no other.", f"{at}.role"
        )
    if message.get("tool_calls") or message.get("function_call"):
        raise _cannot(f"{at}.tool_calls")
    return {"role": _ROLES[role], "content": _text(message.get("content"), f"{at}.content")}


def _text(content: Any, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"'{at}' must be a text, or a list of parts.", at)
    texts = list[str]()
    for place, part in enumerate(content):
        text = (
            part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text") else None
        )
        if not isinstance(text, str):
            raise bad_request(f"'{at}[{place}]' must be a part of text: the engine behind this model takes no others.", at)
        texts.append(text)
    return "\n".join(texts)


def _limit(body: Mapping[str, Any]) -> int:
    """Maximum tokens of the answer; 0: no limit."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is not None:
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 1 <= value <= _MAX_INT
                or value != math.floor(value)
            ):
                raise bad_request(f"'{name}' must be a whole number from 1 to {_MAX_INT}.", name)
            return int(value)
    return 0


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(each, str) for each in stops):
        raise bad_request(f"'stop' must be a text, or a list of at most {MAX_STOPS} texts.", "stop")
    if any(len(each) > MAX_STOP_CHARS for each in stops):
        raise bad_request(f"A text in 'stop' has at most {MAX_STOP_CHARS} characters.", "stop")
    return tuple([each for each in stops if each])


def _cannot(name: str) -> GatewayError:
    return bad_request(f"The engine behind this model cannot do what '{name}' asks for.", name, code="not_supported")
