"""Limits of keys that several workers hold together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway.admission.limits.account import Account
from tests.gateway.cluster.workers.conftest import Worker, star
from tests.gateway.conftest import eventually
from tests.gateway.identity.conftest import PRICES, bearer, made
from tests.support.fakes import FakeReplica, answers


def keys_in(folder: Path) -> dict[str, Any]:
    return {"url": f"sqlite:///{folder}/keys.sqlite"}


def account(worker: Worker, id_: str) -> Account | None:
    keys = worker.gateway.keys
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
            return sum(each.requests for each in there.others.values()) if there else 0

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
    async with FakeReplica([answers(prompt=10**6, cached=0)]) as replica, star(replica, **config) as (wheel, (first, _)):
        id_, key = await made(first.run, budget_usd_day=0.5, requests_per_minute=3)
        _, other = await made(first.run, requests_per_minute=3)
        assert (await first.run.post(headers=bearer(key)))[0] == 200
        for _ in range(3):
            assert (await first.run.post(headers=bearer(other)))[0] == 200
        third = await wheel.join()
        await eventually(lambda: (known := account(third, id_)) is not None and known.others)
        assert (await third.run.post(headers=bearer(key)))[0] == 429
        assert (await third.run.post(headers=bearer(other)))[0] == 200
