"""The gate: of calls that are ready and share a long prefix that nothing has computed yet, one leads, and the others wait.

A call that waits starts when its leader has its first token, or has ended, or at the latest after twice the leader's
estimated prefill. So a prefix is computed once by engines that do not share prompts in flight.

An engine with slots (llama.cpp) finds a prefix in the slot of one ended request, and gives it to one request at a time. There
a call waits until no call with its prefix runs: for its leader's prefill, and then at most as long as its own would take on
another slot. If the next call gets the slot of the leader, it leads, and the others wait for it. So waiting for one call costs
at most about as much as it can save. Prompts are compared in pieces of PIECE bytes. Pure.

With `gate: on` no estimate ends a wait (`GatedEngine`): a call waits for the first token of its leader, with slots for its end.

Requests of cold bursts wait, too (`router/leading.py`), but for a lead at the replica that was chosen for each of them. The
gate holds a call before that, and its leader is the call on the longest path. So siblings follow it to one replica, where
the core would compute their prefix at several; and a waiting call has no body, no slot of the pool and no running time limit.
Only there is learned if engines share prompts in flight (`Router.shares_inflight`), or have slots (`Router.has_slots`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from gateway.features.workflows.running.messages import GatedEngine
from gateway.features.workflows.running.receipt import message_bytes

PIECE: Final = 2048
LEAST_SHARED: Final = 1024  # tokens
LEAST_S: Final = 0.05


class PromptOutline(NamedTuple):
    """pieces: digest and size of each."""

    model: str
    pieces: tuple[tuple[int, int], ...]

    def shared(self, other: PromptOutline) -> int:
        """Bytes of the common beginning."""
        if self.model != other.model:
            return 0
        found = 0
        for one, two in zip(self.pieces, other.pieces, strict=False):
            if one != two:
                break
            found += one[1]
        return found

    @property
    def size(self) -> int:
        """Bytes of the prompt."""
        return sum(size for _, size in self.pieces)


def outline_of(body: Mapping[str, Any]) -> PromptOutline:
    """O(bytes of the prompt)."""
    prompt = body.get("prompt")
    parts = [prompt.encode("utf-8", "surrogatepass")] if isinstance(prompt, str) else map(message_bytes, body["messages"])
    pieces = (part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE))
    return PromptOutline(body["model"], tuple((xxh3_64_intdigest(each), len(each)) for each in pieces))


class PrefixGate:
    """The prompts of a run: of leaders (calls before their first token, with slots before their end), and computed ones.

    engines: by model.
    """

    def __init__(self, engines: Mapping[str, GatedEngine]) -> None:
        self._engines = engines
        self._leading: dict[str, PromptOutline] = {}
        self._answering: set[str] = set()  # leaders with slots, after their first token
        self._computed: list[PromptOutline] = []

    def leader(self, outline: PromptOutline) -> tuple[str, float]:
        """The call for which this prompt waits, and for how long at most; "": it starts. O(calls * pieces)."""
        engine = self._engines[outline.model]
        known = 0 if engine.slots else max(map(outline.shared, self._computed), default=0)
        for name, other in self._leading.items():
            if outline.shared(other) - known >= LEAST_SHARED * engine.token_bytes:
                prefills = 1 if name in self._answering else 2
                tokens = other.size / engine.token_bytes
                most_s = prefills * tokens / engine.prefill_rate if engine.prefill_rate else engine.most_s
                return name, min(engine.most_s, max(LEAST_S, most_s))
        return "", 0.0

    def started(self, name: str, outline: PromptOutline) -> None:
        self._leading[name] = outline

    def first_token(self, name: str) -> bool:
        """The prompt of a call is computed. True: it was not known, and others may start."""
        outline = self._leading.get(name)
        if outline is None:
            return False
        if self._engines[outline.model].slots:
            self._answering.add(name)
            return False
        del self._leading[name]
        self._computed.append(outline)
        return True

    def ended(self, name: str) -> bool:
        """True: others may start."""
        self._answering.discard(name)
        return self._leading.pop(name, None) is not None
