"""Streams of conversations in all dialects for the prefix doctor, with and without an injected cause of broken prefixes.

A conversation is from `bench.agents`; a cause changes its requests, from some turn on or in every turn.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from bench.agents.dialogues import Assistant, Dialogue, Entry, Head, Shape, User, head, words
from bench.agents.kinds import KINDS, Kind
from gateway.features.doctor import causes

SHAPE = Shape(tools=6_000, system=6_000, turn=3_000)
TURNS = 6
LATE = 4  # the turn at which something happens once
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sent:
    """The content of a client's turn, independent of a dialect."""

    turn: int
    head: Head
    entries: tuple[Entry, ...]
    chance: random.Random

    def system(self, text: str) -> Sent:
        """The system prompt, with a text before it."""
        return replace(self, head=replace(self.head, system=(text, *self.head.system)))


Change = Callable[[Sent], Sent]


def _time(sent: Sent) -> Sent:
    return sent.system(f"Current time: 2026-11-27T04:{10 + sent.turn}:07Z\n")


def _id(sent: Sent) -> Sent:
    return sent.system(f"Request {uuid.UUID(int=sent.chance.getrandbits(128))}\n")


def _nonce(sent: Sent) -> Sent:
    return sent.system(f"Nonce a{sent.chance.getrandbits(64):x}9\n")


def _reordered(sent: Sent) -> Sent:
    tools = list(sent.head.tools)
    at = sent.turn % (len(tools) - 1)
    tools[0], tools[at + 1] = tools[at + 1], tools[0]
    return replace(sent, head=replace(sent.head, tools=tuple(tools)))


def _fewer(sent: Sent) -> Sent:
    if sent.turn < LATE:
        return sent
    return replace(sent, head=replace(sent.head, tools=(sent.head.tools[0], *sent.head.tools[2:])))


def _other_system(sent: Sent) -> Sent:
    return sent.system("Answer briefly.\n" if sent.turn < LATE else "Answer at length, and with examples.\n")


def _rewritten(sent: Sent) -> Sent:
    if sent.turn < LATE:
        return sent
    return replace(sent, entries=(User(("The task, in other words.",)), *sent.entries[1:]))


def _truncated(sent: Sent) -> Sent:
    return replace(sent, entries=sent.entries[2 * (sent.turn - LATE + 1) :]) if sent.turn >= LATE else sent


def _compacted(sent: Sent) -> Sent:
    if sent.turn < LATE + 1:
        return sent
    begin = "This session is being continued from a previous conversation that ran out of context. Summary: "
    summary = User((begin + words(random.Random(1), 800),))
    return replace(sent, entries=(summary, *sent.entries[2 * LATE - 3 :]))


PROMPTS: Mapping[str, Change] = MappingProxyType(
    {
        causes.TIMESTAMP: _time,
        causes.ID: _id,
        causes.NONCE: _nonce,
        causes.TOOLS_REORDERED: _reordered,
        causes.TOOLS_CHANGED: _fewer,
        causes.SYSTEM_CHANGED: _other_system,
        causes.HISTORY_REWRITTEN: _rewritten,
        causes.HISTORY_TRUNCATED: _truncated,
        causes.COMPACTION: _compacted,
    }
)


def _salted(body: Line, turn: int) -> Line:
    return body | {"cache_salt": f"salt {turn}"}


def _other_model(body: Line, turn: int) -> Line:
    return body | {"model": "larger"} if turn >= LATE else body


def _adapter(body: Line, turn: int) -> Line:
    return body | {"model": "m:sql"} if turn >= LATE else body


def _setting(body: Line, turn: int) -> Line:
    return body | {"chat_template_kwargs": {"thinking": turn >= LATE}}


BODIES: Mapping[str, Callable[[Line, int], Line]] = MappingProxyType(
    {
        causes.SALT: _salted,
        causes.MODEL_CHANGED: _other_model,
        causes.ADAPTER_CHANGED: _adapter,
        causes.SETTINGS_CHANGED: _setting,
    }
)


def _completion(dialogue: Dialogue, known: Head, most: int, chance: random.Random) -> tuple[Line, dict[str, str]]:
    """A transcript as one text."""
    said = "".join(f"{type(entry).__name__}: {_text(entry)}\n\n" for entry in dialogue.entries)
    return {"model": "m", "prompt": f"{''.join(known.system)}\n{said}", "max_tokens": most}, {}


def _text(entry: Entry) -> str:
    return "\n".join(entry.parts) if isinstance(entry, User) else entry.text


COMPLETION = Kind("completion", "/v1/completions", _completion)
CHATS: Sequence[Kind] = tuple(kind for kind in KINDS if kind.name != "responses-previous")  # its history is at the server
KINDS_OF_STREAMS: Sequence[Kind] = (*CHATS, COMPLETION)


def named(kind: Kind) -> bool:
    """True if its requests name a session."""
    return kind.name in ("messages-claude-code", "responses-list")


def stream(kind: Kind, cause: str = "", conversations: int = 3, seed: int = 0) -> Iterator[Line]:
    """Requests of several alternating conversations, as lines of a file. cause: injected in all of them; "": none."""
    chance, known = random.Random(f"{seed}/chance"), head(SHAPE, seed)
    dialogues = [Dialogue(number, SHAPE, seed) for number in range(conversations)]
    for turn in range(1, TURNS + 1):
        for dialogue in dialogues:
            dialogue.ask()
            sent = Sent(turn, known, tuple(dialogue.entries), chance)
            if cause in PROMPTS:
                sent = PROMPTS[cause](sent)
            shown = replace(dialogue, entries=list(sent.entries))
            body, headers = kind.write(shown, sent.head, 100, chance)
            if cause in BODIES:
                body = BODIES[cause](body, turn)
            yield {"path": kind.path, "body": body, "headers": headers, "time": float(60 * turn + dialogue.number)}
            own = random.Random(f"{seed}/answer {dialogue.tag}")
            dialogue.answered(Assistant(f"Answer {dialogue.tag}: {words(own, 400)}", None), "")


def lines(requests: Iterator[Line] | Sequence[Line]) -> bytes:
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)
