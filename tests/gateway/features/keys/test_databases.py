"""Keys in a real Postgres: two gateways on one database, one that goes away and returns under load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.features.keys.keys import Keys
from gateway.features.keys.limits.calendar import day_number
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.record import KeySettings
from gateway.features.keys.store import open_key_store
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.keys.conftest import PRICES, bearer, made
from tests.support.fakes import FakeReplica, answers
from tests.support.postgres import PASSWORD, Postgres, postgres

pytestmark = pytest.mark.tools
BILL = 0.0009  # USD of an answer below


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as running_server:
        yield running_server


@pytest.fixture
def url(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return server.new().replace(f":{PASSWORD}", "")


def config(url: str) -> dict[str, Any]:
    return {"keys": {"url": url}, "prices": PRICES}


def replica_of() -> FakeReplica:
    return FakeReplica([answers(prompt=400, completion=500, cached=0)])


def keys_of(run: Running) -> Keys:
    return run.gateway[Keys]


async def status(run: Running, key: str) -> int:
    answered: int = (await run.post(headers=bearer(key)))[0]
    return answered


async def race(runs: list[Running], key: str, requests: int) -> list[int]:
    limit = asyncio.Semaphore(100)

    async def one(number: int) -> int:
        async with limit:
            return await status(runs[number % len(runs)], key)

    return await asyncio.gather(*(one(number) for number in range(requests)))


async def spend_all(run: Running, key: str) -> int:
    """Requests until nothing is left, and how many were served: one alone gets what a race has left."""
    served = (await race([run], key, 100)).count(200)
    while await status(run, key) == 200:
        served += 1
    return served


async def test_a_change_at_one_gateway_holds_at_the_other_after_one_look(url: str) -> None:
    async with replica_of() as replica, running(replica, **config(url)) as one, running(replica, **config(url)) as two:
        id_, key = await made(one)
        await keys_of(two).poll()
        assert (await status(one, key), await status(two, key)) == (200, 200)
        async with one.session.delete(f"{one.admin_url}/warmroute/keys/{id_}") as revoked:
            assert revoked.status == 200
        assert await status(one, key) == 401
        await keys_of(two).poll()
        assert await status(two, key) == 401


async def test_a_change_by_command_holds_at_all_gateways_by_itself(url: str) -> None:
    async with replica_of() as replica, running(replica, **config(url)) as one, running(replica, **config(url)) as two:
        store = await open_key_store(url, lambda: 1.8e9)
        created, key = await store.create(KeySettings("acme"))
        for run in (one, two):
            ring = keys_of(run).ring
            await eventually(lambda ring=ring: ring.grant(created.id))  # type: ignore[misc]
            assert await status(run, key) == 200
        await store.revoke(created.id)
        for run in (one, two):
            ring = keys_of(run).ring
            await eventually(lambda ring=ring: ring.grant(created.id).revoked)  # type: ignore[misc]
            assert await status(run, key) == 401
        await store.close()


async def test_a_sum_never_falls_and_is_found_by_its_key(url: str) -> None:
    """Whatever a process has forgotten meanwhile."""
    store = await open_key_store(url, lambda: 1.8e9)
    day = day_number(2026, 11, 27)
    for amount in (5, 3, 7):
        await store.write_spending("p", [(id_, 1, 1, 0, ((day, amount),)) for id_ in ("a", "b", "c")])
    await store.write_spending("p", [("a", 2, 2, 0, ((day, 1), (day - 1, 2)))])
    found = await store.spending_of(["a", "c"], range(day // 31 * 31, day + 31))
    assert sorted(found.pop("p")) == [
        ("a", 2, 2, 0, ((day - 1, 2),)),
        ("a", 2, 2, 0, ((day, 7),)),
        ("c", 1, 1, 0, ((day, 7),)),
    ]
    assert not found
    await store.close()


async def test_a_budget_that_is_spent_at_one_gateway_is_spent_at_the_other(url: str) -> None:
    async with replica_of() as replica, running(replica, **config(url)) as one, running(replica, **config(url)) as two:
        _, key = await made(one, budget_usd_day=0.05)
        await keys_of(two).poll()
        assert await spend_all(one, key) * BILL <= 0.05 + BILL
        await keys_of(one).poll()
        await keys_of(two).poll()
        status_, headers, answer = await two.post(headers=bearer(key))
        assert (status_, answer["error"]["code"]) == (429, "insufficient_quota")
        assert 0 < int(headers["Retry-After"]) <= 86_400


async def test_a_thousand_requests_race_at_two_gateways(url: str) -> None:
    """Each admits no more than the budget and one request; and no more than is left once it knows of the other, which is after
    a round of both.
    """
    async with replica_of() as replica, running(replica, **config(url)) as one, running(replica, **config(url)) as two:
        _, key = await made(one, budget_usd_day=0.1)
        await keys_of(two).poll()
        statuses = await race([one, two], key, 1000)
        assert set(statuses) == {200, 429}
        assert statuses.count(200) * BILL <= 2 * (0.1 + BILL)
        for run in (one, two, one, two):
            await keys_of(run).poll()
        assert await race([one, two], key, 20) == [429] * 20


async def test_a_database_that_goes_away_and_returns_under_load(
    server: Postgres, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are served, budgets go on where they are, and what was spent meanwhile is written later."""
    async with replica_of() as replica, running(replica, **config(url)) as run:
        (_, free), (id_, key) = await made(run), await made(run, budget_usd_month=0.02)
        stopped, statuses = False, list[int]()

        async def load() -> None:
            while not stopped:
                statuses.append(await status(run, free))

        lanes = [asyncio.create_task(load()) for _ in range(4)]
        try:
            await asyncio.to_thread(server.stop)
            failures = run.gateway.metrics.of(KeyMetrics).failures
            await eventually(lambda: failures.values[()] >= 2)
            assert (await run.post({"tenant": "t"}, "/warmroute/keys"))[0] == 503
            before = len(statuses)
            served = await spend_all(run, key)
            assert 0.02 <= served * BILL <= 0.02 + BILL
            await eventually(lambda: len(statuses) > before + 10)
        finally:
            await asyncio.to_thread(server.start)
        await eventually(lambda: any("read again" in record.message for record in caplog.records))
        stopped = True
        await asyncio.gather(*lanes)
        assert set(statuses) == {200}
        mine = [
            record.message
            for record in caplog.records
            if record.name == "warmroute.keys" and record.levelno >= logging.WARNING and "budget" not in record.message
        ]
        assert mine == ["keys are not read: known keys stay valid", "keys are read again"]
        await keys_of(run).poll()
        async with running(replica, **config(url)) as other:
            account = keys_of(other).limiter.account(id_)
            assert account is not None
            assert round(account.spent_in_month(keys_of(other).moment().day) / 1e12 / BILL) == served
            assert await status(other, key) == 429


async def test_a_database_that_hangs_holds_up_no_request(server: Postgres, url: str) -> None:
    async with replica_of() as replica, running(replica, **config(url)) as run:
        _, key = await made(run, budget_usd_month=1, requests_per_minute=1000)
        server.hang()
        try:
            polled = asyncio.create_task(keys_of(run).poll())
            assert await race([run], key, 50) == [200] * 50
            assert not polled.done()
        finally:
            server.go_on()
        await polled
        assert await status(run, key) == 200


async def test_a_gateway_that_has_not_read_its_keys_refuses_and_begins_when_it_can(server: Postgres, url: str) -> None:
    await asyncio.to_thread(server.stop)
    started = False
    try:
        async with replica_of() as replica, running(replica, **config(url)) as run:
            answered, headers, answer = await run.post(headers=bearer("wr-aaaaaaaa-" + "x" * 43))
            assert (answered, answer["error"]["code"]) == (503, "keys_unavailable")
            assert headers["Retry-After"] == "1"
            assert (await run.post())[0] == 401
            await asyncio.to_thread(server.start)
            started = True
            await eventually(lambda: keys_of(run).ready)
            _, key = await made(run)
            assert await status(run, key) == 200
    finally:
        if not started:
            await asyncio.to_thread(server.start)
