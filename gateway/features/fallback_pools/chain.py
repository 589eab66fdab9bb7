"""Which pool comes next: the chain of fallbacks as it is configured now, each pool at most once.

big ── fallback ──► small ── fallback ──► outside
         the first one that has a replica to be used; those between are passed over
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.fleet.directory import Fleet, Target


def next_pool(fleet: Fleet, target: Target, passed: Iterable[str], now: float, *, well: bool = False) -> Target | None:
    """Where a request can go that this target's pool cannot serve; None: nowhere.

    passed: the pools before it. well: only where a replica is live with a closed circuit; else such a pool is preferred to one
    whose replicas are in doubt. O(length of the chain).
    """
    seen, here, doubtful = {*passed, target.pool}, target, None
    while (fallback := here.fallback) is not None and fallback.pool not in seen:
        further = fleet.target_in(fallback.pool, fallback.model or here.model, fallback.model or here.label)
        if further is None:  # a reload has taken it away
            break
        seen.add(further.pool)
        here = further
        if fleet.is_well(here, now):
            return here
        if doubtful is None and here.replicas:
            doubtful = here
    return None if well else doubtful


def foreseen(fleet: Fleet, target: Target, now: float) -> tuple[str, Target]:
    """The pool that would take a request now, and the way there ("big -> small"; "": it is the target's own)."""
    way, here = [target.pool], target
    while not fleet.is_well(here, now) or here.admission.refuses:
        well = bool(here.replicas) and not here.admission.refuses
        further = next_pool(fleet, here, way, now, well=well)
        if further is None:
            break
        way.append(further.pool)
        here = further
    return " -> ".join(way) if len(way) > 1 else "", here
