"""Whether a replica's answer is, or was lately, held back for a client that does not read. Pure.

A server gives up a connection on which it cannot write (nginx after 60 s). Where the gateway itself did not read, that is no
fault of the replica's. Its end is read only when the client reads again and has taken what came before the end, maybe in many
small steps, so what counts is the time for which the answer was held back less the time for which it was not, of late: it grows
while the answer is held back and shrinks while it is not, by a second a second. A client that now and then cannot keep up for a
moment stays near zero; one that is the bottleneck stays at the top, whatever its steps are.
"""

from __future__ import annotations

from typing import Final

HELD_S: Final = 0.5  # from here on an answer counts as held back
MOST_S: Final = 5.0  # what is remembered: for the difference to HELD_S an end is excused after the last step


class Held:
    """See the top of this file. All operations O(1)."""

    __slots__ = ("_on", "_seconds", "_since")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Another answer begins."""
        self._on = False
        self._seconds = self._since = 0.0

    def turn(self, now: float, *, on: bool) -> None:
        """From now on it is held back, or is not. Again and again the same is possible."""
        self._seconds = self._at(now)
        self._since, self._on = now, on

    def lately(self, now: float) -> bool:
        """Whether it was held back for so long that its end may be due to that."""
        return self._at(now) >= HELD_S

    def _at(self, now: float) -> float:
        passed = now - self._since
        return min(MOST_S, self._seconds + passed) if self._on else max(0.0, self._seconds - passed)

    def __repr__(self) -> str:
        return f"<Held {'on' if self._on else 'off'} since {self._since:.3f}, {self._seconds:.3g} s before>"
