"""What is much work to read is read in many turns of the event loop, from clients and from replicas, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import time
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from gateway.errors import GatewayError, bad_request
from gateway.turns import ALL_S, AT_ONCE, LARGE, SMALL, DeferredData, Turns, first_turn, turns_of
from gateway.upstream.connection import MAX_UNREAD, Connection
from tests.gateway.conftest import eventually, longest_pause, running
from tests.gateway.request.test_garbage import STREAMED, garbage, post
from tests.gateway.upstream.test_connection import ANSWER, LIMITS, connected
from tests.support.fakes import STREAM_HEAD, FakeReplica, FakeRequest, answers, chunk, event, writes
from tests.support.tiers import gate

MOST_LINES = 2897  # in one part: the square root of 256 * 32 KiB
MANY_S = 0.15  # for a turn with a hundred clients; all of their bodies at once take about a second
TURN_S = 0.04  # of CPU: some times what a turn takes; what is read at once takes up to some tenths of a second


@given(st.lists(st.sampled_from([b"\n", b"\r", b"x", b"\n" * 999, b"x" * 999, b"data: a\n\n"]), max_size=400).map(b"".join))
def test_a_turn_is_everything_unless_it_has_very_many_lines(data: bytes) -> None:
    size, lines = first_turn(data), lines_of(data)
    assert 0 <= size <= len(data)
    if len(data) <= AT_ONCE or lines <= 256:
        assert size == len(data)
    else:
        assert 1024 <= size <= LARGE
        assert lines_of(data[:size]) <= MOST_LINES


def lines_of(data: bytes) -> int:
    return data.count(b"\n") + data.count(b"\r")


@given(st.lists(st.tuples(st.sampled_from([b"\n", b"x", b"x\r"]), st.integers(1, 40_000)), min_size=1, max_size=8))
def test_lines_that_are_dense_in_one_place_are_read_in_parts(runs: list[tuple[bytes, int]]) -> None:
    data = b"".join(piece * count for piece, count in runs)
    late = DeferredData(Turns())
    read = [late.first(data)]
    while late.size:
        read += late.turn()
    assert b"".join(read) == data
    if len(read) > 1:
        assert max(map(lines_of, read)) <= MOST_LINES


def test_what_is_held_is_what_is_in_memory() -> None:
    late = DeferredData(Turns())
    late.first(DENSE)
    late.add(b"more")
    assert late.held == len(DENSE) + 4
    assert late.size < late.held
    while late.size:
        list(late.turn())
    assert late.held == 0


@given(
    st.binary(max_size=5), st.lists(st.sampled_from([b"", b"x", b"\n" * 9000, b"y" * 200_000]), max_size=9), st.integers(0, 9)
)
def test_what_is_late_is_read_in_order_and_in_parts(begin: bytes, pieces: list[bytes], turns: int) -> None:
    """Some turns come between the pieces."""
    late = DeferredData(Turns())
    data = begin + b"\n" * 9000
    read = [late.first(data)]
    for number, piece in enumerate(pieces):
        if late.size:
            late.add(piece)
            data += piece
            if number < turns:
                read += late.turn()
    while late.size:
        read += late.turn()
    assert b"".join(read) == data
    assert max(map(len, read)) <= LARGE


async def test_work_that_fills_a_turn_waits_for_the_next_ones_in_order() -> None:
    turns, done, in_turn = Turns(), list[int](), list[int]()
    counted = 0

    def turn() -> None:
        nonlocal counted
        counted += 1
        if len(done) < 5:
            asyncio.get_running_loop().call_soon(turn)

    def work(number: int) -> int:
        begin = time.perf_counter()
        while time.perf_counter() <= begin + ALL_S:
            """It takes that long."""
        done.append(number)
        in_turn.append(counted)
        return number

    turn()
    assert await asyncio.gather(*(turns.take(partial(work, number)) for number in range(5))) == [0, 1, 2, 3, 4]
    assert done == [0, 1, 2, 3, 4]
    assert len(set(in_turn)) == 5


async def test_work_that_takes_nothing_does_not_wait() -> None:
    turns, done = Turns(), 0

    def work() -> None:
        nonlocal done
        done += 1

    for _ in range(100):
        await turns.take(work)
    assert (done, turns.free) == (100, True)
    for _ in range(100):
        turns.later(work)
    assert (done, turns.free) == (100, False)
    await eventually(lambda: turns.free)
    assert done == 200


async def test_work_that_fails_or_that_nobody_waits_for_keeps_nobody_waiting() -> None:
    turns, called, errors = Turns(), list[str](), list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    failure = ValueError("it fails")

    def fails() -> None:
        called.append("fails")
        raise failure

    def fills_its_turn() -> None:
        called.append("first")
        begin = time.perf_counter()
        while time.perf_counter() <= begin + ALL_S:
            """It takes that long."""

    left = asyncio.ensure_future(turns.take(lambda: called.append("left")))
    failing = asyncio.ensure_future(turns.take(fails))
    turns.later(fills_its_turn)
    await asyncio.sleep(0)  # both wait for the next turn
    left.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await left
    with pytest.raises(ValueError, match="it fails"):
        await failing
    assert not errors
    turns.later(fails)
    turns.later(lambda: called.append("last"))
    await eventually(lambda: turns.free)
    assert errors == [failure]
    assert called == ["first", "fails", "fails", "last"]


async def test_work_that_fails_leaves_no_garbage() -> None:
    turns = Turns()

    def fails() -> None:
        raise bad_request("it fails")

    async def waits() -> bool:
        try:
            await turns.take(fails)
        except GatewayError:
            return True
        return False

    with garbage() as found:
        for _ in range(10):
            turns.later(lambda: None)  # else it would not wait
            assert await waits()
    assert not found


async def test_all_of_an_event_loop_take_turns_with_each_other() -> None:
    loop = asyncio.get_running_loop()
    assert turns_of(loop) is turns_of(loop)


async def test_while_others_wait_only_what_is_small_is_read_at_once() -> None:
    turns = Turns()
    turns.later(lambda: None)
    late = DeferredData(turns)
    assert late.first(b"x" * SMALL) == b"x" * SMALL
    assert late.first(b"x" * (SMALL + 1)) == b""
    assert late.size == SMALL + 1
    await eventually(lambda: turns.free)
    assert b"".join(late.turn()) == b"x" * (SMALL + 1)
    assert late.first(b"x" * AT_ONCE) == b"x" * AT_ONCE


async def test_what_was_read_at_once_counts_for_the_turn() -> None:
    late = DeferredData(turns := Turns())
    reads = 0
    while turns.free:
        reads += 1
        late.first(b"\n" * AT_ONCE)
    assert 1 < reads < 10


DENSE = b"a\n" * 50_000


class Sink:
    """What came, as it came."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def __call__(self, data: bytes) -> None:
        self.parts.append(data)


