"""A client that takes nothing is disconnected, whatever it has asked for; one that takes it slowly gets all of it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from replica.api.server import ServerConfig
from replica.sim.cost import SimConfig
from tests.replica.api.test_server import chat
from tests.replica.conftest import Replica, serve
from tests.replica.fakes import WatchedEngine

ENDLESS = {"prompt": "Hi", "max_tokens": 300_000, "ignore_eos": True}


def request(path: str, body: object) -> bytes:
    data = orjson.dumps(body)
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass(slots=True)
class Narrow:
    """A client with a small buffer. `cut`: the server has closed the connection instead of answering."""

    replica: Replica
    socket: socket.socket
    cut: asyncio.Event

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self) -> bytes:
        """What comes next; empty at the end."""
        return await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)


@contextlib.asynccontextmanager
async def narrow(send_timeout_s: float, buffer: int, max_body_bytes: int = 1 << 24) -> AsyncIterator[Narrow]:
    cut = asyncio.Event()

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        finally:
            if request.transport is None or request.transport.is_closing():
                cut.set()

    engine = WatchedEngine(SimConfig(kv_tokens=400_000, prefill_rate=1e6, decode_rate=1e6))
    config = ServerConfig(send_timeout_s=send_timeout_s, max_body_bytes=max_body_bytes)
    async for replica in serve(engine, None, config, around=[watch]):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", int(replica.url.rpartition(":")[2])))
            yield Narrow(replica, client, cut)


@pytest.mark.parametrize(
    "asked",
    [
        request("/v1/completions", ENDLESS | {"stream": True}),
        request("/v1/completions", ENDLESS),
        request("/tokenize", {"prompt": "w " * 100_000, "return_token_strs": True}),
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 300,
    ],
    ids=["stream", "whole", "tokens", "metrics"],
)
async def test_a_client_that_never_reads_is_left(asked: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with narrow(0.2, 4096) as client:
        await client.send(asked)
        async with asyncio.timeout(30):
            await client.cut.wait()
        async with client.replica.http.get(client.replica.url + "/load") as response:
            assert await response.json() == {"server_load": 0}
        assert (await client.replica.post("/v1/chat/completions", chat("Hi")))[0] == 200
        with contextlib.suppress(ConnectionResetError):
            while await client.read():  # what was on its way, and then the end
                pass
        assert not caplog.records


async def test_answers_that_are_not_taken_have_a_bound() -> None:
    """Until this one of megabytes is gone, nothing else is begun where all bodies may have 320,000 bytes."""
    async with narrow(60.0, 4096, max_body_bytes=20_000) as client:
        await client.send(request("/v1/completions", ENDLESS))
        assert (await client.read()).startswith(b"HTTP/1.1 200 ")
        status, answer, headers = await client.replica.post("/v1/chat/completions", chat("Hi"))
        error: Any = answer["error"]
        assert (status, error["code"], "Retry-After" in headers) == (503, "queue_full", True)
        client.socket.close()
        async with asyncio.timeout(30):
            await client.cut.wait()
        assert (await client.replica.post("/v1/chat/completions", chat("Hi")))[0] == 200


async def test_a_client_that_takes_a_whole_answer_too_slowly_is_left() -> None:
    """It takes something in each `send_timeout_s`, and would hold megabytes of what all may have for long."""
    async with narrow(0.5, 4096) as client:
        await client.send(request("/v1/completions", ENDLESS))
        left = asyncio.create_task(client.cut.wait())
        with contextlib.suppress(ConnectionResetError):
            while await client.read():
                await asyncio.wait([left], timeout=0.05)
        assert left.done()


async def test_a_client_that_reads_slowly_gets_all() -> None:
    """It takes longer than `send_timeout_s`, but not by what its bytes may take."""
    async with narrow(1.0, 1 << 16) as client:
        await client.send(request("/v1/completions", ENDLESS))
        got = bytearray()
        while b"\r\n\r\n" not in got:
            got += await client.read()
        head, _, body = bytes(got).partition(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        assert b"application/json" in head
        got = bytearray(body)
        began = asyncio.get_running_loop().time()
        pause, next_pause = length // 16, length // 16
        while len(got) < length:
            piece = await client.read()
            assert piece, f"cut off after {len(got)} of {length} bytes"
            got += piece
            if len(got) >= next_pause:
                await asyncio.sleep(0.1)
                next_pause += pause
        assert asyncio.get_running_loop().time() - began > 1.0
        assert orjson.loads(got)["usage"]["completion_tokens"] == 300_000
        await client.send(request("/v1/chat/completions", chat("Hi")))
        assert (await client.read()).startswith(b"HTTP/1.1 200 "), "the connection goes on"
        assert not client.cut.is_set()
