"""Evidence about one replica: how often its answers show a sign, and the level of a ratio. Old evidence fades."""

from __future__ import annotations

import math
from typing import Final

LEAST: Final = 5  # answers with a sign before anything is concluded
MEASURED: Final = 10  # answers of a level
_KEEP: Final = math.pow(0.5, 1 / 50)  # an answer's weight halves with 50 more
_SIGNED: Final = LEAST * math.pow(_KEEP, LEAST)  # the faded counts of so many answers
_KNOWN: Final = MEASURED * math.pow(_KEEP, MEASURED)
_RECENT: Final = 8  # signs, of which another client than the one with most must have a quarter


class SignTally:
    """Answers with and without a sign. total, signs: faded counts. clients: of the last answers with the sign."""

    __slots__ = ("clients", "signs", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.signs = 0.0
        self.clients: tuple[int, ...] = ()

    def add(self, sign: bool, client: int) -> None:
        """Count an answer. O(1)."""
        self.total = self.total * _KEEP + 1.0
        self.signs *= _KEEP
        if sign:
            self.signs += 1.0
            self.clients = (*self.clients[1 - _RECENT :], client)

    @property
    def share(self) -> float:
        """The share of answers with the sign; 0 without answers."""
        return self.signs / self.total if self.total else 0.0

    def shows(self, *, alone: bool) -> bool:
        """True if at least half of the answers have the sign, of two clients, or of the only one. alone: the replica has only
        one client.
        """
        if self.signs < _SIGNED or self.share < 0.5:
            return False
        clients = self.clients
        return alone or 4 * (len(clients) - max(map(clients.count, clients))) >= len(clients)

    def __repr__(self) -> str:
        return f"<SignTally {self.signs:.1f} of {self.total:.1f}>"


class RatioLevel:
    """The geometric mean of a positive ratio. weight: the faded count of answers."""

    __slots__ = ("total", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.total = 0.0

    def add(self, ratio: float) -> None:
        """Count an answer. O(1)."""
        self.weight = self.weight * _KEEP + 1.0
        self.total = self.total * _KEEP + math.log(ratio)

    @property
    def known(self) -> bool:
        """True if there are enough answers."""
        return self.weight >= _KNOWN

    @property
    def mean(self) -> float:
        """The mean of the logarithms; 0 without answers."""
        return self.total / self.weight if self.weight else 0.0

    def __repr__(self) -> str:
        return f"<RatioLevel {math.exp(self.mean):.3g} of {self.weight:.1f}>"
