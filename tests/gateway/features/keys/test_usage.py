"""A key's holder asks for its usage: its own numbers, and nobody else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.features.keys.keys import Keys
from tests.gateway.conftest import Running, eventually
from tests.gateway.features.keys.conftest import asked, bearer, keyed, made
from tests.support.fakes import FakeReplica, answers

PRICES = {"m": {"input": 100_000.0, "output": 100_000.0, "cached_input": 100_000.0}}


async def usage(run: Running, key: str) -> tuple[int, dict[str, Any]]:
    status, _, body = await run.get("/v1/usage", headers=bearer(key))
    return status, json.loads(body)


def spent_by(run: Running, id_: str) -> int:
    keys = run.gateway[Keys]
    account = keys.limiter.account(id_)
    return account.spent(keys.moment().day) if account is not None and not account.open else 0


async def test_a_holder_reads_budgets_limits_and_spending(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_day=1000, requests_per_minute=5, models=["m"])
        other_id, other = await made(run, tenant="other")
        status, before = await usage(run, key)
        assert (status, before["key"], before["tenant"], before["models"]) == (200, id_, "acme", ["m"])
        assert before["requests_per_minute"] == {"limit": 5, "left": 5}
        assert (before["day"]["spent_usd"], before["day"]["left_usd"], before["month"]["budget_usd"]) == (0, 1000, None)
        for each in (key, other, other):
            assert (await run.post(headers=bearer(each)))[0] == 200
        await eventually(lambda: spent_by(run, id_) and spent_by(run, other_id) == 2 * spent_by(run, id_))
        _, after = await usage(run, key)
        spent = after["day"]["spent_usd"]
        assert spent > 0
        assert (after["day"]["left_usd"], after["month"]["spent_usd"], after["month"]["left_usd"]) == (
            1000 - spent,
            spent,
            None,
        )
        assert after["requests_per_minute"] == {"limit": 5, "left": 4}, "questions for the usage do not count"
        assert after["uncached_tokens_per_minute"] is None
        _, others = await usage(run, other)
        assert (others["tenant"], others["day"]["spent_usd"], others["day"]["budget_usd"]) == ("other", 2 * spent, None)
        text = json.dumps(others)
        assert id_ not in text
        assert "acme" not in text
        assert len(replica.requests) == 3, "no replica is asked"


async def test_a_spent_budget_and_rate_can_be_read(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_day=0.000001, requests_per_minute=1)
        assert (await run.post(headers=bearer(key)))[0] == 200
        await eventually(lambda: spent_by(run, id_))
        assert (await run.post(headers=bearer(key)))[0] == 429
        status, found = await usage(run, key)
        assert (status, found["day"]["left_usd"], found["requests_per_minute"]["left"]) == (200, 0, 0)


async def test_a_lower_limit_is_shown_before_the_next_request(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        id_, key = await made(run, requests_per_minute=600)
        assert (await run.post(headers=bearer(key)))[0] == 200
        assert (await asked(run, "PATCH", f"/warmroute/keys/{id_}", {"requests_per_minute": 2}))[0] == 200
        _, found = await usage(run, key)
        assert found["requests_per_minute"]["limit"] == 2
        assert found["requests_per_minute"]["left"] <= 2
        (row,) = json.loads((await run.get("/warmroute/keys"))[2])["keys"]
        assert row["used"]["requests_left"] <= 2


@pytest.mark.parametrize("headers", [{}, bearer("wr-guess"), {"X-Api-Key": "a", "Authorization": "Bearer b"}])
async def test_nobody_else_reads_it(tmp_path: Path, headers: dict[str, str]) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run)
        assert (await run.get("/v1/usage", headers=headers))[0] == 401
        await asked(run, "DELETE", f"/warmroute/keys/{key.split('-')[1]}")
        assert (await usage(run, key))[0] == 401


async def test_a_request_without_a_key_has_no_usage_where_keys_are_optional(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, keys={"required": False}) as run:
        status, _, body = await run.get("/v1/usage")
        assert (status, json.loads(body)["error"]["code"]) == (404, "usage_not_kept")
