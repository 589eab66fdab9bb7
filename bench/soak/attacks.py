"""Hostile clients, one coroutine per kind: each opens a connection, attacks, and returns the outcome.

An outcome is a status code, "closed" (the gateway hung up), "left" (the client did), the name of an error in connecting, or
"silent": it waited for `PATIENCE_S` and nothing came, which must not happen. `EXPECTED` has those that a kind is to have.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from scripts.fuzzing.requests import make
from tests.chaos.hostile import POISON, POISONS
from tests.chaos.wire import Message, chunks, read_head

PATIENCE_S = 60.0  # for an answer
LINGER_S = 4.0  # for which a slow client goes on
PIECE = 64 << 10
AT_ONCE = 16  # requests of one hostile client
CHAT = "/v1/chat/completions"
BROKEN = (OSError, EOFError, ValueError, LookupError, asyncio.LimitOverrunError)  # no answer, or none that is HTTP


@dataclass(slots=True)
class Line:
    """A connection to the gateway that counts its bytes. `sent`, `received`: shared by all."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    traffic: Counter[str]

    async def send(self, data: bytes) -> None:
        """All of it, or what the gateway takes: it may refuse a large body before its end, and its answer is to be read."""
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), PIECE):
                if self.writer.is_closing():
                    return
                self.writer.write(data[at : at + PIECE])
                self.traffic["sent"] += len(data[at : at + PIECE])
                await self.writer.drain()

    async def answer(self) -> str:
        """The status of the next answer, which is read to its end; interim ones (1xx) are passed over."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await self._head()
                size = int(head.headers.get("content-length", 0))
                if head.headers.get("transfer-encoding") == "chunked":
                    async for part in chunks(self.reader):
                        self.traffic["received"] += len(part)
                else:
                    self.traffic["received"] += len(await self.reader.readexactly(size))
        except TimeoutError:
            return "silent"
        except BROKEN:
            return "closed"
        return str(head.status)

    async def _head(self) -> Message:
        """Of the next answer that is no interim one."""
        while (head := await read_head(self.reader)).status < 200:
            pass
        return head

    async def ends(self) -> str:
        """The status that comes at once, or "closed"; "left" if the gateway waits for more for `LINGER_S`."""
        return await self._within(LINGER_S, "left")

    async def ends_after_eof(self) -> str:
        """As `ends`, for a client that has closed its sending side: the gateway must not wait for more."""
        with contextlib.suppress(OSError):  # it has hung up, or has reset the connection
            self.writer.write_eof()
        return await self._within(PATIENCE_S, "silent")

    async def _within(self, seconds: float, else_: str) -> str:
        try:
            async with asyncio.timeout(seconds):
                return str((await self._head()).status)
        except TimeoutError:
            return else_
        except BROKEN:
            return "closed"

    def reset(self) -> str:
        sock: socket.socket = self.writer.get_extra_info("socket")
        with contextlib.suppress(OSError):  # it is closed already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        return "left"


@dataclass(slots=True)
class Target:
    """bomb_mb: the size of decompressed bodies. traffic: bytes sent and received by all kinds together."""

    port: int
    models: tuple[str, str]
    bomb_mb: int
    traffic: Counter[str] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def line(self, receive_buffer: int = 0) -> AsyncIterator[Line]:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            yield Line(reader, writer, self.traffic)
        finally:
            writer.transport.abort()

    async def ask(self, body: bytes, *headers: str) -> str:
        async with self.line() as line:
            await line.send(post(body, *headers))
            return await line.answer()


def post(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: soak", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chat(model: str, text: str, **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 20, **more}).encode()


def word(chance: random.Random, least: int, most: int) -> str:
    return chance.randbytes(chance.randint(least, most) // 2).hex()


def repeated(head: bytes, piece: bytes, tail: bytes, size: int) -> bytes:
    """gzip of a long JSON text."""
    return gzip.compress(head + piece * (size // len(piece)) + tail, 1)


# -- kinds: bodies


async def json_bomb(to: Target, chance: random.Random) -> str:
    """Millions of small objects in a small compressed body."""
    head = b'{"model":"%b","messages":[{"role":"user","content":[{}' % to.models[0].encode()
    body = await asyncio.to_thread(repeated, head, b",{}", b"]}]}", to.bomb_mb << 20)
    return await to.ask(body, "Content-Encoding: gzip")


async def gzip_bomb(to: Target, chance: random.Random) -> str:
    """Far more than the largest body when it is decompressed."""
    body = await asyncio.to_thread(repeated, b'{"model":"', b"x" * 1024, b'"}', to.bomb_mb << 22)
    return await to.ask(body, "Content-Encoding: gzip")


async def nested_json(to: Target, chance: random.Random) -> str:
    depth = chance.choice([100, 10_000, 500_000])
    return await to.ask(b'{"model":"%b","messages":' % to.models[0].encode() + b"[" * depth + b"]" * depth + b"}")


async def large_body(to: Target, chance: random.Random) -> str:
    """A valid one, as a coding agent sends it."""
    return await to.ask(chat(to.models[0], word(chance, 20_000, 200_000)))


# -- kinds: values that a gateway might keep


async def huge_salt(to: Target, chance: random.Random) -> str:
    return await to.ask(chat(to.models[0], "salted", cache_salt=word(chance, 1000, 1_000_000)))


async def random_model(to: Target, chance: random.Random) -> str:
    return await to.ask(chat(word(chance, 2, 5000), "Hello"))


async def random_names(to: Target, chance: random.Random) -> str:
    names = ("X-Tenant-Id", "X-Session-Id", "X-Request-Id", "Authorization")
    body = chat(to.models[0], "Hello", user=word(chance, 2, 2000))
    return await to.ask(body, *(f"{name}: {word(chance, 2, 1000)}" for name in names))


# -- kinds: clients that take their time, or leave


async def unfinished_head(to: Target, chance: random.Random) -> str:
    async with to.line() as line:
        await line.send(post(b"")[:-4] + b"\r\nX: " + b"x" * chance.choice([0, 1000, 7000]))
        return await line.ends()


async def unfinished_body(to: Target, chance: random.Random) -> str:
    async with to.line() as line:
        body = chat(to.models[0], word(chance, 10_000, 1_000_000))
        await line.send(post(body)[: -len(body) // 2])
        return line.reset() if chance.random() < 0.5 else await line.ends()


async def slow_body(to: Target, chance: random.Random) -> str:
    async with to.line() as line:
        data, end = post(chat(to.models[0], "slowly " * 20)), time.monotonic() + LINGER_S
        for at in range(0, len(data), 4):
            await line.send(data[at : at + 4])
            await asyncio.sleep(LINGER_S / len(data))
            if time.monotonic() > end:
                return line.reset()
        return await line.answer()


async def half_closed(to: Target, chance: random.Random) -> str:
    """It closes its sending side: to the gateway it has left."""
    async with to.line() as line:
        await line.send(post(chat(to.models[0], word(chance, 20, 400))))
        line.writer.write_eof()
        return await line.answer()


async def slow_reader(to: Target, chance: random.Random) -> str:
    async with to.line(receive_buffer=2048) as line:
        await line.send(post(chat(to.models[0], word(chance, 20, 400), stream=True, max_tokens=3000, ignore_eos=True)))
        end = time.monotonic() + LINGER_S
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while data := await line.reader.read(chance.choice([1, 100, 500])):
                    line.traffic["received"] += len(data)
                    await asyncio.sleep(0.05)
        return "closed" if time.monotonic() < end else line.reset()


async def aborted_stream(to: Target, chance: random.Random) -> str:
    async with to.line() as line:
        await line.send(post(chat(to.models[0], word(chance, 20, 400), stream=True, max_tokens=500, ignore_eos=True)))
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(chance.choice([0.01, 0.3, LINGER_S])):
                await line.reader.read(300)
        return line.reset()


async def crowd(to: Target, chance: random.Random) -> str:
    """Connections that send nothing, or a part of a request."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(50):
            line = await stack.enter_async_context(to.line())
            await line.send(post(chat(to.models[0], "Hello"))[: chance.choice([0, 10, 60, 120])])
        await asyncio.sleep(1)
    return "left"


