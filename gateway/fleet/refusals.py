"""429 answers of one replica: an overload of the replica, or a limit of a single client."""

from __future__ import annotations

from typing import Final

REST_MOST_S: Final = 60.0  # longest rest that a replica can ask for
REFUSED_CLIENTS: Final = 3  # 429 answers to this many different clients show an overload
REFUSALS_WINDOW_S: Final = 10.0


class Refusals:
    """Decides if 429 answers with Retry-After show an overload of the replica or a limit of one client's rate.

    It is an overload if REFUSED_CLIENTS different clients were refused within REFUSALS_WINDOW_S, and since the first of these
    refusals no more requests were answered than refused. All operations O(1): at most REFUSED_CLIENTS clients are stored, by
    hash.
    """

    __slots__ = ("_answered", "_clients", "_refused")

    def __init__(self) -> None:
        self._clients: dict[int, tuple[float, float]] = {}  # client -> time of its last refusal, Retry-After
        self._refused = self._answered = 0

    def __bool__(self) -> bool:
        """True if `answered` has to be called."""
        return bool(self._clients)

    def answered(self) -> None:
        """The replica has answered a request well."""
        self._answered += 1

    def refused(self, client: int, retry_after_s: float, now: float) -> float:
        """A client was refused. Returns the seconds for which the replica should rest: 0 while only this client may be
        meant.
        """
        self._clients = {key: value for key, value in self._clients.items() if now - value[0] < REFUSALS_WINDOW_S}
        if not self._clients:
            self._refused = self._answered = 0
        self._clients.pop(client, None)
        self._clients[client] = (now, retry_after_s)
        self._refused += 1
        if len(self._clients) < REFUSED_CLIENTS:
            return 0.0
        if self._refused < self._answered:
            self._clients.pop(next(iter(self._clients)))  # the client with the oldest refusal
            return 0.0
        rest_s = min(seconds for _, seconds in self._clients.values())
        self._clients = {}
        return rest_s

    def __repr__(self) -> str:
        return f"<Refusals of {len(self._clients)} clients, {self._refused} refused, {self._answered} answered>"
