"""A replica that believes nothing: it takes plain requests only, and remembers each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field

from tests.fakes import FACTS, http, usage

_LINE = re.compile(rb"([A-Z-]+) (/[!-~]*) HTTP/1\.1")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+): ?([^\x00-\x08\x0a-\x1f\x7f]*)")
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
_ANSWER = http(200, json.dumps({"id": "c", "model": "m", "choices": [_CHOICE], "usage": usage()}).encode())
_MODELS = http(200, b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"fake"}]}')


@dataclass(slots=True)
class Doubter:
    """A replica that takes nothing but plain requests. paths: of what it was asked to do; wrong: what it would not read."""

    url: str = ""
    paths: Counter[str] = field(default_factory=Counter)
    wrong: list[bytes] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Doubter:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = self._length(head)
                    if length is None:
                        self.wrong.append(head)
                        return
                    await reader.readexactly(length)
                    method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
                    if path != "/v1/models" and path not in FACTS:
                        self.paths[path] += 1
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n" if method == "HEAD" else self._answer(path))
                    await writer.drain()
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    @staticmethod
    def _answer(path: str) -> bytes:
        return _MODELS if path == "/v1/models" else http(404, b"{}") if path in FACTS else _ANSWER

    @staticmethod
    def _length(head: bytes) -> int | None:
        """The body's length; None: it is no plain request."""
        line, *lines = head[:-4].split(b"\r\n")
        fields = [_FIELD.fullmatch(item) for item in lines]
        if not _LINE.fullmatch(line) or not all(fields):
            return None
        names = Counter(found[1].lower() for found in fields if found)
        lengths = [found[2] for found in fields if found and found[1].lower() == b"content-length"]
        if names[b"host"] != 1 or names[b"x-request-id"] > 1 or names[b"transfer-encoding"] or len(lengths) > 1:
            return None
        return int(lengths[0]) if lengths and lengths[0].isdigit() else None if lengths else 0
