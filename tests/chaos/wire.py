"""Strict HTTP/1.1 for both sides of these tests: a message that does not end properly raises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple


class Message(NamedTuple):
    """start: the request line or the status line. headers: names in lower case."""

    start: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def status(self) -> int:
        return int(self.start.split(" ")[1])

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def read_head(reader: asyncio.StreamReader) -> Message:
    start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    pairs = (line.partition(":") for line in lines)
    return Message(start, {name.lower(): value.strip() for name, _, value in pairs}, b"")


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    if await reader.readexactly(2) != b"\r\n":
        raise ValueError("there is something behind the last chunk")


async def read_message(reader: asyncio.StreamReader) -> Message:
    """One message with a length or in chunks."""
    head = await read_head(reader)
    if head.headers.get("transfer-encoding") == "chunked":
        return head._replace(body=b"".join([part async for part in chunks(reader)]))
    return head._replace(body=await reader.readexactly(int(head.headers.get("content-length", 0))))


def request(method: str, path: str, body: bytes = b"") -> bytes:
    head = b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % (method.encode(), path.encode(), len(body)) + body


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def fetch(url: str, path: str, method: str = "GET") -> Message:
    """One request on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    try:
        writer.write(request(method, path))
        return await read_message(reader)
    finally:
        writer.close()
