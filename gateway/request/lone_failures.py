"""Judges failures without a comparison with other replicas: the replica's fault, or the client's requests'. Pure.

Such a request was sent once: it may not be repeated (a file upload), or its answer broke off, or there was no other replica. If
its replica were always blamed, one client whose requests fail everywhere would open the breakers of the whole fleet; if it
never were, a replica that fails all requests would be used for ever. So other failures of the same client decide:

    a failure counts, unless the same client has a mark at another replica

A mark is such a failure within the last WINDOW_S seconds. It is removed when its replica has answered a request of this client
well: with a complete answer, because a poisoned one may begin well, and to a request that was sent after the failure, because
an earlier one may have been running for long. A client has at most MARKS marks, and the older one stays. So while a replica
whose failure counted has its mark, no other failure of the client counts: a client can cut off only one replica at a time.
Before the next one, the first replica must answer the client well, or WINDOW_S must pass, which is twice as long as a breaker
stays open. And a failing replica is cut off even if all clients share one proxy's address, as long as the other replicas
answer.
"""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 60.0
MAX_CLIENTS: Final = 1024
MARKS: Final = 2


class LoneFailures:
    """Marks of failures (see the module). Clients are known by hash, at most MAX_CLIENTS; the client with the oldest failure is
    forgotten.

    until: the time at which all marks have expired; before, `answered` has to be called. All operations O(1).
    """

    __slots__ = ("_clients", "until")

    def __init__(self) -> None:
        self._clients: dict[int, dict[str, float]] = {}  # client -> replica -> time of the mark; both ordered, the oldest first
        self.until = float("-inf")

    def failed(self, client: int, replica: str, now: float) -> bool:
        """A request of the client failed at this replica only. True if the failure counts for the replica's breaker."""
        marks = {name: at for name, at in self._clients.pop(client, {}).items() if now - at < WINDOW_S}
        counts = not marks or (len(marks) == 1 and replica in marks)
        if replica not in marks and len(marks) == MARKS:
            marks.popitem()
        marks[replica] = now  # keeps its place in the order
        if len(self._clients) >= MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]
        self._clients[client] = marks
        self.until = now + WINDOW_S
        return counts

    def answered(self, client: int, replica: str, begun: float) -> None:
        """The replica has answered a request of the client, sent at `begun`, well and completely."""
        marks = self._clients.get(client)
        if marks and begun > marks.get(replica, begun):
            del marks[replica]
            if not marks:
                del self._clients[client]

    def check(self) -> None:
        """Raises AssertionError if a bound is exceeded."""
        assert len(self._clients) <= MAX_CLIENTS
        for marks in self._clients.values():
            assert 0 < len(marks) <= MARKS
            assert all(at + WINDOW_S <= self.until for at in marks.values())

    def __repr__(self) -> str:
        return f"<LoneFailures of {len(self._clients)} clients>"
