"""Retention hints, over real sockets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import BODY, running
from tests.support.fakes import FakeReplica, answers, models

RETAINS: Any = {"routing": {"retain": True}}
SESSION = {"X-Session-Id": "s1"}


async def hints(owner: str, headers: dict[str, str], config: Any, **own: Any) -> tuple[Any, dict[str, Any]]:
    """(the hint that the replica got, its other fields)."""
    async with FakeReplica([answers()], listing=models("m", owner=owner)) as replica, running(replica, **config) as run:
        await run.gateway.fleet.probe_all(run.gateway.upstream)
        assert (await run.post({**BODY, **own}, headers=headers))[0] == 200
        got = replica.requests[-1].json
        return got.pop("cache_retention", None), got


@pytest.mark.parametrize(
    ("owner", "headers", "config", "hint"),
    [
        ("warmroute", SESSION, RETAINS, "5m"),
        ("warmroute", {}, RETAINS, None),
        ("vllm", SESSION, RETAINS, None),
        ("sglang", SESSION, RETAINS, None),
        ("someone", SESSION, RETAINS, None),
        ("warmroute", SESSION, {}, None),
    ],
    ids=["session", "no_session", "vllm", "sglang", "unknown_engine", "off"],
)
async def test_only_our_replica_gets_a_hint_for_a_session(owner: str, headers: Any, config: Any, hint: Any) -> None:
    assert await hints(owner, headers, config) == (hint, BODY), "and no other field"


@pytest.mark.parametrize("own", [{"cache_retention": "1h"}, {"prompt_cache_retention": "24h"}])
async def test_a_clients_own_hint_counts(own: dict[str, Any]) -> None:
    hint, got = await hints("warmroute", SESSION, RETAINS, **own)
    assert {**got, **({"cache_retention": hint} if hint else {})} == {**BODY, **own}


async def test_embeddings_get_no_hint() -> None:
    body = {"model": "m", "input": "text"}
    async with FakeReplica(listing=models("m", owner="warmroute")) as replica, running(replica, **RETAINS) as run:
        await run.post(body, "/v1/embeddings", headers=SESSION)
        assert replica.requests[-1].json == body
