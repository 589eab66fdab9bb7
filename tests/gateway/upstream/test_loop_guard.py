"""Gateways whose replicas lead back to a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.server.access import fields_are_direct
from gateway.upstream.loop_guard import MAX_GATEWAYS, LoopGuard
from tests.gateway.conftest import eventually, running
from tests.gateway.features.workers.test_supervisor import supervised
from tests.support.fakes import FakeReplica, FakeRequest, answers, models, status

OTHERS = [f"{number:016x}" for number in range(1, MAX_GATEWAYS + 1)]  # not random: names of tests are made of them
Lines = Callable[[], list[dict[str, Any]]]


def chain(count: int) -> str:
    return ", ".join(OTHERS[:count])


def test_a_request_passes_a_bounded_number_of_gateways_and_each_once() -> None:
    guard, via = LoopGuard(), None
    for _ in range(MAX_GATEWAYS):
        passing = LoopGuard()
        passing.require_no_loop(via)
        via = passing.line(via).removeprefix("X-Warmroute-Via: ").removesuffix("\r\n")
    with pytest.raises(GatewayError, match=f"passed {MAX_GATEWAYS} gateways"):
        guard.require_no_loop(via)
    with pytest.raises(GatewayError, match="passed this gateway before") as caught:
        guard.require_no_loop(f"{chain(1)}, {guard.id}")
    assert (caught.value.status, caught.value.code) == (508, "loop_detected")


@pytest.mark.parametrize("forged", ["", ",", "x", "é" * 16, chain(1) + ",", chain(1) + "\r\nA: b", "0" * 17, "0" * 100_000])
def test_a_header_that_no_gateway_has_written_is_refused(forged: str) -> None:
    with pytest.raises(GatewayError, match="is not a list of"):
        LoopGuard().require_no_loop(forged)


def test_whoever_comes_through_another_gateway_is_no_direct_client() -> None:
    assert fields_are_direct({b"host": b"localhost"})
    assert not fields_are_direct({b"host": b"localhost", b"x-warmroute-via": OTHERS[0].encode()})


async def test_a_replica_sees_which_gateways_a_request_has_passed_and_nothing_else() -> None:
    async with FakeReplica() as one, running(one) as run:
        own = run.gateway.loops.id
        await run.post()
        await run.post(headers={"X-Warmroute-Via": chain(2)})
        await run.post(headers=[("X-Warmroute-Via", chain(1)), ("X-Warmroute-Via", "forged")])
        assert [request.headers["x-warmroute-via"] for request in one.requests] == [
            own,
            f"{chain(2)}, {own}",
            f"{chain(1)}, {own}",
        ]
        assert {name for name in one.requests[0].headers if name.startswith("x-warmroute")} == {"x-warmroute-via"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/rerank", "/v1/models"])
async def test_what_has_passed_this_gateway_before_is_refused(path: str) -> None:
    async with FakeReplica() as one, running(one) as run:
        for via in (run.gateway.loops.id, chain(MAX_GATEWAYS)):
            method = "GET" if path == "/v1/models" else "POST"
            async with run.session.request(method, run.url + path, headers={"X-Warmroute-Via": via}, json={}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (508, "loop_detected")
        assert not one.requests
        assert (await run.get("/health", headers={"X-Warmroute-Via": run.gateway.loops.id}))[0] == 200


async def test_a_replica_that_is_the_gateway_itself_is_never_up(request_lines: Lines) -> None:
    async with FakeReplica() as one, running(one) as run:
        added = await run.post({"url": run.url, "name": "itself"}, path="/warmroute/replicas")
        assert (added[0], added[2]["replica"]["up"]) == (201, False)
        assert "it is this gateway itself" in added[2]["replica"]["error"]
        await run.post({"name": one.name}, path="/warmroute/drain")
        code, _, answer = await run.post()
        assert (code, answer["error"]["code"]) == (503, "no_replica_available")
        await run.post({"name": one.name}, path="/warmroute/undrain")
    assert len(request_lines()) == 1


async def test_two_gateways_that_list_each_other_end_a_request_at_its_second_visit(request_lines: Lines) -> None:
    async with FakeReplica() as one, running(one) as outer, running(one) as inner:
        for run, other in ((outer, inner), (inner, outer)):
            added = await run.post({"url": other.url, "name": "other"}, path="/warmroute/replicas")
            assert added[2]["replica"]["up"]
            await run.post({"name": one.name}, path="/warmroute/drain")
        code, _, answer = await outer.post()
        assert (code, answer["error"]["code"]) == (508, "loop_detected")
    assert [line["status"] for line in request_lines()] == [508, 508, 508]  # outer's second visit, inner's, outer's first


async def test_a_forged_header_opens_no_breaker() -> None:
    """Who forges the ids of gateways makes a gateway behind this one refuse what an engine answers."""

    async def gateway(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await (status(508) if "," in request.headers["x-warmroute-via"] else answers())(request, writer)

    async with FakeReplica([gateway]) as one, FakeReplica() as two, running(one, two) as run:
        for number in range(20):
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number} " * 200}]}
            assert (await run.post(body, headers={"X-Warmroute-Via": chain(1)}))[0] == 200
        assert len(one.requests) > 5
        assert len(two.requests) == 20
        assert not any(state.restricted(run.gateway.clock()) for state in run.gateway.fleet.replicas)


async def test_all_workers_of_a_gateway_have_one_id() -> None:
    seen: dict[str, set[str]] = {"/v1/models": set()}

    async def listing(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        seen["/v1/models"].add(request.headers["x-warmroute-via"])
        await models("m")(request, writer)

    async with FakeReplica(listing=listing) as one, supervised(one) as run:
        (gateway_id,) = seen["/v1/models"]
        first, _ = run.pids
        probes = one.connections
        os.kill(run.pids[first], signal.SIGKILL)
        await run.replaced(first)
        await eventually(lambda: one.connections > probes)
        assert seen["/v1/models"] == {gateway_id}
        async with run.session.get(f"{run.url}/v1/models", headers={"X-Warmroute-Via": gateway_id}) as answer:
            assert answer.status == 508
            assert json.loads(await answer.read())["error"]["code"] == "loop_detected"
