"""Requests and connections leave nothing to the garbage collector: objects that refer to each other in a circle stay in memory
until it comes, and then it goes through all of them at once, while nobody is served (50,000 took 0.1 s).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from yarl import URL

from gateway.dialects.openai.request import ApiRequest
from gateway.errors import GatewayError
from gateway.parser.process import ParserProcess
from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    dies_after_headers,
    dies_in_plain_body,
    event,
    hangs,
    http,
    status,
    streams,
    writes,
)

OURS = ("gateway", "router")
TIMES = 12
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 200}]}).encode()
STREAMED = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 200}], "stream": True}).encode()
PATH = "/v1/chat/completions"
CHUNKED = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
)
UNTIL_END = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{"a":1}'


async def until_end(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(UNTIL_END)
    writer.close()


def post(body: bytes, *fields: str, path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


UNFINISHED = (b"", post(BODY)[:-9])


@contextlib.contextmanager
def garbage() -> Iterator[Counter[str]]:
    """What of ours the collector finds of that which was made meanwhile, by type."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        found.update(name for name in names if name.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def exchange(run: Running, data: bytes, *, leaves: bool = False, ends: bool = True) -> None:
    """One request on a connection of its own. leaves: the client resets it when it has a replica. ends: it is the last one;
    where none can be whole, the client leaves at once.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(run.url).port)
    try:
        last = data.replace(b"Host: h", b"Host: h\r\nConnection: close", 1)
        writer.write(last if ends and not leaves else data)
        if leaves:
            await eventually(lambda: run.gateway.router.ledger.open_leases)
        else:
            if ends and data in UNFINISHED:
                writer.write_eof()
            await reader.read()
    finally:
        writer.transport.abort()


async def seen_off(run: Running) -> None:
    """Until the gateway has noticed that its clients are gone."""
    await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
    await asyncio.sleep(0)


async def several(run: Running, data: bytes, times: int, *, leaves: bool = False, rests: bool = True) -> None:
    """rests: nothing else is under way."""
    for _ in range(times):
        await exchange(run, data, leaves=leaves)
    if rests:
        await seen_off(run)


@pytest.mark.parametrize(
    ("data", "behaviour"),
    [
        pytest.param(post(BODY), answers(), id="plain"),
        pytest.param(post(BODY), writes(CHUNKED), id="plain, in chunks"),
        pytest.param(post(BODY), writes(http(200, b'{"choices":[{"text":"%b"}]}' % (b"x" * 3_000_000))), id="plain, large"),
        pytest.param(post(STREAMED), streams("a", "b", "c"), id="streamed"),
        pytest.param(post(STREAMED), streams("a", "b", die=True), id="streamed, broken off"),
        pytest.param(post(STREAMED), dies_after_headers, id="streamed, without an event"),
        pytest.param(post(BODY), dies, id="no answer"),
        pytest.param(post(BODY), dies_in_plain_body, id="half an answer"),
        pytest.param(post(BODY), writes(b"nonsense"), id="no HTTP"),
        pytest.param(post(BODY), status(400), id="refused by the replica"),
        pytest.param(post(BODY), status(429), id="too many requests"),
        pytest.param(post(b"{"), answers(), id="no JSON"),
        pytest.param(post(BODY.replace(b'"m"', b'"other"')), answers(), id="no such model"),
        pytest.param(post(gzip.compress(BODY), "Content-Encoding: gzip"), answers(), id="compressed"),
        pytest.param(post(b"{}", path="/v1/other"), answers(), id="another endpoint"),
        pytest.param(post(b"{}", path="/v1/other"), until_end, id="another endpoint, until the end"),
        pytest.param(post(BODY, "Transfer-Encoding: gzip"), answers(), id="an unknown coding"),
        pytest.param(b"nonsense\r\n\r\n", answers(), id="not HTTP"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", answers(), id="models"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n", answers(), id="health"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n", answers(), id="metrics"),
        pytest.param(b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n", answers(), id="no such path"),
        pytest.param(b"PUT /health HTTP/1.1\r\nHost: h\r\n\r\n", answers(), id="no such method there"),
        pytest.param(b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", answers(), id="options of the server"),
        pytest.param(b"CONNECT a:1 HTTP/1.1\r\nHost: h\r\n\r\n", answers(), id="connect"),
        pytest.param(
            b"CONNECT a:1 HTTP/1.1\r\nHost: h\r\n\r\n" + b"x" * 1000, answers(), id="connect, and what is sent through"
        ),
        pytest.param(post(b"["), answers(), id="no object"),
        pytest.param(b"", answers(), id="nothing"),
        pytest.param(post(BODY)[:-9], answers(), id="half a body"),
    ],
)
async def test_a_request_leaves_no_garbage(data: bytes, behaviour: Behaviour) -> None:
    async with FakeReplica([behaviour]) as replica, running(replica) as run:
        await leaves_none(run, data)


def held_stream(until: asyncio.Event) -> Behaviour:
    return streams("a", "b", hold=until)


WRITES_ERROR = writes(STREAM_HEAD + chunk(event("a")) + chunk(b'data: {"error":{"code":500,"message":"out of memory"}}\n\n'))


async def breaks_off_before_and_after_done(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    if b"continue_final_message" not in request.body:
        return await streams("a", "b", die=True)(request, writer)
    writer.write(STREAM_HEAD + chunk(event("c") + DONE))
    await writer.drain()
    return writer.close()


@pytest.mark.parametrize(
    "behaviour",
    [streams("a", "b", die=True), WRITES_ERROR, dies_after_headers, streams("a", "b"), breaks_off_before_and_after_done],
)
async def test_a_stream_that_may_be_resumed_leaves_no_garbage(behaviour: Behaviour) -> None:
    async with FakeReplica([behaviour]) as one, FakeReplica([behaviour]) as other:
        pools = [{"replicas": [one.url, other.url], "resume_streams": True}]
        async with running(pools=pools) as run:
            await leaves_none(run, post(STREAMED))


@pytest.mark.parametrize(
    ("data", "behaviour"),
    [
        pytest.param(post(BODY), hangs, id="while its request waits"),
        pytest.param(post(STREAMED), held_stream, id="in a stream"),
        pytest.param(post(gzip.compress(STREAMED), "Content-Encoding: gzip"), held_stream, id="in a stream, compressed"),
    ],
)
async def test_a_client_that_leaves_leaves_no_garbage(data: bytes, behaviour: Callable[[asyncio.Event], Behaviour]) -> None:
    async with FakeReplica([behaviour(asyncio.Event())]) as replica, running(replica) as run:
        await leaves_none(run, data, leaves=True)


async def test_a_connection_of_many_requests_leaves_no_garbage_before_its_end() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(run.url).port)

        async def requests(times: int) -> None:
            for _ in range(times):
                writer.write(post(BODY))
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))

        await requests(3)
        with garbage() as found:
            await requests(TIMES)
        writer.transport.abort()
    assert_none(found)


@pytest.mark.parametrize("line", [{"queue_s": 0.01}, {"max_queue": 0}], ids=["too late", "the line is full"])
async def test_a_request_that_waits_in_vain_leaves_no_garbage(line: dict[str, float]) -> None:
    async with FakeReplica([hangs(asyncio.Event())]) as replica, one_place(replica, **line) as run, under_way(run):
        await leaves_none(run, post(BODY), rests=False)


async def test_a_request_that_gives_way_in_the_line_leaves_no_garbage() -> None:
    async with FakeReplica([hangs(asyncio.Event())]) as replica, one_place(replica, max_queue=1) as run, under_way(run):
        line = run.gateway.fleet.pools[0].admission

        def asks(priority: int) -> asyncio.Task[None]:
            data = post(BODY, f"X-Priority: {priority}", "Connection: close")
            return asyncio.create_task(exchange(run, data, ends=False))

        last = asks(0)
        await eventually(lambda: line.waiting == 1)
        with garbage() as found:
            for priority in range(1, TIMES + 4):
                next_one = asks(priority)
                await last
                last = next_one
        assert line.refused["displaced"] == TIMES + 3
        await cancelled(last)
    assert_none(found)


async def test_a_body_whose_parser_process_dies_leaves_no_garbage() -> None:
    process = ParserProcess(boot="raise SystemExit")

    async def job() -> None:
        with contextlib.suppress(GatewayError):
            await process.run(("chat",), b"{}")

    await job()
    with garbage() as found:
        for _ in range(TIMES):
            await job()
    await process.close()
    assert_none(found)
    assert process.started > TIMES


def one_place(replica: FakeReplica, **line: float) -> contextlib.AbstractAsyncContextManager[Running]:
    """line: of the pool, how many may wait, and how long."""
    return running(pools=[{"replicas": [replica.url], "max_inflight": 1, **line}])


@contextlib.asynccontextmanager
async def under_way(run: Running) -> AsyncIterator[None]:
    """A request that has its pool's only place meanwhile."""
    task = asyncio.create_task(exchange(run, post(BODY), ends=False))
    await eventually(lambda: run.gateway.fleet.pools[0].admission.inflight == 1)
    try:
        yield
    finally:
        await cancelled(task)


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def leaves_none(run: Running, data: bytes, *, leaves: bool = False, rests: bool = True) -> None:
    await several(run, data, 3, leaves=leaves, rests=rests)  # caches, and what is made once
    with garbage() as found:
        await several(run, data, TIMES, leaves=leaves, rests=rests)
    assert_none(found)


