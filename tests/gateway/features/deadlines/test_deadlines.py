"""Deadlines of requests, over real sockets. The replicas wait for events, so that only the deadline can end a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from gateway.admission.pool_queue import Admission
from gateway.features.deadlines.deadlines import DEADLINE_OF, Deadlines
from gateway.request.client import ClientReply, InternalRequest
from gateway.request.exchange import Exchange
from gateway.request.record import new_record
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.gateway.features.websocket.test_responses_socket import answer as receive_all
from tests.gateway.features.websocket.test_responses_socket import dial, send
from tests.support.compiled import uncompiled
from tests.support.fakes import FakeReplica, answers, hangs, streams
from tests.support.in_memory import BytesReply, BytesRequest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LATER = {"X-Request-Timeout": "3600"}
STREAM = {**BODY, "stream": True}
Lines = Callable[[], list[dict[str, Any]]]


async def exceeded(run: Running) -> dict[str, float]:
    begin = "warmroute_deadlines_exceeded_total"
    samples = (await run.metrics()).items()
    return {name.split('"')[1]: value for name, value in samples if name.startswith(begin) and value}


async def expired(run: Running, once: Callable[[], object]) -> None:
    """The time of the running requests is over once this holds: a short time may be over before, on a busy machine."""
    await eventually(once)
    for exchange in run.gateway.running.exchanges:
        deadline = DEADLINE_OF.get(exchange.record)
        if deadline is not None:
            assert deadline.timer is not None
            deadline.timer._run()


@contextlib.asynccontextmanager
async def hanging(**config: Any) -> AsyncIterator[tuple[FakeReplica, Running]]:
    async with FakeReplica([hangs(asyncio.Event())]) as replica, running(replica, **config) as run:
        yield replica, run


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, BODY, "server_error"),
        (CHAT, STREAM, "server_error"),
        (MESSAGES, {**BODY, "max_tokens": 5}, "timeout_error"),
        (RESPONSES, {"model": "m", "input": "hello", "store": False}, "server_error"),
    ],
)
async def test_a_request_ends_at_its_time_and_its_replica_is_free(path: str, body: dict[str, Any], kind: str) -> None:
    async with hanging() as (replica, run):
        asking = asyncio.create_task(run.post(body, path, headers=LATER))
        await expired(run, lambda: replica.requests)
        status, headers, answer = await asking
        assert (status, headers["x-should-retry"], answer["error"]["type"]) == (504, "false", kind)
        assert "in the 3600 s that X-Request-Timeout allows" in answer["error"]["message"]
        await eventually(lambda: replica.gone == 1)
        assert await exceeded(run) == {"running": 1}


async def test_a_begun_stream_ends_with_an_error_event(request_lines: Lines) -> None:
    """The time is doubled until the stream has begun within it, however slow this machine is."""
    async with FakeReplica([streams("a", "b", hold=asyncio.Event())]) as replica, running(replica) as run:
        data, timeout_s = b"", 0.1
        while b'"a"' not in data:
            async with run.session.post(run.url + CHAT, json=STREAM, headers={"X-Request-Timeout": f"{timeout_s}"}) as answer:
                data = await answer.read()
            timeout_s *= 2
        *_, error, done = [line for line in data.split(b"\n") if line.startswith(b"data: ")]
        assert (json.loads(error[6:])["error"]["code"], done) == ("deadline_exceeded", b"data: [DONE]")
        await eventually(lambda: replica.gone == len(replica.requests))
        line = request_lines()[-1]
        assert (line["status"], line["code"]) == (200, "deadline_exceeded")


async def test_a_stream_with_signs_of_life_ends_with_an_error_event() -> None:
    async with hanging(limits={"keepalive_s": 0.01, "drain_timeout_s": 1}) as (_, run):
        data, timeout_s = b"", 0.1
        while b": computing" not in data:
            async with run.session.post(run.url + CHAT, json=STREAM, headers={"X-Request-Timeout": f"{timeout_s}"}) as answer:
                data = await answer.read()
            timeout_s *= 2
        assert answer.status == 200
        assert b'"code":"deadline_exceeded"' in data.replace(b" ", b"")


async def test_the_wait_in_the_queue_counts() -> None:
    hold = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        replica = await stack.enter_async_context(FakeReplica([streams("a", "b", hold=hold)]))
        run = await stack.enter_async_context(running(pools=[{"replicas": [replica.url], "max_inflight": 1}]))
        first = asyncio.ensure_future(run.post(STREAM, params={}))
        await eventually(lambda: replica.requests)
        asking = asyncio.create_task(run.post(headers=LATER))
        await expired(run, lambda: run.gateway.fleet.pools[0].admission.waiting == 1)
        status, _, answer = await asking
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert "it still waited for a replica" in answer["error"]["message"]
        assert await exceeded(run) == {"queued": 1}
        assert run.gateway.fleet.pools[0].admission.waiting == 0
        status, headers, answer = await run.post(headers={"x-llm-d-inference-ttl": "50ms"})
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "queue_timeout", "1")
        hold.set()
        with contextlib.suppress(json.JSONDecodeError):
            await first
        assert len(replica.requests) == 1


async def test_the_time_in_the_queue_of_llm_d_ends_with_the_queue() -> None:
    async with (
        FakeReplica([streams("a", "b")]) as replica,
        running(replica) as run,
        run.session.post(run.url + CHAT, json=STREAM, headers={"x-llm-d-inference-ttl": "1ns"}) as answer,
    ):
        assert b"[DONE]" in await answer.read()


async def test_work_that_cannot_be_done_in_time_is_refused_with_the_estimate() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        pool = run.gateway.router.ledger.rates.of(replica.name).pool
        pool.value, pool.known = 10.0, True  # tokens per second
        pool.members[replica.name].settle()
        status, headers, answer = await run.post(headers={"X-Request-Timeout": "10"})
        assert (status, headers["x-should-retry"], answer["error"]["code"]) == (504, "false", "deadline_exceeded")
        assert "its first token is expected after about 3" in answer["error"]["message"]
        assert (len(replica.requests), await exceeded(run)) == (0, {"foreseen": 1})
        assert (await run.post(headers={"X-Request-Timeout": "3600"}))[0] == 200
        assert (await run.post())[0] == 200
        pool.known = False
        assert (await run.post({**BODY, "messages": [{"role": "user", "content": "x " * 5000}]}, headers=LONG))[0] == 200


LONG = {"X-Request-Timeout": "60"}  # less than the estimate, which is not believed


async def test_a_queue_that_is_too_long_is_foreseen() -> None:
    hold = asyncio.Event()
    script = [answers(), answers(), answers(), streams("a", "b", hold=hold)]
    async with FakeReplica(script) as replica, running(pools=[{"replicas": [replica.url], "max_inflight": 1}]) as run:
        for _ in range(3):
            assert (await run.post())[0] == 200
        first = asyncio.ensure_future(run.session.post(run.url + CHAT, json=STREAM))
        await eventually(lambda: len(replica.requests) == 4)
        admission = run.gateway.fleet.pools[0].admission
        assert admission.expected_s is not None
        status, _, answer = await run.post(headers={"X-Request-Timeout": "0.000001"})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert "a slot at a replica is expected after" in answer["error"]["message"]
        assert await exceeded(run) == {"foreseen": 1}
        hold.set()
        (await first).close()


def test_a_free_slot_is_expected_at_once() -> None:
    admission = Admission(max_inflight=1, max_queue=5, queue_s=1, clock=lambda: 0.0)
    assert admission.expected_s is None
    permit = admission.try_admit()
    assert permit is not None
    assert admission.expected_s is None, "nothing is known"


@pytest.mark.parametrize("value", ["0", "-5", "NaN", "1, 2", "soon", "1e9"])
async def test_an_invalid_time_is_an_error_of_the_client(value: str) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        for path, body in ((CHAT, BODY), (MESSAGES, {**BODY, "max_tokens": 5})):
            status, _, answer = await run.post(body, path, headers={"X-Request-Timeout": value})
            assert status == 400
            assert "must be a number of seconds above 0" in answer["error"]["message"]
        assert not replica.requests


@pytest.mark.parametrize("value", ["0.000001", "1", "0", "-1", "NaN", "NOT_GIVEN", "600.0"])
async def test_the_timeout_of_an_sdk_is_no_deadline(value: str) -> None:
    """It counts from the last byte, and its client leaves at that time by itself."""
    async with FakeReplica() as replica, running(replica) as run:
        names = ("x-stainless-timeout", "x-stainless-read-timeout")
        assert (await run.post(headers=dict.fromkeys(names, value)))[0] == 200
        assert await exceeded(run) == {}


async def test_the_next_request_of_the_connection_goes_on() -> None:
    async with hanging() as (replica, run):
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for number in range(1, 6):
                asking = asyncio.create_task(session.post(run.url + CHAT, json=BODY, headers=LATER))
                await expired(run, lambda number=number: len(replica.requests) == number)  # type: ignore[misc]
                async with await asking as answer:
                    assert answer.status == 504
            async with session.get(run.url + "/v1/models") as answer:
                assert answer.status == 200
        assert len(replica.requests) == 5


async def test_on_a_websocket_it_counts_for_each_message() -> None:
    async with hanging() as (replica, run), dial(run, additional_headers=LATER) as client:
        for number in (1, 2):
            await send(client)
            await expired(run, lambda number=number: len(replica.requests) == number)  # type: ignore[misc]
            (error,) = await receive_all(client)
            assert (error["type"], error["status"], error["error"]["code"]) == ("error", 504, "deadline_exceeded")
        assert len(replica.requests) == 2


async def test_a_computed_prompt_is_paid_for(request_lines: Lines) -> None:
    async with hanging(prices={"m": {"input": 1.0, "output": 1.0}}) as (replica, run):
        asking = asyncio.create_task(run.post(headers=LATER))
        await expired(run, lambda: replica.requests)
        assert (await asking)[0] == 504
        (line,) = request_lines()
        assert (line["status"], line["code"]) == (504, "deadline_exceeded")
        assert line["cost_usd"] > 0
        assert line["estimated"]


async def test_a_thousand_deadlines_leave_nothing() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        for _ in range(20):
            codes = await asyncio.gather(*[run.post(headers={"X-Request-Timeout": "3600"}) for _ in range(50)])
            assert {status for status, _, _ in codes} == {200}
        loop: Any = asyncio.get_running_loop()
        held = getattr(loop, "_scheduled", [])
        assert not [timer for timer in held if not timer.cancelled() and "Deadlines" in repr(timer)]


@uncompiled
def test_a_request_of_the_gateway_itself_has_none() -> None:
    async def check() -> None:
        asked = BytesRequest(b"{}", CHAT, **{"X-Request-Timeout": "1"})
        async with FakeReplica() as replica, running(replica) as run:
            deadlines = run.gateway[Deadlines]

            def exchange_of(request: BytesRequest | InternalRequest) -> Exchange:
                return Exchange(request, run.gateway.lifecycle.dialects.at(CHAT), new_record(None, CHAT, 0.0))

            def reply() -> ClientReply:
                return BytesReply()

            assert deadlines.concerns(exchange_of(asked))
            assert not deadlines.concerns(exchange_of(InternalRequest(asked, "r", reply, asked.lease)))
            asked.upgrades = True
            assert not deadlines.concerns(exchange_of(asked)), "nor a session"

    asyncio.run(check())
