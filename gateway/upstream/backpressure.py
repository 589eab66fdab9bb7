"""Tracks how long a replica's answer was recently paused because its client does not read. Pure.

A server closes a connection on which it cannot write for a while (nginx after 60 s). If the gateway paused the reading, that is
no failure of the replica. The close is noticed only once the client has read all bytes before it, maybe in many small steps. So
the measure is a level of seconds, between 0 and MAX_S: it rises by a second per second while the answer is paused, and falls as
fast while it is not. The level of a client that is briefly slow now and then stays near zero; a client that is the bottleneck
stays near MAX_S.
"""

from __future__ import annotations

from typing import Final

RECENT_S: Final = 0.5  # level from which an answer counts as recently paused
MAX_S: Final = 5.0  # highest level: a close is excused for MAX_S - RECENT_S after the last pause, at most


class Backpressure:
    """The level of one answer (see the module). All operations O(1)."""

    __slots__ = ("_on", "_seconds", "_since")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset, for the next answer."""
        self._on = False
        self._seconds = self._since = 0.0

    def set(self, now: float, *, on: bool) -> None:
        """The answer is paused (on) or continues. Idempotent."""
        self._seconds = self._at(now)
        self._since, self._on = now, on

    def recent(self, now: float) -> bool:
        """True if the answer was paused for long enough to explain that the replica closed the connection."""
        return self._at(now) >= RECENT_S

    def _at(self, now: float) -> float:
        passed = now - self._since
        return min(MAX_S, self._seconds + passed) if self._on else max(0.0, self._seconds - passed)

    def __repr__(self) -> str:
        return f"<Backpressure {'on' if self._on else 'off'} since {self._since:.3f}, {self._seconds:.3g} s before>"
