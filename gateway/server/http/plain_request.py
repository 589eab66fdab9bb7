"""Parser of plain requests, for the fast path, which takes POSTs to FAST_PATHS; aiohttp parses or refuses all others.

Pure, except for waiting.

Nearly all requests are plain: HTTP/1.1, the whole head in one read, a body with a Content-Length, and no header with a special
meaning for a proxy. All HTTP parsers agree on such a head: printable ASCII with at most one space after the colon, no header
twice, a Host, and none that changes the framing or the connection (a transfer coding, an upgrade, an expectation, a Connection
header other than `keep-alive`). Other requests are valid, but slower.
"""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache
from io import BytesIO
from typing import Final, Protocol

from gateway.admission.memory import MemoryLease, peak_of
from gateway.errors import GatewayError, over_budget
from gateway.request.client import Caller, ClientRequest, caller_of
from gateway.server.http.body import too_slow
from gateway.server.http.response import HttpReply
from gateway.upstream.headers import upstream_headers

MAX_HEAD_BYTES: Final = 16 << 10
MAX_FIELDS: Final = 100

_HEAD: Final = re.compile(
    rb"([A-Z]{3,7}) (/[!-~]*+) HTTP/1\.1\r\n((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++: ?[!-~]++(?: ++[!-~]++)*+\r\n)++)\r\n"
)
_FIELD: Final = re.compile(rb"([^:]++): ?([^\r]++)\r\n")
# A client's heads mostly differ in their length only: parsed heads are cached without it.
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,12})(?=\r\n)")
_NOT_ASKED: Final = ""  # no value of a plain head is empty
_KNOWN: Final = 256
_KNOWN_BYTES: Final = 2048
_UNUSUAL: Final = frozenset(
    b"content-encoding content-length expect http2-settings keep-alive proxy-authenticate proxy-authorization proxy-connection"
    b" sec-websocket-key1 te trailer transfer-encoding upgrade".split()
)


