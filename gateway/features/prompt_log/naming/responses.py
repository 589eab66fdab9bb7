"""OpenAI's Responses as logs. All items of one answer are one entry. Pure."""

from __future__ import annotations

from typing import Any, Final

from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.entries import (
    MARKERS,
    Entry,
    Log,
    OpenCalls,
    call_of,
    entry_of,
    list_in,
    object_in,
    sealed_of,
    text_in,
    without,
)
from gateway.features.prompt_log.naming.frame import framed, require_unframed, tools_of
from gateway.features.prompt_log.naming.parts import parts_of, unknown_part

_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")
_OUTSIDE: Final = ("previous_response_id", "conversation", "prompt")  # members that name turns outside of the body
_ITEM_IDS: Final = frozenset(["id", "status"])
_NOT_IN_FUNCTION: Final = MARKERS | {"type", "strict"}


def responses_log(body: dict[str, Any], calls: OpenCalls, *, named: bool = False) -> Log:
    """The log of a body (`framed`). calls: open before it. Raises NoNameError."""
    require_unframed(body, "instructions", named=named)
    for name in _OUTSIDE:
        if body.get(name) is not None:
            raise NoNameError("the body names turns that it does not have", name)
    items, before = body.get("input") or [], list[Entry]()
    if instructions := body.get("instructions"):
        try:
            before.append(entry_of("system", parts_of(instructions)))
        except NoNameError as error:
            raise NoNameError(error.reason, "instructions") from None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    entries = [*before, *item_entries(list_in(items, "'input'"), calls)]
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    options = {**body, "reasoning_effort": effort} if effort else body
    ends = range(len(before) + 1, len(entries) + 1)  # leading items of the system are an entry each
    return framed(entries, [_tool(tool) for tool in tools_of(body)], options, ends, named=named)


def item_entries(items: Any, open_calls: OpenCalls) -> list[Entry]:
    """The entries of a list of items. Raises NoNameError."""
    reader = ItemEntryReader(open_calls)
    for index, item in enumerate(items):
        try:
            reader.read(object_in(item, "the item"))
        except NoNameError as error:
            raise NoNameError(f"in input[{index}], {error.reason}", "input") from None
    reader.close()
    return reader.entries


CALL, SAID, THOUGHT, OTHER = "call", "said", "thought", "other"
"""Kinds of items: three that answers have, and all others."""


def kind_of(item: dict[str, Any]) -> str:
    """The kind of an item."""
    type_ = item.get("type") or "message"
    if type_ in _CALLS:
        return CALL
    if type_ == "reasoning":
        return THOUGHT
    return SAID if type_ == "message" and item.get("role") == "assistant" else OTHER


class AnswerBounds:
    """Finds where the items of an answer end, by the kinds of the items. begun: the last item is of an answer."""

    def __init__(self) -> None:
        self.begun = False
        self._ends = False  # a text or a thought after a text or a call begins another answer

    def ends_before(self, kind: str) -> bool:
        """True if an answer ends before the next item, which is of this kind."""
        ended = self.begun and (kind == OTHER or (self._ends and kind != CALL))
        if ended:
            self._ends = False
        self.begun = kind != OTHER
        self._ends = self.begun and (self._ends or kind != THOUGHT)
        return ended


class ItemEntryReader:
    """Gathers the items of each answer."""

    def __init__(self, open_calls: OpenCalls) -> None:
        self.entries = list[Entry]()
        self._open_calls = open_calls
        self._bounds = AnswerBounds()
        self._content = list[dict[str, Any]]()
        self._thoughts = list[str]()
        self._calls = list[dict[str, Any]]()
        self._sealed = list[dict[str, Any]]()

    @property
    def number(self) -> int:
        """The number of the entry that the last item is a part of, from 1."""
        return len(self.entries) + self._bounds.begun

    def read(self, item: dict[str, Any]) -> None:
        """The next item. Raises NoNameError."""
        kind = kind_of(item)
        if self._bounds.ends_before(kind):
            self._end()
        if kind == CALL:
            self._open_calls.add(item.get("call_id"))
            custom = item["type"] == "custom_tool_call"
            given = item.get("input" if custom else "arguments")
            name = text_in(item.get("name"), "the name of a call")
            self._calls.append({"name": name, "arguments": given} if custom else call_of(name, given))
        elif kind == OTHER:
            self.entries.append(self._other(text_in(item.get("type") or "message", "the type"), item))
        else:
            self._read_said(kind, item)

    def close(self) -> None:
        """The last answer has ended."""
        if self._bounds.ends_before(OTHER):
            self._end()

    def _end(self) -> None:
        thoughts = "".join(self._thoughts)
        self.entries.append(entry_of("assistant", self._content, reasoning=thoughts, calls=self._calls, sealed=self._sealed))
        self._content, self._thoughts, self._calls, self._sealed = [], [], [], []

    def _read_said(self, kind: str, item: dict[str, Any]) -> None:
        if kind == SAID:
            self._content = parts_of(item.get("content"))
            return
        self._thoughts.append(_reasoning_of(item))
        if encrypted := item.get("encrypted_content"):
            self._sealed.append(sealed_of("reasoning", encrypted))

    def _other(self, kind: str, item: dict[str, Any]) -> Entry:
        if kind == "message":
            return entry_of(text_in(item.get("role"), "the role"), parts_of(item.get("content")))
        if kind in _RESULTS:
            return entry_of("tool", parts_of(item.get("output")), of=self._open_calls.answer(item.get("call_id")))
        if kind == "item_reference":
            raise NoNameError("the item is a reference")
        if encrypted := item.get("encrypted_content"):
            return entry_of(kind, sealed=[sealed_of(kind, encrypted)])
        return entry_of(kind, [unknown_part(kind, item, _ITEM_IDS)])


def _reasoning_of(item: dict[str, Any]) -> str:
    """The readable reasoning: its content, else its summary."""
    for name in ("content", "summary"):
        parts = [object_in(part, "a part of the reasoning") for part in list_in(item.get(name), "the reasoning")]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if texts:
            return "".join(texts)
    return ""


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat writes it; a provider's own tools stay as they are."""
    if tool.get("type", "function") != "function" or "name" not in tool:
        return tool
    strict = {"strict": True} if tool.get("strict") else {}
    return {"type": "function", "function": {**without(tool, _NOT_IN_FUNCTION), **strict}}
