"""Limit on open client connections, in total and per client. Pure.

A client (`memory.client_of`: a remote address) may open a connection while it has fewer than SHARE times the number of free
ones (a dynamic threshold, as in `memory.py`). So

- a single client gets SHARE / (1 + SHARE) of the limit: nine tenths, because behind a reverse proxy all clients are one;
- n greedy clients have SHARE / (1 + n * SHARE) of it each, and 1 / (1 + n * SHARE) stays free for the next one;
- no client has to be configured, and on the clients' port no connection is closed in favour of another (on the operators'
  listeners an idle one may be: `replace`, `ClientServer.admit`).

Invariants: `open` is the sum over clients, at most the limit in force when the last was admitted; a client without connections
has no entry. All operations O(1).
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 9


class ConnectionLimit:
    """The connection limit (see the module). limit: may change at any time; open connections stay. open: their number. refused:
    number of refused connections.
    """

    __slots__ = ("_by_client", "limit", "open", "refused")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        self.refused = 0
        self._by_client: dict[str, int] = {}

    def admit(self, client: str) -> bool:
        """Count a connection of this client, if it may have one more; the caller must `release` it once."""
        count = self._by_client.get(client, 0)
        if count >= SHARE * (self.limit - self.open):
            self.refused += 1
            return False
        self._by_client[client] = count + 1
        self.open += 1
        return True

    def release(self, client: str) -> None:
        """An admitted connection has closed."""
        count = self._by_client[client] - 1
        if count:
            self._by_client[client] = count
        else:
            del self._by_client[client]
        self.open -= 1

    def replace(self, evicted: str, admitted: str) -> None:
        """Replace a connection of the client `evicted` by the connection that `admit` has just refused to `admitted`."""
        self.release(evicted)
        self.refused -= 1
        self._by_client[admitted] = self._by_client.get(admitted, 0) + 1
        self.open += 1

    def of(self, client: str) -> int:
        """The number of a client's connections."""
        return self._by_client.get(client, 0)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.open == sum(self._by_client.values())
        assert all(count > 0 for count in self._by_client.values())

    def __repr__(self) -> str:
        return f"<ConnectionLimit {self.open}/{self.limit}, {len(self._by_client)} clients>"
