"""Requests that are plain, and so are read here; all others are aiohttp's to read, or to refuse. Pure but for the waiting.

Nearly all requests are: HTTP/1.1, the whole head in one piece, a body by its length, and nothing in the head that means more
than itself to a gateway. For such a head every reader of HTTP comes to the same result, so nothing is guessed: printable ASCII
with one space or none after the colon, no header twice, a Host, and none of those that change how the message is read or what
becomes of the connection (a transfer coding, an upgrade, an expectation, a Connection header other than `keep-alive`). What
is not plain costs more, and is nobody's fault.
"""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from aiohttp import HttpVersion11
from aiohttp.http import StreamWriter

if TYPE_CHECKING:
    from gateway.front import ClientConnection

MAX_HEAD_BYTES: Final = 16 << 10
MAX_FIELDS: Final = 100

_HEAD: Final = re.compile(
    rb"([A-Z]{3,7}) (/[!-~]*+) HTTP/1\.1\r\n((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++: ?[!-~]++(?: ++[!-~]++)*+\r\n)++)\r\n"
)
_FIELD: Final = re.compile(rb"([^:]++): ?([^\r]++)\r\n")
# A client's heads differ in little else; all others that are seen again need not be read again.
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,12})(?=\r\n)")
_KNOWN: Final = 256
_KNOWN_BYTES: Final = 2048
_UNUSUAL: Final = frozenset(
    b"content-encoding content-length expect http2-settings keep-alive proxy-authenticate proxy-authorization proxy-connection"
    b" sec-websocket-key1 te trailer transfer-encoding upgrade".split()
)


class Head:
    """A plain head, less its Content-Length. onward: its lines for a replica, once they are made (`failover.py`). direct:
    whether no proxy had a part in it, once that is known (`access.py`).
    """

    __slots__ = ("direct", "fields", "headers", "method", "onward", "target")

    def __init__(self, method: str, target: str, headers: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.fields = Fields(fields)
        self.onward: bytes | None = None
        self.direct: bool | None = None

    def __repr__(self) -> str:
        return f"<Head {self.method} {self.target}, {self.fields!r}>"


class Beginning:
    """What some bytes begin with. length: of the body; end: where in the bytes it begins."""

    __slots__ = ("end", "head", "length")

    def __init__(self, head: Head, length: int, end: int) -> None:
        self.head = head
        self.length = length
        self.end = end


def read_head(data: bytes) -> Beginning | None:
    """The plain head that `data` begins with; None if it begins with anything else."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    if end == 3:
        return None
    length, known = 0, data[:end]
    if found := _LENGTH.search(known):
        length, known = int(found[1]), known[: found.start()] + known[found.end() :]
    head = _known(known) if len(known) <= _KNOWN_BYTES else _parse(known)
    return Beginning(head, length, end) if head else None


def _parse(data: bytes) -> Head | None:
    """A whole head without its Content-Length; one that is left may be a second one, or no number."""
    found = _HEAD.fullmatch(data)
    if found is None:
        return None
    headers = _FIELD.findall(found[3])
    fields = {name.lower(): value for name, value in headers}
    if len(fields) != len(headers) or len(headers) > MAX_FIELDS or b"host" not in fields or not _UNUSUAL.isdisjoint(fields):
        return None
    if fields.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    return Head(found[1].decode("ascii"), found[2].decode("ascii"), headers, fields)


_known: Final = lru_cache(maxsize=_KNOWN)(_parse)


class Fields:
    """A plain head's headers, by names in any case. raw: by names in lower case."""

    __slots__ = ("raw",)

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self.raw = fields

    def get(self, name: str, /) -> str | None:
        value = self.raw.get(name.lower().encode("ascii"))
        return None if value is None else value.decode("ascii")

    def __repr__(self) -> str:
        return f"<Fields {list(self.raw)}>"


class PlainRequest:
    """A plain request, with what of aiohttp's is used on the way of one. body: None until all of it is here."""

    __slots__ = (
        "_arrived",
        "_left",
        "_so_far",
        "body",
        "head",
        "headers",
        "keep_alive",
        "method",
        "path",
        "protocol",
        "raw_path",
        "transport",
        "version",
    )

    def __init__(self, data: bytes, begun: Beginning, protocol: ClientConnection) -> None:
        """data: its first bytes, at most all of them."""
        self.head = head = begun.head
        self.method = head.method
        self.path = self.raw_path = head.target
        self.headers = head.fields
        self.version = HttpVersion11
        self.keep_alive = True
        self.protocol = protocol
        self.transport = protocol.transport
        self.body: bytes | None = data[begun.end :]
        self._left = begun.end + begun.length - len(data)
        self._so_far = bytearray()  # in one piece: it may come byte by byte
        self._arrived: asyncio.Future[None] | None = None
        if self._left:
            self._so_far += self.body
            self.body = None

    def feed(self, data: bytes) -> bytes:
        """Take what is still missing of the body. Returns what came behind it."""
        if len(data) < self._left:
            self._left -= len(data)
            self._so_far += data
            return b""
        rest = data[self._left :]
        self._so_far += data[: self._left]
        self.body, self._so_far, self._left = bytes(self._so_far), bytearray(), 0
        if self._arrived and not self._arrived.done():
            self._arrived.set_result(None)
        return rest

    async def read(self) -> bytes:
        """The whole body, once it is here."""
        while self.body is None:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return self.body

    @property
    def writer(self) -> StreamWriter:
        """To wait with until the client has taken what was written."""
        return StreamWriter(self.protocol, asyncio.get_running_loop())

    def __repr__(self) -> str:
        return f"<PlainRequest {self.method} {self.path}, {f'{self._left} bytes to come' if self.body is None else 'complete'}>"
