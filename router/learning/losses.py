"""Times at which replicas lost their caches."""

from __future__ import annotations


class Losses:
    """The last loss of each replica, as long as it matters."""

    def __init__(self) -> None:
        self._lost: dict[str, float] = {}  # the latest last

    def __len__(self) -> int:
        return len(self._lost)

    def after(self, replica: str, at: float) -> bool:
        """True if the replica has lost its cache since `at`. O(1)."""
        return at <= self._lost.get(replica, at - 1)

    def add(self, replica: str, now: float, for_s: float) -> None:
        """The replica has lost its cache. for_s: older losses are dropped. O(1), amortised."""
        self._lost.pop(replica, None)
        while self._lost and self._lost[first := next(iter(self._lost))] <= now - for_s:
            del self._lost[first]
        self._lost[replica] = now
