"""The keys of what differs between two configurations."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.changes import changed_keys
from tests.support.configs import load

BEGIN: dict[str, Any] = {
    "pools": [
        {"name": "big", "replicas": ["http://10.0.0.1:8000"]},
        {"name": "small", "models": ["s"], "replicas": ["http://10.0.0.2:8000"]},
    ],
    "prices": {"m": {"input": 1.0, "output": 2.0}},
}
SECRET = "s3cret"
ENV = {"REPLICA_KEY": SECRET}


def pools(**more: Any) -> dict[str, Any]:
    big, small = BEGIN["pools"]
    return {"pools": [{**big, **more}, small]}


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({}, []),
        ({"limits": {"body_mb": 7}}, ["limits.body_mb"]),
        ({"log_clients": False, "routing": {"policy": "sticky"}}, ["routing.policy", "log_clients"]),
        ({"prices": {"n": {"input": 1.0, "output": 2.0}}}, ["prices.m (gone)", "prices.n (new)"]),
        ({"prices": {"m": {"input": 1.0, "output": 3.0}}}, ["prices.m"]),
        (pools(queue_s=5), ["pools.big.queue_s"]),
        (
            pools(replicas=[{"url": "http://10.0.0.1:8000", "key": {"env": "REPLICA_KEY"}}]),
            ["pools.big.replicas.10.0.0.1:8000.key"],
        ),
        (
            pools(replicas=["http://10.0.0.3:8000"]),
            ["pools.big.replicas.10.0.0.1:8000 (gone)", "pools.big.replicas.10.0.0.3:8000 (new)"],
        ),
        ({"pools": BEGIN["pools"][:1]}, ["pools.small (gone)"]),
        ({"pools": BEGIN["pools"][::-1]}, ["pools"]),
        ({"cors_origins": ["https://chat.example.org"]}, ["cors_origins"]),
        ({"model_aliases": {"gpt-4": "m"}}, ["model_aliases.gpt-4 (new)"]),
    ],
)
def test_what_differs_is_named_without_its_value(change: dict[str, Any], keys: list[str]) -> None:
    found = list(changed_keys(load(None, BEGIN, ENV), load(None, {**BEGIN, **change}, ENV)))
    assert found == keys
    assert SECRET not in str(found)
