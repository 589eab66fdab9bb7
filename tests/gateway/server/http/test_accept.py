"""Accepting connections: many in one iteration of the event loop, whoever fails; and nothing after the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from gateway.app import compose, serve
from gateway.cluster.listeners import CLIENT_LOST_S, open_listeners, refuse_new
from gateway.server.http.accept import BATCH, Acceptor
from tests.gateway.conftest import LOGGED
from tests.support.configs import load
from tests.support.fakes import FakeReplica
from tests.support.sockets import silence_of

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
ASK = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
CLIENTS = 200
ITERATIONS = 40  # one per connection would be five times as many


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine in either event loop."""

    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(main, 30))

    return run


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"hello")  # type: ignore[attr-defined]  # uvloop's is no subclass of asyncio.Transport
        transport.close()


class Troubled(socket.socket):
    """A listening socket whose first `accept` calls fail with these errors."""

    troubles: list[int]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.troubles:
            raise OSError(self.troubles.pop(0), "trouble")
        return super().accept()


def troubled(*troubles: int) -> Troubled:
    listener = Troubled()
    listener.troubles = list(troubles)
    listener.bind(("127.0.0.1", 0))
    listener.listen(BATCH)
    return listener


@contextlib.contextmanager
def clients(address: Any, count: int) -> Iterator[list[socket.socket]]:
    """They connect while the event loop stands still: the kernel has to hold them all."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, timeout=0.9)) for _ in range(count)]


async def iterations_until(condition: Callable[[], bool]) -> int:
    """Of the event loop."""
    count = 0
    while not condition():
        await asyncio.sleep(0)
        count += 1
    return count


async def iterations_until_readable(waiting: list[socket.socket]) -> int:
    """Until each of these sockets has something to read."""
    poll = select.poll()
    for each in waiting:
        poll.register(each, select.POLLIN)
    return await iterations_until(lambda: len(poll.poll(0)) == len(waiting))


def test_clients_that_connect_at_once_are_served_within_a_few_iterations(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """uvloop's own server takes an iteration for each, in which all others are read and written."""

    async def main() -> None:
        stop, hurry, started = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
        async with FakeReplica() as replica:
            raw = {"listen": "127.0.0.1:0", "pools": [{"replicas": [replica.url]}]}
            over = asyncio.create_task(serve(compose(load(None, raw, env={}), LOGGED), stop, hurry, started.set_result))
            port = int((await started).rpartition(":")[2])
            with clients(("127.0.0.1", port), CLIENTS) as waiting:
                for client in waiting:
                    client.sendall(ASK)
                taken = await iterations_until_readable(waiting)
                answers = {client.recv(12) for client in waiting}
            stop.set()
            await over
        assert answers == {b"HTTP/1.1 200"}
        assert taken <= ITERATIONS

    run(main())


def test_one_batch_per_iteration(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Clients who wait to be accepted do not keep out those who are."""

    async def main() -> None:
        made = 0

        def make() -> Greeter:
            nonlocal made
            made += 1
            return Greeter()

        (listener,) = open_listeners("127.0.0.1", 0)
        acceptor = Acceptor(listener, make)
        with clients(listener.getsockname(), 2 * BATCH) as waiting:
            await iterations_until(lambda: made > 0)
            assert made <= BATCH
            await iterations_until_readable(waiting)
        assert made == 2 * BATCH
        acceptor.close()
        await acceptor.wait_closed()

    run(main())


def test_a_client_that_has_left_does_not_keep_out_the_others(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def main() -> None:
        listener = troubled(errno.ECONNABORTED, errno.EPROTO)
        acceptor = Acceptor(listener, Greeter)
        with clients(listener.getsockname(), 3) as waiting:
            await iterations_until_readable(waiting)
            assert [client.recv(10) for client in waiting] == [b"hello"] * 3
        acceptor.close()

    run(main())


@pytest.mark.parametrize("why", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_resources_it_pauses_and_tries_again(run: Callable[[Coroutine[Any, Any, None]], None], why: int) -> None:
    async def main() -> None:
        listener = troubled(why)
        acceptor = Acceptor(listener, Greeter, retry_s=0.01)
        with clients(listener.getsockname(), 1) as waiting:
            await iterations_until(lambda: not listener.troubles)
            assert repr(acceptor) == "<Acceptor paused, 0 opening>"
            await iterations_until_readable(waiting)
            assert waiting[0].recv(10) == b"hello"
        await acceptor.wait_closed()
        assert repr(acceptor) == "<Acceptor accepting, 0 opening>"
        acceptor.close()

    run(main())


def test_nothing_is_accepted_after_the_end_of_a_pause(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def main() -> None:
        listener = troubled(errno.EMFILE)
        acceptor = Acceptor(listener, Greeter, retry_s=60)
        address = listener.getsockname()
        assert acceptor.sockets == (listener,)
        with clients(address, 1):
            await iterations_until(lambda: not listener.troubles)
            acceptor.close()
            acceptor.close()
        await acceptor.wait_closed()
        assert acceptor.sockets == ()
        assert repr(acceptor) == "<Acceptor closed, 0 opening>"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=0.9)

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters")
def test_the_last_connections_are_accepted_before_the_end_and_none_begins_in_between(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """A connection that begins between the last `accept` and `close` would be reset."""

    async def main() -> None:
        (listener,) = open_listeners("127.0.0.1", 0)
        address = listener.getsockname()
        acceptor = Acceptor(listener, Greeter)
        with clients(address, 3) as established, socket.socket() as late:
            refuse_new(listener)
            late.setblocking(False)
            assert late.connect_ex(address) == errno.EINPROGRESS
            await acceptor.finish()
            await acceptor.wait_closed()
            await iterations_until_readable(established)
            assert [client.recv(10) for client in established] == [b"hello"] * 3
            assert acceptor.sockets == ()
            assert select.select([], [late], [], 10)[1]  # it tries again after a second
            assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED

    run(main())


def test_small_parts_of_an_answer_are_sent_at_once(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Without TCP_NODELAY the second waits until the client has acknowledged the first, which takes it 40 ms."""

    async def main() -> None:
        (listener,) = open_listeners("127.0.0.1", 0)
        options: list[int] = []

        class Asking(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                sock: socket.socket = transport.get_extra_info("socket")
                options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        acceptor = Acceptor(listener, Asking)
        with clients(listener.getsockname(), 1):
            await iterations_until(lambda: bool(options))
        assert options == [1]
        acceptor.close()

    run(main())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_the_system_ends_connections_of_clients_that_are_gone_without_an_end(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """Without it a request waits for a machine without power for hours, and its replica with it."""

    async def main() -> None:
        (listener,) = open_listeners("127.0.0.1", 0)
        options: list[tuple[bool, float]] = []

        class Asking(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                sock: socket.socket = transport.get_extra_info("socket")
                options.append(silence_of(sock))
                transport.close()

        acceptor = Acceptor(listener, Asking)
        with clients(listener.getsockname(), 1):
            await iterations_until(lambda: bool(options))
        assert options == [(True, CLIENT_LOST_S)]
        acceptor.close()

    run(main())


def test_listeners_are_of_one_process_alone() -> None:
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(listener) for listener in open_listeners("127.0.0.1", 0)]
        with pytest.raises(OSError, match="in use"):
            open_listeners("127.0.0.1", first[0].getsockname()[1])
