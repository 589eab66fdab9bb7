"""Rates and time per phase over the last minute: sums in slots of one second. Time is an argument.

Phases of a request, in order: `tokenise` (its prompt), `queue` (until the engine admits it), `prefill` (until its first
token), `decode` (until its last), `detokenise` (tokens to text), `send` (waiting until the client takes bytes of a stream).
Queue, prefill and decode of many requests overlap. Detokenise, and tokenise of short prompts, are work of the server's own
thread: one second of them per second is its limit. Long bodies, grammars and bad words are prepared in other threads, and
waiting for these counts as tokenise, too. Reading a body and parsing it count nowhere.
"""

from collections import defaultdict, deque
from typing import Any

NOW_S = 5
MINUTE_S = 60
PHASES = ("tokenise", "queue", "prefill", "decode", "detokenise", "send")


class Stats:
    """Sums by name. `add` is O(1), memory O(names x 60). Times never decrease."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._slots: deque[tuple[int, dict[str, float]]] = deque()

    def __repr__(self) -> str:
        return f"<Stats {len(self._slots)} seconds, {sorted({name for _, sums in self._slots for name in sums})}>"

    def add(self, name: str, amount: float, now: float) -> None:
        second = int(now)
        if not self._slots or self._slots[-1][0] < second:
            self._slots.append((second, defaultdict(float)))
            self._drop_old(second)
        self._slots[-1][1][name] += amount

    def phase(self, name: str, seconds: float, now: float) -> None:
        """Add one request's seconds in a phase."""
        self.add(name, seconds, now)
        self.add(f"{name}_count", 1, now)

    def total(self, name: str, seconds: int, now: float) -> float:
        """The sum over the last `seconds` whole seconds. O(seconds)."""
        first = int(now) - seconds
        return sum(sums.get(name, 0.0) for second, sums in self._slots if first <= second < int(now))

    def rate(self, name: str, seconds: int, now: float) -> float:
        """The sum per second; of a replica younger than `seconds`, since its start."""
        whole = min(seconds, int(now) - int(self._began))
        return self.total(name, whole, now) / whole if whole > 0 else 0.0

    def body(self, now: float) -> dict[str, Any]:
        rates = {
            kind: {"now": round(self.rate(kind, NOW_S, now), 1), "minute": round(self.rate(kind, MINUTE_S, now), 1)}
            for kind in ("prefill_tokens", "cached_tokens", "decode_tokens", "answers")
        }
        return {"per_second": rates, "phases_last_minute": {name: self._phase(name, now) for name in PHASES}}

    def _phase(self, name: str, now: float) -> dict[str, float]:
        seconds, count = (self.total(key, MINUTE_S, now) for key in (name, f"{name}_count"))
        return {
            "seconds": round(seconds, 4),
            "count": int(count),
            "mean_ms": round(1000 * seconds / count, 3) if count else 0.0,
        }

    def _drop_old(self, second: int) -> None:
        while self._slots and self._slots[0][0] < second - MINUTE_S:
            self._slots.popleft()
