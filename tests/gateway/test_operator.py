from __future__ import annotations

import json

import pytest

from tests.fakes import FakeReplica
from tests.gateway.conftest import BODY, running

FOREIGN = {"X-Forwarded-For": "203.0.113.5"}  # came through a proxy: not a local client, wherever the proxy runs


async def test_a_dry_run_tells_every_candidate_and_books_nothing() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two) as run:
        warm = (await run.post())[1]["X-Warmroute-Replica"]
        before = repr(run.gateway.router)
        code, _, told = await run.post(path="/warmroute/route")
        assert (code, told["replica"], told["reason"], told["policy"]) == (200, warm, "warm", "cost")
        assert {candidate["replica"] for candidate in told["candidates"]} == {one.name, two.name}
        best, other = told["candidates"]
        assert best["matched_tokens"] > 0 == other["matched_tokens"]
        assert best["cost"]["total_s"] < other["cost"]["total_s"]
        assert sum(value for name, value in other["cost"].items() if name != "total_s") == pytest.approx(
            other["cost"]["total_s"]
        )
        assert repr(run.gateway.router) == before
        assert (await run.post({"model": "m", "prompt": "x"}, path="/warmroute/route"))[2]["reason"] == "blind"
        assert (await run.post({"model": "nope", "prompt": "x"}, path="/warmroute/route"))[0] == 404


async def test_the_replica_list_tells_state_and_load() -> None:
    async with FakeReplica() as one, running(one, "http://127.0.0.1:9") as run:
        await run.post()
        rows = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
        assert [(row["name"], row["up"]) for row in rows] == [(one.name, True), ("127.0.0.1:9", False)]
        assert rows[0]["models"] == ["m"]
        assert rows[0]["held_blocks"] > 0 == rows[0]["inflight"]
        assert "connect" in rows[1]["error"].lower()


@pytest.mark.parametrize("headers", [{"Via": "1.1 proxy"}, {"X-Forwarded-Proto": "https"}, {"Host": "evil.example"}])
async def test_what_a_proxy_on_this_machine_hands_on_is_remote(headers: dict[str, str]) -> None:
    async with FakeReplica() as one, running(one) as run:
        assert (await run.get("/warmroute/replicas", headers=headers))[0] == 403
        assert (await run.get("/warmroute/replicas", headers={"Host": "localhost:1"}))[0] == 200


async def test_others_are_kept_out_without_the_key() -> None:
    async with FakeReplica() as one, running(one) as run:
        code, _, body = await run.get("/warmroute/replicas", headers=FOREIGN)
        assert code == 403
        assert b"WARMROUTE_ADMIN_KEY" in body
        assert (await run.post(BODY, headers=FOREIGN))[0] == 200, "the API is open to them"
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        for wrong in ({}, {"Authorization": "Bearer k-2"}, {"Authorization": "Bearer é"}):
            assert (await run.get("/warmroute/replicas", headers={**FOREIGN, **wrong}))[0] == 401
        assert (await run.get("/warmroute/replicas", headers={**FOREIGN, "Authorization": "Bearer k-1"}))[0] == 200


@pytest.mark.parametrize("header", ["X-Session-Id", "X-Correlation-Id"])
async def test_sticky_follows_the_session_that_the_client_names(header: str) -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two, routing={"policy": "sticky"}) as run:
        homes = set()
        for session in range(20):
            taken = {(await run.post(headers={header: f"s{session}"}))[1]["X-Warmroute-Replica"] for _ in range(3)}
            dry = await run.post(path="/warmroute/route", headers={header: f"s{session}"})
            assert taken == {dry[2]["replica"]}
            homes |= taken
        assert homes == {one.name, two.name}, "the prompt is the same: only the header tells the sessions apart"
