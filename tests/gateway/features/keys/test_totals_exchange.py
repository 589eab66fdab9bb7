"""Limits of keys that several workers hold together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.commands import SingleProcess
from gateway.cluster.topics import Topics
from gateway.errors import GatewayError
from gateway.features.keys.keys import Keys
from gateway.features.keys.limits.account import KeyAccount, KeyLimits
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.record import KeySettings
from gateway.features.keys.section import KeysConfig
from gateway.features.keys.totals_exchange import TotalsExchange, encode_totals
from gateway.features.table import WholeConfig, new_metrics
from tests.gateway.conftest import eventually
from tests.gateway.features.keys.conftest import PRICES, bearer, made
from tests.gateway.features.workers.conftest import Worker, star
from tests.support.fakes import FakeReplica, answers


def keys_in(folder: Path) -> dict[str, Any]:
    return {"url": f"sqlite:///{folder}/keys.sqlite"}


def account(worker: Worker, id_: str) -> KeyAccount | None:
    keys = worker.gateway[Keys]
    return keys.limiter.account(id_) if keys else None


async def test_a_thousand_requests_race_at_two_workers(tmp_path: Path) -> None:
    """What is spent exceeds the budget by one request of each worker at most: no answer is longer than what is reserved."""
    config: dict[str, Any] = {"keys": keys_in(tmp_path), "prices": PRICES}
    async with FakeReplica([answers(prompt=400, completion=500, cached=0)]) as replica, star(replica, **config) as (_, workers):
        _, key = await made(workers[0].run, budget_usd_day=0.1)
        limit = asyncio.Semaphore(100)

        async def one(number: int) -> int:
            async with limit:
                status, _, answer = await workers[number % 2].run.post(headers=bearer(key))
                assert status in {200, 429}, answer
                return status

        statuses = await asyncio.gather(*(one(number) for number in range(1000)))
        assert set(statuses) == {200, 429}
        assert statuses.count(200) * 0.0009 <= 0.1 + 2 * 0.0009
        assert statuses.count(200) * 0.0009 > 0.05


async def test_what_is_used_at_one_worker_is_used_at_all(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, star(replica, keys=keys_in(tmp_path)) as (_, (first, second)):
        id_, key = await made(first.run, requests_per_minute=3)
        for _ in range(3):
            assert (await first.run.post(headers=bearer(key)))[0] == 200

        def known() -> int:
            there = account(second, id_)
            return sum(each.requests for each in there.by_process.values()) if there else 0

        await eventually(lambda: known() == 3)
        assert (await second.run.post(headers=bearer(key)))[0] == 429


async def test_a_revocation_holds_at_all_workers_at_once(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, star(replica, keys=keys_in(tmp_path)) as (_, (first, second)):
        id_, key = await made(first.run)
        assert (await second.run.post(headers=bearer(key)))[0] == 200
        async with first.run.session.delete(f"{first.run.admin_url}/warmroute/keys/{id_}") as answer:
            assert answer.status == 200
        assert (await second.run.post(headers=bearer(key)))[0] == 401


async def test_a_new_worker_knows_what_was_spent(tmp_path: Path) -> None:
    """And not for how long the others have run: what they did before is no debt of a rate."""
    config: dict[str, Any] = {"keys": keys_in(tmp_path), "prices": PRICES}
    async with FakeReplica([answers(completion=10**6)]) as replica, star(replica, **config) as (wheel, (first, _)):
        id_, key = await made(first.run, budget_usd_day=0.5, requests_per_minute=3)
        _, other = await made(first.run, requests_per_minute=3)
        assert (await first.run.post(headers=bearer(key)))[0] == 200
        for _ in range(3):
            assert (await first.run.post(headers=bearer(other)))[0] == 200
        third = await wheel.join()
        await eventually(lambda: (known := account(third, id_)) is not None and known.by_process)
        assert (await third.run.post(headers=bearer(key)))[0] == 429
        assert (await third.run.post(headers=bearer(other)))[0] == 200


async def test_what_a_worker_did_before_is_no_debt_in_whatever_order_it_is_told(tmp_path: Path) -> None:
    """What has changed may be on its way to a new worker before the other one knows that there is a new one."""
    keys = Keys(
        WholeConfig(pools=(), keys=KeysConfig(**keys_in(tmp_path))), new_metrics().of(KeyMetrics), lambda: 1.8e9, lambda: 0.0
    )
    await keys.begin()
    key, other = [(await (await keys.store()).create(KeySettings("acme", requests_per_minute=3)))[0] for _ in range(2)]
    await keys.poll()

    def limits_of(id_: str) -> KeyLimits:
        grant = keys.ring.grant(id_)
        assert grant is not None
        assert grant.limits is not None
        return grant.limits

    topics = Topics()
    TotalsExchange(keys.process, keys.limiter, keys.siblings, topics, lambda: 0.0)

    def told(requests: int, *, whole: bool, process: str = "p", id_: str = key.id) -> None:
        (message,) = encode_totals(process, [(id_, requests, 0, 0, ())], complete=whole)
        topics.receive("keys.spent", 7, message)

    told(1000, whole=False)
    keys.limiter.require(key.id, limits_of(key.id), keys.moment())
    told(1001, whole=True)
    told(1003, whole=False)
    with pytest.raises(GatewayError):
        keys.limiter.require(key.id, limits_of(key.id), keys.moment())
    topics.ended(7)
    assert not keys.siblings
    told(1000, whole=False, process="q", id_=other.id)  # another one has its number
    keys.limiter.require(other.id, limits_of(other.id), keys.moment())
    await keys.close()


async def test_a_worker_begins_with_all_that_it_has(tmp_path: Path) -> None:
    """Which is nothing: from then on the others know that what it sends is new."""
    keys = Keys(
        WholeConfig(pools=(), keys=KeysConfig(**keys_in(tmp_path))), new_metrics().of(KeyMetrics), lambda: 1.8e9, lambda: 0.0
    )
    sent = list[tuple[str, bytes]]()

    class Control(SingleProcess):
        def __init__(self) -> None:
            pass

        def publish(self, topic: str, message: bytes) -> None:
            sent.append((topic, message))

    spending = TotalsExchange(keys.process, keys.limiter, keys.siblings, Topics(), lambda: 0.0)
    running = asyncio.create_task(spending.run(Control()))
    await eventually(lambda: sent)
    running.cancel()
    await asyncio.wait([running])
    assert sent == [("keys.spent", message) for message in encode_totals(keys.process, [], complete=True)]
    await keys.close()
