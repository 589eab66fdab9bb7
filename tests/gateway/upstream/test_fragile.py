"""Connections to a server that ends when one closes before the whole request was there."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.errors import UNREACHABLE, ReplicaFailure
from gateway.upstream.access.fragile import FragilePool
from gateway.upstream.connection import Connection
from gateway.upstream.timeouts import Limits

LIMITS = Limits(60, 60, 60)
DISMISSAL = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


class Held:
    """A Connector: makes a connection when it is let. made: those that it has made."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def connect(self, timeout_s: float) -> Connection:
        self.asked.set()
        await self.let.wait()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(loop), "127.0.0.1", self._port)
        return connection


class Server:
    """received: by connection, all that came until its end. Reads when it is let."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.over = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.port = self._listener.getsockname()[1]

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=1 << 18)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.reads.wait()
        data = b""
        while part := await reader.read(1 << 16):
            data += part
            if data == DISMISSAL:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        self.received.append(data)
        self.over.set()
        writer.close()


async def test_a_connection_that_nobody_wants_any_more_gets_a_harmless_request() -> None:
    async with Server() as server:
        pool = FragilePool(held := Held(server.port), None, DISMISSAL)
        await pool.turn(1)
        asking = asyncio.create_task(pool.connect(5))
        await held.asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert pool.busy, "the next one must not connect yet"
        held.let.set()
        await server.over.wait()
        assert server.received == [DISMISSAL]
        await pool.turn(5)


async def test_so_does_one_that_comes_too_late() -> None:
    async with Server() as server:
        pool = FragilePool(held := Held(server.port), None, DISMISSAL)
        await pool.turn(1)
        with pytest.raises(ReplicaFailure) as late:
            await pool.connect(0.01)
        assert (late.value.reason, pool.busy) == (UNREACHABLE, True)
        held.let.set()
        await server.over.wait()
        assert server.received == [DISMISSAL]


async def test_it_is_closed_when_its_whole_request_was_sent() -> None:
    body = b"x" * (16 << 20)  # more than the kernel takes
    async with Server() as server:
        server.reads.clear()
        pool = FragilePool(held := Held(server.port), None, DISMISSAL)
        held.let.set()
        await pool.turn(1)
        connection = await pool.connect(5)
        connection.send(b"head", body, to_head=False, limits=LIMITS)
        pool.give_back(connection)
        assert pool.busy
        server.reads.set()
        await server.over.wait()
        assert server.received == [b"head" + body]
        await pool.turn(5)


async def test_one_at_a_time_first_come_first_served() -> None:
    async with Server() as server:
        pool = FragilePool(held := Held(server.port), None, DISMISSAL)
        held.let.set()
        order = list[int]()

        async def ask(number: int) -> None:
            await pool.turn(5)
            order.append(number)
            connection = await pool.connect(5)
            connection.send(DISMISSAL, to_head=False, limits=LIMITS)
            await connection.wait()
            assert len(order) == number + 1, "nobody else has come meanwhile"
            pool.give_back(connection)

        await asyncio.gather(*map(ask, range(5)))
        assert order == [0, 1, 2, 3, 4]


async def test_who_waits_too_long_is_told_why_and_holds_nothing() -> None:
    pool = FragilePool(Held(1), None, DISMISSAL)
    await pool.turn(1)
    with pytest.raises(ReplicaFailure, match="busy with other requests") as late:
        await pool.turn(0.01)
    assert (late.value.reached, late.value.blameless) == (0, True)


async def test_a_refused_connection_ends_the_turn() -> None:
    class Refuses:
        async def connect(self, timeout_s: float) -> Connection:
            raise ReplicaFailure("refused", "no")

    pool = FragilePool(Refuses(), None, DISMISSAL)
    for _ in range(2):
        await pool.turn(1)
        with pytest.raises(ReplicaFailure, match="no"):
            await pool.connect(1)
