"""How many connections clients may have open, all together and each client. Pure.

A client (`memory.client_of`: a remote address) may open a connection while it has fewer than SHARE times as many as are still
free (a dynamic threshold, as in `memory.py`). So

- a client that is alone gets SHARE / (1 + SHARE) of the limit: nine tenths, for behind a reverse proxy all clients are one;
- n clients that take all they can get have SHARE / (1 + n * SHARE) of it each, and 1 / (1 + n * SHARE) stays free, so that the
  next one can connect;
- nothing has to be configured for a client, and on the clients' port no connection is closed in favour of another (on the
  listeners beside it an idle one may be: `hand_over`, `ClientServer.admit`).

Invariants: `open` is the sum of what the clients have, at most the limit that was in force; no client is kept without a
connection. All operations O(1).
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 9


class Connections:
    """See the top of this file. limit: may be changed at any time, open connections stay; open: how many there are; refused:
    how many were not admitted.
    """

    __slots__ = ("_by_client", "limit", "open", "refused")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        self.refused = 0
        self._by_client: dict[str, int] = {}

    def admit(self, client: str) -> bool:
        """Count one more connection of this client, if it may have it; `release` it once."""
        count = self._by_client.get(client, 0)
        if count >= SHARE * (self.limit - self.open):
            self.refused += 1
            return False
        self._by_client[client] = count + 1
        self.open += 1
        return True

    def release(self, client: str) -> None:
        """One that was admitted has closed."""
        count = self._by_client[client] - 1
        if count:
            self._by_client[client] = count
        else:
            del self._by_client[client]
        self.open -= 1

    def hand_over(self, giver: str, taker: str) -> None:
        """A connection that was admitted closes in favour of another client's, or of the same one's."""
        self.release(giver)
        self.refused -= 1  # `admit` has said no before
        self._by_client[taker] = self._by_client.get(taker, 0) + 1
        self.open += 1

    def of(self, client: str) -> int:
        """How many the client has."""
        return self._by_client.get(client, 0)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.open == sum(self._by_client.values())
        assert all(count > 0 for count in self._by_client.values())

    def __repr__(self) -> str:
        return f"<Connections {self.open}/{self.limit}, {len(self._by_client)} clients>"
