"""Which of a model's replicas may be sent a request now. Pure.

    left:    live replicas that the request has not tried
    rested:  those of `left` whose Retry-After is over                     none: all of `left`
    allowed: those of `rested` whose breaker lets a request through        none, or too many are open: all of `rested`
    warmed:  those of `allowed` that are up for a while and have the       none: all of `allowed`
             whole weight, and a random part of the others

Each step may narrow the choice and never empties it: a replica in doubt is better than no replica. Tried replicas are left out
first, so that one that cannot be used any more does not decide about the others.

Open breakers exclude at most half of the replicas (as Envoy's max_ejection_percent). If more are open, the reason is more
likely in the requests than in the replicas, and the rest would get the load of all: then the breakers are disregarded. A retry
goes to a replica with a closed breaker all the same, if there is one: retries are few.
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
    """See the top of this file. suspects: the only ones that may be restricted. resting: whether a replica that asked for rest
    is used when there is no other. Empty only if all were tried (or rest, without `resting`). O(replicas).
    """
    left = [(name, state) for name, state in replicas.items() if name not in tried]
    rested = [(name, state) for name, state in left if state not in suspects or now >= state.rests_until]
    if not rested:
        return [name for name, _ in left] if resting else []
    allowed = [(name, state) for name, state in rested if state not in suspects or state.breaker.allows(now)]
    if not allowed or (not tried and too_many_open(replicas, suspects, now)):
        allowed = rested
    warmed = [name for name, state in allowed if state not in suspects or chance.random() < state.share(now)]
    return warmed or [name for name, _ in allowed]


def any_well(replicas: Mapping[str, ReplicaState], suspects: Set[ReplicaState], now: float) -> bool:
    """Whether one of them is live, does not rest, and its breaker lets a request through. O(1) if the first one is."""
    return any(
        state.live and (state not in suspects or (now >= state.rests_until and state.breaker.allows(now)))
        for state in replicas.values()
    )


def too_many_open(replicas: Mapping[str, ReplicaState], suspects: Set[ReplicaState], now: float) -> bool:
    """Whether the breakers of more than half of the replicas let no request through. O(suspects)."""
    open_ones = sum(not state.breaker.allows(now) for state in suspects if replicas.get(state.name) is state)
    return open_ones * 2 > len(replicas)
