"""Sections that features declare, in the type of the whole file: read, checked, fixed, encoded as the core's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pytest
from msgspec import Meta

from gateway.cluster.messages import decode_config, encode_config
from gateway.cluster.reload import possible
from gateway.config.hints import CLASHES, FIXED, PROCESSES, SOURCES
from gateway.config.kinds import ConfigSection, Positive
from gateway.config.parse import ConfigError, Key, Problem
from gateway.config.schema import Config, PoolConfig
from gateway.config.sections import Section, config_type, processes_of, sources_of
from gateway.config.source import read


class ToyConfig(ConfigSection, frozen=True):
    """Of a toy."""

    size: Positive = 1
    names: tuple[str, ...] = ()


def odd(values: Mapping[Key, Any]) -> Iterator[Problem]:
    if values.get(("toy", "size")) == 13:
        yield Problem(("toy", "size"), "this is an unlucky size")


HINT = {FIXED: ("size",), CLASHES: odd, SOURCES: lambda toy: toy.names}
TOY = Section("toy", Annotated[ToyConfig, Meta(extra=HINT)], ToyConfig())
SPEED = Section("speed", Annotated[int, Meta(ge=1, extra={FIXED: True})], 3, within="routing")
COUNT = Section("count", Annotated[int, Meta(ge=1, extra={PROCESSES: True})], 1)
KIND = config_type([TOY, SPEED, COUNT])
POOLS = [{"replicas": ["http://a:1"]}]


def config(**raw: Any) -> Config:
    return read(KIND, None, {"pools": POOLS, **raw}, env={}).config


def test_a_section_is_read_with_its_defaults_and_travels_to_other_processes() -> None:
    one = config(toy={"size": 7}, routing={"speed": 5, "ttl_s": 1})
    assert (TOY.of(one), SPEED.of(one), one.routing.ttl_s) == (ToyConfig(7), 5, 1.0)
    assert decode_config(KIND, encode_config(one)) == one
    assert (TOY.of(config()), SPEED.of(config())) == (ToyConfig(), 3)
    assert (TOY.of(Config((PoolConfig(),))), SPEED.of(Config((PoolConfig(),)))) == (ToyConfig(), 3), "a type without them"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"toy": {"size": 0}}, "toy.size: must be greater than 0"),
        ({"toy": {"size": 13}}, "toy.size: this is an unlucky size"),
        ({"routing": {"speed": 0}}, "routing.speed: must be at least 1"),
        ({"routing": {"sped": 1}}, "routing.sped: unknown key; did you mean 'speed'?"),
        ({"keys": {}}, "keys: unknown key"),
    ],
)
def test_what_is_wrong_in_a_section_has_its_key(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**raw)
    assert message in str(refused.value)


def test_what_cannot_change_is_named(caplog: pytest.LogCaptureFixture) -> None:
    new = config(toy={"size": 2, "names": ["n"]}, routing={"speed": 9, "block_bytes": 8, "ttl_s": 1}, count=2)
    with caplog.at_level(logging.WARNING):
        taken = possible(config(), new)
    assert (TOY.of(taken), SPEED.of(taken), taken.routing.ttl_s) == (ToyConfig(1, ("n",)), 3, 1.0)
    (record,) = caplog.records
    assert sorted(vars(record)["keys"]) == ["routing.block_bytes", "routing.speed", "toy.size"]


def test_the_core_learns_of_processes_and_sources() -> None:
    assert (processes_of(config(count=4)), processes_of(Config((PoolConfig(),)))) == (4, 1)
    assert (list(sources_of(config(toy={"names": ["a", "b"]}))), list(sources_of(config()))) == (["a", "b"], [])
    assert config(pools=[{}], toy={"names": ["a"]}).pools == (PoolConfig(name="default"),)
    with pytest.raises(ConfigError, match="at least one replica URL"):
        config(pools=[{}])
