"""Frames between the supervisor and one of its workers, over a pair of connected sockets.

    length of the message (4 bytes), worker (8 bytes), message

`worker` is the sender or the receiver of the message, by its number at the hub (HUB: the hub itself). It may also be a router
of another gateway. These get a new number at each start, so four bytes might not suffice. Messages: `messages.py`. A frame that
is too long, or whose message does not decode, ends the channel, because later frames cannot be trusted.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Final, cast

from gateway.cluster.messages import MessageError
from gateway.features.workers.messages import Message, encode

log = logging.getLogger("warmroute.workers")

HEAD: Final = struct.Struct("<IQ")
HUB: Final = 0
MAX_MESSAGE_BYTES: Final = 256 << 20  # the counters of 64 workers, each with all permitted label sets

Receive = Callable[[int, Message, bytes], None]
"""(worker, message, encoded message for forwarding). May raise MessageError because of the content."""


class ChannelError(Exception):
    """The other end has sent an invalid frame. The message is the reason."""


class Channel(asyncio.Protocol):
    """One end of the channel. Frames wait until there is a receiver. error: set if the other end has sent an invalid frame."""

    __slots__ = ("_buffer", "_decode", "_lost", "_receive", "_transport", "closed", "error")

    def __init__(self, decode: Callable[[bytes], Message]) -> None:
        """decode: `from_worker` at the hub's end, `from_hub` at a worker's. Raises MessageError."""
        self._decode = decode
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._receive: Receive | None = None
        self._lost: Callable[[], None] | None = None
        self.error: ChannelError | None = None
        self.closed = asyncio.Event()  # the other end has closed

    def receive(self, receive: Receive, lost: Callable[[], None]) -> None:
        """Passes waiting and later frames to `receive`. lost: called once when the other end has closed."""
        self._receive, self._lost = receive, lost
        self._parse()
        if self.closed.is_set():
            lost()

    async def first(self) -> tuple[int, Message]:
        """(worker, message) of the first frame; later frames wait. Raises ConnectionError if there is none."""
        waiter: asyncio.Future[tuple[int, Message]] = asyncio.get_running_loop().create_future()

        def receive(worker: int, message: Message, _payload: bytes) -> None:
            self._receive = None
            waiter.set_result((worker, message))

        def lost() -> None:
            if not waiter.done():
                waiter.set_exception(ConnectionError("the other end has closed"))

        self.receive(receive, lost)
        return await waiter

    def send(self, message: Message, worker: int = HUB) -> None:
        """Does nothing if the other end has closed."""
        self.forward(encode(message), worker)

    def forward(self, payload: bytes, worker: int) -> None:
        """Sends an encoded message."""
        if self._transport is not None:
            self._transport.write(HEAD.pack(len(payload), worker) + payload)

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not read yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.error is None:
            self._buffer += data
            self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closed.set()
        if self._lost is not None:
            self._lost()

    def _parse(self) -> None:
        try:
            self._parse_frames()
        except ChannelError as error:
            self.error = error
            self._buffer.clear()
            log.error("the channel to another process is broken", extra={"error": str(error)})
            if self._transport is not None:
                self._transport.abort()

    def _parse_frames(self) -> None:
        """Raises ChannelError."""
        buffer, at = self._buffer, 0
        while self._receive is not None and len(buffer) - at >= HEAD.size:
            length, worker = HEAD.unpack_from(buffer, at)
            if length > MAX_MESSAGE_BYTES:
                raise ChannelError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are possible")
            begin = at + HEAD.size
            if len(buffer) - begin < length:
                break
            at = begin + length
            payload = bytes(buffer[begin:at])
            try:
                self._receive(worker, self._decode(payload), payload)
            except MessageError as error:
                raise ChannelError(f"a message of {length} bytes does not decode: {error}") from error
        del buffer[:at]
