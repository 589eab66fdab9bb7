"""Failures that no other replica could be compared with: is it the replica that fails, or the client's requests? Pure.

Such a request was sent once: it may not be sent twice (a file upload), or its answer broke off, or there was no other replica
to try. If its replica were always blamed, one client whose requests fail everywhere would open the breakers of the whole fleet;
if it never were, a replica that fails them all would be used for ever. So what decides is where else the client's requests
fail:

    a failure counts, unless the same client has a mark at another replica

where a mark is a failure that was not compared, of the last WINDOW_S seconds, unless that replica has answered a request of
this client well since: a whole answer, for a poisoned one may begin well, to a request that was sent after the failure, for
another may have been on its way for long. A client has MARKS marks at most, and the older one stays. Therefore, as long as a
replica whose failure counted has its mark, no other one's counts: a client can cut off one replica at a time, and to go on to
the next it has to let that one answer, or leave it alone for WINDOW_S, which is twice as long as a breaker stays open. And a
replica that fails is cut off although all clients come from one proxy's address, as long as the others answer.
"""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 60.0
MAX_CLIENTS: Final = 1024
MARKS: Final = 2


class LoneFailures:
    """See the top of this file. Clients are known by hash, MAX_CLIENTS of them; the one whose failure is the oldest is
    forgotten.

    until: then all marks are too old; before, `answered` has to be called. All operations O(1).
    """

    __slots__ = ("_clients", "until")

    def __init__(self) -> None:
        self._clients: dict[int, dict[str, float]] = {}  # client -> replica -> when; the oldest first, of both
        self.until = float("-inf")

    def failed(self, client: int, replica: str, now: float) -> bool:
        """A request of the client has failed there and nowhere else. Whether that counts for the replica's breaker."""
        marks = {name: at for name, at in self._clients.pop(client, {}).items() if now - at < WINDOW_S}
        counts = not marks or (len(marks) == 1 and replica in marks)
        if replica not in marks and len(marks) == MARKS:
            marks.popitem()
        marks[replica] = now  # which stays where it was in the order
        if len(self._clients) >= MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]
        self._clients[client] = marks
        self.until = now + WINDOW_S
        return counts

    def answered(self, client: int, replica: str, begun: float) -> None:
        """The replica has answered a request of the client well and whole that was sent to it then."""
        marks = self._clients.get(client)
        if marks and begun > marks.get(replica, begun):
            del marks[replica]
            if not marks:
                del self._clients[client]

    def check(self) -> None:
        """Assert that all of it is bounded."""
        assert len(self._clients) <= MAX_CLIENTS
        for marks in self._clients.values():
            assert 0 < len(marks) <= MARKS
            assert all(at + WINDOW_S <= self.until for at in marks.values())

    def __repr__(self) -> str:
        return f"<LoneFailures of {len(self._clients)} clients>"
