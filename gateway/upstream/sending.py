"""A request on its way out of a connection to a replica: small ones in one buffer, a large body slice by slice.

A large body is not copied: what is not written yet is a view of it.

Over TLS there are two transports, and what TLS has encrypted may wait in the one beneath it, TCP's. Nobody is called when that
one is empty, for its protocol is TLS itself: so it is asked now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

MAX_JOINED: Final = 1 << 16  # bytes of a body that goes out in one buffer with its head
ASK_S: Final = 0.1  # how often the transport beneath TLS is asked whether it is empty
SLICE: Final = 1 << 20  # bytes of a larger body that are written in one turn of the event loop: TLS encrypts them at once


class Sending:
    """See the top of this file. One request after the other: `write`, then `end`. transport: None while there is none; flow:
    TCP's, without TLS the same.
    """

    __slots__ = ("_asking", "_loop", "_sent", "_unsent", "_writable", "flow", "transport")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.transport: asyncio.Transport | None = None
        self.flow: asyncio.Transport | None = None
        self._unsent: memoryview | None = None  # the part of the body that was not given to the transport yet
        self._writable = True  # the transport accepts more: its buffer is below its high-water mark
        self._sent: Callable[[], None] | None = None  # to be called when the whole request has left this process
        self._asking: asyncio.TimerHandle | None = None

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
        """Write the next slice: one in each turn of the event loop, when the transport accepts more."""
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

    def when_sent(self, call: Callable[[], None]) -> None:
        """Call it when nothing of the request is in memory here any more."""
        transport = self.transport
        if transport is None or self._is_sent(transport):
            self._forget_call()
            call()
            return
        self._sent = call
        if self._unsent is not None or transport.get_write_buffer_size():
            transport.set_write_buffer_limits(0)  # `resume` is called when nothing is left
        elif self._asking is None:
            self._asking = self._loop.call_later(ASK_S, self._ask)

    def _ask(self) -> None:
        self._asking = None
        if self._sent:
            self.when_sent(self._sent)

    def _is_sent(self, transport: asyncio.Transport) -> bool:
        flow = self.flow
        return (
            self._unsent is None
            and not transport.get_write_buffer_size()
            and (flow is None or flow is transport or not flow.get_write_buffer_size())
        )

    def _forget_call(self) -> None:
        self._sent = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def pause(self) -> None:
        self._writable = False

    def resume(self) -> None:
        self._writable = True
        if self._unsent is not None:
            self._write_slice()
        elif self._sent:
            self.when_sent(self._sent)

    def end(self) -> bool:
        """The call is over. Whether the whole request has left this process."""
        self._forget_call()
        return self.transport is None or self._is_sent(self.transport)

    def drop(self) -> None:
        """Write no more of it."""
        self._unsent = None

    def __repr__(self) -> str:
        return f"<Sending {'nothing' if self._unsent is None else f'{len(self._unsent)} bytes'}>"
