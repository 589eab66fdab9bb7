"""The load generator against the mock replica, and against servers that lie: what it counts is what happened."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bench.measure.answer import WORD
from bench.measure.load import Closed, Open, closed_loop, open_loop
from bench.measure.mock import MockReplica
from bench.measure.replies import WORDS


@asynccontextmanager
async def serving(protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0)  # so that aborted connections are gone


def mock() -> MockReplica:
    return MockReplica(interval=0.001)


class Liar(asyncio.Protocol):
    """Answers whole requests with what it is given, in turns; b"" closes the connection, None: no answer."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self._answers = answers
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if self._seen.endswith(b"}"):
            self._seen = b""
            answer = self._answers.pop(0) if self._answers else answered(WORDS)
            if answer:
                self._transport.write(answer)
            elif answer is not None:
                self._transport.abort()


def answered(words: int, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, words * len(WORD), WORD * words)


async def test_whole_answers_are_good() -> None:
    async with serving(mock) as port:
        found = await closed_loop(Closed(port, os.getpid(), size=5000, connections=4, requests=50, warm=10))
    assert (found["sent"], found["good"], found["words"], found["errors"]) == (50, 50, 50 * WORDS, {})
    assert found["cpu_s"] > 0


async def test_streams_are_counted_chunk_by_chunk() -> None:
    async with serving(mock) as port:
        found = await closed_loop(Closed(port, chunks=20, connections=3, requests=9))
    assert (found["sent"], found["good"], found["words"], found["errors"]) == (9, 9, 180, {})
    assert 0 < found["gap_p50"] <= found["gap_p99"] < 1


async def test_every_lie_is_an_error_under_its_name() -> None:
    wrong = [answered(WORDS, 500), answered(WORDS - 1), b"HTTP/1.1 200 OK\r\n\r\n", b"", answered(WORDS) + b"x"]
    async with serving(lambda: Liar(wrong)) as port:
        found = await closed_loop(Closed(port, connections=1, requests=8))
    assert (found["sent"], found["good"]) == (8, 3)
    assert found["errors"] == {
        "status 500": 1,
        f"{WORDS - 1} words of {WORDS}": 1,
        "not HTTP: an answer that begins with b'HTTP/1.1 200 OK\\r\\n\\r\\n' and has no length": 1,
        "cut off": 1,
        "not HTTP: 1 bytes after the end of the answer": 1,
    }


async def test_a_stream_without_its_last_event_is_no_good_one() -> None:
    body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n word\r\n0\r\n\r\n"
    async with serving(lambda: Liar([body])) as port:
        found = await closed_loop(Closed(port, chunks=1, connections=1, requests=1))
    assert found["errors"] == {"no last event": 1}


async def test_an_answer_that_never_comes_is_an_error() -> None:
    async with serving(lambda: Liar([None])) as port:
        closed = await closed_loop(Closed(port, connections=1, requests=1, seconds=0.1, patience=0.1))
    async with serving(lambda: Liar([None, None, None])) as port:
        opened = await open_loop(Open(port, port, rate=30, seconds=0.1, chunks=0, even=True, patience=0.1))
    assert closed["errors"] == {"no answer": 1}
    assert opened["through"]["errors"] == {"no answer": 3}


async def test_nobody_listening_is_an_error() -> None:
    async with serving(mock) as port:
        pass
    found = await open_loop(Open(port, port, rate=30, seconds=0.1, even=True))
    assert found["through"]["errors"] == {"cannot connect: ConnectionRefusedError": 3}


async def test_open_load_goes_through_and_beside() -> None:
    async with serving(mock) as port, serving(mock) as direct:
        found = await open_loop(Open(port, direct, rate=100, beside=50, seconds=0.2, chunks=5, even=True, settle=0.0))
    through, beside = found["through"], found["direct"]
    assert (through["sent"], through["good"], through["words"]) == (20, 20, 100)
    assert (beside["sent"], beside["good"]) == (10, 10)
    assert 0.001 < through["first_p50"] <= through["first_p99"] < 1
