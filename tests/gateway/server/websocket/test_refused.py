"""Messages and handshakes that are refused are requests like any other: counted, timed, and one line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from gateway.server.websocket.responses_socket import MAX_QUEUED
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.request.test_dialects import CREATED, DELTA, events
from tests.gateway.server.websocket.test_frames import masked
from tests.gateway.server.websocket.test_responses_socket import (
    CREATE,
    WHOLE,
    answer,
    closed,
    dial,
    exchange,
    handshake,
    receive,
    send,
)
from tests.support.fakes import FakeReplica

Lines = Callable[[], list[dict[str, Any]]]


async def count(run: Running, code: int, endpoint: str = "/v1/responses", model: str = "unknown") -> float:
    labels = f'{{code="{code}",endpoint="{endpoint}",model="{model}"}}'
    return (await run.metrics()).get(f"warmroute_requests_total{labels}", 0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("hello", 400),
        ('{"type": "session.update"}', 400),
        ('{"type": "response.create", "input": "x", "stream_id": ""}', 400),
        ('{"type": "response.create", "model": 7}', 400),
        ('{"type": "response.create", "model": "m", "x": [' + "[],[]," * 400_000 + "[]]}", 413),
        (json.dumps({**CREATE, "previous_response_id": "a", "conversation": "b"}), 400),
        (json.dumps({**CREATE, "previous_response_id": 7}), 400),
    ],
)
async def test_a_refused_message(text: str, code: int, request_lines: Lines) -> None:
    headers = {"X-Request-Id": "mine", "X-Tenant-Id": "t"}
    async with FakeReplica(script=[WHOLE]) as replica, running(replica) as run:
        async with dial(run, additional_headers=headers) as client:
            await client.send(text)
            error = await receive(client)
            assert (error["status"], error["headers"]["x-request-id"]) == (code, "mine.1")
            assert await count(run, code) == 1
            await send(client)
            await answer(client)
        await eventually(lambda: run.gateway.served.memory.held == 0)
        seconds = await run.metrics()
        assert seconds['warmroute_request_seconds_count{endpoint="/v1/responses",model="unknown"}'] == 1
    lines = request_lines()
    assert [(line["id"], line["path"], line["status"], line["tenant"]) for line in lines] == [
        ("mine.1", "/v1/responses", code, "t"),
        ("mine.2", "/v1/responses", 200, "t"),
    ]
    assert lines[0]["error"] == error["error"]["message"]
    assert lines[0]["seconds"] >= 0
    assert not replica.requests[1:]


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\x81\x02hi", 400), (masked(2, b"x"), 400), (masked(1, b"\xff"), 400), (b"\x81\xff" + b"\xff" * 12, 413)],
    ids=["unmasked", "binary", "no text", "too long"],
)
async def test_a_message_that_cannot_be_read(data: bytes, code: int, request_lines: Lines) -> None:
    async with FakeReplica() as replica, running(replica) as run, dial(run) as client:
        client.transport.write(data)
        await closed(client)
        await eventually(lambda: run.gateway.served.memory.held == 0)
        assert await count(run, code) == 1
    assert [line["status"] for line in request_lines()] == [code]


async def test_a_message_that_takes_too_long(request_lines: Lines) -> None:
    limits = {"body_s": 0.2, "client_idle_s": 0.4}
    async with FakeReplica() as replica, running(replica, limits=limits) as run, dial(run, ping_interval=None) as client:
        client.transport.write(masked(1, b"{", fin=False))
        await eventually(lambda: run.gateway.served.memory.held > 0)
        await closed(client)
        await eventually(lambda: run.gateway.served.memory.held == 0)
        assert await count(run, 408) == 1
    assert [line["status"] for line in request_lines()] == [408]


async def test_a_message_over_the_memory_budget(request_lines: Lines) -> None:
    async with FakeReplica(script=[WHOLE]) as replica, running(replica, limits={"inflight_mb": 2, "body_mb": 1}) as run:
        async with dial(run) as client:
            budget = run.gateway.served.memory
            others = budget.lease("another client")
            assert others.grow(budget.largest - (100 << 10))
            await send(client, input="x" * (1 << 19))
            error = await receive(client)
            others.close()
            assert await count(run, error["status"]) == 1
        await eventually(lambda: run.gateway.served.memory.held == 0)
    assert [line["status"] for line in request_lines()] == [error["status"]]


async def flood(client: ClientConnection, more: int) -> None:
    text = json.dumps(CREATE).encode()
    client.transport.write(masked(1, text) * more)


async def test_messages_over_the_limit_and_at_the_end(request_lines: Lines) -> None:
    """Each of them has its line: refused at once (429), or when the gateway goes down (503)."""
    hold, hurry, more = asyncio.Event(), asyncio.Event(), 100
    async with FakeReplica(script=[events(CREATED, DELTA, then=hold)]) as replica, running(replica) as run:
        async with dial(run, max_queue=None) as client:
            await flood(client, 1 + MAX_QUEUED + more)
            await eventually(lambda: len(replica.requests) == 1)
            while (await count(run, 429)) < more:
                await receive(client)
            over = asyncio.create_task(run.gateway.served.running.wait(30, hurry))
            await eventually(lambda: run.gateway.served.running.draining)
            hurry.set()
            await over
            with contextlib.suppress(ConnectionClosed):
                async for _ in client:
                    pass
        await eventually(lambda: run.gateway.served.memory.held == 0)
    statuses = [line["status"] for line in request_lines()]
    assert statuses.count(429) == more
    assert statuses.count(503) == MAX_QUEUED
    assert len(statuses) == 1 + MAX_QUEUED + more
    assert len({line["id"] for line in request_lines()}) == len(statuses)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime"])
async def test_a_refused_handshake(path: str, request_lines: Lines) -> None:
    async with FakeReplica() as replica, running(replica) as run:

        async def opens(**headers: str) -> tuple[int, bytes]:
            asks = handshake(run, X_Request_Id="mine", **headers)
            return await exchange(run, asks.replace(b"/v1/responses", path.encode()))

        refused = [await opens(Origin="https://evil.example")]
        if path == "/v1/responses":
            refused.append(await opens(Sec_WebSocket_Version="8"))
            assert b"\r\nSec-WebSocket-Version: 13\r\n" in refused[-1][1]
            refused.append(await opens(Sec_WebSocket_Key="short"))
        run.gateway.served.running.drain()
        refused.append(await opens())
        statuses = [status for status, _ in refused]
        assert statuses == ([403, 426, 400, 503] if path == "/v1/responses" else [403, 503])
        assert all(b"\r\nX-Request-Id: mine\r\n" in head for _, head in refused)
        for status in statuses:
            assert await count(run, status, path) == 1
        await eventually(lambda: run.gateway.served.memory.held == 0)
    lines = request_lines()
    assert [(line["id"], line["path"], line["status"]) for line in lines] == [("mine", path, status) for status in statuses]
    assert not replica.requests
