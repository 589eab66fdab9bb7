"""Translates the input of a Responses request to chat messages: the same turns in the same order
(`dialects/responses/prompt.py`).

The items of one answer (its reasoning, text and calls) are one message; each output of a call is a separate message. Items that
need a server with stored objects or its own tools are an error 400 that names the item.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.prompt.canonical import to_json
from gateway.dialects.prompt.content import TEXT_TYPES
from gateway.dialects.responses.prompt import CALLS, OUTPUTS, is_of_answer, reasoning_of
from gateway.errors import GatewayError, bad_request
from gateway.features.translation.responses.tools import INPUT, flat_name

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class _Answer:
    """The items of one answer, which become one message."""

    __slots__ = ("calls", "content", "has_content", "reasoning")

    def __init__(self) -> None:
        self.content: Any = None
        self.has_content = False
        self.reasoning = list[str]()
        self.calls = list[dict[str, Any]]()

    def message(self) -> dict[str, Any]:
        # Engines require a content if there are no calls.
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.content is None and not self.calls:
            message["content"] = ""
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def chat_messages(instructions: Any, items: Any) -> list[dict[str, Any]]:
    """instructions, items: of the request. O(items). Raises GatewayError 400."""
    messages = list[dict[str, Any]]()
    if instructions is not None and not isinstance(instructions, str):
        raise bad_request("'instructions' must be a string.", "instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    elif isinstance(items, list):
        _add_items(messages, items)
    elif items is not None:
        raise bad_request("'input' must be a string, or a list of items.", "input")
    if not messages:
        raise bad_request("'input' is required: a string, or a list of items.", "input")
    return messages


def _add_items(messages: list[dict[str, Any]], items: list[Any]) -> None:
    answer: _Answer | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise bad_request(f"{where} must be an object: a message or another item.", where)
        kind = item.get("type", "message")
        if is_of_answer(kind, item):
            if answer is not None and (answer.has_content or answer.calls) and kind not in CALLS:
                messages.append(answer.message())
                answer = None
            answer = answer or _Answer()
            _add_to_answer(answer, kind, item, where)
        else:
            if answer is not None:
                messages.append(answer.message())
                answer = None
            messages.append(_turn(kind, item, where))
    if answer is not None:
        messages.append(answer.message())


def _add_to_answer(answer: _Answer, kind: str, item: dict[str, Any], where: str) -> None:
    if kind == "message":
        answer.content, answer.has_content = _content(item.get("content"), f"{where}.content"), True
    elif kind == "reasoning":
        if text := reasoning_of(item):
            answer.reasoning.append(text)  # no engine here can read encrypted reasoning
    else:
        name, namespace = _text(item, "name", where), item.get("namespace")
        if isinstance(namespace, str):
            name = flat_name(namespace, name)
        if kind == "function_call":
            arguments = _text(item, "arguments", where)
        else:
            arguments = orjson.dumps({INPUT: _text(item, "input", where)}).decode()
        function = {"name": name, "arguments": arguments}
        answer.calls.append({"id": _text(item, "call_id", where), "type": "function", "function": function})


def _turn(kind: Any, item: dict[str, Any], where: str) -> dict[str, Any]:
    """An item that is a separate turn."""
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad_request(f"{where}.role must be 'user', 'assistant', 'system' or 'developer'.", f"{where}.role")
        return {"role": _ROLES[role], "content": _content(item.get("content"), f"{where}.content") or ""}
    if isinstance(kind, str) and kind in OUTPUTS:
        output = item.get("output")
        known = output is None or isinstance(output, str | list)
        content = _content(output, f"{where}.output") if known else to_json(output).decode()
        return {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content or ""}
    if kind == "item_reference":
        raise _not_here(where, "refers to an item that a server keeps. Send the item itself")
    raise _not_here(where, "must be a message, reasoning, or a call of a function or custom tool or its output")


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string.", f"{where}.{name}")
    return value


def _content(content: Any, where: str) -> Any:
    """A text, or a list of parts in chat's format; None for nothing."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of content parts.", where)
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts or ""


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise bad_request(f"{where} must be an object with a 'type'.", where)
    kind = part.get("type", "text")
    if isinstance(kind, str) and kind in TEXT_TYPES:
        return {"type": "text", "text": _text(part, "text", where)}
    if kind == "refusal":
        return {"type": "text", "text": _text(part, "refusal", where)}
    if kind == "input_image":
        if part.get("image_url") is None and part.get("file_id") is not None:
            raise _not_here(f"{where}.file_id", "names a file that a server keeps. Send 'image_url'")
        image = {"url": _text(part, "image_url", where)}
        if isinstance(detail := part.get("detail"), str):
            image["detail"] = detail
        return {"type": "image_url", "image_url": image}
    if kind == "input_file":
        for name in ("file_id", "file_url"):
            if part.get("file_data") is None and part.get(name) is not None:
                raise _not_here(f"{where}.{name}", "names a file that is not in the request. Send 'file_data'")
        file = {"file_data": _text(part, "file_data", where)}
        if isinstance(filename := part.get("filename"), str):
            file["filename"] = filename
        return {"type": "file", "file": file}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise _not_here(f"{where}.type", "must be a text, image, file, audio or refusal")


def _not_here(where: str, why: str) -> GatewayError:
    return bad_request(f"{where} {why}: this model's replicas speak only chat completions.", where)
