"""A gateway whose aiohttp has moved: everything is answered through the public API alone, with one warning in the log."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from gateway.app import Gateway, compose, serve
from gateway.cluster.side_sockets import side_sockets
from gateway.config.source import load
from gateway.core import Surroundings
from gateway.server.aiohttp_seam import Seam
from gateway.server.fallback.server import WRITTEN_AHEAD
from tests.gateway.conftest import BODY, LOGGED, eventually
from tests.support.fakes import FakeReplica, FakeRequest, answers, chunk, dies_now, event, hangs, http, streams, writes

CHAT = "/v1/chat/completions"
MIB = 1 << 20
STREAM = {**BODY, "stream": True}


@dataclass(slots=True)
class Run:
    gateway: Gateway
    url: str
    admin_url: str
    stop: asyncio.Event
    over: asyncio.Task[None]
    session: aiohttp.ClientSession
    client: openai.AsyncOpenAI

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, body: Any = BODY, path: str = CHAT, **options: Any) -> tuple[int, Any, Any]:
        data = {"json": body} if isinstance(body, dict) else {"data": body}
        async with self.session.post(self.url + path, **data, **options) as answer:
            return answer.status, answer.headers, await answer.json(content_type=None)


@contextlib.asynccontextmanager
async def moved(*replicas: FakeReplica, **more: Any) -> AsyncIterator[Run]:
    """As the command runs it, but that the check finds something."""
    raw = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "health": {"interval_s": 60}, **more}
    config = load(None, {"pools": [{"replicas": [replica.url for replica in replicas]}], **raw}, env={})
    stop, hurry, started = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
    gateway = compose(config, LOGGED, Surroundings(seam=Seam(lambda: ["RequestHandler._waiter"])))
    with side_sockets(config) as sides:
        over = asyncio.create_task(serve(gateway, stop, hurry, started.set_result, sides=sides))
        try:
            url = await started
            async with (
                aiohttp.ClientSession() as session,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
                asyncio.timeout(40),
            ):
                yield Run(gateway, url, sides.urls["admin_url"], stop, over, session, client)
            await eventually(lambda: gateway.router.ledger.open_leases == 0)
            gateway.router.check()
        finally:
            stop.set()
            hurry.set()
            await over
    assert gateway.served.memory.held == 0
    assert gateway.served.connections.open == 0


async def test_a_chat_request_a_stream_and_an_operator_are_answered_and_the_log_has_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with FakeReplica([answers(), streams("a", "b"), answers()]) as replica, moved(replica) as run:
        status, headers, body = await run.post()
        assert (status, headers["Server"], headers["X-Warmroute-Replica"]) == (200, "warmroute", replica.name)
        assert body["choices"]
        parts = [part async for part in await run.client.chat.completions.create(**BODY, stream=True)]
        assert [part.choices[0].delta.content for part in parts if part.choices] == ["a", "b"]
        async with run.session.post(f"{run.admin_url}/warmroute/drain", json={"name": replica.name}) as answer:
            assert (answer.status, (await answer.json())["draining"]) == (200, True)
        assert (await run.post())[0] == 503
        async with run.session.get(f"{run.admin_url}/metrics") as answer:
            assert 'warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"} 2.0' in await answer.text()
    records = [record for record in caplog.records if "aiohttp has moved" in record.message]
    assert [vars(record)["moved"] for record in records] == [["RequestHandler._waiter"]]


async def test_a_stream_comes_as_it_is_made_and_is_finished_at_the_end() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as replica, moved(replica) as run:
        parts = aiter(await run.client.chat.completions.create(**BODY, stream=True))
        assert (await anext(parts)).choices[0].delta.content == "a"
        run.stop.set()
        await eventually(lambda: run.gateway.served.running.draining)
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts if part.choices] == ["b"]


async def test_a_client_that_leaves_frees_its_replica() -> None:
    async with FakeReplica([hangs(asyncio.Event())]) as replica, moved(replica) as run:
        asking = asyncio.create_task(run.post())
        await eventually(lambda: replica.requests)
        asking.cancel()
        await eventually(lambda: replica.gone == 1)


async def test_a_client_that_does_not_read_holds_its_replica_back() -> None:
    written, size, pieces = 0, 100_000, 200

    async def floods(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(pieces):
            writer.write(chunk(event("~" * size)))
            await writer.drain()
            written += size
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()

    async with FakeReplica([floods]) as replica, moved(replica) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port, limit=1 << 10)
        writer.write(raw(json.dumps(STREAM).encode(), b"Connection: close"))
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while written != before:
            before = written
            for _ in range(500):
                await asyncio.sleep(0)
        assert 0 < written < pieces * size
        got = await reader.read()
        assert got.count(b"~") == pieces * size
        assert got.endswith(b"0\r\n\r\n")
        writer.close()


def raw(body: bytes, *lines: bytes, target: bytes = CHAT.encode()) -> bytes:
    head = [b"POST %b HTTP/1.1" % target, b"Host: h", b"Content-Length: %d" % len(body), *lines, b"", b""]
    return b"\r\n".join(head) + body


async def first_line(run: Run, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
    writer.write(data)
    line = await reader.readline()
    writer.close()
    return line


async def test_what_is_refused_elsewhere_is_refused_here() -> None:
    async with FakeReplica() as replica, moved(replica, limits={"body_mb": 1, "body_s": 0.2}) as run:
        assert b" 413 " in await first_line(run, raw(b"x" * (2 << 20)))
        assert b" 408 " in await first_line(run, raw(b"x" * 100)[:-1])
        assert b" 400 " in await first_line(run, raw(b"{}", target=b"/v1/../admin"))
        assert b" 417 " in await first_line(run, raw(b"{}", b"Expect: more"))
        assert b" 505 " in await first_line(run, raw(b"{}").replace(b"HTTP/1.1", b"HTTP/2.0"))
        assert not replica.requests


async def test_compressed_bodies_are_read() -> None:
    async with FakeReplica([answers()]) as replica, moved(replica) as run:
        body = gzip.compress(json.dumps(BODY).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        assert (await run.post(body, headers=headers))[0] == 200
        assert json.loads(replica.requests[0].body)["messages"] == BODY["messages"]


async def test_a_connection_too_many_is_refused_and_a_place_comes_back() -> None:
    async with FakeReplica() as replica, moved(replica, limits={"connections": 1}) as run:
        _, first = await asyncio.open_connection("127.0.0.1", run.port)
        await eventually(lambda: run.gateway.served.connections.open == 1)
        assert b" 503 " in await first_line(run, raw(b"{}"))
        first.close()
        await eventually(lambda: run.gateway.served.connections.open == 0)
        assert (await run.post())[0] == 200


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    async with FakeReplica([streams("a", die=True)]) as replica, moved(replica) as run:
        async with run.session.post(run.url + CHAT, json=STREAM) as answer:
            text = await answer.text()
        assert '"a"' in text
        assert '"error"' in text


AHEAD = 10  # requests on one connection, each with an answer of LONG bytes: more than the kernel's buffers hold of them
LONG = 900_000  # bytes; read whole from the replica


@contextlib.asynccontextmanager
async def unread(run: Run) -> AsyncIterator[socket.socket]:
    """A client that sends requests ahead and reads nothing by itself."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", run.port))
        await loop.sock_sendall(client, raw(json.dumps(BODY).encode()) * AHEAD)
        yield client


