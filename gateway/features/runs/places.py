"""Places for background work of clients: limited in all, per owner and per address. Pure.

Owners are identified by credentials, which a client may invent or omit. So addresses are limited as well, in the same way as
their connections (`admission/connection_limit.py`): an address gets a place while it has fewer than SHARE times the free
places. One address gets at most SHARE / (1 + SHARE) of all places, n greedy addresses leave 1 / (1 + n * SHARE) to the next
one, and behind a reverse proxy, where all clients have one address, nearly all places can be used.

Invariants: `taken` is the sum over addresses, and over owners, at most the limit. Owners and addresses without places have no
entry. All O(1).
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import Final

SHARE: Final = 9


class RunPlaces:
    """limit: places in all. max_owned: places per owner."""

    def __init__(self, limit: int, max_owned: int) -> None:
        self.limit = limit
        self.taken = 0
        self._max_owned = max_owned
        self._owners = Counts[str]()
        self._addresses = Counts[str]()

    def admit(self, owner: str, address: str) -> bool:
        """Takes a place if both the owner and the address may have one. To be released once."""
        if self.is_full(owner) or self._addresses[address] >= SHARE * (self.limit - self.taken):
            return False
        self.taken += 1
        self._owners[owner] += 1
        self._addresses[address] += 1
        return True

    def is_full(self, owner: str) -> bool:
        """True if the owner has max_owned places."""
        return self._owners[owner] >= self._max_owned

    def release(self, owner: str, address: str) -> None:
        self.taken -= 1
        for counts, name in ((self._owners, owner), (self._addresses, address)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for counts in (self._owners, self._addresses):
            assert self.taken == counts.total() <= self.limit
            assert all(count > 0 for count in counts.values())
        assert all(count <= self._max_owned for count in self._owners.values())

    def __repr__(self) -> str:
        return f"<Places {self.taken}/{self.limit}, {len(self._owners)} owners, {len(self._addresses)} addresses>"