class RequestHead:
    """A plain head without its Content-Length. Cached, with the values derived from it:

    upstream_lines: its header lines for a replica. direct: whether it came without a proxy (`access.py`). caller: named in it.
    """

    __slots__ = ("caller", "direct", "fields", "headers", "method", "target", "upstream_lines")

    def __init__(self, method: str, target: str, headers: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.fields = HeaderFields(fields)
        self.upstream_lines: bytes | None = None
        self.direct: bool | None = None
        self.caller: Caller | None = None

    def __repr__(self) -> str:
        return f"<RequestHead {self.method} {self.target}, {self.fields!r}>"


class RequestStart:
    """The request at the start of some bytes. length: of its body; end: offset of its body."""

    __slots__ = ("end", "head", "length")

    def __init__(self, head: RequestHead, length: int, end: int) -> None:
        self.head = head
        self.length = length
        self.end = end


def read_head(data: bytes) -> RequestStart | None:
    """The plain request at the start of `data`; None if there is none."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    if end == 3:
        return None
    length, known = 0, data[:end]
    if found := _LENGTH.search(known):
        length, known = int(found[1]), known[: found.start()] + known[found.end() :]
    head = _known(known) if len(known) <= _KNOWN_BYTES else _parse(known)
    return RequestStart(head, length, end) if head else None


def _parse(data: bytes) -> RequestHead | None:
    """data: a whole head, its Content-Length removed; a remaining one is a duplicate or invalid."""
    found = _HEAD.fullmatch(data)
    if found is None:
        return None
    headers = _FIELD.findall(found[3])
    fields = {name.lower(): value for name, value in headers}
    if len(fields) != len(headers) or len(headers) > MAX_FIELDS or b"host" not in fields or not _UNUSUAL.isdisjoint(fields):
        return None
    if fields.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    return RequestHead(found[1].decode("ascii"), found[2].decode("ascii"), headers, fields)


_known: Final = lru_cache(maxsize=_KNOWN)(_parse)


class HeaderFields:
    """A plain head's headers, by names in any case. raw: by names in lower case.

    Looked-up values are cached as text: only the gateway's code looks them up, so there is a handful of names.
    """

    __slots__ = ("_asked", "raw")

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self.raw = fields
        self._asked: dict[str, str | None] = {}

    def get(self, name: str, /) -> str | None:
        asked = self._asked.get(name, _NOT_ASKED)
        return asked if asked is not _NOT_ASKED else self._find(name)

    def _find(self, name: str) -> str | None:
        value = self.raw.get(name.lower().encode("ascii"))
        self._asked[name] = found = None if value is None else value.decode("ascii")
        return found

    def __repr__(self) -> str:
        return f"<HeaderFields {list(self.raw)}>"


class PlainConnection(Protocol):
    """What a plain request needs of its connection. local: the client is on this machine."""

    local: bool

    @property
    def transport(self) -> asyncio.Transport | None: ...


class PlainRequest(ClientRequest):
    """A plain request. Its body arrives in pieces: `feed`, then `take`.

    Its head and each piece of its body are charged to its lease as they arrive. A request beyond the budget drops its body and
    further input, and `read` raises.
    """

    def __init__(self, data: bytes, begun: RequestStart, connection: PlainConnection, lease: MemoryLease) -> None:
        """data: its first bytes, none after its end."""
        head = begun.head
        super().__init__(head.method, head.target, head.target, head.fields, lease)
        self.head = head
        self.connection = connection
        self._body = b""
        self._left = begun.end + begun.length - len(data)  # missing bytes
        self._pieces: BytesIO | None = None
        self._refusal: GatewayError | None = None
        self._waiter: asyncio.Future[None] | None = None
        extra = (
            begun.end if begun.end > _KNOWN_BYTES else 0
        )  # such a head is not cached, so bytes and fields are this request's
        lease.head = begun.end + extra
        if not lease.grow(len(data) + extra) or (self._left and not self._may_come(begun.length)):
            self._refuse(begun.length)  # refused early, before the client sends it
        elif self._left:
            self._pieces = BytesIO()
            self._pieces.write(data[begun.end :])
        else:
            self._body = data[begun.end :]

    @property
    def here(self) -> bool:
        return not self._left and self._refusal is None

    @property
    def complete(self) -> bool:
        return not self._left

    @property
    def lingers(self) -> bool:
        """Whether the connection may linger after the answer: only if the budget has room for the head."""
        return self.lease.held >= self.lease.head

    def feed(self, data: bytes) -> bytes:
        """Take the missing bytes of the body. Returns pipelined bytes."""
        if not self._left:
            return data
        piece = data if len(data) <= self._left else data[: self._left]
        self._left -= len(piece)
        if self._pieces is not None:
            if self.lease.grow(len(piece)):
                self._pieces.write(piece)
            else:
                self._refuse(self.lease.held - self.lease.head + len(piece) + self._left)
        if not self._left:
            self._finish()
        return data[len(piece) :]

    async def arrived(self) -> None:
        """Wait for the whole body. Raises GatewayError 503 or 413 if it exceeds the budget."""
        while self._left and self._refusal is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._refusal:
            raise self._refusal

    async def read(self, *, max_bytes: int, within_s: float, opaque: bool) -> bytes:
        try:
            async with asyncio.timeout(within_s):
                await self.arrived()
        except TimeoutError as late:
            raise too_slow(within_s) from late
        return self.take()

    def caller(self) -> Caller:
        """O(1) if its head is cached."""
        head = self.head
        if head.caller is None:
            head.caller = caller_of(head.fields)
        return head.caller

    def upstream_headers(self) -> bytes:
        head = self.head
        if head.upstream_lines is None:
            head.upstream_lines = upstream_headers(head.headers)
        return head.upstream_lines

    def reply(self, *, keep_alive: bool, patience_s: float) -> HttpReply:
        connection = self.connection
        return HttpReply(
            connection, connection.transport, http11=True, to_head=False, keep_alive=keep_alive, patience_s=patience_s
        )

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """End of the request: drop its body, whoever still refers to the request."""
        self._pieces, self._body = None, b""
        self.lease.close()

    def _finish(self) -> None:
        if self._pieces is not None:
            self._body, self._pieces = self._pieces.getvalue(), None  # not a copy: BytesIO hands its buffer over
        self._wake()

    def _may_come(self, length: int) -> bool:
        """Whether the budget has room for the rest of the body now."""
        lease = self.lease
        return peak_of(length) <= lease.account.largest and lease.fits(self._left)

    def _refuse(self, body: int) -> None:
        """body: the size of the whole body."""
        self._refusal = over_budget(peak_of(body), self.lease.account.largest, body)
        self._pieces = None
        self.lease.drop_body()
        self.lease.grow(self.lease.head - self.lease.held)  # if there is room: see `lingers`
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def __repr__(self) -> str:
        return f"<PlainRequest {self.method} {self.path}, {f'{self._left} bytes to come' if self._left else 'complete'}>"
