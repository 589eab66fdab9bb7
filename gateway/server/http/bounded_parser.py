"""aiohttp's parser of one connection, with additional bounds: on a whole head, and on the memory of all clients.

aiohttp bounds a header line and the number of headers, but not their sum, and it buffers up to its own limits on each of ten
thousand connections. So all bytes go to its parser through here and are charged to the budget:

- a partial head, and bytes that the parser holds while it is paused, to the connection's lease;
- each request's head and the bytes of its body, as they arrive, to a separate lease, which `next_request` gives to its handler.

Bytes beyond the budget end the connection: from then on its bytes are dropped (`closed`), as is the parser with its buffers,
because the connection may linger after its last answer. A partial head is answered at once by the error raised here; a request
in its turn by `connections.py`, which finds its lease refused.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.admission.memory import MemoryLease
from gateway.errors import GatewayError, head_too_large, internal_error, line_too_long, over_budget
from gateway.server.bounds import HEAD_COPIES
from gateway.server.http.ambiguity import invalid_http

log = logging.getLogger("warmroute.gateway")

MAX_HEAD_BYTES: Final = 64 << 10  # request line and headers
NOTHING: Final = ((), False, b"")
NO_HEADERS: Final = CIMultiDictProxy[str](CIMultiDict())
_HEAD_END: Final = b"\r\n\r\n"


class Refused(HttpProcessingError):
    """Raised into aiohttp's connection, which answers with `error` (`error_of`)."""

    def __init__(self, error: GatewayError) -> None:
        super().__init__(code=error.status, message=error.message)
        self.error = error


