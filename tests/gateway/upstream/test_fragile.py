"""Connections to a server that crashes when one closes before the whole request was there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

import pytest

from gateway.errors import UNREACHABLE, ReplicaFailure
from gateway.upstream.access.fragile import FragilePool
from gateway.upstream.connection import Connection
from gateway.upstream.dialer import Dialer
from gateway.upstream.pool import Connector
from gateway.upstream.resolver import Resolver
from gateway.upstream.timeouts import UpstreamTimeouts

LIMITS = UpstreamTimeouts(60, 60, 60)
DISMISSAL = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n"


class Held:
    """A Connector: makes a connection when it is let, if it has the time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def connect(self, timeout_s: float) -> Connection:
        self.asked.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self.let.wait()
        except TimeoutError as late:
            raise ReplicaFailure(UNREACHABLE, "no connection") from late
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(loop), "127.0.0.1", self._port)
        return connection


def pool_of(connector: Connector, turns: asyncio.Lock | None = None, **more: float) -> FragilePool:
    return FragilePool(connector, None, DISMISSAL, turns or asyncio.Lock(), **more)


class Server:
    """received: by connection, all that came until its end. Reads, and answers a request, when it is let; answers the dismissal
    at once.
    """

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self._serving = list[asyncio.Task[None]]()
        self.over, self.answers = asyncio.Event(), asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.port = self._listener.getsockname()[1]

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=1 << 18)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reads.set()
        self.answers.set()
        self._server.close()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._serving.append(task)
        await self.reads.wait()
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := await reader.read(1 << 16):
                data += part
                if data == DISMISSAL:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                elif data == REQUEST:
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    await self.answers.wait()
                    writer.write(b"3\r\none\r\n")
        self.received.append(data)
        self.over.set()
        writer.close()


async def test_a_connection_that_nobody_wants_any_more_gets_a_harmless_request() -> None:
    async with Server() as server:
        pool = pool_of(held := Held(server.port))
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
        pool = pool_of(held := Held(server.port))
        await pool.turn(1)
        with pytest.raises(ReplicaFailure) as late:
            await pool.connect(0.01)
        assert (late.value.reason, pool.busy) == (UNREACHABLE, True)
        held.let.set()
        await server.over.wait()
        assert server.received == [DISMISSAL]


@pytest.mark.skipif(sys.platform != "linux", reason="fills the queue of a listener as Linux has it")
async def test_so_does_one_that_the_kernel_goes_on_making() -> None:
    """The queue of the listener is full: the SYN is sent again after a second, long after the time that the request had."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            listener.settimeout(0)
            pool = pool_of(Dialer(*address, None, Resolver(), one_by_one=True))
            await pool.turn(1)
            with pytest.raises(ReplicaFailure) as late:
                await pool.connect(0.05)
            assert (late.value.reason, pool.busy) == (UNREACHABLE, True)
            listener.accept()[0].close()
            loop = asyncio.get_running_loop()
            server, _ = await loop.sock_accept(listener)
            with server:
                server.setblocking(False)
                assert await loop.sock_recv(server, 1000) == DISMISSAL
                assert pool.busy
                await loop.sock_sendall(server, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                await pool.turn(5)


async def test_one_whose_server_does_not_read_its_request_is_closed_after_a_while() -> None:
    async with Server() as server:
        server.reads.clear()
        pool = pool_of(held := Held(server.port), send_s=0.05)
        held.let.set()
        await pool.turn(1)
        connection = await pool.connect(5)
        connection.send(b"head", b"x" * (16 << 20), to_head=False, limits=LIMITS)
        pool.give_back(connection)
        assert pool.busy
        await pool.turn(5)
        assert not connection.alive


async def sent(pool: FragilePool, *, probe: bool = False, limits: UpstreamTimeouts = LIMITS) -> Connection:
    """A request whose client, or a probe whose prober, does not wait for the answer."""
    await pool.turn(1)
    connection = await pool.connect(5)
    if not probe:
        pool.carries_request(connection, None)
    connection.send(REQUEST, to_head=False, limits=limits)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await connection.wait()
    pool.give_back(connection)
    return connection


async def test_it_is_busy_until_the_answer_to_a_client_that_has_left_begins() -> None:
    async with Server() as server:
        pool = pool_of(held := Held(server.port))
        held.let.set()
        connection = await sent(pool)
        assert (pool.busy, connection.alive) == (True, True)
        server.answers.set()
        await pool.turn(5)
        assert not connection.alive, "so that the server notices when it writes on"
        assert pool.answered_at > 0, "the answer is a sign of life"


async def test_or_until_its_time_is_over() -> None:
    async with Server() as server:
        pool = pool_of(held := Held(server.port))
        held.let.set()
        await sent(pool, limits=UpstreamTimeouts(60, 0.1, 60))
        assert pool.busy
        await pool.turn(5)


async def test_or_until_the_server_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pool = pool_of(held := Held(listener.getsockname()[1]))
        held.let.set()
        await sent(pool)
        assert pool.busy
        listener.accept()[0].close()
        await pool.turn(5)


async def test_a_probe_that_is_not_answered_in_time_is_closed_at_once() -> None:
    async with Server() as server:
        pool = pool_of(held := Held(server.port))
        held.let.set()
        connection = await sent(pool, probe=True)
        assert (pool.busy, connection.alive) == (False, False)


async def test_pools_of_one_server_have_their_turns_in_common() -> None:
    async with Server() as server:
        turns = asyncio.Lock()
        before, after = (pool_of(Held(server.port), turns) for _ in range(2))
        await before.turn(1)
        assert after.busy
        with pytest.raises(ReplicaFailure, match="busy with other requests"):
            await after.turn(0.01)


async def test_it_is_closed_when_its_whole_request_was_sent() -> None:
    body = b"x" * (16 << 20)  # more than the kernel takes
    async with Server() as server:
        server.reads.clear()
        pool = pool_of(held := Held(server.port))
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
        pool = pool_of(held := Held(server.port))
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
    pool = pool_of(Held(1))
    await pool.turn(1)
    with pytest.raises(ReplicaFailure, match="busy with other requests") as late:
        await pool.turn(0.01)
    assert (late.value.reached, late.value.blameless) == (0, True)


async def test_a_refused_connection_ends_the_turn() -> None:
    class Refuses:
        async def connect(self, timeout_s: float) -> Connection:
            raise ReplicaFailure("refused", "no")

    pool = pool_of(Refuses())
    for _ in range(2):
        await pool.turn(1)
        with pytest.raises(ReplicaFailure, match="no"):
            await pool.connect(1)
