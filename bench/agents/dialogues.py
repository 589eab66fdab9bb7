"""Conversations of agents, independent of the API: a common head, a task, calls of tools, their results.

Texts follow from the seed. Every turn's own text has a tag, `[turn 7.3]`, by which the stand-ins recognise it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.agents.answers import Call

TOOLS = 20
REMINDER_BYTES = 250
_SYLLABLES = ("ka", "lo", "mi", "ren", "tos", "vi", "dar", "sun", "pe", "gol", "ish", "um")


@dataclass(frozen=True, slots=True)
class Shape:
    """Bytes of the head's two parts and of a turn's new text."""

    tools: int = 30_000
    system: int = 15_000
    turn: int = 6_000


@dataclass(frozen=True, slots=True)
class Head:
    """The common head of all conversations. tools: name, description, parameters."""

    tools: tuple[tuple[str, str, dict[str, Any]], ...]
    system: tuple[str, ...]  # pieces, which follow each other directly


@dataclass(frozen=True, slots=True)
class User:
    """parts: texts of one message."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assistant:
    text: str
    call: Call | None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call."""

    identity: str
    text: str


Entry = User | Assistant | Result


def words(chance: random.Random, size: int) -> str:
    made = list[str]()
    while size > 0:
        made.append("".join(chance.choices(_SYLLABLES, k=chance.randrange(1, 4))))
        size -= len(made[-1]) + 1
    return " ".join(made)


def head(shape: Shape, seed: int) -> Head:
    chance = random.Random(f"{seed}/head")
    return Head(
        tuple(_tools(chance, shape.tools)),
        ("You are an agent that works on source code.\n", words(chance, shape.system)),
    )


def _tools(chance: random.Random, size: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for number in range(TOOLS):
        name = "Bash" if number == 0 else f"Tool{number}"
        texts = {"command": {"type": "string", "description": words(chance, size // TOOLS // 3)}}
        schema = {"type": "object", "properties": texts, "required": ["command"]}
        yield name, words(chance, size // TOOLS // 2), schema


@dataclass(slots=True)
class Dialogue:
    """One conversation so far. sent: the entries known to a server that stores state. previous: the id of its last answer."""

    number: int
    shape: Shape
    seed: int
    entries: list[Entry] = field(default_factory=list)
    turn: int = 0
    sent: int = 0
    previous: str = ""

    @property
    def tag(self) -> str:
        return f"{self.number}.{self.turn}"

    @property
    def session(self) -> str:
        """A UUID."""
        digits = f"{random.Random(f'{self.seed}/session {self.number}').getrandbits(128):032x}"
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def ask(self) -> None:
        """The next turn: the task, or what the call has brought, with a reminder."""
        self.turn += 1
        chance = random.Random(f"{self.seed}/turn {self.tag}")
        text, reminder = words(chance, self.shape.turn), words(chance, REMINDER_BYTES)
        reminder = f"<system-reminder>\n{reminder}\n</system-reminder>"
        last = self.entries[-1] if self.entries else None
        if isinstance(last, Assistant) and last.call:
            self.entries += (Result(last.call.identity, f"[turn {self.tag}] {text}"), User((reminder,)))
        else:
            self.entries.append(User((reminder, f"[turn {self.tag}] {text}")))

    def answered(self, answer: Assistant, identity: str) -> None:
        self.entries.append(answer)
        self.sent, self.previous = len(self.entries), identity
