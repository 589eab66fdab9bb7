"""A replica on loopback that follows a script: it answers, streams, refuses, dies before or after its first byte, hangs, lies.

A behaviour is an async function of (request, writer). Each generation request takes the next behaviour of `script`, and the
last one repeats. `/v1/models` is answered by `listing`, an engine's status pages by `pages` (404 without), so that probes do
not consume the script.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.cluster.listeners import open_listeners
from gateway.server.http.accept import Acceptor


@dataclass(frozen=True, slots=True)
class FakeRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Behaviour = Callable[[FakeRequest, asyncio.StreamWriter], Awaitable[None]]

# what probes ask for
FACTS = frozenset(["/metrics", "/props", "/v1/loads", "/server_info", "/get_server_info", "/weight_info", "/model_info"]) | {
    *("/get_model_info", "/is_sleeping")
}


def http(status: int, body: bytes, content_type: str = "application/json", *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def models(*names: str, owner: str = "fake") -> Behaviour:
    entries = [{"id": name, "object": "model", "created": 1, "owned_by": owner} for name in names]
    return writes(http(200, json.dumps({"object": "list", "data": entries}).encode()))


def writes(data: bytes) -> Behaviour:
    """Writes these bytes unchanged."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return behave


def usage(prompt: int = 100, completion: int = 4, cached: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


def answers(text: str = "hello", **counts: Any) -> Behaviour:
    """A plain chat completion with usage."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage(**counts)}
    return writes(http(200, json.dumps(body).encode()))


def status(code: int, message: str = "no", *headers: str) -> Behaviour:
    body = json.dumps({"error": {"message": message, "type": "t", "param": None, "code": code}}).encode()
    return writes(http(code, body, "application/json", *headers))


def event(text: str | None = None, reason: str | None = None, **extra: Any) -> bytes:
    """One SSE event of a chat stream; text=None: a last event with no choices. reason: why the answer ends with it."""
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **extra}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def streams(*texts: str, hold: asyncio.Event | None = None, die: bool = False, **counts: Any) -> Behaviour:
    """A chat stream, with usage at the end if requested. hold: awaited after the first event. die: break off instead of the
    end.
    """

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for place, text in enumerate(texts):
            ends = place == len(texts) - 1 and not die
            writer.write(chunk(event(text, "stop" if ends else None)))
            await writer.drain()
            if hold and place == 0:
                await hold.wait()
        if die:
            return dies_now(writer)
        if (request.json.get("stream_options") or {}).get("include_usage"):
            writer.write(chunk(event(usage=usage(**counts))))
        writer.write(chunk(DONE) + b"0\r\n\r\n")
        return None

    return behave


def dies_now(writer: asyncio.StreamWriter) -> None:
    """Resets the connection, like the kernel of a killed process."""
    writer.transport.abort()


async def dies(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    """Reads the request, then breaks off without a byte."""
    dies_now(writer)


async def dies_after_headers(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    await writer.drain()
    writer.write_eof()


async def dies_in_plain_body(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"half": ')
    await writer.drain()
    dies_now(writer)


def hangs(until: asyncio.Event) -> Behaviour:
    """Writes nothing until the event is set, then dies."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await until.wait()
        dies_now(writer)

    return behave


@dataclass(slots=True)
class FakeReplica:
    """Use as an async context manager. `url` is its base URL. `gone`: number of connections closed by the other side during an
    answer.
    """

    script: Sequence[Behaviour] = (answers(),)
    listing: Behaviour = field(default_factory=lambda: models("m"))
    pages: MutableMapping[str, Behaviour] = field(default_factory=dict)
    requests: list[FakeRequest] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # paths of FACTS
    port: int = 0
    host: str = "127.0.0.1"
    gone: int = 0
    connections: int = 0
    tls: ssl.SSLContext | None = None
    _server: Acceptor | asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    async def __aenter__(self) -> FakeReplica:
        # Not asyncio's server: that loses a connection which it has just accepted when it is closed.
        (listener,) = open_listeners(self.host, self.port)
        if self.tls:
            self._server = await asyncio.start_server(self._serve, sock=listener, ssl=self.tls)
        else:
            self._server = Acceptor(listener, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve))
        self.port = listener.getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Refuse new connections and reset the open ones."""
        if self._server:
            self.refuse()
            await self._server.wait_closed()
            await asyncio.sleep(0)  # the tasks of connections that were accepted last begin
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._server = None

    def refuse(self) -> None:
        """Closes the listening socket, and resets every open connection."""
        assert self._server
        self._server.close()
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        self.connections += 1
        try:
            # Cancelled by `refuse`: asyncio's streams would log it as an error.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while not writer.is_closing():
                    await self._one(await _read_request(reader), reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, request: FakeRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/models":
            behaviour = self.listing
        elif request.method == "GET" and request.path in FACTS:
            behaviour = self.pages.get(request.path, status(404))
            self.asked.append(request.path)
        else:
            behaviour = self.script[min(len(self.requests), len(self.script) - 1)]
            self.requests.append(request)
        doing = asyncio.ensure_future(behaviour(request, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([doing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self.gone += 1  # nobody pipelines here: to become readable is to be closed
                raise ConnectionResetError
            await doing
            await writer.drain()
        finally:
            doing.cancel()
            leaving.cancel()
            await asyncio.gather(doing, leaving, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader) -> FakeRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *rest = head.split("\r\n")
    method, path, _ = line.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (item.partition(":") for item in rest if item)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return FakeRequest(method, path, headers, body)
