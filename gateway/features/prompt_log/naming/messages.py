"""Anthropic's Messages as logs. Results of tools are entries of their own, before the other blocks of their message. Pure."""

from __future__ import annotations

from typing import Any, Final

from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.entries import (
    MARKERS,
    Entry,
    Log,
    OpenCalls,
    entry_of,
    list_in,
    object_in,
    sealed_of,
    text_in,
    without,
)
from gateway.features.prompt_log.naming.frame import framed, require_unframed, tools_of
from gateway.features.prompt_log.naming.parts import parts_of

_BILLING: Final = "x-anthropic-billing-header:"  # a line that a client puts before its system text, another one in each request
_OF_TOOL: Final = frozenset(["type", "name", "description", "input_schema"])
_TOOL_MARKERS: Final = frozenset(["eager_input_streaming", "defer_loading", "allowed_callers"])
_NOT_IN_FUNCTION: Final = _OF_TOOL | MARKERS | _TOOL_MARKERS


def messages_log(body: dict[str, Any], calls: OpenCalls, *, named: bool = False) -> Log:
    """The log of a body (`framed`). calls: open before it. Raises NoNameError."""
    entries, ends = list[Entry](), list[int]()
    require_unframed(body, "system", named=named)
    if system := body.get("system"):
        try:
            entries += message_entries({"role": "system", "content": system}, calls)
        except NoNameError as error:
            raise NoNameError(f"in 'system', {error.reason}", "system") from None
    for index, message in enumerate(list_in(body.get("messages"), "'messages'")):
        try:
            entries += message_entries(object_in(message, "the message"), calls)
        except NoNameError as error:
            raise NoNameError(f"in messages[{index}], {error.reason}", "messages") from None
        ends.append(len(entries))
    return framed(entries, [_tool(tool) for tool in tools_of(body)], body, ends, named=named)


def message_entries(message: dict[str, Any], open_calls: OpenCalls) -> list[Entry]:
    """The entries of one message. Raises NoNameError."""
    role, content = text_in(message.get("role"), "the role"), message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = [object_in(block, "a block") for block in list_in(content, "the content")]
    if role == "system":
        blocks = [_unbilled(block) for block in blocks]
        if blocks and all(block.get("type") == "text" and not block["text"] for block in blocks):
            return []  # nothing but the billing line
    entries, said, calls = list[Entry](), list[dict[str, Any]](), list[dict[str, Any]]()
    thoughts, sealed = list[str](), list[dict[str, Any]]()
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            entries.append(_result(block, open_calls))
        elif kind == "tool_use":
            open_calls.add(block.get("id"))
            calls.append({"name": text_in(block.get("name"), "the name of a call"), "arguments": block.get("input")})
        elif kind == "thinking":
            thoughts.append(text_in(block.get("thinking"), "the thinking"))
        elif kind == "redacted_thinking":
            sealed.append(sealed_of("redacted_thinking", block.get("data")))
        else:
            said.append(block)
    if not entries or said or calls or thoughts or sealed:
        entries.append(entry_of(role, parts_of(said), reasoning="".join(thoughts), calls=calls, sealed=sealed))
    return entries


def _result(block: dict[str, Any], open_calls: OpenCalls) -> Entry:
    of = open_calls.answer(block.get("tool_use_id"))
    return entry_of("tool", parts_of(block.get("content")), of=of, more={"is_error": True} if block.get("is_error") else None)


def _unbilled(block: dict[str, Any]) -> dict[str, Any]:
    """A text of the system without the client's billing line."""
    if block.get("type") != "text":
        return block
    text = text_in(block.get("text"), "the text of a block")
    return {**block, "text": text.partition("\n")[2] if text.startswith(_BILLING) else text}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat writes it; a provider's own tools stay as they are."""
    if "input_schema" not in tool or tool.get("type") not in (None, "custom"):
        return tool
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": {**function, **without(tool, _NOT_IN_FUNCTION)}}
