"""Check of the wall clock before old rows are removed: a clock that jumped ahead would empty the database.

The wall clock is steady if it has kept pace with the monotonic clock for STEADY_S, since the start or since its last jump.
"""

from __future__ import annotations

from typing import Final

STEADY_S: Final = 3600.0
JUMP_S: Final = 60.0  # between two checks; a smaller difference is a correction


class Steadiness:
    """Steadiness of the wall clock (see the module)."""

    __slots__ = ("_ahead", "_since")

    def __init__(self) -> None:
        self._ahead: float | None = None  # seconds between wall clock and monotonic clock
        self._since = 0.0

    def steady(self, wall: float, monotonic: float) -> bool:
        """True if the clock is steady. Call it from time to time: each call notices a jump since the last one. O(1)."""
        ahead = wall - monotonic
        if self._ahead is None or not abs(ahead - self._ahead) <= JUMP_S:  # `<=` is False for NaN
            self._since = monotonic
        self._ahead = ahead
        return monotonic - self._since >= STEADY_S

    def __repr__(self) -> str:
        return f"<Steadiness since {self._since:g}>"