class BoundedParser:
    """See the top of this file. Stands in for aiohttp's parser.

    Relies on aiohttp: its connection gives all bytes to `_parser.feed_data`, which returns (messages, upgraded, tail); a
    message's `raw_headers`, `path` and `_replace`; a payload's `total_bytes`, `is_eof`, `read_nowait`, `feed_eof`; that the
    second argument of a LineTooLong is the bound.
    """

    def __init__(self, parser: Any, lease: MemoryLease) -> None:
        """lease: the connection's."""
        self._parser = parser
        self._lease = lease
        self._head = 0  # bytes of a partial head
        self._payload: Any = None  # of the last request, while its body is incomplete
        self._leases: deque[MemoryLease] = deque()  # of requests not yet given to `next_request`
        self._last: MemoryLease | None = None  # of the last request
        self._excess: GatewayError | None = None  # what the next `feed_data` raises
        self._end = b""  # the last bytes of a partial head
        self.sent_early = False  # bytes have come behind a request for an upgrade
        self.closed = False
        self.paused = False  # until it is fed b"", it may buffer its input

    def pause_reading(self) -> None:
        if not self.closed:
            self.paused = True
            self._parser.pause_reading()

    def message_consumed(self) -> None:
        if not self.closed:
            self._parser.message_consumed()

    def set_upgraded(self, upgraded: bool) -> None:
        if not self.closed:
            self._parser.set_upgraded(upgraded)

    def feed_eof(self) -> Any:
        return None if self.closed else self._parser.feed_eof()

    def feed_data(self, data: bytes) -> tuple[Sequence[Any], bool, bytes]:
        """Raises HttpProcessingError, once."""
        if excess := self._excess:
            self._excess = None
            raise Refused(excess)
        if self.closed:
            return NOTHING
        if not data:
            self.paused = False
        payload = self._payload
        before = payload.total_bytes if payload is not None else 0
        try:
            messages, upgraded, tail = self._parser.feed_data(data)
        except LineTooLong as error:
            self.close()
            raise Refused(line_too_long(error.args[1])) from None
        except HttpProcessingError:
            self.close()
            raise
        if payload is not None:
            self._charge(payload.total_bytes - before, payload)
            if payload.is_eof():
                self._payload = None
        if messages:
            self.sent_early = not (self._end + data).endswith(_HEAD_END)
            if messages[-1][0].upgrade and not (len(messages) == 1 and _is_whole(data, messages[0][0])):
                # aiohttp's parser drops the bytes after it, so it has to be the connection's last request.
                messages[-1] = (messages[-1][0]._replace(should_close=True), messages[-1][1])
            messages = [(self._begin(message, its_payload), its_payload) for message, its_payload in messages]
        if messages or payload is not None:
            self._head = 0  # a part of a next head counts later
            self._end = b""
        else:
            self._head += len(data)
            self._end = (self._end + data)[-len(_HEAD_END) :]
            self._check_head()
        return messages, upgraded, tail

    def note_paused(self, size: int) -> bool:
        """To be called after each `feed_data`. size: bytes queued for the parser, which may be paused.

        Returns True if they exceed the budget and belong to no request: call `feed_data(b"")`, which raises it (not while
        an Upgrade awaits its answer, which ends the connection).
        """
        if self.closed or self._lease.resize(self._head * HEAD_COPIES + size):
            return False
        if self._payload is not None and self._last is not None:  # its body stays incomplete
            self._last.refused = self._last.held + size
            self._cut(self._payload)
            return False
        self._excess = over_budget(size, self._lease.account.largest)
        self.close()
        return True

    def next_request(self) -> MemoryLease:
        """The lease of the request whose turn it is; the caller closes it."""
        return self._leases.popleft()

    def close(self) -> None:
        """Drop all further input."""
        self.closed = True
        self._parser = None
        self._head = 0
        self._lease.resize(0)

    def lost(self) -> None:
        """The connection is lost: close it and the leases of all queued requests."""
        self.closed = True
        self._parser = None
        for lease in self._leases:
            lease.close()
        self._lease.close()

    def _begin(self, message: Any, payload: Any) -> Any:
        """Charge a request. Returns its message, without headers if they exceed the budget."""
        size = len(message.path) + sum(len(name) + len(value) + 4 for name, value in message.raw_headers)
        self._last = lease = self._lease.account.lease()
        self._leases.append(lease)
        lease.head = size * HEAD_COPIES
        if size > MAX_HEAD_BYTES:
            lease.refused = lease.head
            self.close()
        self._charge(lease.head + payload.total_bytes, payload)
        self._payload = None if payload.is_eof() else payload
        return message._replace(headers=NO_HEADERS, raw_headers=()) if lease.refused else message

    def _charge(self, size: int, payload: Any) -> None:
        """Charge bytes to the last request. If they exceed the budget, its body is dropped and ended."""
        assert self._last is not None
        if size and not self._last.grow(size):
            self._cut(payload)

    def _cut(self, payload: Any) -> None:
        """End a body and drop its buffered bytes. Its reader wakes up and finds its lease refused."""
        self.close()
        payload.feed_eof()
        payload.read_nowait()

    def _check_head(self) -> None:
        """Raises Refused if the partial head exceeds its limit or the budget."""
        if self._head > MAX_HEAD_BYTES:
            error = head_too_large(MAX_HEAD_BYTES)
        elif not self._lease.resize(self._head * HEAD_COPIES):
            error = over_budget(self._head, self._lease.account.largest)
        else:
            return
        self.close()
        raise Refused(error)


def _is_whole(data: bytes, message: Any) -> bool:
    """Whether these bytes are exactly this request."""
    length = message.headers.get("Content-Length", "0")
    head = data.find(b"\r\n\r\n") + 4
    begins = data.startswith(message.method.encode() + b" ")
    return bool(begins and not message.chunked and length.isdecimal() and head + int(length) == len(data))


def refusal_of(lease: MemoryLease) -> GatewayError | None:
    """The error for a request whose bytes were refused; None if they were not."""
    if not lease.refused:
        return None
    if lease.head > MAX_HEAD_BYTES * HEAD_COPIES:
        return head_too_large(MAX_HEAD_BYTES)
    return over_budget(lease.refused, lease.account.largest)


def forget_frames(messages: Iterable[tuple[Any, Any]]) -> None:
    """Break the cycles of errors that aiohttp keeps: their frames refer to them and to the connection."""
    for message, _ in messages:
        if (error := getattr(message, "exc", None)) is not None:
            error.__traceback__ = None


def error_of(status: int, error: BaseException | None, message: str | None) -> GatewayError:
    """The error for bytes that aiohttp could not parse, or a request that it could not handle."""
    if isinstance(error, Refused):
        return error.error
    if status < 500:
        return invalid_http(message or "it cannot be read")
    if not isinstance(error, ConnectionError):  # not if the client left
        log.error("unhandled error", exc_info=error)
    return internal_error()
