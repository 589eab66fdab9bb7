"""Clients' bytes, valid and invalid, to a real gateway on a socket, in front of a strict replica.

The fuzzer checks for any bytes of a client: it gets whole, well-formed answers, at most as many as the requests it can have
sent; the replica gets one plain request for each that the gateway counted, and no bytes of a body as a request; no lease stays
open, no error is logged, and the next client is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.fuzzing import stage
from scripts.fuzzing.answers import Outcome, read
from scripts.fuzzing.mutate import cut, mutate
from scripts.fuzzing.stage import Errors
from scripts.fuzzing.strict_replica import StrictReplica
from tests.gateway.conftest import OUTPUT, STREAM, Running, eventually, running

try:
    import h11
except ImportError:  # a second parser, where it is installed
    h11 = None  # type: ignore[assignment,unused-ignore]

SILENCE_S = 0.1  # an answer that has not begun by then is not waited for
CLIENTS = 24

_JSON = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
_CANARY = b"POST /v1/canary HTTP/1.1\r\nHost: c\r\nContent-Length: %d\r\n\r\n" % len(_JSON) + _JSON
_STREAM = _JSON[:-1] + b',"stream":true}'
_LINES = [
    b"POST /v1/chat/completions HTTP/1.1",
    b"POST /v1/chat/completions HTTP/1.0",
    b"POST /v1/completions?a=%2e%00 HTTP/1.1",
    b"POST http://evil.example/v1/chat/completions HTTP/1.1",
    b"POST //v1/chat/completions HTTP/1.1",
    b"GET /v1/files/%0d%0aX:%20y HTTP/1.1",
    b"GET /v1/files/a%zz?%0d%0a HTTP/1.1",
    b"GET /v1/x#y HTTP/1.1",
    b"GET /v1/models/%ff%fe%00 HTTP/1.1",
    b"GET /%ff%ed%a0%80 HTTP/1.1",
    b"GET /v1/\xc3\xa9?\xff HTTP/1.1",
    b"GET /v1/../health HTTP/1.1",
    b"HEAD /v1/files HTTP/1.1",
    b"HEAD /health HTTP/1.1",
    b"GET /health HTTP/1.1",
    b"GET /health HTTP/1.0",
    b"GET /health",
    b"GET http://[::1/health HTTP/1.1",
    b"GET http:///v1/x HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"OPTIONS /v1/x HTTP/1.1",
    b"CONNECT evil.example:80 HTTP/1.1",
    b"CONNECT /v1/x HTTP/1.1",
    b"TRACE /v1/x HTTP/1.1",
    b"PRI * HTTP/2.0",
    b"get /health HTTP/1.1",
    b"GET /v1/a b HTTP/1.1",
    b"GET  /v1/a HTTP/1.1",
    b"GET /v1/a\rb HTTP/1.1",
    b"GET /v1/a HTTP/1.1\rX: y",
    b"DELETE /v1/files/" + b"a" * 9000 + b" HTTP/1.1",
]
_FIELDS = [
    b"Host: h",
    b"Host: h, evil",
    b"Host:",
    b"Host: a b",
    b"Content-Length: %d" % len(_JSON),
    b"Content-Length: 0",
    b"Content-Length: 5",
    b"Content-Length: +5",
    b"Content-Length: 5, 5",
    b"Content-Length: 0x39",
    b"Content-Length : 57",
    b"Content-Length: 99999999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding: identity, chunked",
    b"Transfer-Encoding:\x0bchunked",
    b"Transfer-Encoding : chunked",
    b"Transfer_Encoding: chunked",
    b"Transfer-Encoding: gzip",
    b"Content-Encoding: gzip",
    b"Content-Encoding: deflate",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: Upgrade, Content-Length, Host, X-Request-Id, Authorization",
    b"Upgrade: websocket",
    b"Upgrade: h2c",
    b"Expect: 100-continue",
    b"Expect: 200-maybe",
    b"X-Request-Id: a\tb",
    b"X-Request-Id: " + b"i" * 200,
    b"X-Tenant-Id: \xff\xfe t",
    b"X-Session-Id: s\x01",
    b"X: a\r\n folded",
    b"X: a\rY: b",
    b"X: a\nTransfer-Encoding: chunked",
    b"X: a\x00b",
    b"X: \xe9\xff",
    b": x",
    b"X",
    b"X Y: z",
    b"X: " + b"v" * 9000,
    b"Trailer: X",
    b"Authorization: Bearer k",
]
_BODIES = [
    b"",
    _JSON,
    _STREAM,
    _JSON + _CANARY,
    _CANARY,
    b"%x\r\n" % len(_JSON) + _JSON + b"\r\n0\r\n\r\n",
    b"%x;%b\r\n" % (len(_JSON), b"e" * 99) + _JSON + b"\r\n0\r\nX: y\r\n\r\n",
    b"0\r\n\r\n" + _CANARY,
    b"%x\r\n" % len(_CANARY) + _CANARY + b"\r\n0\r\n\r\n",
    b"5\r\n" + _CANARY + b"\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"-1\r\nx\r\n0\r\n\r\n",
    b"fffffffffffffffff\r\nx",
    b'{"model":"m","messages":[',
    b"\x1f\x8b\x08\x00" + b"\x00" * 20,
]
TOKENS = [*_LINES, *_FIELDS, *_BODIES, b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\x00", b"0\r\n\r\n", b" ", b"\t", b":", b"%0d%0a"]


def invent(chance: Random) -> bytes:
    """One to three requests, or something like them."""
    parts = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        body = chance.choice(_BODIES)
        lines = [chance.choice(_LINES if chance.random() < 0.3 else _LINES[:3])]
        if chance.random() < 0.9:
            lines.append(b"Host: h")
        if chance.random() < 0.7:
            lines.append(b"Content-Length: %d" % len(body))
        elif chance.random() < 0.7:
            lines.append(b"Transfer-Encoding: chunked")
        lines += [chance.choice(_FIELDS) for _ in range(chance.choice([0, 0, 0, 1, 2]))]
        parts.append(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    return b"".join(parts)


def make(known: bytes, chance: Random) -> bytes:
    """One input made of a known one, or of nothing."""
    return mutate(known or invent(chance), chance, TOKENS) if chance.random() < 0.4 else invent(chance)


# -- a gateway that is watched


@dataclass(slots=True)
class Watched:
    """A running gateway, its replica, and its logged errors."""

    run: Running
    replica: StrictReplica
    errors: Errors

    async def batch(self, inputs: list[bytes], chance: Random) -> list[str]:
        """Send these at once, each on its own connection; returns the kind of each outcome. AssertionError: a bug."""
        OUTPUT.flush()
        begun = STREAM.tell()
        self.replica.forget()
        self.errors.seen.clear()
        kinds = await asyncio.gather(*(self.one(data, chance) for data in inputs))
        status, _, _ = await self.run.get("/health")
        assert status == 200
        ledger = self.run.gateway.router.ledger
        await eventually(lambda: ledger.open_leases == 0)
        await eventually(lambda: not self.run.gateway.served.running._running)
        OUTPUT.flush()
        STREAM.seek(begun)
        counted = Counter(str(json.loads(line)["path"]) for line in STREAM)
        assert not self.replica.wrong, (self.replica.wrong, inputs)
        assert sum(self.replica.paths.values()) <= counted.total(), (self.replica.paths, counted, inputs)
        for path in (path for path in self.replica.paths if "canary" in path):
            assert self.replica.paths[path] <= counted[path], (path, counted, inputs)
        assert not self.errors.seen, (self.errors.seen, inputs)
        self.run.gateway.router.check()
        return kinds

    async def blame(self, inputs: list[bytes], chance: Random) -> list[str]:
        return await stage.blame(self.batch, inputs, chance)

    def notes(self) -> list[str]:
        return []

    async def one(self, data: bytes, chance: Random) -> str:
        received, ended = await self._talk(data, chance)
        found = parse(received, head="HEAD" in data.decode("latin-1").upper(), whole=ended)
        assert found is not None, (data, received)
        assert len(found) <= len(re.findall(rb"[\r\n]", data)) + 1, (data, received)
        return " ".join(map(str, found)) + (" end" if ended else " open")

    async def _talk(self, data: bytes, chance: Random) -> tuple[bytes, bool]:
        """(What came back, whether the gateway ended the connection)."""
        loop, received = asyncio.get_running_loop(), b""
        with socket.socket() as plain:
            plain.setblocking(False)
            address = self.run.url.removeprefix("http://").split(":")
            await loop.sock_connect(plain, (address[0], int(address[1])))
            try:
                for piece in cut(data, chance)[:4] if chance.random() < 0.5 else [data]:
                    await loop.sock_sendall(plain, piece)
                    await asyncio.sleep(0)
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        more = await loop.sock_recv(plain, 1 << 16)
                    if not more:
                        return received, True
                    received += more
            except TimeoutError:
                return received, False
            except ConnectionError:
                return received, False  # a reset may discard bytes that were not read yet


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    with stage.errors_logged() as errors:
        async with StrictReplica() as replica, running(replica.url, limits={"body_mb": 1}) as run:
            yield Watched(run, replica, errors)


# -- reading what came back


def parse(data: bytes, *, head: bool, whole: bool) -> list[int] | None:
    """The statuses of the answers in `data`. None: it is not a row of well-formed answers.

    head: some may be answers to a HEAD. whole: the last one must be complete; else the reader just stopped listening.
    """
    if not data:
        return []
    for to_head in (False, True) if head else (False,):
        found = read([data], to_head=to_head)
        if isinstance(found, Outcome):
            if not found.early and found.status not in (200, 404):
                return None  # only HTTP/1.0 streams and the like end with their connection
            _second_opinion(data[: len(data) - len(found.rest)], found, to_head)
            more = parse(found.rest, head=head, whole=whole)
            if more is not None:
                return [found.status, *more]
        elif found.why == "the connection ended within the answer" and not whole:
            return [0]
    return None


def _second_opinion(data: bytes, found: Outcome, to_head: bool) -> None:
    if h11 is None:
        return
    client: Any = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="HEAD" if to_head else "GET", target="/", headers=[("Host", "h")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    if not found.early:
        client.receive_data(b"")
    body, status = b"", 0
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, data
        if isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.Response):
            status = event.status_code
    assert (status, body) == (found.status, found.body), data
