"""The places of a pool's replicas, for its queue: see `places.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from gateway.admission.pool_queue import PlaceGate
from gateway.fleet.places import ASKED_AT_ONCE, MOST, STALE_S
from gateway.fleet.state import ReplicaState
from router.load import ReplicaLoad


class PoolPlaces(PlaceGate):
    """The places of a pool's replicas, for its queue. replicas: all of the pool. total: of the live ones; MOST: unknown."""

    def __init__(
        self,
        replicas: Sequence[ReplicaState],
        loads: Mapping[str, ReplicaLoad],
        clock: Callable[[], float],
        crowded: asyncio.Event,
    ) -> None:
        """crowded: set when requests begin to wait for a place."""
        self.replicas = replicas
        self.total = MOST
        self._loads = loads
        self._clock = clock
        self._crowded = crowded
        self.count()

    def crowds(self) -> None:
        """See PlaceGate."""
        self._crowded.set()

    def count(self) -> bool:
        """Add up the places again. True if their number is another one. O(replicas)."""
        before, total = self.total, 0
        for state in self.replicas:
            if state.live and state.answers:
                total += state.places.value + state.places.idle
        self.total = min(total, MOST) or MOST
        return self.total != before

    def look(self) -> None:
        """Count the answers that have begun. O(replicas)."""
        for state in self.replicas:
            if (load := self._loads.get(state.name)) is not None:
                state.places.began(load.decoding - load.presumed)
        self.count()

    def free(self, granted: int) -> bool:
        """See PlaceGate. O(replicas)."""
        now, left = self._clock(), granted
        for state in self.replicas:
            if not (state.live and state.answers):
                continue
            places, load = state.places, self._loads.get(state.name)
            if places.value == MOST or now - places.at > STALE_S:
                return True
            free = places.value + places.idle - (load.sequences if load is not None else 0)
            if free > 0:
                if free > left:
                    return True
                left -= free
        return False

    def oldest(self) -> list[ReplicaState]:
        """The replicas whose reports are the oldest, ASKED_AT_ONCE at most. O(replicas log replicas)."""
        known = [state for state in self.replicas if state.live and state.has_metrics]
        return sorted(known, key=lambda state: state.places.at)[:ASKED_AT_ONCE]
