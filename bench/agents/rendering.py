"""Renders a request's body to the engine's prompt, for the three APIs. This implementation shares no code with any gateway, and
so can check one.

It does the same as vLLM (its chat template, its conversions of Messages and Responses to chat): tools first, then system, then
the messages; a tool result is a separate turn; ids, `cache_control`, metadata and earlier thinking are not printed. So a
conversation has the same prompt with every API. The billing header of Claude Code is removed, as in vLLM; `verbatim` keeps it,
as in llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

BILLING = "x-anthropic-billing-header:"
TOKEN_BYTES = 4

Body = Mapping[str, Any]


class BadRequest(Exception):
    """The engine refuses the body."""


@dataclass(frozen=True, slots=True)
class Turn:
    """role: system, user, assistant or tool. calls: (name, arguments as JSON)."""

    role: str
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        calls = "".join(f"\n<tool_call>{name} {arguments}</tool_call>" for name, arguments in self.calls)
        return f"<|{self.role}|>\n{self.text}{calls}<|end|>\n"


@dataclass(frozen=True, slots=True)
class Conversation:
    """tools: as the template prints them."""

    tools: tuple[str, ...]
    turns: tuple[Turn, ...]

    def prompt(self) -> bytes:
        """What the model continues: it ends where an answer is to begin."""
        return (self._text() + "<|assistant|>\n").encode()

    def answered(self, answer: Turn) -> bytes:
        """The prompt and its answer: the beginning of the next turn's prompt."""
        return (self._text() + str(answer)).encode()

    def _text(self) -> str:
        tools = "\n".join(self.tools)
        return (f"<|tools|>\n{tools}<|end|>\n" if tools else "") + "".join(map(str, self.turns))


def tokens(text: bytes) -> int:
    return -(-len(text) // TOKEN_BYTES)


# -- the three APIs


def chat(body: Body, *, verbatim: bool = False) -> Conversation:
    """Raises BadRequest. verbatim: without effect, as engines look for the billing header in Messages only."""
    turns = [_chat_turn(message) for message in _list(body, "messages")]
    tools = (_tool(tool.get("function", {}), "parameters") for tool in body.get("tools") or ())
    return Conversation(tuple(tools), tuple(turns))


def messages(body: Body, *, verbatim: bool = False) -> Conversation:
    """Raises BadRequest."""
    system = _system(body.get("system") or "", verbatim)
    turns = [Turn("system", system)] if system else []
    for message in _list(body, "messages"):
        turns += _message_turns(message, verbatim)
    tools = (_tool(tool, "input_schema") for tool in body.get("tools") or ())
    return Conversation(tuple(tools), tuple(turns))


def responses(body: Body, *, verbatim: bool = False, before: Sequence[Turn] = ()) -> Conversation:
    """Raises BadRequest. before: the turns of the response that it goes on from, without its instructions."""
    instructions = body.get("instructions") or ""
    turns = [Turn("system", instructions)] if instructions else []
    turns += before
    items = body.get("input") or []
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        _add_item(turns, item)
    if not turns:
        raise BadRequest("no input")
    functions = (tool for tool in body.get("tools") or () if tool.get("type") == "function")
    return Conversation(tuple(_tool(tool, "parameters") for tool in functions), tuple(turns))


def _list(body: Body, key: str) -> Sequence[Any]:
    found = body.get(key)
    if not isinstance(found, list) or not found:
        raise BadRequest(f"{key} must be a list with at least one entry")
    return found


def _tool(tool: Body, schema: str) -> str:
    return json.dumps([tool.get("name"), tool.get("description"), tool.get(schema)])


def _arguments(value: Any) -> str:
    """Of a call: templates print the object, whether an API has it as one or as text."""
    try:
        return json.dumps(json.loads(value) if isinstance(value, str) else value)
    except ValueError:
        return str(value)


def _text(content: Any) -> str:
    """Of a string or of parts, one a line; what is no text stands as its kind."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part) for part in content or ())


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        raise BadRequest("a part of a content is not an object")
    text = part.get("text")
    return text if isinstance(text, str) else f"<{part.get('type')}>"


def _chat_turn(message: Body) -> Turn:
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    named = tuple((str(call.get("name")), _arguments(call.get("arguments") or "{}")) for call in calls)
    role = message.get("role")
    return Turn("system" if role == "developer" else str(role), _text(message.get("content")), named)


def _system(content: Any, verbatim: bool) -> str:
    """Blocks one after the other. The billing header is a block of its own, or the first line."""
    blocks = [content] if isinstance(content, str) else [_part(block) for block in content]
    return "".join(blocks if verbatim else map(without_billing, blocks))


def without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _message_turns(message: Body, verbatim: bool) -> Iterator[Turn]:
    role, content = str(message.get("role")), message.get("content")
    if role == "system":
        yield Turn(role, _system(content or "", verbatim))
        return
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    texts: list[str] = []
    calls: list[tuple[str, str]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            if texts:
                yield Turn(role, "\n".join(texts))
                texts = []
            yield Turn("tool", _text(block.get("content")))
        elif kind == "tool_use":
            calls.append((str(block.get("name")), _arguments(block.get("input") or {})))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(_part(block))
    if texts or calls or not blocks:
        yield Turn(role, "\n".join(texts), tuple(calls))


def _add_item(turns: list[Turn], item: Any) -> None:
    """An assistant's text and its calls are items of their own, and one turn."""
    if not isinstance(item, dict):
        raise BadRequest("an item is not an object")
    kind = item.get("type") or "message"
    if kind == "message":
        role = str(item.get("role"))
        turns.append(Turn("system" if role == "developer" else role, _text(item.get("content"))))
    elif kind == "function_call":
        if not turns or turns[-1].role != "assistant":
            turns.append(Turn("assistant"))
        call = (str(item.get("name")), _arguments(item.get("arguments") or "{}"))
        turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, call))
    elif kind == "function_call_output":
        turns.append(Turn("tool", _text(item.get("output"))))
    elif kind != "reasoning":
        raise BadRequest(f"items of type {kind!r} are not supported")
