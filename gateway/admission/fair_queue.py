"""Who waits for a place at a pool's replicas, whose turn it is, and how long that takes. Pure.

The higher priority goes first. Within one priority the tenants take turns, and within one tenant it is first come, first
served: who sends a thousand requests delays his own. When the line is full, the newest request of the lowest priority, of the
tenant who has the most in line there, gives way to one of a higher priority, and to one of the same priority whose tenant has
at least two fewer in line; else one tenant's thousand would lock all others out.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

_REMEMBERED = 64  # releases that the pace remembers, about

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """One request in line. told: how it hears what became of it; no business of the line."""

    tenant: str
    priority: int
    told: T


class Line(Generic[T]):
    """Who waits, and whose turn it is. All operations are O(1) but for `last` and `gives_way`, which are O(tenants in line)."""

    def __init__(self) -> None:
        # priority -> tenant (the one whose turn it is first) -> its places, the oldest first; no part is ever empty
        self._levels: dict[int, OrderedDict[str, OrderedDict[Place[T], None]]] = {}
        self._priorities: list[int] = []  # of the levels, rising
        self._size = 0

    def add(self, place: Place[T]) -> None:
        """At the end of its tenant's; a tenant who has none in line at this priority takes his turn after the others."""
        level = self._levels.get(place.priority)
        if level is None:
            level = self._levels[place.priority] = OrderedDict()
            bisect.insort(self._priorities, place.priority)
        level.setdefault(place.tenant, OrderedDict())[place] = None
        self._size += 1

    def first(self) -> Place[T] | None:
        """Whose turn it is."""
        if not self._priorities:
            return None
        level = self._levels[self._priorities[-1]]
        return next(iter(level[next(iter(level))]))

    def serve(self, place: Place[T]) -> None:
        """It has had its turn: its tenant's next one is after all other tenants'."""
        self.remove(place)
        level = self._levels.get(place.priority)
        if level is not None and place.tenant in level:
            level.move_to_end(place.tenant)

    def remove(self, place: Place[T]) -> bool:
        """It leaves; its tenant keeps his turn if he has others in line. False if it is not in line."""
        level = self._levels.get(place.priority, OrderedDict())
        places = level.get(place.tenant)
        if places is None or place not in places:
            return False
        self._size -= 1
        del places[place]
        if not places:
            del level[place.tenant]
        if not level:
            del self._levels[place.priority]
            self._priorities.remove(place.priority)
        return True

    def last(self) -> Place[T] | None:
        """Who is sent away when there are too many: at the lowest priority, of the tenant with the most there, the newest.

        Of several such tenants the one whose turn comes last.
        """
        if not self._priorities:
            return None
        level = self._levels[self._priorities[0]]
        most = max(map(len, level.values()))
        return next(next(reversed(places)) for places in reversed(level.values()) if len(places) == most)

    def gives_way(self, tenant: str, priority: int) -> Place[T] | None:
        """Who leaves a full line for this newcomer. None: nobody does."""
        last = self.last()
        if last is None or last.priority > priority:
            return None
        if last.priority == priority:
            level = self._levels[priority]
            if len(level[last.tenant]) - len(level.get(tenant, ())) < 2:
                return None
        return last

    def __len__(self) -> int:
        return self._size

    def check(self) -> None:
        """Assert that everyone stands where it belongs. O(n)."""
        assert self._priorities == sorted(self._levels)
        size = 0
        for priority, level in self._levels.items():
            assert level
            for tenant, places in level.items():
                assert places
                assert all(place.tenant == tenant and place.priority == priority for place in places)
                size += len(places)
        assert size == self._size

    def __repr__(self) -> str:
        levels = (
            f"{priority}: " + ", ".join(f"{tenant} {len(places)}" for tenant, places in self._levels[priority].items())
            for priority in reversed(self._priorities)
        )
        return f"<Line {'; '.join(levels) or 'empty'}>"


class Pace:
    """How fast places come free while all are taken; what happens in easier times tells nothing of that.

    It begins as the belief of one place a second, which is worth one release.
    """

    __slots__ = ("_releases", "_seconds", "_since")

    def __init__(self) -> None:
        self._releases = 1.0
        self._seconds = 1.0
        self._since = 0.0

    def full(self, now: float) -> None:
        """From now on all places are taken."""
        self._since = now

    def released(self, now: float) -> None:
        """One of them came free."""
        if self._releases >= _REMEMBERED:
            self._releases /= 2
            self._seconds /= 2
        self._releases += 1
        self._seconds += now - self._since
        self._since = now

    def seconds(self, places: int, now: float) -> float:
        """How long it takes until so many places come free, all being taken now."""
        return places * (self._seconds + now - self._since) / self._releases

    def __repr__(self) -> str:
        return f"<Pace {self._releases / self._seconds:.3g}/s>"
