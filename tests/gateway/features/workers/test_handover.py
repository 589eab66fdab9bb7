"""Connections that one process accepts and another one serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from gateway.features.workers.handover import BATCH, Handover, Receiver
from tests.gateway.conftest import eventually
from tests.support.limits import open_files as open_files_limit

WAIT_S = 60.0  # a thread that waited for ever would keep its event loop from ending, too


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"hello")  # type: ignore[attr-defined]  # uvloop's is no subclass of asyncio.Transport
        transport.close()


@contextlib.contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, the supervisor's end and the worker's."""
    with socket.create_server(("127.0.0.1", 0), backlog=500) as listener, contextlib.ExitStack() as stack:
        listener.setblocking(False)
        ours, its = (stack.enter_context(end) for end in socket.socketpair())
        ours.setblocking(False)
        yield listener, ours, its


async def greeting(listener: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        return await reader.read()
    finally:
        writer.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_connections_are_served_by_the_receiver_until_the_handover_is_closed() -> None:
    with sockets() as (listener, ours, its):
        receiver, handover = Receiver(its, Greeter), Handover([listener], lambda: [ours])
        assert await asyncio.gather(*(greeting(listener) for _ in range(3 * BATCH))) == [b"hello"] * (3 * BATCH)
        assert repr(handover) == f"<Handover open, {3 * BATCH} connections passed on>"
        handover.close()
        late = asyncio.create_task(greeting(listener))
        await asyncio.wait([late], timeout=0.05)
        assert not late.done()
        again = Handover([listener], lambda: [ours])
        assert await late == b"hello", "it has waited"
        again.close()
        receiver.close()


async def test_what_no_worker_takes_stays_in_the_queue() -> None:
    with sockets() as (listener, ours, its), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(listener.getsockname(), WAIT_S)) for _ in range(300)]
        before = open_files()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that the kernel allows
        nobody = Handover([listener], list)
        await eventually(lambda: not nobody.open)
        handover = Handover([listener], lambda: [ours])
        await eventually(lambda: handover._retry is not None)
        assert nobody.passed_on == 0
        assert 0 < handover.passed_on < 100, "the receiver does not read"
        assert open_files() <= before
        receiver = Receiver(its, Greeter)
        await eventually(lambda: handover.passed_on == len(clients))
        for client in clients:
            assert await asyncio.to_thread(client.recv, 5) == b"hello"
        handover.close()
        receiver.close()


async def test_without_file_descriptors_it_asks_again_later_and_not_at_once() -> None:
    with sockets() as (listener, ours, its):
        receiver, handover = Receiver(its, Greeter), Handover([listener], lambda: [ours])
        with socket.socket() as client:
            client.settimeout(WAIT_S)
            with open_files_limit(4):
                client.connect(listener.getsockname())
                await eventually(lambda: handover._retry is not None)
            assert await asyncio.to_thread(client.recv, 5) == b"hello"
        handover.close()
        receiver.close()


async def test_connections_that_are_lost_for_want_of_descriptors_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with sockets() as (listener, ours, its):
        receiver = Receiver(its, Greeter)
        for lost in (5, 3):
            caplog.clear()
            with open_files_limit(0):
                for _ in range(lost):
                    socket.send_fds(ours, [b"c"], [listener.fileno()])
                await eventually(lambda lost=lost: receiver.lost == lost)  # type: ignore[misc]
            with contextlib.closing(Handover([listener], lambda: [ours])):
                assert await greeting(listener) == b"hello"
            logged = [(record.message, vars(record).get("lost")) for record in caplog.records]
            assert logged == [
                ("connections that are handed over are lost: this worker has no file descriptors left", None),
                ("connections that are handed over arrive again", lost),
            ]
        receiver.close()


async def test_each_of_several_workers_gets_some_and_one_that_has_ended_is_passed_over() -> None:
    counts = [0, 0]

    def counting(which: int) -> Greeter:
        counts[which] += 1
        return Greeter()

    with sockets() as (listener, one, its_one), sockets() as (_, two, its_two), sockets() as (_, ended, its_end):
        its_end.close()
        receivers = [Receiver(its_one, lambda: counting(0)), Receiver(its_two, lambda: counting(1))]
        handover = Handover([listener], lambda: [ended, one, two])
        assert await asyncio.gather(*(greeting(listener) for _ in range(40))) == [b"hello"] * 40
        assert min(counts) >= 10
        handover.close()
        for receiver in receivers:
            receiver.close()


async def test_a_receiver_ends_with_its_supervisor() -> None:
    with sockets() as (_, ours, its):
        Receiver(its, Greeter)
        ours.close()
        await eventually(lambda: its.fileno() == -1)
