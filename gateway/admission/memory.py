"""Limit on the memory of clients' requests, in total and per client. Pure.

Every byte from a client is charged when it arrives and released when it is dropped: partial heads, bodies, pipelined bytes. A
client (a remote address) may hold at most SHARE times the free bytes at that moment (dynamic thresholds, Choudhury and Hahne,
1998), so

- a single client may hold SHARE / (1 + SHARE) of the limit;
- n greedy clients hold SHARE / (1 + n * SHARE) of it each, and 1 / (1 + n * SHARE) stays free for the next one;
- no client has to be configured, and no bytes of one client are dropped in favour of another.

    Budget ─┬─ Account (one client) ─┬─ MemoryLease (one request, one connection): grow, shrink, close
            └─ Account               └─ MemoryLease

Invariants: a lease holds its granted and not yet released bytes; an account, the sum of its leases; the budget, the sum of its
accounts, at most its limit; exactly the clients with an open lease have an account. All operations O(1).
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from typing import Final

from gateway.errors import GatewayError, over_budget

SHARE: Final = 4
LARGE_BODY: Final = 1 << 18  # bytes; the parser's copies of smaller bodies are not charged
PARSE_COPIES: Final = 2  # of a large body while it is parsed: one in the parser process, one when it is edited


class Budget:
    """The budget of all clients (see the module). limit: in bytes; may change at any time. held: bytes charged now. refused:
    number of leases that were refused a part of their bytes.
    """

    __slots__ = ("_accounts", "held", "limit", "refused")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.refused = 0
        self._accounts: dict[str, ClientAccount] = {}

    def lease(self, client: str) -> MemoryLease:
        """A new, empty lease. client: the unit of fairness."""
        account = self._accounts.get(client)
        if account is None:
            account = ClientAccount(self, client)
        return account.lease()

    @property
    def largest(self) -> int:
        """Maximum bytes of a single client."""
        return largest_of(self.limit)

    @property
    def clients(self) -> int:
        """Number of clients with an open lease."""
        return len(self._accounts)

    def _keep(self, account: ClientAccount) -> None:
        self._accounts[account.client] = account

    def _forget(self, account: ClientAccount) -> None:
        del self._accounts[account.client]

    def check(self) -> None:
        """Raises AssertionError if an invariant of the budget or its accounts is broken."""
        assert self.held == sum(account.held for account in self._accounts.values())
        for client, account in self._accounts.items():
            assert account.client == client
            assert account.open_leases > 0
            assert account.held >= 0

    def __repr__(self) -> str:
        return f"<Budget {self.held}/{self.limit} bytes, {len(self._accounts)} clients>"


class ClientAccount:
    """One client's bytes. Exists while it has an open lease."""

    __slots__ = ("_budget", "client", "held", "open_leases")

    def __init__(self, budget: Budget, client: str) -> None:
        self._budget = budget
        self.client = client
        self.held = 0
        self.open_leases = 0

    def lease(self) -> MemoryLease:
        """A new, empty lease."""
        if not self.open_leases:
            self._budget._keep(self)
        self.open_leases += 1
        return MemoryLease(self)

    def grants(self, size: int) -> bool:
        """True if the client may hold `size` more bytes now. This and the methods below are for leases only."""
        held, free = self.held + size, self._budget.limit - self._budget.held - size
        return held <= free or held <= SHARE * free  # the first test is cheaper and mostly decides

    def count_refusal(self) -> None:
        self._budget.refused += 1

    def add(self, size: int) -> None:
        """Book a change in bytes."""
        self.held += size
        self._budget.held += size

    def close_one(self, held: int) -> None:
        """A lease of `held` bytes has closed."""
        self.add(-held)
        self.open_leases -= 1
        if not self.open_leases:
            self._budget._forget(self)

    @property
    def largest(self) -> int:
        """Maximum bytes of this client if it were the only one."""
        return self._budget.largest

    def __repr__(self) -> str:
        return f"<Account {self.client}, {self.held} bytes in {self.open_leases} leases>"


class MemoryLease:
    """Bytes held by one request or connection of a client. After `close`, all methods do nothing.

    head: bytes of the request's head, which stay when its body is dropped. refused: size of the request at the first refusal,
    including the refused bytes; 0: none.
    """

    __slots__ = ("account", "head", "held", "open", "refused")

    def __init__(self, account: ClientAccount) -> None:
        self.account = account
        self.held = 0
        self.head = 0
        self.open = True
        self.refused = 0

    def grow(self, size: int) -> bool:
        """Charge `size` more bytes. False, without a charge, if the client may not hold them."""
        if not self.open:
            return True
        if not self.fits(size):
            return False
        self.held += size
        self.account.add(size)
        return True

    def charge(self, size: int) -> None:
        """`grow`. Raises GatewayError 503 or 413 if the client may not hold the bytes."""
        if not self.grow(size):
            raise self.refusal(size)

    def refusal(self, size: int) -> GatewayError:
        """The error for `size` more bytes: 413 if the client could not hold them even alone, else 503."""
        return over_budget(self.held + size, self.account.largest)

    def fits(self, size: int) -> bool:
        """True if `grow` would charge the bytes. False counts as a refusal."""
        if self.account.grants(size):
            return True
        if not self.refused:
            self.refused = self.held + size
            self.account.count_refusal()
        return False

    def shrink(self, size: int) -> None:
        """Release `size` bytes, at most the held ones."""
        size = min(size, self.held)
        if size > 0 and self.open:
            self.held -= size
            self.account.add(-size)

    def resize(self, size: int) -> bool:
        """Hold exactly `size` bytes. False, without a change, if the client may not hold them."""
        if size > self.held:
            return self.grow(size - self.held)
        self.shrink(self.held - size)
        return True

    def drop_body(self) -> None:
        """Release all but the head."""
        self.shrink(self.held - self.head)

    def close(self) -> None:
        """Release everything. Idempotent."""
        if self.open:
            self.open = False
            self.account.close_one(self.held)
            self.held = 0

    def __repr__(self) -> str:
        return f"<MemoryLease {self.held} bytes, {'open' if self.open else 'closed'}>"


def largest_of(limit: int) -> int:
    """Maximum bytes of a single client in a budget of `limit` bytes."""
    return limit * SHARE // (1 + SHARE)


def limit_for(size: int) -> int:
    """The smallest limit that lets a client hold `size` bytes."""
    return -(-size * (1 + SHARE) // SHARE)


def peak_of(size: int) -> int:
    """Peak memory of a request of `size` bytes, reached while it is parsed."""
    return size * (1 + PARSE_COPIES) if size >= LARGE_BODY else size


def client_of(peer: object) -> str:
    """The unit of fairness for a socket's peer name: an IPv4 address, or an IPv6 /64 (a client usually has all of it)."""
    if not isinstance(peer, tuple) or not peer:
        return "local"  # a unix socket
    address = str(peer[0]).partition("%")[0]
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped else f"{ipaddress.IPv6Address(int(parsed) >> 64 << 64)}/64"


@contextlib.contextmanager
def holding(lease: MemoryLease, size: int, body: int = 0) -> Iterator[None]:
    """Charge `size` bytes within the context. Raises GatewayError 503 or 413 if there is no room.

    body: size of the body that needs them, if known.
    """
    if not lease.grow(size):
        raise over_budget(lease.held + size, lease.account.largest, body)
    try:
        yield
    finally:
        lease.shrink(size)


def parsing(lease: MemoryLease, size: int) -> contextlib.AbstractContextManager[None]:
    """Charge the copies of a large body within the context. Raises GatewayError 503 or 413 if there is no room."""
    return holding(lease, PARSE_COPIES * size, size)
