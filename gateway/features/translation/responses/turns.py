"""Translates the input of a Responses request to chat messages: the same turns in the same order
(`dialects/responses/prompt.py`).

The items of one answer (its reasoning, text and calls) are one message; each output of a call is a separate message. Calls that
the client runs in a form of OpenAI's (`local_shell_call`, `apply_patch_call`) are calls of functions of that name, and their
outputs are results. Any other item follows its rule (`rules.py`): mostly it becomes text at its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.prompt.canonical import to_json
from gateway.dialects.prompt.content import TEXT_TYPES
from gateway.dialects.responses.prompt import CALLS, OUTPUTS, is_of_answer, reasoning_of
from gateway.errors import GatewayError, bad_request
from gateway.features.translation.responses.tools import INPUT, flat_name
from gateway.features.translation.rules import Omissions, readable_json, refusal, text_for

_CALL, _OUTPUT = "_call", "_output"  # ends of types
# Items of servers' tools whose type does not end with _call.
_OF_SERVERS: Final = frozenset(["mcp_list_tools", "mcp_approval_request", "program"])
_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class _Answer:
    """The items of one answer, which become one message."""

    __slots__ = ("calls", "content", "has_content", "notes", "reasoning")

    def __init__(self) -> None:
        self.content: Any = None
        self.notes = list[str]()  # texts of items without a form in chat, before its content
        self.has_content = False
        self.reasoning = list[str]()
        self.calls = list[dict[str, Any]]()

    def message(self) -> dict[str, Any]:
        content = self.content
        if self.notes and isinstance(content, list):
            content = [*({"type": "text", "text": note} for note in self.notes), *content]
        elif self.notes:
            content = "\n\n".join([*self.notes, *([content] if content else [])])
        # Engines require a content if there are no calls.
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if content is None and not self.calls:
            message["content"] = ""
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def chat_messages(instructions: Any, items: Any, left_out: Omissions) -> list[dict[str, Any]]:
    """instructions, items: of the request. O(items). Raises GatewayError 400."""
    messages = list[dict[str, Any]]()
    if instructions is not None and not isinstance(instructions, str):
        raise bad_request("'instructions' must be a string.", "instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    elif isinstance(items, list):
        _add_items(messages, items, left_out)
    elif items is not None:
        raise bad_request("'input' must be a string, or a list of items.", "input")
    if not messages and isinstance(items, list):  # engines refuse a conversation without a turn
        messages.append({"role": "user", "content": ""})
    if not messages:
        raise bad_request("'input' is required: a string, or a list of items.", "input")
    return messages


def _add_items(messages: list[dict[str, Any]], items: list[Any], left_out: Omissions) -> None:
    answer: _Answer | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise bad_request(f"{where} must be an object: a message or another item.", where)
        kind = item.get("type", "message")
        if is_of_answer(kind, item) or _is_call(kind, item) or _is_of_server(kind, item):
            if answer is not None and (answer.has_content or answer.calls) and not _is_call(kind, item):
                messages.append(answer.message())
                answer = None
            answer = answer or _Answer()
            _add_to_answer(answer, kind, item, where, left_out)
        else:
            if answer is not None:
                messages.append(answer.message())
                answer = None
            if turn := _turn(kind, item, where, left_out):
                messages.append(turn)
    if answer is not None:
        messages.append(answer.message())


def _is_call(kind: Any, item: Mapping[str, Any]) -> bool:
    """True for a call that the client runs: its output refers to it."""
    return isinstance(kind, str) and (kind in CALLS or (kind.endswith(_CALL) and isinstance(item.get("call_id"), str)))


def _is_of_server(kind: Any, item: Mapping[str, Any]) -> bool:
    """True for an item that a server with tools of its own has added to its answer."""
    return isinstance(kind, str) and (kind in _OF_SERVERS or (kind.endswith(_CALL) and not _is_call(kind, item)))


def _add_to_answer(answer: _Answer, kind: str, item: dict[str, Any], where: str, left_out: Omissions) -> None:
    if kind == "message":
        answer.content, answer.has_content = _content(item.get("content"), f"{where}.content", left_out), True
    elif kind == "reasoning":
        if text := reasoning_of(item):
            answer.reasoning.append(text)
        elif item.get("encrypted_content"):
            left_out.add(kind, "no model here can read it")
    elif not _is_call(kind, item):
        if text := text_for(item, left_out):
            answer.notes.append(text)
    else:
        function = {"name": _name_of(kind, item, where), "arguments": _arguments_of(kind, item, where)}
        answer.calls.append({"id": _text(item, "call_id", where), "type": "function", "function": function})


def _name_of(kind: str, item: Mapping[str, Any], where: str) -> str:
    """The function of a call."""
    if kind not in CALLS:
        return kind.removesuffix(_CALL)
    name, namespace = _text(item, "name", where), item.get("namespace")
    return flat_name(namespace, name) if isinstance(namespace, str) else name


def _arguments_of(kind: str, item: Mapping[str, Any], where: str) -> str:
    """The arguments of a call: JSON, also of a call without any, because engines parse them."""
    if kind == "custom_tool_call":
        return orjson.dumps({INPUT: _text(item, "input", where)}).decode()
    if kind != "function_call":
        return readable_json(item)
    arguments = item.get("arguments")
    if isinstance(arguments, dict):
        return to_json(arguments).decode()
    return _text(item, "arguments", where) if arguments else "{}"


def _turn(kind: Any, item: dict[str, Any], where: str, left_out: Omissions) -> dict[str, Any] | None:
    """An item that is a separate turn; None if it is left out."""
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad_request(f"{where}.role must be 'user', 'assistant', 'system' or 'developer'.", f"{where}.role")
        return {"role": _ROLES[role], "content": _content(item.get("content"), f"{where}.content", left_out) or ""}
    if not isinstance(kind, str):
        raise bad_request(f"{where}.type must be a string.", where)
    if reason := refusal(kind):
        raise _not_here(where, reason)
    if kind in OUTPUTS or (kind.endswith(_OUTPUT) and isinstance(item.get("call_id"), str)):
        output = item.get("output")
        known = output is None or isinstance(output, str) or (isinstance(output, list) and not _has_no_parts(output))
        content = _content(output, f"{where}.output", left_out) if known else to_json(output).decode()
        if output is None and kind not in OUTPUTS:
            content = readable_json(item)
        return {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content or ""}
    text = text_for(item, left_out)
    return {"role": "user", "content": text} if text else None


def _has_no_parts(output: list[Any]) -> bool:
    """True for an output that is a list of objects of its tool (of a shell: the output and the end of each command)."""
    return any(isinstance(each, dict) and not ("type" in each or "text" in each) for each in output)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string.", f"{where}.{name}")
    return value


def _content(content: Any, where: str, left_out: Omissions) -> Any:
    """A text, or a list of parts in chat's format; None for nothing."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of content parts.", where)
    found = (_part(part, f"{where}[{index}]", left_out) for index, part in enumerate(content))
    parts = [part for part in found if part is not None]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts or ""


def _part(part: Any, where: str, left_out: Omissions) -> dict[str, Any] | None:
    """A part in chat's format; None if it is left out."""
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
        return _file(part, where)
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    if not isinstance(kind, str):
        raise bad_request(f"{where}.type must be a string.", f"{where}.type")
    text = text_for(part, left_out)
    return {"type": "text", "text": text} if text else None


def _file(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in ("file_id", "file_url"):
        if part.get("file_data") is None and part.get(name) is not None:
            raise _not_here(f"{where}.{name}", "names a file that is not in the request. Send 'file_data'")
    file = {"file_data": _text(part, "file_data", where)}
    if isinstance(filename := part.get("filename"), str):
        file["filename"] = filename
    return {"type": "file", "file": file}


def _not_here(where: str, why: str) -> GatewayError:
    return bad_request(f"{where} {why}: this model's replicas speak only chat completions.", where)
