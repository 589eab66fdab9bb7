"""429 answers of one replica: is it overloaded, or does it limit a single client?"""

from __future__ import annotations

from typing import Final

REST_MOST_S: Final = 60.0  # no replica sends itself away for longer
REFUSED_CLIENTS: Final = 3  # 429 to so many different clients is about the replica, not about a client
REFUSALS_WINDOW_S: Final = 10.0


class Refusals:
    """429 answers with Retry-After of one replica: a limit of one client's rate, or an overload of the replica?

    It is an overload when REFUSED_CLIENTS different clients were refused within REFUSALS_WINDOW_S, and since the first of
    them no fewer requests were refused than answered. All operations O(1): at most REFUSED_CLIENTS clients are kept, by hash.
    """

    __slots__ = ("_answered", "_clients", "_refused")

    def __init__(self) -> None:
        self._clients: dict[int, tuple[float, float]] = {}  # client -> when it was refused last, Retry-After
        self._refused = self._answered = 0

    def __bool__(self) -> bool:
        """Whether `answered` has to be called."""
        return bool(self._clients)

    def answered(self) -> None:
        """The replica has answered a request well."""
        self._answered += 1

    def refused(self, client: int, retry_after_s: float, now: float) -> float:
        """A client was refused. Returns the seconds for which the replica should rest: 0 while it may be about the client."""
        self._clients = {key: value for key, value in self._clients.items() if now - value[0] < REFUSALS_WINDOW_S}
        if not self._clients:
            self._refused = self._answered = 0
        self._clients.pop(client, None)
        self._clients[client] = (now, retry_after_s)
        self._refused += 1
        if len(self._clients) < REFUSED_CLIENTS:
            return 0.0
        if self._refused < self._answered:
            self._clients.pop(next(iter(self._clients)))  # the one that was refused the longest ago
            return 0.0
        rest_s = min(seconds for _, seconds in self._clients.values())
        self._clients = {}
        return rest_s

    def __repr__(self) -> str:
        return f"<Refusals of {len(self._clients)} clients, {self._refused} refused, {self._answered} answered>"
