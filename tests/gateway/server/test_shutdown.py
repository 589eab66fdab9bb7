"""Shutdown: running requests may finish, those that do not finish get an error, and it takes no longer than it should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
import openai
import pytest

from gateway.app import Gateway, compose, serve
from gateway.cluster.commands import ControlPlane, LocalControl, SingleProcess
from gateway.core import Surroundings
from gateway.request.running import ROUND_S, ROUNDS, RunningRequests
from gateway.server.http.accept import BATCH
from tests.gateway.conftest import BODY, LOGGED, eventually
from tests.support.configs import load
from tests.support.fakes import FakeReplica, answers, hangs, streams

RAW = json.dumps(BODY).encode()
RAW = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(RAW), RAW)
CLIENTS = BATCH + 36  # more than are accepted at once


@dataclass(slots=True)
class Serving:
    gateway: Gateway
    url: str
    client: openai.AsyncOpenAI
    stop: asyncio.Event
    hurry: asyncio.Event
    over: asyncio.Task[None]

    async def refuses(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        except ConnectionError:
            return True
        writer.close()
        return False


class SlowEnd(SingleProcess):
    """Has much to write at the end."""

    def __init__(self, local: LocalControl) -> None:
        super().__init__(local)
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def stop(self) -> None:
        self.begun.set()
        await self.go_on.wait()


@contextlib.asynccontextmanager
async def serving(
    replica: FakeReplica, drain_timeout_s: float, control_plane: Callable[[LocalControl], ControlPlane] = SingleProcess
) -> AsyncIterator[Serving]:
    """The gateway as the command runs it."""
    raw = {"listen": "127.0.0.1:0", "pools": [{"replicas": [replica.url]}], "limits": {"drain_timeout_s": drain_timeout_s}}
    stop, hurry, started = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
    gateway = compose(load(None, raw, env={}), LOGGED, Surroundings(control_plane=control_plane))
    over = asyncio.create_task(serve(gateway, stop, hurry, started.set_result))
    url = await started
    try:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            yield Serving(gateway, url, client, stop, hurry, over)
    finally:
        stop.set()
        hurry.set()
        await over
        for _ in range(5):
            await asyncio.sleep(0)  # connections that were closed end in the loop's next rounds


async def test_while_requests_still_come_the_drain_goes_on() -> None:
    """Each ends before the next one begins, so that at any moment it may look idle."""
    running, ended, come = RunningRequests(), 0, 60

    async def client() -> None:
        nonlocal ended
        for _ in range(come):
            task = running.enter()
            await asyncio.sleep(0.001)
            running.leave(task)
            ended += 1
            await asyncio.sleep(ROUND_S / 2)

    asking = asyncio.create_task(client())
    await running.wait(30.0, asyncio.Event())
    assert ended == come
    await asking


async def test_a_running_stream_finishes_and_nothing_new_is_accepted() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go_on)]) as replica, serving(replica, 60) as gateway, asyncio.timeout(40):
        parts = aiter(await gateway.client.chat.completions.create(**BODY, stream=True))
        assert (await anext(parts)).choices[0].delta.content == "a"
        gateway.stop.set()
        while not await gateway.refuses():  # noqa: ASYNC110  (a listening socket has no event)
            await asyncio.sleep(0.002)
        assert not gateway.over.done()
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]
        await gateway.over


@pytest.mark.parametrize("by", ["time", "a second signal"])
async def test_what_does_not_finish_is_ended_with_a_word(by: str) -> None:
    never = asyncio.Event()
    replica = FakeReplica([streams("a", "b", hold=never), hangs(never)])
    limit = 0.2 if by == "time" else 600
    async with replica, serving(replica, limit) as gateway, aiohttp.ClientSession() as session, asyncio.timeout(40):
        parts = aiter(await gateway.client.chat.completions.create(**BODY, stream=True))
        assert (await anext(parts)).choices[0].delta.content == "a"
        waiting = asyncio.create_task(session.post(f"{gateway.url}/v1/chat/completions", json=BODY))
        await eventually(lambda: len(replica.requests) == 2)
        gateway.stop.set()
        if by != "time":
            gateway.hurry.set()
        with pytest.raises(openai.APIError, match="shutting down"):
            await anext(parts)
        answer = await waiting
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "shutting_down")
        assert answer.headers["Connection"] == "close"
        await gateway.over


async def test_whoever_the_kernel_has_let_in_is_answered() -> None:
    """They connect and send their requests before the gateway's loop has its turn; then it is to stop."""
    async with FakeReplica() as replica, serving(replica, 60) as gateway, asyncio.timeout(40):
        address = ("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(address)) for _ in range(CLIENTS)]
            for client in clients:
                client.sendall(RAW)
            gateway.stop.set()
            await gateway.over
            for client in clients:
                answer = client.recv(10_000)
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                assert b"Connection: close" in answer
    assert len(replica.requests) == CLIENTS


async def test_a_client_that_got_no_connection_close_may_send_one_more_request() -> None:
    go_on = asyncio.Event()
    replica = FakeReplica([streams("a", "b", hold=go_on), answers()])
    async with replica, serving(replica, 60) as gateway, aiohttp.ClientSession() as session, asyncio.timeout(40):
        url = f"{gateway.url}/v1/chat/completions"
        async with session.post(url, json={**BODY, "stream": True}) as first:
            assert "Connection" not in first.headers
            gateway.stop.set()
            while not await gateway.refuses():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            go_on.set()
            await first.read()
        for _ in range(50):
            await asyncio.sleep(0)  # it is in no hurry
        async with session.post(url, json=BODY) as second:
            assert (second.status, second.headers["Connection"]) == (200, "close")
        await gateway.over


async def test_while_it_leaves_it_serves_all_and_closes_their_connections() -> None:
    async with (
        FakeReplica() as replica,
        serving(replica, 60) as gateway,
        aiohttp.ClientSession() as session,
        asyncio.timeout(40),
    ):
        url = f"{gateway.url}/v1/chat/completions"
        async with session.post(url, json=BODY) as kept, session.get(f"{gateway.url}/ready") as before:
            assert (kept.status, before.status) == (200, 200)
        gateway.gateway.begin_leaving()
        for path in ("/ready", "/health"):
            async with session.get(gateway.url + path) as answer:
                assert (answer.status, answer.headers["Connection"]) == (503 if path == "/ready" else 200, "close")
        for _ in range(3):  # on new connections
            async with session.post(url, json=BODY) as answer:
                assert (answer.status, answer.headers["Connection"]) == (200, "close")
        async with session.ws_connect(f"{gateway.url}/v1/responses") as socket:
            gateway.stop.set()
            assert (await socket.receive()).type == aiohttp.WSMsgType.CLOSE
        await gateway.over


async def test_no_connection_is_idle_while_the_end_takes_its_time() -> None:
    """A request on it would not be waited for."""
    made: list[SlowEnd] = []

    def control_plane(local: LocalControl) -> ControlPlane:
        made.append(SlowEnd(local))
        return made[0]

    async with FakeReplica() as replica, serving(replica, 60, control_plane) as gateway, asyncio.timeout(40):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(RAW)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Connection: close" not in head
        gateway.stop.set()
        await made[0].begun.wait()
        await reader.read()  # the answer's body, and the end
        writer.close()
        assert not gateway.over.done()
        made[0].go_on.set()
        await gateway.over


async def test_what_comes_in_the_moment_when_idle_connections_are_closed_is_waited_for() -> None:
    running, released = RunningRequests(), asyncio.Event()
    closings: list[asyncio.Task[None]] = []

    async def request() -> None:
        task = running.enter()
        await released.wait()
        running.leave(task)

    def close_idle() -> bool:
        if not closings:
            closings.append(asyncio.create_task(request()))
            asyncio.get_running_loop().call_later(3 * ROUNDS * ROUND_S, released.set)
        return True

    await running.wait(30.0, asyncio.Event(), close_idle)
    assert closings[0].done()
    assert released.is_set()
