"""Time of the event loop that the bodies of each client take.

A client that has taken more than SHARE of the time, after BURST_S at once, has the further work for its large bodies done
outside of the loop, where clients take turns: in the parser process, or for decompression in a thread. Otherwise bodies just
below the bounds would fill the loop. Small bodies stay in the loop: to hand them over would cost as much. Nor does the work
for a body count that is done in QUICK_S, as for most texts of 256 KiB: many of them delay others no more than as many small
requests do, and handing them over would cost more than that work. Pure: time is an argument.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.1
BURST_S: Final = 0.1
QUICK_S: Final = 0.0001
MAX_CLIENTS: Final = 1024


class LoopShares:
    """The clients that have taken time recently. O(1) mostly."""

    __slots__ = ("_debts",)

    def __init__(self) -> None:
        self._debts: dict[str, tuple[float, float]] = {}  # seconds taken beyond the share, at a time

    def is_used_up(self, client: str, now: float) -> bool:
        found = self._debts.get(client)
        return found is not None and _left(found, now) > BURST_S

    def spent(self, client: str, seconds: float, now: float) -> None:
        """Counts the work of `seconds` that ends now."""
        found = self._debts.get(client)
        self._debts[client] = (seconds if found is None else _left(found, now) + seconds, now)
        if len(self._debts) > MAX_CLIENTS:
            self._debts = {each: debt for each, debt in self._debts.items() if _left(debt, now) > 0}
            if len(self._debts) > MAX_CLIENTS:
                del self._debts[next(iter(self._debts))]

    def __repr__(self) -> str:
        return f"<LoopShares of {len(self._debts)} clients>"


def _left(debt: tuple[float, float], now: float) -> float:
    return max(0.0, debt[0] - SHARE * (now - debt[1]))
