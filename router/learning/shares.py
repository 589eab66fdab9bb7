"""Shares of the sent blocks that replicas with several private caches hold for a request, where none can choose its cache.

Such a replica spreads requests over its caches, so a prefix that it has computed once is found by chance: with R caches in one
of R turns, and a head that all prompts have in common everywhere. The blocks that it was sent times this share is what the
router believes. Zero hits say nothing about a restart there, because they are expected.

R is known (`Replica.caches`): the share begins at 1 / R and never leaves 1 / R to 1. Or the caches are hidden, behind a load
balancer for example, and their engine looks as if it lost its cache again and again: after WRONG_LOSSES inferred losses that a
later hit has contradicted, the share is learned, from SUSPECTED on, and given up once it is WHOLE.

It is learned from found and believed tokens of prefixes that return. Each client has an estimate, and their median counts: so
no single client moves the belief for others once there are three.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from router.learning.learned import Ratio

WRONG_LOSSES: Final = 2
SUSPECTED: Final = 0.5
LEAST: Final = 1 / 64
WHOLE: Final = 0.95
PRIOR_TOKENS: Final = 8_000.0
HALF_LIFE_TOKENS: Final = 200_000.0
MAX_CLIENTS: Final = 16  # the latest


class CacheShare:
    """The share of one replica. value: 0 to 1. caches: 0 if their number is unknown. Operations are O(MAX_CLIENTS)."""

    __slots__ = ("_clients", "caches", "value")

    def __init__(self, caches: int = 0) -> None:
        self.caches = caches
        self.value = 1 / caches if caches else SUSPECTED
        self._clients: OrderedDict[int, Ratio] = OrderedDict()

    def learn(self, client: int, believed: float, found: float) -> None:
        """A prefix of `believed` tokens (positive) has returned, of which `found` were cached."""
        ratio = self._clients.get(client)
        if ratio is None:
            ratio = self._clients[client] = Ratio(self.value, PRIOR_TOKENS, HALF_LIFE_TOKENS)
            if len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(client)
        ratio.learn(min(max(found, 0.0), believed), believed, believed)
        values = sorted([each.value for each in self._clients.values()])
        least = 1 / self.caches if self.caches else LEAST
        self.value = min(1.0, max(least, values[len(values) // 2]))

    @property
    def whole(self) -> bool:
        """True if the replica was taken for one with hidden caches, and is none."""
        return not self.caches and self.value >= WHOLE

    def __repr__(self) -> str:
        return f"<CacheShare {self.value:.3g} of {self.caches or 'hidden'} caches>"


class CacheShares:
    """The shares of all replicas that have one: mostly none."""

    def __init__(self) -> None:
        self._of: dict[str, CacheShare] = {}
        self._wrong: dict[str, int] = {}  # losses that were inferred, and contradicted

    def __bool__(self) -> bool:
        return bool(self._of)

    def get(self, replica: str) -> CacheShare | None:
        return self._of.get(replica)

    def set(self, replica: str, caches: int) -> None:
        """The replica has so many caches, of which none can be chosen."""
        known = self._of.get(replica)
        if caches > 1 and (known is None or known.caches != caches):
            self._of[replica] = CacheShare(caches)
        elif caches == 1 and known is not None and known.caches:
            del self._of[replica]

    def forget(self, replica: str) -> None:
        """The replica has left."""
        self._of.pop(replica, None)
        self._wrong.pop(replica, None)

    def contradicted(self, replica: str) -> None:
        """The replica holds a prefix whose loss was inferred."""
        self._wrong[replica] = wrong = self._wrong.get(replica, 0) + 1
        if wrong >= WRONG_LOSSES and replica not in self._of:
            self._of[replica] = CacheShare()

    def learn(self, replica: str, client: int, believed: float, found: float) -> None:
        """See `CacheShare.learn`."""
        share = self._of[replica]
        share.learn(client, believed, found)
        if share.whole:
            self.forget(replica)

    def believed(self, matched: dict[str, int]) -> dict[str, int]:
        """The blocks that replicas are believed to hold, of all their sent blocks. O(replicas in `matched`)."""
        shares = self._of
        return {name: int(blocks * shares[name].value) if name in shares else blocks for name, blocks in matched.items()}

    def __repr__(self) -> str:
        return f"<CacheShares {self._of!r}>"
