"""Fair queue of requests waiting for a slot of a pool, and an estimate of their waiting time. Pure.

Order: by priority, highest first; round robin over tenants within a priority; within a tenant the least `turn` goes first. A
tenant with a thousand requests delays only its own.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

_WINDOW = 64  # number of releases over which the rate is averaged, roughly

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiter(Generic[T]):
    """One queued request. result: receives the outcome. sequences: that an engine runs for it. The queue uses neither. turn: of
    its tenant's waiters the least goes first, of equal ones the oldest.
    """

    tenant: str
    priority: int
    result: T
    sequences: int = 1
    turn: float = 0.0


class FairQueue(Generic[T]):
    """Fair queue (see the module). size: number of waiters. Operations compare O(log waiters of the tenant) if their turns
    differ, and move its list, except `last`: O(tenants in the queue).
    """

    def __init__(self) -> None:
        # priority -> tenant (next to be served first) -> its waiters by turn; no level or tenant is empty
        self._levels: dict[int, OrderedDict[str, list[Waiter[T]]]] = {}
        self._priorities: list[int] = []  # of the levels, ascending
        self.size = 0

    def add(self, waiter: Waiter[T], *, last: bool = False) -> None:
        """Add to its tenant's waiters; a tenant without waiters at this priority is served after all others. last: it goes
        after all of its tenant.
        """
        level = self._levels.get(waiter.priority)
        if level is None:
            level = self._levels[waiter.priority] = OrderedDict()
            bisect.insort(self._priorities, waiter.priority)
        waiters = level.setdefault(waiter.tenant, [])
        if last and waiters:
            waiter.turn = max(waiter.turn, waiters[-1].turn)
        bisect.insort(waiters, waiter, key=_turn)
        self.size += 1

    def first(self) -> Waiter[T] | None:
        """The next waiter to be served."""
        if not self._priorities:
            return None
        level = self._levels[self._priorities[-1]]
        return level[next(iter(level))][0]

    def served(self, waiter: Waiter[T]) -> None:
        """Remove a waiter that gets a slot; its tenant moves behind all other tenants."""
        self.remove(waiter)
        level = self._levels.get(waiter.priority)
        if level is not None and waiter.tenant in level:
            level.move_to_end(waiter.tenant)

    def remove(self, waiter: Waiter[T]) -> bool:
        """Remove a waiter that leaves; its tenant keeps its turn. False if it is not in the queue."""
        level = self._levels.get(waiter.priority, OrderedDict())
        waiters = level.get(waiter.tenant, [])
        at = bisect.bisect_left(waiters, waiter.turn, key=_turn)
        while at < len(waiters) and waiters[at] is not waiter and waiters[at].turn == waiter.turn:
            at += 1
        if at == len(waiters) or waiters[at] is not waiter:
            return False
        self.size -= 1
        del waiters[at]
        if not waiters:
            del level[waiter.tenant]
        if not level:
            del self._levels[waiter.priority]
            self._priorities.remove(waiter.priority)
        return True

    def last(self) -> Waiter[T] | None:
        """The waiter to be removed when the queue shrinks: of the lowest priority the tenant with the most waiters (if there
        are several, the one served last), of this tenant the last one.
        """
        if not self._priorities:
            return None
        level = self._levels[self._priorities[0]]
        most = max(map(len, level.values()))
        return next(waiters[-1] for waiters in reversed(level.values()) if len(waiters) == most)

    def place(self, waiter: Waiter[T], most: int) -> int:
        """The waiter's present place in the order of service, from 1 on. 0: it does not wait here, or at least `most` waiters
        are before it. O(most).
        """
        ahead = 0
        for priority in reversed(self._priorities):
            level = self._levels[priority]
            if priority <= waiter.priority:
                return self._place_in(level, waiter, ahead, most) if priority == waiter.priority else 0
            for waiters in level.values():
                ahead += len(waiters)
                if ahead >= most:
                    return 0
        return 0

    def _place_in(self, level: OrderedDict[str, list[Waiter[T]]], waiter: Waiter[T], ahead: int, most: int) -> int:
        """`place` within its priority, whose tenants take turns. ahead: waiters of higher priorities."""
        own = 0  # waiters of its tenant before it
        for other in level.get(waiter.tenant, ()):
            if other is waiter:
                break
            own += 1
            if ahead + own >= most:
                return 0
        else:
            return 0
        ahead, turns = ahead + own, own + 1  # of each tenant with an earlier turn
        for tenant, waiters in level.items():
            if tenant == waiter.tenant:
                turns = own
                if not turns:
                    break
            else:
                ahead += min(len(waiters), turns)
            if ahead >= most:
                return 0
        return ahead + 1

    def __len__(self) -> int:
        return self.size

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken. O(n)."""
        assert self._priorities == sorted(self._levels)
        size = 0
        for priority, level in self._levels.items():
            assert level
            for tenant, waiters in level.items():
                assert waiters
                assert all(waiter.tenant == tenant and waiter.priority == priority for waiter in waiters)
                assert waiters == sorted(waiters, key=_turn)
                size += len(waiters)
        assert size == self.size

    def __repr__(self) -> str:
        levels = (
            f"{priority}: " + ", ".join(f"{tenant} {len(waiters)}" for tenant, waiters in self._levels[priority].items())
            for priority in reversed(self._priorities)
        )
        return f"<FairQueue {'; '.join(levels) or 'empty'}>"


def _turn(waiter: Waiter[T]) -> float:
    return waiter.turn


class ReleaseRate:
    """Rate at which slots come free, measured while all are taken. Prior: one slot per second, with the weight of one
    release.
    """

    __slots__ = ("_releases", "_seconds", "_since")

    def __init__(self) -> None:
        self._releases = 1.0
        self._seconds = 1.0
        self._since = 0.0

    def saturated(self, now: float) -> None:
        """All slots are taken from now on."""
        self._since = now

    def released(self, now: float) -> None:
        """One slot came free."""
        if self._releases >= _WINDOW:
            self._releases /= 2
            self._seconds /= 2
        self._releases += 1
        self._seconds += now - self._since
        self._since = now

    @property
    def known(self) -> bool:
        """True if a slot has come free since the start."""
        return self._releases > 1

    def seconds_to_next(self, now: float) -> float:
        """Expected seconds until a slot comes free, if all are taken now."""
        return (self._seconds + now - self._since) / self._releases

    def __repr__(self) -> str:
        return f"<ReleaseRate {self._releases / self._seconds:.3g}/s>"
