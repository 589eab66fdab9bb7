"""Pools: their names, and which old pool a new one continues."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.admission.pool_queue import QUEUE_S, STREAM_QUEUE_S
from gateway.config.parse import ConfigError
from gateway.config.schema import MAX_POOL_NAME, Config, PoolConfig, ReplicaConfig
from gateway.fleet.breaker import Breaker
from gateway.fleet.membership import Member
from gateway.fleet.pools import Pool, succeed
from gateway.fleet.state import ReplicaState
from tests.support.configs import load


def config_of(*pools: dict[str, Any]) -> Config:
    numbered = [{"replicas": [f"http://r:{port}"], **pool} for port, pool in enumerate(pools, 1)]
    return load(None, {"pools": numbered}, env={})


def names_of(*pools: dict[str, Any]) -> list[str]:
    return [pool.name for pool in config_of(*pools).pools]


def test_a_pool_is_named_by_its_models_unless_it_has_a_name() -> None:
    assert names_of({}) == ["default"]
    assert names_of({"models": ["llama", "qwen"]}, {"models": ["*"]}, {"name": "rest"}) == ["llama,qwen", "*", "rest"]


def test_names_are_unique_and_those_that_are_given_stay() -> None:
    assert names_of({}, {"name": "default"}, {}) == ["default-2", "default", "default-3"]


def test_a_name_made_of_models_is_short_and_plain() -> None:
    (name,) = names_of({"models": ["x" * 300, 'a "b"']})
    assert len(name) == MAX_POOL_NAME
    assert names_of({"models": ['a "b" \n', "ü"]}) == ["ab,"]


def test_a_name_that_two_pools_have_is_an_error_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"pools\[1\]\.name: the name 'a' is that of pools\[0\]\.name already"):
        config_of({"name": "a"}, {"name": "a"})


@pytest.mark.parametrize("name", ["a b", 'a"', "ü", "x" * 101])
def test_a_name_is_plain_text(name: str) -> None:
    with pytest.raises(ConfigError, match=r"pools\[0\]\.name"):
        config_of({"name": name})


def made_of(names: str, old: tuple[Pool, ...] = ()) -> tuple[Pool, ...]:
    configs = [PoolConfig((ReplicaConfig("http://r:1"),), name=name) for name in names]
    member = Member("r:1", "http://r:1", "")
    return succeed(configs, [(ReplicaState(member, Breaker(random.Random())),) for _ in names], old)


def test_a_pool_continues_the_one_of_its_name() -> None:
    old = made_of("abc")
    new = made_of("cdb", old)
    assert [pool.name for pool in new] == ["c", "d", "b"]
    assert new[0].admission is old[2].admission
    assert new[2].admission is old[1].admission
    assert new[1].admission not in [pool.admission for pool in old]


@pytest.mark.parametrize(
    ("keys", "times"),
    [
        ({}, (QUEUE_S, STREAM_QUEUE_S)),
        ({"queue_s": 7}, (7, 7)),
        ({"fallback": "other"}, (QUEUE_S, QUEUE_S)),
        ({"queue_s": 300, "fallback": "other"}, (300, 300)),
    ],
)
def test_streams_may_wait_for_longer_where_no_other_pool_would_serve_them(
    keys: dict[str, Any], times: tuple[float, float]
) -> None:
    config = config_of({"name": "one", **keys}, {"name": "other", "models": ["x"]})
    pools = succeed(config.pools, [(), ()], ())
    assert (pools[0].admission.queue_s, pools[0].admission.stream_queue_s) == times
    again = succeed(config_of({"name": "one", "queue_s": 5}).pools, [()], pools)[0].admission
    assert (again is pools[0].admission, again.queue_s, again.stream_queue_s) == (True, 5, 5)