def begun(length: bytes = b"") -> Connection:
    connection, _ = connected()
    connection.send(b"GET", to_head=False, limits=LIMITS)
    connection.data_received(ANSWER[:-2] + length + b"\r\n")
    return connection


async def some_turns() -> None:
    """More than it takes until anything happens that nothing holds back: nothing here waits for time or for a network."""
    for _ in range(10):
        await asyncio.sleep(0)


async def pumped(connection: Connection, size: int, sink: Callable[[bytes], None]) -> None:
    """Until `size` bytes have gone into the sink."""
    task = asyncio.create_task(connection.pump(sink))
    assert isinstance(sink, Sink)
    await eventually(lambda: sum(map(len, sink.parts)) >= size)
    connection.eof_received()
    connection.connection_lost(None)
    await task


async def test_a_replica_s_dense_read_is_passed_on_in_turns() -> None:
    connection, sink = begun(), Sink()
    task = asyncio.create_task(pumped(connection, len(DENSE), sink))
    await asyncio.sleep(0)
    connection.data_received(DENSE)
    assert sum(map(len, sink.parts)) <= 1024
    await task
    assert b"".join(sink.parts) == DENSE
    assert max(map(len, sink.parts)) <= 1024


async def test_what_waits_for_its_owner_is_passed_on_in_turns() -> None:
    connection, sink = begun(), Sink()
    for at in range(0, len(DENSE), 1000):
        connection.data_received(DENSE[at : at + 1000])
    assert len(connection.take_turn()) == 1024
    await pumped(connection, len(DENSE) - 1024, sink)
    assert max(map(len, sink.parts)) <= AT_ONCE
    assert b"".join(sink.parts) == DENSE[1024:]


