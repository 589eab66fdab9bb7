"""The conversation of a Messages request in the words of chat: as vLLM and llama.cpp translate it, and as the canonical prompt
of Messages has it (`anthropic/prompt.py`).

    system                     one text, without the billing line
    a user's tool results      messages of the role `tool`, before the rest of their turn
    images and files in them   parts of the user's message behind them: a tool's message has only text in chat
    thinking                   `reasoning_content` of its turn; what is redacted no model can read
    tool uses                  `tool_calls` of their turn

The order and the number of turns stay: results without their call, or two turns of one role, are left to the engine's template,
as on replicas that speak Messages. So is an answer that the client has begun. `is_error` has no word in chat, and the texts of
errors speak for themselves; only where there is no text, one says that the tool has failed.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.dialects.anthropic.billing import strip_line
from gateway.dialects.prompt.canonical import to_json
from gateway.errors import bad_request
from gateway.features.translation.messages.blocks import add_parts, kind_of, string_of, text_of, unknown

FAILED: Final = "The tool has failed."


def system_text(system: Any) -> str | None:
    """None: there is none. Raises GatewayError 400 for what is no text."""
    if system is None:
        return None
    if isinstance(system, str):
        return strip_line(system) or None
    if not isinstance(system, list):
        raise bad_request("'system' must be a string or a list of text blocks.", "system")
    texts = _system_texts(system, "system")
    return "".join(texts) if texts else None


def chat_messages(messages: Any) -> list[Any]:
    """Raises GatewayError 400 that names the block that is none, or that chat has no words for. O(number of blocks)."""
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a list with at least one message.", "messages")
    turns = list[Any]()
    for index, message in enumerate(messages):
        _add_turn(turns, message, f"messages[{index}]")
    return turns


def _add_turn(turns: list[Any], message: Any, where: str) -> None:
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
        _add_user(turns, content, where)
    elif role == "assistant":
        turns.append(_assistant(content, where))
    else:
        texts = _system_texts(content, where)
        turns.append({"role": role, "content": _content([{"type": "text", "text": text} for text in texts])})


def _system_texts(blocks: list[Any], where: str) -> list[str]:
    """Without the billing line, and without a block that has nothing else."""
    texts = list[str]()
    for number, block in enumerate(blocks):
        if kind_of(block, where, number) != "text":
            raise unknown(block, where, number)
        text = text_of(block, where, number)
        rest = strip_line(text)
        if rest or not text:
            texts.append(rest)
    return texts


def _content(parts: list[Any]) -> Any:
    """The usual form of a content: a text where it is one."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _add_user(turns: list[Any], content: list[Any], where: str) -> None:
    said, shown, results = list[Any](), list[Any](), 0
    for number, block in enumerate(content):
        if kind_of(block, where, number) == "tool_result":
            results += 1
            turns.append(_result(block, f"{where}[{number}]", shown))
        else:
            add_parts(said, block, where, number)
    if said or shown or not results:
        turns.append({"role": "user", "content": _content(shown + said)})


def _result(block: dict[str, Any], where: str, shown: list[Any]) -> dict[str, Any]:
    """The message of a tool. shown: takes what is no text."""
    id_, content = string_of(block, "tool_use_id", where), block.get("content")
    parts, texts = list[Any](), list[Any]()
    if isinstance(content, list):
        for number, inner in enumerate(content):
            add_parts(parts, inner, f"{where}.content", number)
        for part in parts:
            (texts if part["type"] == "text" else shown).append(part)
        content = _content(texts)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise bad_request(f"{where}.content must be a string or a list of content blocks.", f"{where}.content")
    if content == "" and block.get("is_error") is True:
        content = FAILED
    return {"role": "tool", "tool_call_id": id_, "content": content}


def _assistant(content: list[Any], where: str) -> dict[str, Any]:
    said, calls, thoughts = list[Any](), list[Any](), list[str]()
    for number, block in enumerate(content):
        kind = kind_of(block, where, number)
        if kind == "text":
            said.append({"type": "text", "text": text_of(block, where, number)})
        elif kind == "tool_use":
            calls.append(_call(block, f"{where}[{number}]"))
        elif kind == "thinking":
            thoughts.append(string_of(block, "thinking", f"{where}[{number}]"))
        elif kind != "redacted_thinking":
            raise unknown(block, where, number)
    message: dict[str, Any] = {"role": "assistant", "content": _content(said) if said or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}.input is required and must be an object.", f"{where}.input")
    function = {"name": string_of(block, "name", where), "arguments": to_json(arguments).decode()}
    return {"id": string_of(block, "id", where), "type": "function", "function": function}
