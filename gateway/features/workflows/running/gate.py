"""The gate: of calls that are ready and share a long prefix that nothing has computed yet, one leads, and the others wait.

A call that waits starts when its leader has its first token, or has ended, or at the latest after twice the leader's
estimated prefill. So a prefix is computed once: also by engines that do not share prompts in flight, and in a fleet where a
queue in front of one replica would send the next call to another one. Prompts are compared in pieces of PIECE bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from gateway.features.workflows.running.receipt import message_bytes

PIECE: Final = 2048
LEAST_SHARED: Final = 4096  # bytes, some 1,024 tokens
BYTES_PER_SECOND: Final = 32_000  # of a prefill, before anything is known: 8,000 tokens
LEAST_S: Final = 0.05
MOST_S: Final = 10.0


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
        return sum(size for _, size in self.pieces)


def outline_of(body: Mapping[str, Any]) -> PromptOutline:
    """O(bytes of the prompt)."""
    prompt = body.get("prompt")
    parts = [prompt.encode("utf-8", "surrogatepass")] if isinstance(prompt, str) else map(message_bytes, body["messages"])
    pieces = (part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE))
    return PromptOutline(body["model"], tuple((xxh3_64_intdigest(each), len(each)) for each in pieces))


class PrefixGate:
    """The prompts of a run: of calls before their first token (leaders), and computed ones."""

    def __init__(self) -> None:
        self._leading: dict[str, PromptOutline] = {}
        self._computed: list[PromptOutline] = []

    def leader(self, outline: PromptOutline) -> tuple[str, float]:
        """The call for which this prompt waits, and for how long at most; "": it starts. O(calls * pieces)."""
        known = max(map(outline.shared, self._computed), default=0)
        for name, other in self._leading.items():
            if outline.shared(other) - known >= LEAST_SHARED:
                return name, min(MOST_S, max(LEAST_S, 2 * other.size / BYTES_PER_SECOND))
        return "", 0.0

    def started(self, name: str, outline: PromptOutline) -> None:
        self._leading[name] = outline

    def first_token(self, name: str) -> bool:
        """The prompt of a call is computed. True: it was not known."""
        outline = self._leading.pop(name, None)
        if outline is not None:
            self._computed.append(outline)
        return outline is not None

    def ended(self, name: str) -> bool:
        """True: it has ended before its first token."""
        return self._leading.pop(name, None) is not None
