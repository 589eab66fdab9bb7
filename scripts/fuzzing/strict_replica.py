"""A replica that accepts plain requests only, and records them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.fakes import FACTS, http, usage

_LINE = re.compile(rb"([A-Z-]+) (/[!-~]*) HTTP/1\.1")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+): ?([^\x00-\x08\x0a-\x1f\x7f]*)")
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
_ANSWER = http(200, json.dumps({"id": "c", "model": "m", "choices": [_CHOICE], "usage": usage()}).encode())
_MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
_RESPONSE = {"id": "r", "object": "response", "model": "m", "status": "completed", "output": [_MESSAGE]}
_RESPONSES = http(
    200, json.dumps(_RESPONSE | {"usage": {"input_tokens": 100, "output_tokens": 4, "total_tokens": 104}}).encode()
)


class Received(NamedTuple):
    """One request as it reached the replica. fields: names as they were written, in their order."""

    method: str
    path: str
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def get(self, name: bytes) -> list[bytes]:
        """The values of a header; its name in lower case."""
        return [value for known, value in self.fields if known.lower() == name]


def entry(name: object) -> dict[str, object]:
    """One model of a model list."""
    return {"id": name, "object": "model", "created": 1, "owned_by": "fake"}


@dataclass(slots=True)
class StrictReplica:
    """A replica that accepts only plain requests. names: of the models that it lists; paths: number of requests for each;
    wrong: heads of requests that are not plain; taken: the requests themselves, if `keep` is set.
    """

    url: str = ""
    names: Sequence[object] = ("m",)
    keep: bool = False
    paths: Counter[str] = field(default_factory=Counter)
    wrong: list[bytes] = field(default_factory=list)
    taken: list[Received] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> StrictReplica:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def forget(self) -> None:
        """Drop the recorded requests."""
        self.paths.clear()
        self.wrong.clear()
        self.taken.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    fields = _fields_of(head)
                    if fields is None:
                        self.wrong.append(head)
                        return
                    length = next((int(value) for name, value in fields if name.lower() == b"content-length"), 0)
                    body = await reader.readexactly(length)
                    method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
                    self._note(Received(method, path, fields, body))
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n" if method == "HEAD" else self._answer(path))
                    await writer.drain()
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    def _note(self, request: Received) -> None:
        if request.path == "/v1/models" or request.path in FACTS:
            return
        self.paths[request.path] += 1
        if self.keep:
            self.taken.append(request)

    def _answer(self, path: str) -> bytes:
        if path == "/v1/models":
            return http(200, json.dumps({"object": "list", "data": [entry(name) for name in self.names]}).encode())
        if path in FACTS:
            return http(404, b"{}")
        return _RESPONSES if path == "/v1/responses" else _ANSWER


def _fields_of(head: bytes) -> tuple[tuple[bytes, bytes], ...] | None:
    """The headers; None if it is not a plain request."""
    line, *lines = head[:-4].split(b"\r\n")
    found = [_FIELD.fullmatch(item) for item in lines]
    if not _LINE.fullmatch(line) or not all(found):
        return None
    fields = tuple((match[1], match[2]) for match in found if match)
    names = Counter(name.lower() for name, _ in fields)
    lengths = [value for name, value in fields if name.lower() == b"content-length"]
    if names[b"host"] != 1 or names[b"x-request-id"] > 1 or names[b"transfer-encoding"] or len(lengths) > 1:
        return None
    return fields if all(length.isdigit() for length in lengths) else None
