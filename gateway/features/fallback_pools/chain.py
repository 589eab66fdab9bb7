"""The chain of fallback pools, by the current configuration, each pool at most once.

big ── fallback ──► small ── fallback ──► outside
         the first pool with a usable replica is chosen; earlier ones are skipped
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.fleet.directory import Fleet, Target


def next_pool(fleet: Fleet, target: Target, passed: Iterable[str], now: float, *, well: bool = False) -> Target | None:
    """The next pool for a request that the target's pool cannot serve. None: there is none.

    passed: the pools before it. well: require a live replica with a closed circuit; otherwise such a pool is preferred to a
    pool whose replicas are doubtful. O(length of the chain).
    """
    seen, here, doubtful = {*passed, target.pool}, target, None
    while (fallback := here.fallback) is not None and fallback.pool not in seen:
        further = fleet.target_in(fallback.pool, fallback.model or here.model, fallback.model or here.label)
        if further is None:  # removed by a reload
            break
        seen.add(further.pool)
        here = further
        if fleet.is_well(here, now):
            return here
        if doubtful is None and here.replicas:
            doubtful = here
    return None if well else doubtful


def chained(fleet: Fleet, target: Target, pool: str) -> Target | None:
    """The target in a pool of the chain after this one; None: the chain does not have the pool. O(length of the chain)."""
    seen, here = {target.pool}, target
    while (fallback := here.fallback) is not None and fallback.pool not in seen:
        further = fleet.target_in(fallback.pool, fallback.model or here.model, fallback.model or here.label)
        if further is None or further.pool == pool:
            return further
        seen.add(further.pool)
        here = further
    return None


def foreseen(fleet: Fleet, target: Target, now: float) -> tuple[str, Target]:
    """(path, target): the pool that would serve a request now, and the path to it ("big -> small"; "": the target's own
    pool).
    """
    way, here = [target.pool], target
    while not fleet.is_well(here, now) or here.admission.refuses:
        well = bool(here.replicas) and not here.admission.refuses
        further = next_pool(fleet, here, way, now, well=well)
        if further is None:
            break
        way.append(further.pool)
        here = further
    return " -> ".join(way) if len(way) > 1 else "", here
