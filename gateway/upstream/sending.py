"""Writes a request to a connection to a replica: a small one in one buffer, a large body slice by slice.

A large body is not copied: its unwritten part is a view of it.

Over TLS there are two transports, and ciphertext may be buffered in TCP's transport beneath TLS. There is no callback when that
buffer becomes empty (the transport's protocol is TLS itself), so it is polled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

MAX_JOINED: Final = 1 << 16  # bytes; a body up to this size is written in one buffer with its head
POLL_S: Final = 0.1  # interval of polling the TCP transport beneath TLS
SLICE: Final = 1 << 20  # bytes of a larger body written in one turn of the event loop: TLS encrypts them at once


class RequestWriter:
    """Writes requests to one connection (see the module). For each request: `write`, then `end`. transport: None while
    disconnected. tcp: the TCP transport, without TLS the same.
    """

    __slots__ = ("_loop", "_poll_timer", "_sent", "_unsent", "_writable", "tcp", "transport")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.transport: asyncio.Transport | None = None
        self.tcp: asyncio.Transport | None = None
        self._unsent: memoryview | None = None  # part of the body that the transport does not have yet
        self._writable = True  # the transport accepts more: its buffer is below its high-water mark
        self._sent: Callable[[], None] | None = None  # called once the whole request has left this process
        self._poll_timer: asyncio.TimerHandle | None = None

    def write(self, head: bytes, body: bytes) -> None:
        assert self.transport is not None
        if len(body) <= MAX_JOINED:
            self.transport.write(head + body)
        elif len(body) <= SLICE:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head)
            self._unsent = memoryview(body)
            self._write_slice()

    def _write_slice(self) -> None:
        """Write the next slice: one per turn of the event loop, while the transport accepts more."""
        unsent, transport = self._unsent, self.transport
        if unsent is None or not self._writable:
            return
        if transport is None or transport.is_closing():
            self._unsent = None
            return
        self._unsent = unsent[SLICE:] if len(unsent) > SLICE else None
        transport.write(unsent[:SLICE])
        if self._unsent is not None:
            if self._writable:  # else `resume` continues
                self._loop.call_soon(self._write_slice)
        elif self._sent:
            self.when_sent(self._sent)

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` once no part of the request is buffered here."""
        transport = self.transport
        if transport is None or self._is_sent(transport):
            self._forget_callback()
            callback()
            return
        self._sent = callback
        if self._unsent is not None or transport.get_write_buffer_size():
            transport.set_write_buffer_limits(0)  # `resume` is called when the buffer is empty
        elif self._poll_timer is None:
            self._poll_timer = self._loop.call_later(POLL_S, self._poll_empty)

    def _poll_empty(self) -> None:
        self._poll_timer = None
        if self._sent:
            self.when_sent(self._sent)

    def _is_sent(self, transport: asyncio.Transport) -> bool:
        tcp = self.tcp
        return (
            self._unsent is None
            and not transport.get_write_buffer_size()
            and (tcp is None or tcp is transport or not tcp.get_write_buffer_size())
        )

    def _forget_callback(self) -> None:
        self._sent = None
        if self._poll_timer is not None:
            self._poll_timer.cancel()
            self._poll_timer = None

    def pause(self) -> None:
        self._writable = False

    def resume(self) -> None:
        self._writable = True
        if self._unsent is not None:
            self._write_slice()
        elif self._sent:
            self.when_sent(self._sent)

    def end(self) -> bool:
        """End of the call. Returns True if the whole request has left this process."""
        self._forget_callback()
        return self.transport is None or self._is_sent(self.transport)

    def drop(self) -> None:
        """Stop writing the request."""
        self._unsent = None

    def __repr__(self) -> str:
        return f"<RequestWriter {'nothing' if self._unsent is None else f'{len(self._unsent)} bytes'}>"
