"""The items of a Responses request as the engine's chat messages.

Theory of operation. The result is the same as from a client of chat completions, so both have the same tokens and share
their cache: `instructions` are a system message, the role developer is the role system, as in vLLM. The parts of one answer
(a text, calls) are separate items here and one message there: a `function_call` joins the assistant's message before it.
Reasoning goes with the assistant's message after it as `reasoning_content`, for templates that print it; encrypted reasoning
and summaries are left out.
"""

from typing import Any

from replica.api.prompts import chat_messages
from replica.api.validation import ApiError
from replica.engine import Message

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")
_ITEMS = "'message', 'function_call', 'function_call_output' or 'reasoning'"


def conversation(instructions: str | None, items: str | list[Any]) -> list[Message]:
    """The messages of a request's input. Raises ApiError. O(input)."""
    found: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    thoughts: list[str] = []
    for at, item in enumerate(items):
        _add(found, thoughts, item, f"input[{at}]")
    return chat_messages(found, lambda at: "input")


def _add(found: list[Message], thoughts: list[str], item: object, path: str) -> None:
    if not isinstance(item, dict):
        raise ApiError(400, f"{path} must be an object.", path)
    kind = item.get("type", "message")
    if kind == "message":
        message = _message(item, path)
        found.append(_with_thoughts(message, thoughts) if message["role"] == "assistant" else message)
    elif kind in ("function_call", "custom_tool_call"):
        _add_call(found, thoughts, _call(item, path))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        found.append(_result(item, path))
    elif kind == "reasoning":
        thoughts += _thoughts(item.get("content"))
    elif kind == "item_reference":
        missing = f"Item with id {_shown(item.get('id'))} not found: this replica stores nothing. Send the item itself."
        raise ApiError(404, missing, path, "item_not_found")
    else:
        raise ApiError(400, f"{path}.type must be {_ITEMS}, not {_shown(kind)}: this replica reads no others.", f"{path}.type")


def _message(item: dict[str, Any], path: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{path}.role must be one of {', '.join(ROLES)}.", f"{path}.role")
    return {"role": ROLES[role], "content": _content(item.get("content"), f"{path}.content")}


def _result(item: dict[str, Any], path: str) -> Message:
    if not isinstance(item.get("call_id"), str):
        raise ApiError(400, f"{path}.call_id must be a string.", f"{path}.call_id")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": _content(item.get("output"), f"{path}.output")}


def _content(content: object, path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{path} must be a string or a list of parts.", path)
    return [{"type": "text", "text": _text(part, f"{path}[{at}]")} for at, part in enumerate(content)]


def _text(part: object, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if not isinstance(text, str) or kind not in (*_TEXTS, "refusal"):
        raise ApiError(400, f"{path} must be a text part (input_text or output_text): this model reads text only.", path)
    return text


def _call(item: dict[str, Any], path: str) -> dict[str, Any]:
    custom = item["type"] == "custom_tool_call"
    given = "input" if custom else "arguments"
    for name in ("call_id", "name", given):
        if not isinstance(item.get(name), str):
            raise ApiError(400, f"{path}.{name} must be a string.", f"{path}.{name}")
    function = {"name": item["name"], "arguments": {"input": item["input"]} if custom else item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _add_call(found: list[Message], thoughts: list[str], call: dict[str, Any]) -> None:
    if not found or found[-1]["role"] != "assistant" or thoughts:
        found.append(_with_thoughts({"role": "assistant", "content": ""}, thoughts))
    found[-1].setdefault("tool_calls", []).append(call)


def _with_thoughts(message: Message, thoughts: list[str]) -> Message:
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
        thoughts.clear()
    return message


def _thoughts(content: object) -> list[str]:
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return [text for text in parts if isinstance(text, str)]


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) and len(value) <= 128 else "(not a short string)"
