"""The canonical prompt: what the engine's template would see, as bytes.

The one property that counts: a conversation that extends another in the engine extends it here, byte for byte. So the
parts stand in the order of a template (tools first, then the messages), each message begins with a separator, and nothing
that does not enter the prompt (sampling, limits, ids) is in it. An image, audio or file part stands as a digest: what
matters is only whether it is the same one. A client that types separators into its text fools only the prediction for its
own requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
import xxhash

from gateway.errors import GatewayError, bad_request

# ASCII separators: file (head parts), group (content parts), record (messages), unit (fields of a message).
_HEAD: Final = b"\x1c"
_PART: Final = b"\x1d"
_MESSAGE: Final = b"\x1e"
_FIELD: Final = b"\x1f"

# Whatever a chat template reads beside the messages: it shapes the prompt from its first token on.
_HEAD_KEYS = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs", "system")
_MAX_TOKEN_ID = (1 << 32) - 1
_PLACED_KEYS = ("role", "name", "content")


def chat_prompt(body: Mapping[str, Any]) -> bytes:
    """The canonical prompt of a chat request. Raises GatewayError 400 where the messages are not messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a list with at least one message.", "messages")
    parts = [_HEAD + key.encode() + canonical_json(body[key]) for key in _HEAD_KEYS if key in body and body[key] is not None]
    for index, message in enumerate(messages):
        _add_message(parts, message, index)
    return b"".join(parts)


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys: equal values give equal bytes. Raises GatewayError 400 for what is nested too deeply."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from error


def _add_message(parts: list[bytes], message: Any, index: int) -> None:
    """Its parts, one by one: a long content is copied once, when all are joined."""
    if not isinstance(message, dict):
        where = f"messages[{index}]"
        raise bad_request(f"{where} must be an object with 'role' and 'content'.", where)
    role, name, content = message.get("role"), message.get("name"), message.get("content")
    if not isinstance(role, str):
        where = f"messages[{index}].role"
        raise bad_request(f"{where} must be a string such as 'user'.", where)
    parts.append(_MESSAGE + role.encode())
    if isinstance(name, str):
        parts.append(b"@" + name.encode())
    parts.append(_FIELD)
    parts.append(content.encode() if isinstance(content, str) else _content(content, f"messages[{index}].content"))
    if len(message) > 1 + ("content" in message) + ("name" in message):
        others = sorted(key for key, value in message.items() if value is not None and key not in _PLACED_KEYS)
        parts += [_FIELD + key.encode() + b"=" + canonical_json(message[key]) for key in others]


def _content(content: Any, where: str) -> bytes:
    if content is None:
        return b""
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of content parts.", where)
    # One text part reads as the plain string: templates print both alike.
    return _PART.join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> bytes:
    if not isinstance(part, dict):
        raise bad_request(f"{where}: each content part must be an object with a 'type'.", where)
    text = part.get("text")
    if isinstance(text, str):
        return text.encode()
    return b"\x1a" + xxhash.xxh3_128_digest(canonical_json(part))


def completion_prompt(body: Mapping[str, Any], key: str) -> bytes | list[int]:
    """The prompt of a completion or embedding request: text, or token ids. Of a batch, the first one.

    Raises GatewayError 400 where it is neither.
    """
    prompt = body.get(key)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and prompt and all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in prompt):
        return prompt
    raise _bad_prompt(key)


def _bad_prompt(key: str) -> GatewayError:
    return bad_request(f"'{key}' must be a string, a list of strings, a list of token ids, or a list of such lists.", key)
