"""The result of a step, as expressions see it: `answer.text`, `plan.value`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

CHAT, TEXT, CALL, LET, SWITCH, EACH = "chat", "text", "call", "let", "switch", "each"
KINDS: Final = (CHAT, TEXT, CALL, LET, SWITCH, EACH)
STATUS: Final = "status"

MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    CHAT: ("text", "value", "message", "messages", "calls", "finish_reason", "usage", STATUS),
    TEXT: ("text", "value", "prompt", STATUS),
    CALL: ("value", STATUS),
    LET: ("value", "text", STATUS),
    SWITCH: ("value", STATUS),
    EACH: ("values", "value", STATUS),
}
"""The members of a result by the kind of its step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """All members are null until the step is done, except `status`.

    text: the answer. value: the answer as its constraint reads it. message: the answer as a message. messages: all messages of
    the prompt, and the answer. prompt: the exact text that a `text` step sent. calls: tool calls. values: of an `each`.
    """

    status: str = "pending"
    value: Any = None
    text: str | None = None
    message: Mapping[str, Any] | None = None
    messages: list[Any] | None = None
    prompt: str | None = None
    calls: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    values: list[Any] | None = None

    def member(self, name: str) -> Any:
        return getattr(self, name, None) if name in self.__slots__ else None
