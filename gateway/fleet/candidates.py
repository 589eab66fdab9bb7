"""Which of a model's replicas may be sent a request now. Pure.

    left:    live replicas that the request has not tried
    awake:   those of `left` that did not ask for rest (Retry-After)       none: all of `left`
    allowed: those of `awake` whose breaker lets a request through         none, or too many are cut off: all of `awake`
    brisk:   those of `allowed` that are up for long, and of those that    none: all of `allowed`
             have just come up a random part

Each step may narrow the choice and never empties it: a replica in doubt is better than no replica. Tried replicas are left out
first, so that what is said of the others is not decided by one that cannot be used any more.

Breakers cut off at most half of the replicas (as Envoy's max_ejection_percent). If more are open, the reason is more likely in
the requests than in the replicas, and those that are left would get everybody's load: then the breakers are not regarded. A
retry goes to a replica with a closed breaker all the same, if there is one: retries are few.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from random import Random

from gateway.fleet.state import ReplicaState


def eligible(
    replicas: Mapping[str, ReplicaState],
    troubled: Set[ReplicaState],
    now: float,
    chance: Random,
    tried: Collection[str] = (),
    *,
    resting: bool = True,
) -> list[str]:
    """See the top of this file. troubled: those of which anything may be wrong. resting: whether a replica that asked for rest
    is used when there is no other. Empty only if all were tried (or rest, without `resting`). O(replicas).
    """
    left = [(name, state) for name, state in replicas.items() if name not in tried]
    awake = [(name, state) for name, state in left if state not in troubled or now >= state.rests_until]
    if not awake:
        return [name for name, _ in left] if resting else []
    allowed = [(name, state) for name, state in awake if state not in troubled or state.breaker.allows(now)]
    if not allowed or (not tried and too_many_cut_off(replicas, troubled, now)):
        allowed = awake
    brisk = [name for name, state in allowed if state not in troubled or chance.random() < state.share(now)]
    return brisk or [name for name, _ in allowed]


def too_many_cut_off(replicas: Mapping[str, ReplicaState], troubled: Set[ReplicaState], now: float) -> bool:
    """Whether the breakers of more than half of the replicas let no request through. O(troubled)."""
    cut_off = sum(not state.breaker.allows(now) for state in troubled if replicas.get(state.name) is state)
    return cut_off * 2 > len(replicas)