def assert_none(found: Counter[str]) -> None:
    assert not [f"{count} {name}" for name, count in found.most_common() if count >= TIMES]


LIVES = """
import gc
from gateway.cluster.process import relax_garbage_collection
relax_garbage_collection()
most = 0
def count(phase, info):
    global most
    if phase == "start":
        most = max(most, sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))
gc.callbacks.append(count)
index = [[] for _ in range(400_000)]
print(most)
"""


def test_a_collection_goes_through_a_part_of_what_is_kept() -> None:
    """The prefix index is millions of objects in plain Python, and the collector stops everything meanwhile."""
    run = subprocess.run([sys.executable, "-c", LIVES], capture_output=True, text=True, check=True)
    assert 20_000 < int(run.stdout) < 90_000


SMALL = """
import gc
from gateway.cluster.process import relax_garbage_collection
relax_garbage_collection()
frozen = gc.get_freeze_count()
kept = [[] for _ in range(10_000)]
gc.collect()
print(gc.get_freeze_count() - frozen)
"""


def test_few_survivors_of_a_collection_are_looked_at_again() -> None:
    """Or what is under way at every collection would be beyond the collector for ever."""
    run = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, check=True)
    assert int(run.stdout) <= 0


async def test_a_request_that_is_over_has_no_body_whoever_keeps_it() -> None:
    go = asyncio.Event()
    async with FakeReplica([hangs(go)]) as replica, running(replica) as run:
        task = asyncio.create_task(exchange(run, post(BODY)))
        await eventually(lambda: replica.requests)
        kept = [each for each in gc.get_objects() if type(each) is ApiRequest and each.body == BODY]
        assert kept
        go.set()
        await task
        assert [(each.body, each.prompt, each.made) for each in kept] == [(b"", None, None)] * len(kept)
