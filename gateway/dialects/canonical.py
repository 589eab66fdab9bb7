"""The canonical prompt: what the engine's template would see, as bytes.

The one property that counts: a conversation that extends another in the engine extends it here, byte for byte. So the
parts stand in the order of a template (tools first, then the messages), each message begins with a separator, and nothing
that does not enter the prompt (sampling, limits, ids) is in it. What is different for the engine must be different here, too,
or an engine's report about one prompt is taken for one about the other: values keep the order of their keys, for templates
print objects in that order, and every field of the body that shapes the prompt or turns the engine's cache off is in its head.

An image, audio or file part stands as a digest: what matters is only whether it is the same one. A client that types
separators into its text fools only the prediction for its own requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import orjson
import xxhash

from gateway.dialects.api_request import NeedsHelper
from gateway.errors import GatewayError, bad_request

# ASCII separators: file (head parts), group (content parts), record (messages), unit (fields of a message).
_HEAD: Final = b"\x1c"
_PART: Final = b"\x1d"
_MESSAGE: Final = b"\x1e"
_FIELD: Final = b"\x1f"
_DIGEST: Final = b"\x1a"

# The fields of a body that stand in the head of its prompt, in this order. First what chat templates print or read, then what
# changes how a template is applied or cuts the result, then what selects another cache or none. A name that one engine reads
# and another does not only costs a match between a request that has it and one that has not.
_HEAD_KEYS: Final = (
    "tools",
    "functions",
    "tool_choice",
    "function_call",
    "documents",
    "system",
    "instructions",
    "previous_response_id",
    "conversation",
    "reasoning_effort",
    "thinking",
    "enable_thinking",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "truncation",
    "suffix",
    "input_ids",
    "prompt_embeds",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "lora",
    "lora_path",
    "extra_key",
    "cache_prompt",
    "prompt_logprobs",
    "echo",
)
_IN_HEAD: Final = frozenset(_HEAD_KEYS)
# What engines do anyway. (A forced tool call is a matter of decoding; "none" and a named tool change the list that is printed.)
_USUAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "tool_choice": ("auto", "required"),
    "function_call": ("auto",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncation": ("disabled",),
    "cache_prompt": (True,),
    "echo": (False,),
}
_MAX_TOKEN_ID: Final = (1 << 32) - 1
_TEXT_TYPES: Final = frozenset(["text", "input_text", "output_text"])
# A marker for a provider's cache: it moves to the newest message with every turn, and no template prints it.
_MARKER: Final = "cache_control"
_NO_FURTHER_FIELDS: Final = frozenset(["role", "name", "content", _MARKER])  # of a message


def chat_prompt(body: Mapping[str, Any], most: int = 0) -> bytes:
    """The canonical prompt of a chat request. Raises GatewayError 400 where the messages are not messages.

    most: how many parts it may have, or NeedsHelper is raised; 0: any number. The further fields of a message and the parts of
    a content are counted before they are read, so that no more than `most` are read in vain.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a list with at least one message.", "messages")
    most = most or 1 << 62
    parts = head_parts(body)
    for index, message in enumerate(messages):
        _add_message(parts, message, index, most)
        if len(parts) > most:
            raise NeedsHelper
    return b"".join(parts)


def head_parts(body: Mapping[str, Any]) -> list[bytes]:
    """The fields beside messages and prompt that shape the prompt, from its first token on."""
    if _IN_HEAD.isdisjoint(body):
        return []
    parts = list[bytes]()
    for key in _HEAD_KEYS:
        if key in body:
            value = body[key]
            if value is not None and value not in _USUAL.get(key, ()):
                parts.append(_HEAD + key.encode() + _json(value))
    return parts


def head_digest(body: Mapping[str, Any]) -> str:
    """The same as a short text, for prompts that have no head: "" if there are no such fields."""
    parts = head_parts(body)
    return short_digest(b"".join(parts)) if parts else ""


def short_digest(data: bytes) -> str:
    """One of fixed length that nobody can make equal to another's."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _json(value: Any) -> bytes:
    """JSON, its keys in their own order. Raises GatewayError 400 for what is nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from error


def _add_message(parts: list[bytes], message: Any, index: int, most: int) -> None:
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
    if isinstance(content, str):
        parts.append(content.encode())
    elif content is not None:
        _add_content(parts, content, f"messages[{index}].content", most)
    if len(message) > 1 + ("content" in message) + ("name" in message):
        if len(parts) + len(message) > most:
            raise NeedsHelper
        # A template reads a message's fields by name: their order does not matter. Names in UTF-8 sort as the texts do, by code
        # point, and long ones that begin alike sort faster. No two are equal, so the values are not compared.
        fields = [
            (key.encode(), value) for key, value in message.items() if value is not None and key not in _NO_FURTHER_FIELDS
        ]
        fields.sort()
        parts += [_FIELD + key + b"=" + _json(value) for key, value in fields]


def _add_content(parts: list[bytes], content: Any, where: str, most: int) -> None:
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of content parts.", where)
    if len(parts) + 2 * len(content) - 1 > most:  # each part, and what separates it from the next
        raise NeedsHelper
    # One text part reads as the plain string: templates print both alike.
    for number, part in enumerate(content):
        if number:
            parts.append(_PART)
        parts.append(_part(part, where))


def _part(part: Any, where: str) -> bytes:
    if not isinstance(part, dict):
        raise bad_request(f"{where}: each content part must be an object with a 'type'.", where)
    kind, text = part.get("type", "text"), part.get("text")
    if not isinstance(text, str) or not isinstance(kind, str) or kind not in _TEXT_TYPES:
        return _DIGEST + _digest(part)
    if len(part) == 1 + ("type" in part) + (_MARKER in part):
        return text.encode()
    return text.encode() + _DIGEST + _digest(_without(part, "type", "text", _MARKER))


def _digest(part: dict[str, Any]) -> bytes:
    if _MARKER in part:
        part = _without(part, _MARKER)
    return xxhash.xxh3_128_digest(_json(part))


def _without(part: dict[str, Any], *names: str) -> dict[str, Any]:
    """A copy, its fields in their order, without some. A part may have 100,000 fields: they are not copied one by one."""
    others = part.copy()
    for name in names:
        others.pop(name, None)
    return others


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


def is_batch(prompt: Any) -> bool:
    """Whether the prompt of a completion is a list of several prompts."""
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _bad_prompt(key: str) -> GatewayError:
    return bad_request(f"'{key}' must be a string, a list of strings, a list of token ids, or a list of such lists.", key)
