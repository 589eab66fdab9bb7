"""What GET /v1/models shows of many pools, replicas and models, and how much is looked at for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.pool_queue import Admission
from gateway.fleet.catalog import MAX_SHOWN, MAX_SHOWN_BYTES, Catalog
from gateway.fleet.engine_client import ModelEntry
from gateway.fleet.pools import Pool

NAMES = [f"{letter}{number}" for letter in "abc" for number in range(3)]


class Listed(dict[str, ModelEntry]):
    """A replica's list, which counts how often it is walked through."""

    walked = 0

    def __iter__(self) -> Iterator[str]:
        self.walked += 1
        return super().__iter__()

    def items(self) -> Any:
        self.walked += 1
        return super().items()


def entries(names: Sequence[str], size: int = 20) -> Listed:
    return Listed({name: ModelEntry(name.encode().ljust(size), True, "", None) for name in names})


@dataclass
class Replica:
    """As far as the catalog knows replicas."""

    models: Mapping[str, ModelEntry]
    live: bool = True
    doubtful: bool = False
    answers: bool = True
    wakeable: bool = False


def pool_of(replicas: Sequence[Replica], models: Sequence[str] = ()) -> Pool:
    admission = Admission(max_inflight=1, max_queue=1, queue_s=1)
    return Pool("pool", tuple(models), tuple(replicas), admission)  # type: ignore[arg-type]


@dataclass
class Prefixes:
    pools: Sequence[Pool]
    asked: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> Any:
        self.asked.append(name)
        matches = [(len(prefix), pool) for pool in self.pools for prefix in pool.models if name.startswith(prefix)]
        return max(matches, key=lambda match: match[0])[1] if matches else None


def catalog(*pools: Pool) -> Catalog:
    return Catalog(pools, Prefixes(pools))


def home_of(name: str, pools: Sequence[Pool]) -> Pool | None:
    """As requests go: by prefix, else to the first pool without prefixes whose replicas list it, up or down."""
    if found := Prefixes(pools)(name):
        return found  # type: ignore[no-any-return]
    free = (pool for pool in pools if not pool.models)
    return next((pool for pool in free if any(name in replica.models for replica in pool.replicas)), None)


REPLICAS = st.builds(Replica, st.lists(st.sampled_from(NAMES), unique=True).map(entries), st.booleans(), st.booleans())
POOLS = st.lists(st.tuples(st.lists(REPLICAS, max_size=3), st.sampled_from([(), (), ("a",), ("b", "b1")])), max_size=4)


@given(POOLS)
def test_each_model_is_shown_by_the_pool_that_serves_it(drawn: list[tuple[list[Replica], tuple[str, ...]]]) -> None:
    taken: set[str] = set()
    pools = list[Pool]()
    for replicas, prefixes in drawn:  # no two pools have the same prefix
        pools.append(pool_of(replicas, [prefix for prefix in prefixes if prefix not in taken]))
        taken.update(prefixes)
    expected = {name for pool in pools for replica in pool.serving for name in replica.models if home_of(name, pools) is pool}
    made = catalog(*pools)
    assert made.names == sorted(expected)
    for name in expected:
        home = home_of(name, pools)
        assert home
        first = next(replica for replica in home.serving if name in replica.models)
        assert made.entries[name] == first.models[name].shown


def many(count: int, start: int = 0) -> Listed:
    return entries([f"m{number}" for number in range(start, start + count)])


def test_a_long_list_does_not_keep_another_pool_out() -> None:
    hostile = [Replica(many(4096, 4096 * at)) for at in range(9)]
    made = catalog(pool_of(hostile), pool_of([Replica(entries(["ours"]))]))
    assert "ours" in made.entries
    assert len(made.names) == MAX_SHOWN


def test_models_that_a_pool_does_not_serve_do_not_keep_others_out() -> None:
    foreign = [Replica(many(4096, 4096 * at)) for at in range(9)]
    made = catalog(pool_of(foreign, models=["gpt"]), pool_of([Replica(entries(["b-1"]))]))
    assert "b-1" in made.entries


def test_of_more_lists_than_can_be_looked_at_the_first_are_shown() -> None:
    assert len(catalog(*(pool_of([Replica(many(4096, 4096 * at))]) for at in range(64))).names) > MAX_SHOWN // 2


def test_a_model_that_two_pools_list_is_shown_once_however_many_lists_there_are() -> None:
    fleet = [pool_of([Replica(many(4096, 4096 * at))]) for at in range(26)]
    first, second = (pool_of([Replica({"dup": ModelEntry(owner, True, "", None)})]) for owner in (b"first", b"second"))
    assert catalog(*fleet, first, second).entries["dup"] == b"first"


def test_its_bytes_are_bounded() -> None:
    made = catalog(pool_of([Replica(entries([f"m{number}" for number in range(4000)], 16_000))]))
    assert MAX_SHOWN_BYTES - 16_000 < sum(map(len, made.entries.values())) <= MAX_SHOWN_BYTES


@pytest.mark.parametrize(("pools", "replicas"), [(1, 2000), (1000, 2), (30, 60)])
def test_what_is_looked_at_does_not_grow_with_the_replicas(pools: int, replicas: int) -> None:
    same = many(4096)
    fleet = [pool_of([Replica(same)] * replicas) for _ in range(pools)]
    prefixes = Prefixes(fleet)
    Catalog(fleet, prefixes)
    assert same.walked < 300, "of 4,096 names each"
    assert len(prefixes.asked) <= 3 * MAX_SHOWN