# -- kinds: requests that are none


async def bad_framing(to: Target, chance: random.Random) -> str:
    """As the fuzzer invents them; some are well."""
    async with to.line() as line:
        await line.send(make(b"", chance))
        return await line.ends_after_eof()


async def pipelining(to: Target, chance: random.Random) -> str:
    """Several requests in one write; all are answered, in their order, or the connection is closed."""
    async with to.line() as line:
        count = chance.randint(2, AT_ONCE)
        await line.send(b"".join(post(chat(to.models[0], f"{number} {word(chance, 2, 99)}")) for number in range(count)))
        statuses = Counter([await line.answer() for _ in range(count)])
        return next((what for what in ("silent", "closed") if statuses[what]), statuses.most_common(1)[0][0])


async def poisoned(to: Target, chance: random.Random, how: str) -> str:
    """A prompt on which replicas fail in this way, each that it is sent to."""
    return await to.ask(chat(to.models[1], f"{POISON}{how} {word(chance, 20, 400)}"))


# Expected outcomes. A killed worker, or a pool that is down for a moment, gives others.
EXPECTED: Mapping[str, Sequence[str]] = {
    "json bomb": ("413",),
    "gzip bomb": ("413",),
    "nested json": ("400", "413"),
    "large body": ("200",),
    "huge salt": ("200", "400"),
    "random model": ("400", "404"),
    "random names": ("200",),
    "unfinished head": ("left",),
    "unfinished body": ("left",),
    "slow body": ("200", "left"),
    "half closed": ("closed",),
    "slow reader": ("left",),
    "aborted stream": ("left",),
    "crowd": ("left",),
    "bad framing": ("200", "400", "404", "405", "408", "411", "413", "414", "417", "431", "501", "505", "closed"),
    "pipelining": ("200",),
    "poisoned prompt: answers_429": ("429",),
    "poisoned prompt: answers_500": ("500",),
    "poisoned prompt: answers_503": ("503",),
    "poisoned prompt: answers_garbage": ("502",),
    "poisoned prompt: reset_in_body": ("502",),
    "poisoned prompt: reset_in_header": ("502",),
}

Attack = Callable[[Target, random.Random], Awaitable[str]]
PLAIN: tuple[Attack, ...] = (
    *(json_bomb, gzip_bomb, nested_json, large_body, huge_salt, random_model, random_names, unfinished_head, unfinished_body),
    *(slow_body, half_closed, slow_reader, aborted_stream, crowd, bad_framing, pipelining),
)


def attacks() -> Iterator[tuple[str, Attack]]:
    """Every kind, by its name in the report."""
    for attack in PLAIN:
        yield attack.__name__.replace("_", " "), attack  # type: ignore[attr-defined]
    for how in POISONS:
        yield f"poisoned prompt: {how}", partial(poisoned, how=how)
