"""The memory of a gateway's process whose budget is full: it stays below the budget and 100 MB, whatever clients send.

Many clients from many addresses take all that they can get, and go on after that. They come a few at a time, for the peak has
to show what is held, not how much a single iteration of the event loop may read.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from yarl import URL

from gateway.cluster.process import raise_file_limit
from tests.gateway.server.test_stalls import Gateway, started
from tests.support.fakes import Behaviour, FakeReplica, hangs, http, writes

BUDGET_MB, BESIDE_MB = 64, 100
ADDRESSES = 30
AT_ONCE = 20  # connections between two questions that show that the gateway has read what came before
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
LONG_FIELDS = b"".join(b"X-%d: %b\r\n" % (number, b"x" * 7000) for number in range(8))


def prompt(size: int) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": random.Random(1).randbytes(size // 2).hex()}]}
    ).encode()


def whole(body: bytes, *fields: bytes) -> bytes:
    return b"\r\n".join((HEAD + b"Content-Length: %d" % len(body), *fields, b"", body))


UNFINISHED_HEAD = HEAD + LONG_FIELDS
UNFINISHED_BODY = HEAD + LONG_FIELDS + b"Content-Length: 1000\r\n\r\n"
UNFINISHED_UPLOAD = whole(prompt(1_000_000))[:500_000]
UNFINISHED_CHUNKS = (
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"4000\r\n%b\r\n" % (b"x" * 0x4000) for _ in range(15))
)
UNFINISHED_GZIP = whole(gzip.compress(prompt(200_000), 1), b"Content-Encoding: gzip")[:4000]
WHOLE_UPLOAD = whole(prompt(200_000))
WHOLE_LARGE_GZIP = whole(gzip.compress(prompt(3_000_000), 1), b"Content-Encoding: gzip")
SMALL = whole(prompt(100))


def large_answer(size: int) -> Behaviour:
    return writes(http(200, json.dumps({"choices": [{"text": "x" * size}]}).encode()))


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize(
    ("data", "clients", "behaviour"),
    [
        pytest.param(UNFINISHED_HEAD, 1500, hangs, id="unfinished heads"),
        pytest.param(UNFINISHED_BODY, 1500, hangs, id="heads without their bodies"),
        pytest.param(UNFINISHED_UPLOAD, 400, hangs, id="slow uploads"),
        pytest.param(UNFINISHED_CHUNKS, 1200, hangs, id="slow chunked uploads"),
        pytest.param(UNFINISHED_GZIP, 5000, hangs, id="slow compressed uploads"),
        pytest.param(WHOLE_UPLOAD, 600, hangs, id="replicas that do not answer"),
        pytest.param(WHOLE_LARGE_GZIP, 60, hangs, id="large compressed bodies"),
        pytest.param(SMALL, 15, lambda _: large_answer(20_000_000), id="clients that do not read large answers"),
    ],
)
async def test_the_process_stays_below_its_budget_and_100_mb(
    data: bytes, clients: int, behaviour: Callable[[asyncio.Event], Behaviour], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    over = asyncio.Event()
    async with FakeReplica([behaviour(over)]) as replica:
        limits = {"inflight_mb": BUDGET_MB, "drain_timeout_s": 1}
        config.write_text(json.dumps({"pools": [{"replicas": [replica.url]}], "limits": limits}))
        async with started(["--config", str(config)]) as gateway, contextlib.AsyncExitStack() as stack:
            await gateway.get("/health")
            base = megabytes(gateway, "VmRSS")
            sockets = list[socket.socket]()
            for number in range(clients):
                sockets.append(stack.enter_context(await send(gateway, number, data)))
                if number % AT_ONCE == AT_ONCE - 1:
                    assert (await gateway.get("/health"))[0] == 200
            assert (await gateway.get("/health"))[0] == 200
            if data is SMALL:
                for sock in sockets:  # the answer has begun, and now waits for its client
                    await asyncio.get_running_loop().sock_recv(sock, 1)
            if data is not SMALL:
                await full(gateway)
            peak = megabytes(gateway, "VmHWM")
            over.set()
        assert peak - base < BUDGET_MB + BESIDE_MB


async def full(gateway: Gateway) -> None:
    """Until the budget is used up: bodies are read one after the other."""
    async with asyncio.timeout(40):
        while True:
            page = (await gateway.get("/metrics"))[1]
            held, refused = (metric(page, f"warmroute_{name}") for name in ("inflight_bytes", "memory_rejected_total"))
            if held / 2**20 > 0.8 * BUDGET_MB and refused:
                return


async def send(gateway: Gateway, number: int, data: bytes) -> socket.socket:
    """On a connection of its own, of which nothing is read; the gateway may refuse the rest."""
    loop, port = asyncio.get_running_loop(), URL(gateway.url).port
    assert port
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    sock.bind((f"127.0.0.{2 + number % ADDRESSES}", 0))
    await loop.sock_connect(sock, ("127.0.0.1", port))
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(5):  # what is not read any more need not be sent
            await loop.sock_sendall(sock, data)
    return sock


def metric(page: str, name: str) -> float:
    """The sum of its samples."""
    return sum(
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name) and line[len(name)] in " {"
    )


def megabytes(gateway: Gateway, field: str) -> float:
    """A field of the process's status: its memory now, or at its peak."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{gateway.process.pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1024
