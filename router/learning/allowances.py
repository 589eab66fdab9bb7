"""Allowances of clients: the blocks of others that they may hide by prompts that the engine has not counted yet.

A request in flight will evict blocks. They are excluded from matches already, because the requests that follow would find them
gone. But a client chooses its prompts, and may choose prompts that the engine does not compute as the gateway sees them: only
the engine's count at the end of the answer shows that. So an open request reserves the weight of its new blocks of the weight
that the engine has counted for this client before, and hides others' blocks up to that.

Credits that are never counted (the engine reports none, the client has left) evict nothing for want of capacity, but they take
memory of the index. Once it is nearly full, the share of one client is 1 / CLIENT_SHARE, and of all clients 1 / TOTAL_SHARE.

Counts and shares decay with the index's TTL. Beyond MAX_CLIENTS the least recently counted client is forgotten. A flood of
clients gains nothing: nothing was counted for a new client, and the total remains.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

MAX_CLIENTS: Final = 1024
CLIENT_SHARE: Final = 8
TOTAL_SHARE: Final = 4
_STEP: Final = 1 / 256  # of the TTL: the time between two decays of a sum
ALL: Final = -1  # the number of all clients together, which no client has


class Allowance:
    """A decaying sum of one client. amount: at the time `at`."""

    __slots__ = ("amount", "at", "client")

    def __init__(self, client: int, now: float) -> None:
        self.client = client
        self.amount = 0.0
        self.at = now

    def age(self, now: float, ttl_s: float) -> None:
        if now - self.at > ttl_s * _STEP:
            self.amount *= math.exp((self.at - now) / ttl_s)
            self.at = now


class Clients:
    """The sums of at most MAX_CLIENTS clients. Operations are O(1)."""

    __slots__ = ("_known", "_last")

    def __init__(self) -> None:
        self._known: OrderedDict[int, Allowance] = OrderedDict()
        self._last: Allowance | None = None  # the most recently counted one

    def __len__(self) -> int:
        return len(self._known)

    def find(self, client: int) -> Allowance | None:
        last = self._last
        return last if last is not None and last.client == client else self._known.get(client)

    def of(self, client: int, now: float, ttl_s: float) -> Allowance:
        allowance = self._last
        if allowance is None or allowance.client != client:
            allowance = self._last = self._known.get(client) or self._enter(client, now)
            self._known.move_to_end(client)
        allowance.age(now, ttl_s)
        return allowance

    def _enter(self, client: int, now: float) -> Allowance:
        """A new client, in place of the least recently counted one if there are too many."""
        entered = self._known[client] = Allowance(client, now)
        if len(self._known) > MAX_CLIENTS:
            self._known.popitem(last=False)
        return entered

    def check(self) -> None:
        """Raises AssertionError if a bound is broken."""
        assert len(self) <= MAX_CLIENTS
        assert all(each.amount >= 0 for each in self._known.values())

    def __repr__(self) -> str:
        return f"<Clients: {len(self)}>"


class UncountedMemory:
    """The memory that credits without a count have taken."""

    __slots__ = ("clients",)

    def __init__(self) -> None:
        self.clients = Clients()

    def admit(self, client: int, size: int, most: int, now: float, ttl_s: float) -> bool:
        """Add bytes. False: they exceed a share of `most`, and are not added."""
        everyone, own = self.clients.of(ALL, now, ttl_s), self.clients.of(client, now, ttl_s)
        if own.amount + size > most // CLIENT_SHARE or everyone.amount + size > most // TOTAL_SHARE:
            return False
        own.amount += size
        everyone.amount += size
        return True


class Allowances:
    """The allowances at one replica. Operations are O(1). reserved: weight of the reservations of all open requests."""

    __slots__ = ("clients", "reserved")

    def __init__(self) -> None:
        self.reserved = 0
        self.clients = Clients()

    def count(self, client: int, weight: int, most: int, now: float, ttl_s: float) -> None:
        """The engine has counted new blocks of this weight. most: the capacity of the replica."""
        allowance = self.clients.of(client, now, ttl_s)
        allowance.amount = min(allowance.amount + weight, float(most))

    def reserve(self, client: int, weight: int, now: float, ttl_s: float) -> bool:
        """Reserve this weight. False: less was counted for the client."""
        allowance = self.clients.find(client)
        if allowance is None:
            return False
        allowance.age(now, ttl_s)
        if allowance.amount < weight:
            return False
        allowance.amount -= weight
        self.reserved += weight
        return True

    def release(self, client: int, weight: int) -> None:
        """End a reservation."""
        self.reserved -= weight
        if allowance := self.clients.find(client):
            allowance.amount += weight

    def check(self) -> None:
        """Raises AssertionError if a bound is broken."""
        assert self.reserved >= 0
        self.clients.check()

    def __repr__(self) -> str:
        return f"<Allowances of {len(self.clients)} clients, {self.reserved} reserved>"
