"""Selects the replicas of a model to which a request may be sent now. Pure.

    left:    live replicas that the request has not tried
    working: in `left`, and do not hang                                    if empty: all of `left`
    rested:  in `working`, and past their Retry-After                      if empty: all of `working`
    allowed: in `rested`, with a breaker that allows a request             if empty, or too many are open: all of `rested`
    chosen:  in `allowed`: all replicas of the largest weight; each        if empty: all of `allowed`
             other one by chance, as often as its weight in all weights

Each step may narrow the choice and never empties it: a doubtful replica is better than none. Tried replicas are left out first,
so that an unusable replica does not affect the rules for the others.

Open breakers exclude at most half of the replicas (as Envoy's max_ejection_percent). If more are open, the requests are a more
likely cause than the replicas, and the remaining replicas would get the whole load: so breakers are ignored. A retry still goes
to a replica with a closed breaker if there is one, because retries are few.

Chance is for new work only: `spared` are the replicas that it has left out, for a prompt that one of them holds. A conversation
stays where it began, so that a replica's share of requests is its share of conversations. The chance is that share, because a
replica with few requests is the cheapest as often as it is a candidate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from random import Random

from gateway.fleet.state import ReplicaState


def eligible(
    replicas: Mapping[str, ReplicaState],
    suspects: Set[ReplicaState],
    now: float,
    chance: Random,
    tried: Collection[str] = (),
    *,
    resting: bool = True,
) -> list[str]:
    """Names of the selected replicas (see the module). suspects: the only replicas that may be restricted. resting: use a
    resting replica if there is no other. Empty only if all were tried (or rest, without `resting`). O(replicas).
    """
    left = [(name, state) for name, state in replicas.items() if name not in tried]
    left = [(name, state) for name, state in left if not state.hung] or left
    rested = [(name, state) for name, state in left if state not in suspects or now >= state.rests_until]
    if not rested:
        return [name for name, _ in left] if resting else []
    allowed = [(name, state) for name, state in rested if state not in suspects or state.breaker.allows(now)]
    if not allowed or (not tried and too_many_open(replicas, suspects, now)):
        allowed = rested
    return _weighed(allowed, chance) or [name for name, _ in allowed]


def spared(replicas: Mapping[str, ReplicaState], suspects: Set[ReplicaState], now: float, chosen: Collection[str]) -> list[str]:
    """The replicas that only chance has left out of `chosen`, a result of `eligible`. O(suspects)."""
    return [
        state.name
        for state in suspects
        if state.share < 1
        and state.name not in chosen
        and replicas.get(state.name) is state
        and not state.hung
        and now >= state.rests_until
        and state.breaker.allows(now)
    ]


def _weighed(allowed: list[tuple[str, ReplicaState]], chance: Random) -> list[str]:
    """A part of the replicas, by their weights."""
    shares = [state.share for _, state in allowed]
    most, whole = max(shares, default=0.0), sum(shares)
    return [name for name, state in allowed if state.share == most or chance.random() * whole < state.share]


def any_well(replicas: Mapping[str, ReplicaState], suspects: Set[ReplicaState], now: float) -> bool:
    """True if a replica is live, does not hang, does not rest, and its breaker allows a request. O(1) if the first one does."""
    return any(
        state.live and not state.hung and (state not in suspects or (now >= state.rests_until and state.breaker.allows(now)))
        for state in replicas.values()
    )


def too_many_open(replicas: Mapping[str, ReplicaState], suspects: Set[ReplicaState], now: float) -> bool:
    """True if the breakers of more than half of the replicas allow no request. O(suspects)."""
    open_ones = sum(not state.breaker.allows(now) for state in suspects if replicas.get(state.name) is state)
    return open_ones * 2 > len(replicas)
