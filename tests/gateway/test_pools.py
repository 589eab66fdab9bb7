"""Which old pool a new one continues: against the definition, written down as it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.config import PoolConfig, ReplicaConfig
from gateway.health import Breaker
from gateway.pools import Pool, succeed
from gateway.replica_state import ReplicaState

REPLICAS = [ReplicaState(ReplicaConfig(f"http://r:{port}"), Breaker(random.Random())) for port in range(1, 9)]
MODELS = [("a",), ("b",), ("c", "d"), ()]

Made = list[tuple[tuple[str, ...], tuple[ReplicaState, ...]]]


@st.composite
def pools(draw: st.DrawFn) -> Made:
    """Models and replicas of some pools; a replica is in one of them."""
    homes = draw(st.lists(st.integers(0, 4), min_size=len(REPLICAS), max_size=len(REPLICAS)))
    members = [tuple(state for state, home in zip(REPLICAS, homes, strict=True) if home == number) for number in range(4)]
    return [(draw(st.sampled_from(MODELS)), member) for member in members if member]


def continued(new: Made, old: Sequence[Pool]) -> dict[int, Pool]:
    """By pool, the old one with the most of its replicas, else one for the same models. O(new pools x old pools)."""
    left, former = list(old), dict[int, Pool]()

    def choose(likeness: Callable[[int, Pool], int]) -> None:
        for number in range(len(new)):
            best = max(left, key=lambda other: likeness(number, other), default=None)
            if best is not None and number not in former and likeness(number, best):
                former[number] = best
                left.remove(best)

    choose(lambda number, other: len(set(new[number][1]) & set(other.replicas)))
    choose(lambda number, other: other.models == new[number][0])
    return former


def made_of(made: Made, old: Sequence[Pool]) -> tuple[Pool, ...]:
    configs = [PoolConfig(tuple(state.config for state in members), models) for models, members in made]
    return succeed(configs, [members for _, members in made], old)


@given(pools(), pools())
def test_a_pool_continues_the_one_with_the_most_of_its_replicas_else_one_for_its_models(before: Made, after: Made) -> None:
    old = made_of(before, ())
    wanted = continued(after, old)
    for number, pool in enumerate(made_of(after, old)):
        former = [other for other in old if other.admission is pool.admission]
        assert former == [wanted[number]] if number in wanted else not former
