"""Frames between the supervisor and one of its workers, over a pair of connected sockets.

    length of the payload (4 bytes), kind (1), who (4), number (4), payload

`who` is the worker that a frame comes from or is meant for, as the hub numbers them (0: the hub itself); `number` belongs to
the kind. Payloads are pickled, but for events, which are many and plain: they are marshalled, in half the time. Both ends are
processes of this gateway, and nobody else has the sockets.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

_HEAD = struct.Struct("<IBII")
HUB = 0

# worker -> hub -> the other workers
EVENTS = 1  # (since, events): what a router has booked (router/follow.py); the oldest of it was booked at `since`
RESYNC = 13  # (since, events): some events were dropped; its open bookings are these and no others
# worker -> hub
TOLD = 2  # all counters
SERVING = 3  # it takes requests
ALIVE = 12  # nothing but a sign of life
# hub -> worker
WELCOME = 4  # the configuration; who: its number
CURRENT = 5  # all that was known before it came has been told
JOINED = 6  # who: a new worker, which does not know what is open
GONE = 7  # who: a worker that is no more
ASKED = 8  # what it asks has gone to these: {who: what they told last}
# worker -> hub -> all workers; number: the asker's
SCRAPE = 9  # tell all counters
COMMAND = 10  # (key, command, until): the hub ignores a command that it reads later than `until`
# worker -> hub -> the asker
ANSWER = 11

Receive = Callable[[int, int, int, bytes], None]
"""kind, who, number, payload"""


class Channel(asyncio.Protocol):
    """One end. Frames wait until there is somebody to `receive` them."""

    __slots__ = ("_buffer", "_lost", "_receive", "_transport", "closed")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._receive: Receive | None = None
        self._lost: Callable[[], None] | None = None
        self.closed = asyncio.Event()  # the other end is gone

    def receive(self, receive: Receive, lost: Callable[[], None]) -> None:
        """From now on frames go there. lost: the other end is gone; called once."""
        self._receive, self._lost = receive, lost
        self._parse()
        if self.closed.is_set():
            lost()

    async def first(self) -> tuple[int, int, int, bytes]:
        """The first frame; the others wait. Raises ConnectionError if there is none."""
        waiter: asyncio.Future[tuple[int, int, int, bytes]] = asyncio.get_running_loop().create_future()

        def receive(*frame: Any) -> None:
            self._receive = None
            waiter.set_result(frame)

        def lost() -> None:
            if not waiter.done():
                waiter.set_exception(ConnectionError("the other end is gone"))

        self.receive(receive, lost)
        return await waiter

    def send(self, kind: int, who: int = HUB, number: int = 0, payload: bytes = b"") -> None:
        """Nothing happens if the other end is gone."""
        if self._transport is not None:
            self._transport.write(_HEAD.pack(len(payload), kind, who, number) + payload)

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closed.set()
        if self._lost is not None:
            self._lost()

    def _parse(self) -> None:
        buffer, at = self._buffer, 0
        while self._receive is not None and len(buffer) - at >= _HEAD.size:
            length, kind, who, number = _HEAD.unpack_from(buffer, at)
            begin = at + _HEAD.size
            if len(buffer) - begin < length:
                break
            at = begin + length
            self._receive(kind, who, number, bytes(buffer[begin:at]))
        del buffer[:at]
