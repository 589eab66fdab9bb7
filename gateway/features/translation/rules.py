"""Rules for what chat has no form for: one table for the blocks of Messages and the items of Responses.

    text       what a model can read of it becomes text at its place; also what the table does not name
    left out   the answer can do without it; the request's log line names it and the reason (`left_out`)
    refused    the answer would be about something else: error 400

A conversation has its blocks and items in every later turn, so a refused one ends it. Hence only names of objects that are
elsewhere are refused. Ids, encrypted texts and binary data are no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.prompt.canonical import to_json

TEXT, LEFT_OUT, REFUSED = "text", "left out", "refused"

_ELSEWHERE: Final = "names an object that a server keeps. Send the object itself"
_UNREADABLE: Final = "no model here can read it"
_OF_PROVIDER: Final = "only the provider's servers have it"
# Type of a block, an item or a tool: action, and the reason. The others: TEXT.
RULES: Final[Mapping[str, tuple[str, str]]] = {
    # Messages
    "redacted_thinking": (LEFT_OUT, _UNREADABLE),
    "container_upload": (LEFT_OUT, _OF_PROVIDER),
    "image": (LEFT_OUT, "it is where only text can be"),
    # Responses
    "item_reference": (REFUSED, _ELSEWHERE),
    "compaction_trigger": (LEFT_OUT, "nothing here compacts a conversation"),
}
_NO_TEXT: Final = frozenset(
    ["type", "id", "call_id", "tool_use_id", "status", "cache_control", "citations", "signature", "caller", "phase"]
)
_GIVEN: Final = frozenset(
    ["input", "arguments", "action", "operation"]
)  # fields of a call, written by the model: they stay whole
_SECRET: Final = "encrypted"  # names of fields begin with it
_LONGEST_WORD: Final = 2000  # characters; a longer one is binary data
_DEEPEST: Final = 8
_ALONE: Final = ("text", "content", "summary")  # fields that are a text for the model if nothing is beside them


# Types of tools that the client runs, in a form that a model knows by training only.
_TRAINED: Final = frozenset(["computer", "computer_use_preview", "local_shell", "shell", "apply_patch"])


class Omissions:
    """Left-out parts of one request: names and reasons, each once, at most MOST."""

    MOST: Final = 20

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = list[str]()

    def add(self, name: str, reason: str) -> None:
        text = f"{name[:50]}: {reason}"
        if text not in self.found and len(self.found) < self.MOST:
            self.found.append(text)


def text_for(value: Mapping[str, Any], left_out: Omissions) -> str:
    """The text for a block or an item whose rule is no refusal; "" if it is left out."""
    kind = str(value.get("type"))
    action, reason = RULES.get(kind, (TEXT, _UNREADABLE))
    text = _readable(kind, value) if action == TEXT else ""
    if not text:
        left_out.add(kind, reason)
    return text


def refusal(kind: Any) -> str:
    """The reason why a block or an item of this type is refused; "" if it is not."""
    action, reason = RULES.get(kind, (TEXT, "")) if isinstance(kind, str) else (TEXT, "")
    return reason if action == REFUSED else ""


def tool_refusal(kind: Any) -> str:
    """The reason why a tool of this type is refused; "" if it is left out instead."""
    return "a model knows it by training only, and chat has no form for it" if kind in _TRAINED else ""


def readable_json(value: Mapping[str, Any], *without: str) -> str:
    """The readable fields as JSON."""
    cleaned = _cleaned({name: field for name, field in value.items() if name not in without}, 0)
    return to_json(cleaned or {}).decode()


def _readable(kind: str, value: Mapping[str, Any]) -> str:
    fields = _cleaned(value, 0)
    if not fields:
        return ""
    if len(fields) == 1:
        name, field = next(iter(fields.items()))
        if name in _ALONE and isinstance(field, str):
            return field
    return f"[{kind}] {to_json(fields).decode()}"


def _cleaned(value: Any, depth: int) -> Any:
    """The value without fields that are no text; None if nothing remains. O(size)."""
    if isinstance(value, str):
        return None if len(value) > _LONGEST_WORD and not any(map(str.isspace, value[:_LONGEST_WORD])) else value or None
    if depth > _DEEPEST:
        return value
    if isinstance(value, Mapping):
        names = [name for name in value if name not in _NO_TEXT and not name.startswith(_SECRET)]
        fields = {name: value[name] if name in _GIVEN else _cleaned(value[name], depth + 1) for name in names}
        return {name: field for name, field in fields.items() if field is not None} or None
    if isinstance(value, list):
        return [each for each in (_cleaned(each, depth + 1) for each in value) if each is not None] or None
    return value
