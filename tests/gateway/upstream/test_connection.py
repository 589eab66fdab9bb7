"""A connection to a replica, without a network: what it costs to read in small pieces, and how a large body is written."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ReplicaFailure
from gateway.upstream.connection import Connection
from gateway.upstream.sending import SLICE
from gateway.upstream.timeouts import UpstreamTimeouts

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
LIMITS = UpstreamTimeouts(5, 5, 5)


class FakeTransport(asyncio.Transport):
    """Accepts what is written, or keeps it while it is `full`. writes: their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Connection | None = None
        self.data = bytearray()
        self.writes: list[int] = []
        self.full = False
        self.buffered = 0
        self.closed = False
        self.reads = True  # more may come; nothing comes by itself

    def write(self, data: Any) -> None:
        self.data += data
        self.writes.append(len(data))
        if self.full:
            self.buffered += len(data)
            assert self.protocol
            self.protocol.pause_writing()

    def flush(self) -> None:
        """The kernel accepts everything."""
        self.buffered = 0
        assert self.protocol
        self.protocol.resume_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It is full as soon as it has anything."""

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def connected() -> tuple[Connection, FakeTransport]:
    connection, transport = Connection(asyncio.get_running_loop()), FakeTransport()
    transport.protocol = connection
    connection.connection_made(transport)
    return connection, transport


def calls_of(action: Callable[[], object]) -> int:
    """How many functions are called by it, those in C included."""
    count = 0

    def note(_frame: object, event: str, _what: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


async def test_a_further_byte_costs_the_same_however_many_are_unread() -> None:
    connection, _ = connected()
    connection.send(b"GET", to_head=False, limits=LIMITS)
    connection.data_received(ANSWER + b"a")
    first = calls_of(lambda: connection.data_received(b"b"))
    for _ in range(5000):
        connection.data_received(b"c")
    assert calls_of(lambda: connection.data_received(b"d")) <= first + 2
    assert connection.unread == 5003
    assert calls_of(lambda: connection.peek(5000)) < 20, "only the parts that are asked for are looked at"
    assert connection.peek(5000) == b"ccd"
    assert connection.take() == b"ab" + b"c" * 5000 + b"d"
    assert connection.unread == 0
    connection.abort()
    connection.connection_lost(None)


@given(st.lists(st.binary(min_size=1, max_size=5)), st.integers(0, 60))
def test_a_peek_is_what_came_from_a_byte_on(parts: list[bytes], start: int) -> None:
    async def look() -> None:
        connection, _ = connected()
        connection.send(b"GET", to_head=False, limits=LIMITS)
        connection.data_received(ANSWER)
        for part in parts:
            connection.data_received(part)
        whole = b"".join(parts)
        assert connection.unread == len(whole)
        if start <= len(whole):
            assert connection.peek(start) == whole[start:]
        assert connection.peek() == connection.take() == whole
        connection.abort()
        connection.connection_lost(None)

    asyncio.run(look())


async def test_a_call_on_a_connection_that_has_ended_was_not_sent() -> None:
    connection, _ = connected()
    connection.connection_lost(None)
    with pytest.raises(ReplicaFailure, match="ended before the request") as caught:
        connection.send(b"GET", to_head=False, limits=LIMITS)
    assert caught.value.reached == 0


async def test_a_connection_that_is_lost_with_late_bytes_leaves_no_timer() -> None:
    connection, _ = connected()
    connection.send(b"GET", to_head=False, limits=LIMITS)
    connection.data_received(ANSWER + b"a\n" * 50_000)
    connection.pause()
    connection.connection_lost(None)
    assert not connection.release()
    assert connection._timer is None


class SettableLoop(asyncio.SelectorEventLoop):
    """Its time can be moved on."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


@pytest.mark.parametrize(
    ("held_s", "free_s", "blameless"),
    [(0.0, 0.0, False), (0.2, 0.0, False), (60.0, None, True), (60.0, 0.0, True), (60.0, 3.0, True), (60.0, 10.0, False)],
)
def test_an_end_counts_unless_the_answer_was_held_back_for_its_client(
    held_s: float, free_s: float | None, blameless: bool
) -> None:
    """free_s: since the client reads again; None: it does not."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SettableLoop)
        connection, _ = connected()
        for _ in range(2):  # the time held back in one answer does not count in the next one
            connection.send(b"GET", to_head=False, limits=UpstreamTimeouts(900, 900, 900))
            connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na")
            if not connection.used:
                connection.pause()
                loop.ahead_s += 60
                connection.resume()
                connection.data_received(b"b")
                assert connection.release()
        pumped = asyncio.create_task(connection.pump(lambda _: None))
        await turn()
        if held_s:
            connection.pause()
            loop.ahead_s += held_s
        if held_s and free_s is not None:
            connection.resume()
            loop.ahead_s += free_s
        connection.connection_lost(ConnectionResetError("reset by peer"))
        with pytest.raises(ReplicaFailure, match="reset by peer") as caught:
            await pumped
        assert caught.value.blameless is blameless
        connection.release()

    with asyncio.Runner(loop_factory=SettableLoop) as runner:
        runner.run(scenario())


BODY = bytes(range(256)) * (SLICE // 256) * 5 + b"end"


async def turn() -> None:
    """One turn of the event loop."""
    await asyncio.sleep(0)


async def test_a_large_body_is_written_in_slices_one_in_each_turn() -> None:
    connection, transport = connected()
    sent: list[int] = []
    connection.send(b"head", BODY, to_head=False, limits=LIMITS)
    connection.when_sent(lambda: sent.append(len(transport.data)))
    for number in range(1, 7):
        assert len(transport.writes) == 1 + number
        assert not sent or number == 6
        await turn()
    assert max(transport.writes) == SLICE
    assert bytes(transport.data) == b"head" + BODY
    assert sent == [len(transport.data)]
    connection.abort()
    connection.connection_lost(None)


async def test_a_large_body_waits_for_a_replica_that_does_not_read() -> None:
    connection, transport = connected()
    sent: list[int] = []
    transport.full = True
    connection.send(b"head", BODY, to_head=False, limits=LIMITS)
    connection.when_sent(lambda: sent.append(len(transport.data)))
    for _ in range(10):
        await turn()
    assert sum(transport.writes) <= len(b"head") + SLICE
    while not sent:
        before = len(transport.writes)
        transport.flush()
        assert len(transport.writes) <= before + 1
    assert bytes(transport.data) == b"head" + BODY
    assert transport.buffered == 0, "it is sent when nothing of it is in memory"
    connection.abort()
    connection.connection_lost(None)


@pytest.mark.parametrize("lost", [False, True])
async def test_nothing_is_written_after_the_end(lost: bool) -> None:
    """A replica may answer before it has read the whole body: such a connection is not used again."""
    connection, transport = connected()
    connection.send(b"head", BODY, to_head=False, limits=LIMITS)
    if lost:
        connection.connection_lost(None)
    else:
        connection.data_received(b"HTTP/1.1 413 no\r\nContent-Length: 0\r\n\r\n")
        assert connection.complete
        assert not connection.release()
        assert transport.closed
    before = len(transport.writes)
    for _ in range(3):
        await turn()
    assert len(transport.writes) == before
    connection.connection_lost(None)