async def test_a_dense_read_waits_while_its_owner_is_paused() -> None:
    connection, sink = begun(), Sink()
    task = asyncio.create_task(pumped(connection, len(DENSE), sink))
    await asyncio.sleep(0)
    connection.data_received(DENSE)
    connection.pause()
    await some_turns()
    assert sum(map(len, sink.parts)) <= 1024
    connection.resume()
    await task
    assert b"".join(sink.parts) == DENSE


@pytest.mark.parametrize("length", [b"", b"Content-Length: %d\r\n" % len(DENSE)], ids=["until the end", "by length"])
@pytest.mark.parametrize("paused", [False, True])
async def test_what_came_before_the_end_of_a_connection_is_read(length: bytes, paused: bool) -> None:
    """TLS reports the end at once."""
    connection, sink = begun(length), Sink()
    task = asyncio.create_task(connection.pump(sink))
    await asyncio.sleep(0)
    connection.data_received(DENSE)
    if paused:
        connection.pause()
    connection.connection_lost(None)
    if paused:
        await some_turns()
        assert not task.done()
        assert sum(map(len, sink.parts)) <= 1024, "what is late is kept until it goes on"
        connection.resume()
    await task
    assert b"".join(sink.parts) == DENSE
    assert connection.complete


async def test_what_waits_for_its_owner_is_bounded_while_it_is_read_in_turns() -> None:
    connection, transport = connected()
    sink = Sink()
    connection.send(b"GET", to_head=False, limits=LIMITS)
    connection.data_received(ANSWER)
    for _ in range(3):
        connection.data_received(b"x" * 4000 + b"\n" * 96_000)
        await eventually(lambda: not connection._late.size or connection.unread > MAX_UNREAD)
    assert connection.unread > MAX_UNREAD
    assert not transport.reads
    task = asyncio.create_task(connection.pump(sink))
    for _ in range(50):
        if transport.reads:
            connection.data_received(b"x" * 200_000)
        await asyncio.sleep(0)
        assert connection.unread <= 2 * MAX_UNREAD
    connection.connection_lost(None)
    await task


async def test_a_large_read_is_the_last_one_of_its_turn() -> None:
    """uvloop reads up to 32 times unless reading is paused."""
    connection, transport = connected()
    sink = Sink()
    connection.send(b"GET", to_head=False, limits=LIMITS)
    connection.data_received(ANSWER)
    task = asyncio.create_task(connection.pump(sink))
    await asyncio.sleep(0)
    for size, reads in ((1000, True), (LARGE, True), (LARGE + 1, False)):
        connection.data_received(b"x" * size)
        assert transport.reads is reads
        assert len(sink.parts[-1]) == size
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert transport.reads
    connection.pause()
    connection.data_received(b"x" * (LARGE + 1))
    await some_turns()
    assert not transport.reads
    connection.resume()
    await eventually(lambda: transport.reads)
    connection.connection_lost(None)
    await task


async def test_a_connection_with_unread_bytes_is_not_used_again() -> None:
    connection, transport = connected()
    connection.send(b"GET", to_head=False, limits=LIMITS)
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n")
    connection.data_received(DENSE)
    assert connection.complete
    assert connection.answer
    assert not connection.answer.rest, "all of the first turn is the answer's"
    assert not connection.release()
    assert transport.closed
    connection.connection_lost(None)


