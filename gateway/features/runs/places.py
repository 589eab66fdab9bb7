"""Places for what clients may have going here without a request of theirs: so many in all, of an owner, of an address. Pure.

Owners are told apart by credentials, which a client may invent or leave out. So an address is bounded as well, as its
connections are (`admission/connection_limit.py`): it gets a place while it has fewer than SHARE times the free ones. One
address has SHARE / (1 + SHARE) of them at most, n greedy ones leave 1 / (1 + n * SHARE) to the next, and behind a reverse
proxy, where all clients have one address, nearly all places can be used.

Invariants: `taken` is the sum over addresses, and over owners, at most the limit; who has no place has no entry. All O(1).
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import Final

SHARE: Final = 9


class RunPlaces:
    """See the top of this file. limit: in all. most: of an owner."""

    def __init__(self, limit: int, most: int) -> None:
        self.limit = limit
        self.taken = 0
        self._most = most
        self._owners = Counts[str]()
        self._addresses = Counts[str]()

    def admit(self, owner: str, address: str) -> bool:
        """Take a place, if there is one for both; `release` it once."""
        if self.is_full(owner) or self._addresses[address] >= SHARE * (self.limit - self.taken):
            return False
        self.taken += 1
        self._owners[owner] += 1
        self._addresses[address] += 1
        return True

    def is_full(self, owner: str) -> bool:
        """Whether the owner has all places that one may have."""
        return self._owners[owner] >= self._most

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
        assert all(count <= self._most for count in self._owners.values())

    def __repr__(self) -> str:
        return f"<Places {self.taken}/{self.limit}, {len(self._owners)} owners, {len(self._addresses)} addresses>"
