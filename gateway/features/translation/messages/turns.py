"""Translates the conversation of a Messages request to chat messages, as vLLM and llama.cpp do, and consistent with the
canonical prompt of Messages (`anthropic/prompt.py`).

    system                     one text, without the billing line
    a user's tool results      messages of the role `tool`, before the rest of their turn
    images and files in them   parts of the following user message, because a tool message has only text in chat
    thinking                   `reasoning_content` of its turn
    tool uses                  `tool_calls` of their turn
    any other block            by its rule (`rules.py`): mostly text at its place

Order and number of turns stay. Results without their call, or two turns of one role, are left to the engine's template, as on
replicas with Messages. So is a partial answer from the client. `is_error` does not exist in chat, and error texts are
self-explanatory; only an error without a text is replaced by a fixed text.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.dialects.anthropic.billing import strip_line
from gateway.dialects.prompt.canonical import to_json
from gateway.errors import bad_request
from gateway.features.translation.messages.blocks import add_parts, kind_of, string_of, text_of
from gateway.features.translation.rules import Omissions, text_for

FAILED: Final = "The tool has failed."


def system_text(system: Any, left_out: Omissions) -> str | None:
    """None: there is no system prompt. Raises GatewayError 400 for other values than a text and a list of blocks."""
    if system is None:
        return None
    if isinstance(system, str):
        return strip_line(system) or None
    if not isinstance(system, list):
        raise bad_request("'system' must be a string or a list of text blocks.", "system")
    texts = _system_texts(system, "system", left_out)
    return "".join(texts) if texts else None


def chat_messages(messages: Any, left_out: Omissions) -> list[Any]:
    """Raises GatewayError 400 with the name of an invalid block. O(size)."""
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a list with at least one message.", "messages")
    turns = list[Any]()
    for index, message in enumerate(messages):
        _add_turn(turns, message, f"messages[{index}]", left_out)
    return turns


def _add_turn(turns: list[Any], message: Any, where: str, left_out: Omissions) -> None:
    if not isinstance(message, dict):
        raise bad_request(f"{where} must be an object with 'role' and 'content'.", where)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role must be 'user' or 'assistant'.", f"{where}.role")
    where += ".content"
    if isinstance(content, str):
        turns.append({"role": role, "content": strip_line(content) if role == "system" else content})
    elif not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of content blocks.", where)
    elif role == "user":
        _add_user(turns, content, where, left_out)
    elif role == "assistant":
        turns.append(_assistant(content, where, left_out))
    else:
        texts = _system_texts(content, where, left_out)
        turns.append({"role": role, "content": _content([{"type": "text", "text": text} for text in texts])})


def _system_texts(blocks: list[Any], where: str, left_out: Omissions) -> list[str]:
    """The texts without the billing line, and without blocks that contain only that line."""
    texts = list[str]()
    for number, block in enumerate(blocks):
        if kind_of(block, where, number) != "text":
            if other := text_for(block, left_out):
                texts.append(other)
            continue
        text = text_of(block, where, number)
        rest = strip_line(text)
        if rest or not text:
            texts.append(rest)
    return texts


def _content(parts: list[Any]) -> Any:
    """The usual form of a content: a string if it is a single text."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _add_user(turns: list[Any], content: list[Any], where: str, left_out: Omissions) -> None:
    parts_, images, results = list[Any](), list[Any](), 0
    for number, block in enumerate(content):
        if kind_of(block, where, number) == "tool_result":
            results += 1
            turns.append(_result(block, f"{where}[{number}]", images, left_out))
        else:
            add_parts(parts_, block, where, number, left_out)
    if parts_ or images or not results:
        turns.append({"role": "user", "content": _content(images + parts_)})


def _result(block: dict[str, Any], where: str, images: list[Any], left_out: Omissions) -> dict[str, Any]:
    """A tool message. images: receives the parts that are not text."""
    id_, content = string_of(block, "tool_use_id", where), block.get("content")
    parts, texts = list[Any](), list[Any]()
    if isinstance(content, list):
        for number, inner in enumerate(content):
            add_parts(parts, inner, f"{where}.content", number, left_out)
        for part in parts:
            (texts if part["type"] == "text" else images).append(part)
        content = _content(texts)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise bad_request(f"{where}.content must be a string or a list of content blocks.", f"{where}.content")
    if content == "" and block.get("is_error") is True:
        content = FAILED
    return {"role": "tool", "tool_call_id": id_, "content": content}


def _assistant(content: list[Any], where: str, left_out: Omissions) -> dict[str, Any]:
    parts_, calls, thoughts = list[Any](), list[Any](), list[str]()
    for number, block in enumerate(content):
        kind = kind_of(block, where, number)
        if kind == "text":
            parts_.append({"type": "text", "text": text_of(block, where, number)})
        elif kind == "tool_use":
            calls.append(_call(block, f"{where}[{number}]"))
        elif kind == "thinking":
            thoughts.append(string_of(block, "thinking", f"{where}[{number}]"))
        elif text := text_for(block, left_out):
            parts_.append({"type": "text", "text": text})
    message: dict[str, Any] = {"role": "assistant", "content": _content(parts_) if parts_ or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input") or {}  # some clients write none for a tool without parameters
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}.input is required and must be an object.", f"{where}.input")
    function = {"name": string_of(block, "name", where), "arguments": to_json(arguments).decode()}
    return {"id": string_of(block, "id", where), "type": "function", "function": function}
