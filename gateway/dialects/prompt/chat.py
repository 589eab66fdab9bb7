"""The canonical prompt of OpenAI's chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
import xxhash

from gateway.dialects.prompt.calls import add_chat_calls
from gateway.dialects.prompt.canonical import FIELD, MAX_NAME, TURN, CanonicalPrompt, short, to_json
from gateway.dialects.prompt.content import add_content
from gateway.dialects.prompt.head import head_parts
from gateway.dialects.prompt.marks import MARKER
from gateway.errors import bad_request

REASONING: Final = b"reasoning"

_KNOWN: Final = frozenset(["role", "name", "content", "tool_call_id", MARKER])  # fields of a message
_CALLS: Final = b"tool_calls"
_REASONINGS: Final = frozenset([REASONING, b"reasoning_content"])  # engines' names of the same field


def chat_prompt(body: Mapping[str, Any], most: int = 0) -> CanonicalPrompt:
    """The canonical prompt of a chat request. Raises GatewayError 400 where the messages are not messages.

    most: maximum number of parts; beyond it NeedsHelper is raised. 0: no maximum.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a list with at least one message.", "messages")
    prompt = CanonicalPrompt(most)
    prompt.parts += head_parts(body)
    for index, message in enumerate(messages):
        _add_message(prompt, message, index)
        prompt.require(0)
    return prompt


def _add_message(prompt: CanonicalPrompt, message: Any, index: int) -> None:
    if not isinstance(message, dict):
        where = f"messages[{index}]"
        raise bad_request(f"{where} must be an object with 'role' and 'content'.", where)
    role, name, content = message.get("role"), message.get("name"), message.get("content")
    if not isinstance(role, str):
        where = f"messages[{index}].role"
        raise bad_request(f"{where} must be a string such as 'user'.", where)
    prompt.parts.append(TURN + (role.encode() if len(role) <= MAX_NAME else short(role)))
    if isinstance(name, str):
        prompt.parts.append(b"@" + short(name))
    prompt.parts.append(FIELD)
    if isinstance(content, str):
        prompt.parts.append(content.encode())
    elif content is not None:
        add_content(prompt, content, f"messages[{index}].content")
    if len(message) > 1 + ("content" in message) + ("name" in message):
        _add_fields(prompt, message)


def _add_fields(prompt: CanonicalPrompt, message: dict[str, Any]) -> None:
    """Adds the further fields of a message. Their number is checked before they are read."""
    prompt.require(len(message))
    # A template reads a message's fields by name, so their order does not matter. Names in UTF-8 sort as the texts do, by code
    # point, and long names with a common beginning sort faster. No two are equal, so the values are not compared.
    fields = [
        (key.encode(), value) for key, value in message.items() if value is not None and value != [] and key not in _KNOWN
    ]
    fields.sort()
    unknown: Any = None
    for key, value in fields:
        if key == _CALLS:
            add_chat_calls(prompt, value)
        elif key in _REASONINGS:
            prompt.unprinted(REASONING, to_json(value))
        else:
            unknown = unknown or xxhash.xxh3_128()
            unknown.update(orjson.dumps(key.decode()) + to_json(value))
    prompt.digests(len(fields))
    if unknown is not None:
        prompt.unprinted(b"", unknown.digest())
