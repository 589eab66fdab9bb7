"""OpenAI's chat completions as logs. Pure."""

from __future__ import annotations

from typing import Any, Final

from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.entries import (
    UNPRINTED,
    Entry,
    Log,
    OpenCalls,
    call_of,
    entry_of,
    list_in,
    object_in,
    text_in,
    without,
)
from gateway.features.prompt_log.naming.frame import framed, tools_of
from gateway.features.prompt_log.naming.parts import parts_of

_READ: Final = frozenset(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"])
_PLAIN: Final = frozenset(["role", "content"])
_ROLES: Final = frozenset(["system", "user", "assistant"])
_LEFT_OUT: Final = _READ | UNPRINTED | {"id", "status", "index"}


def chat_log(body: dict[str, Any], calls: OpenCalls, *, named: bool = False) -> Log:
    """The log of a body (`framed`). calls: open before it. Raises NoNameError."""
    entries = list[Entry]()
    for index, message in enumerate(list_in(body.get("messages"), "'messages'")):
        try:
            entries.append(message_entry(object_in(message, "the message"), calls))
        except NoNameError as error:
            raise NoNameError(f"in messages[{index}], {error.reason}", "messages") from None
    return framed(entries, tools_of(body), body, range(1, len(entries) + 1), named=named)


def message_entry(message: dict[str, Any], open_calls: OpenCalls) -> Entry:
    """The entry of one message. Raises NoNameError."""
    role, content = text_in(message.get("role"), "the role"), message.get("content")
    if message.keys() == _PLAIN and role in _ROLES and content and isinstance(content, str):
        return {"role": role, "content": [{"text": content}]}  # nearly all messages without calls
    of = open_calls.answer(message.get("tool_call_id")) if role == "tool" else 0
    calls = list[dict[str, Any]]()
    for call in list_in(message.get("tool_calls"), "'tool_calls'"):
        open_calls.add(object_in(call, "a call").get("id"))
        calls.append(_call(call))
    more = {name: value for name, value in without(message, _LEFT_OUT).items() if value != []}
    return entry_of(
        role,
        parts_of(content),
        name=message.get("name"),
        of=of,
        reasoning=text_in(message.get("reasoning") or message.get("reasoning_content") or "", "the reasoning"),
        calls=calls,
        more=more,
    )


def _call(call: dict[str, Any]) -> dict[str, Any]:
    custom = call.get("custom")
    if isinstance(custom, dict):
        return {"name": text_in(custom.get("name"), "the name of a call"), "arguments": custom.get("input")}
    function = object_in(call.get("function"), "the function of a call")
    return call_of(function.get("name"), function.get("arguments"))