TINY = event("a")


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(TINY + b"\n\n" * 1_000_000, id="blank lines"),
        pytest.param(TINY + b'"usage"\n\n' * 200_000, id="words of ours"),
        pytest.param(TINY + (b"[DONE]\n" + b"d\n" * 520_000 + b"\n") * 4, id="long events"),
        pytest.param(TINY + b"\r" * 1_000_000, id="carriage returns"),
        pytest.param(TINY * 10_000, id="tokens"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
@gate(
    *("False-blank lines", "True-words of ours", "True-long events", "False-carriage returns", "True-tokens"),
    reason="each stream; pools of both kinds",
)
async def test_a_replica_s_stream_does_not_hold_the_loop(stream: bytes, resume: bool) -> None:
    data = STREAM_HEAD + chunk(stream) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    async with FakeReplica([writes(data)]) as replica, running(pools=[pool(replica, resume=resume)]) as run:
        await holds_no_loop(run.url, post(STREAMED, "Connection: close"), least=len(stream))


async def test_a_replica_s_tiny_chunks_do_not_hold_the_loop() -> None:
    data = STREAM_HEAD + chunk(TINY) + b"1\r\n\n\r\n" * 300_000 + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    async with FakeReplica([writes(data)]) as replica, running(replica) as run:
        await holds_no_loop(run.url, post(STREAMED, "Connection: close"), least=300_000)


@pytest.mark.parametrize("event_", [TINY, b'data:{"choices":[]}\n\n'], ids=["tokens", "nothing"])
async def test_a_continuation_does_not_hold_the_loop(event_: bytes) -> None:
    rest = STREAM_HEAD + chunk(event_ * 10_000) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    async def breaks_off_once(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        goes_on = b"continue_final_message" in request.body
        await writes(rest if goes_on else STREAM_HEAD + chunk(TINY))(request, writer)
        if not goes_on:
            writer.close()

    async with FakeReplica([breaks_off_once]) as one, FakeReplica([breaks_off_once]) as other:
        async with running(pools=[pool(one, other, resume=True)]) as run:
            await holds_no_loop(run.url, post(STREAMED, "Connection: close"), least=10_000 * len(event_))
        assert len(one.requests) == len(other.requests) > 0


async def test_a_client_s_tiny_chunks_do_not_hold_the_loop_and_all_arrive() -> None:
    text = "x" * 150_000
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        await holds_no_loop(run.url, head + chunks + b"0\r\n\r\n", least=100, times=4)
        assert {request.body for request in replica.requests} == {body}
        assert len(replica.requests) % 4 == 0


def of_values(values: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":%b}' % values


@pytest.mark.parametrize(
    ("body", "times"),
    [
        pytest.param(of_values(b"[" + b"[]," * 86_000 + b"[]]"), 100, id="brackets"),
        pytest.param(of_values(b"{" + b",".join(b'"%x":1' % number for number in range(27_000)) + b"}"), 100, id="names"),
        pytest.param(
            gzip.compress(of_values(b'"' + random.Random(0).randbytes(10_000).hex().encode() * 200 + b'"'), 1), 25, id="gzip"
        ),
    ],
)
async def test_many_bodies_that_arrive_at_once_do_not_hold_the_loop(body: bytes, times: int) -> None:
    coding = ("Content-Encoding: gzip",) if body.startswith(b"\x1f\x8b") else ()
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        data = post(body, "Connection: close", *coding)
        await holds_no_loop(run.url, data, least=100, times=times, limit_s=MANY_S)


async def test_tiny_chunks_of_many_clients_at_once_do_not_hold_the_loop() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in of_values(b'"' + b"x" * 9000 + b'"'))
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        await holds_no_loop(run.url, head + chunks + b"0\r\n\r\n", least=100, times=100, limit_s=MANY_S)


def pool(*replicas: FakeReplica, resume: bool) -> dict[str, object]:
    return {"replicas": [replica.url for replica in replicas], "resume_streams": resume}


async def holds_no_loop(url: str, data: bytes, *, least: int, times: int = 1, limit_s: float = TURN_S) -> None:
    """`times` clients at once send this; each gets `least` bytes or more.

    Up to three times, for a machine with other work counts some of it as this thread's CPU time.
    """

    async def ask() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
        writer.write(data)
        answer = await reader.read()
        writer.transport.abort()
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]
        return len(answer)

    sizes: list[int] = []

    async def all_ask() -> None:
        sizes.extend(await asyncio.gather(*(ask() for _ in range(times))))

    longest: list[float] = []
    while len(longest) < 3 and min(longest, default=limit_s) >= limit_s:
        longest.append(await longest_pause(all_ask))
    assert min(sizes) >= least
    assert min(longest) < limit_s, longest
