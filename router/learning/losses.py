"""When replicas lost their caches."""

from __future__ import annotations


class Losses:
    """The last loss of each replica, as long as it matters."""

    def __init__(self) -> None:
        self._lost: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._lost)

    def after(self, replica: str, at: float) -> bool:
        """Whether what the replica had computed by then is lost. O(1)."""
        return at <= self._lost.get(replica, at - 1)

    def add(self, replica: str, now: float, for_s: float) -> None:
        """The replica has lost its cache. for_s: nobody asks for older losses. O(replicas that lost theirs since)."""
        self._lost = {name: at for name, at in self._lost.items() if at > now - for_s}
        self._lost[replica] = now