def long_answers() -> FakeReplica:
    return FakeReplica([writes(http(200, json.dumps({"x": "~" * LONG}).encode()))])


def unread_bytes(run: Run) -> int:
    """What is charged while no replica is asked: beside heads only what clients have not read."""
    return 0 if run.gateway.router.ledger.open_leases else run.gateway.served.memory.held


async def test_answers_that_clients_do_not_read_are_charged_and_what_is_too_much_is_refused() -> None:
    limits = {"inflight_mb": 4, "drain_timeout_s": 1}
    async with long_answers() as replica, moved(replica, limits=limits) as run, contextlib.AsyncExitStack() as stack:
        memory = run.gateway.served.memory
        for _ in range(20):
            await stack.enter_async_context(unread(run))
        await eventually(lambda: memory.refused > 0 and unread_bytes(run) > memory.largest // 2)
        assert memory.held <= memory.limit
        memory.check()


async def test_answers_that_are_read_late_are_charged_until_then_and_come_whole() -> None:
    loop, got = asyncio.get_running_loop(), 0
    async with long_answers() as replica, moved(replica) as run, unread(run) as client:
        memory = run.gateway.served.memory
        await eventually(lambda: unread_bytes(run) >= WRITTEN_AHEAD)
        while got < AHEAD * LONG:
            got += (await loop.sock_recv(client, MIB)).count(b"~")
        assert got == AHEAD * LONG
        await eventually(lambda: memory.held == 0)


async def test_a_plain_answer_that_breaks_off_resets_an_http_1_0_client() -> None:
    """A plain end would look like that of a complete answer."""

    async def breaks_off(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(chunk(b"x" * 100_000))
        await writer.drain()
        dies_now(writer)

    async with FakeReplica([breaks_off]) as replica, moved(replica) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(raw(b"{}", target=b"/v1/files").replace(b"HTTP/1.1", b"HTTP/1.0"))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_http_1_0_has_its_answer_up_to_the_end_of_the_connection() -> None:
    async with FakeReplica([streams("a", "b")]) as replica, moved(replica) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(raw(json.dumps(STREAM).encode()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        writer.close()
