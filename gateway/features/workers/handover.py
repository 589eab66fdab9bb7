"""New connections of a worker that does not accept, accepted by the supervisor and passed on to workers that do.

    listener of a silent worker ──► Handover (supervisor): accept ──► socket pair, SCM_RIGHTS ──► Receiver (another worker)

The kernel spreads new connections over the listeners of all workers, also of one that hangs. Its listener stays open and is
only shared for a while: a worker that was merely slow goes on to accept, and while no other worker is well the connections wait
as before. The file descriptors of connections are in the supervisor only for a moment.

A connection is lost if the worker that it is passed to ends before it has taken it, or has no file descriptor left for it: the
kernel then closes it, and the client sees a reset. While the supervisor itself has none left, connections wait in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final

from gateway.cluster.accepted import AcceptedConnections
from gateway.errors import OUT_OF_RESOURCES

log = logging.getLogger("warmroute.workers")

BATCH: Final = 64  # connections in one iteration of the event loop
PAUSE_S: Final = 0.02  # while no receiver has room, or this process has no file descriptors or memory left
_MARK: Final = b"c"  # a file descriptor needs a byte to go with


class Handover:
    """Accepts on the listeners of one worker from now on and until `close`. Made within the event loop."""

    def __init__(self, listeners: Sequence[socket.socket], receivers: Callable[[], Sequence[socket.socket]]) -> None:
        """receivers: the sockets of the workers that are well, as they are at the time of the call."""
        self._listeners = tuple(listeners)
        self._receivers = receivers
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._retry: asyncio.TimerHandle | None = None
        self.open = True
        self.passed_on = 0
        self._watch()

    def waits(self) -> bool:
        """True: a connection waits to be accepted. O(listeners)."""
        poll = select.poll()
        for listener in self._listeners:
            poll.register(listener, select.POLLIN)
        return bool(poll.poll(0))

    def _watch(self) -> None:
        self._retry = None
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _pause(self) -> None:
        self._unwatch()
        self._retry = self._loop.call_later(PAUSE_S, self._watch)

    def _unwatch(self) -> None:
        if self._retry:
            self._retry.cancel()
            self._retry = None
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def close(self) -> None:
        """Before the listeners are closed. Idempotent."""
        if self.open:
            self.open = False
            self._unwatch()

    def _accept(self, listener: socket.socket) -> None:
        receivers = self._receivers()
        if not receivers:  # no worker is well any more: what is not accepted can wait
            self.close()
            return
        for _ in range(BATCH):
            receiver = self._writable(receivers)
            if receiver is None:
                self._pause()
                return
            try:
                client, _address = listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:  # the listener stays readable: it would be asked again at once
                    self._pause()
                return  # else there are no more
            with client, contextlib.suppress(OSError):  # that worker has just ended: so has this connection
                socket.send_fds(receiver, [_MARK], [client.fileno()])
                self.passed_on += 1

    def _writable(self, receivers: Sequence[socket.socket]) -> socket.socket | None:
        """The next receiver that has room for a file descriptor."""
        for _ in receivers:
            self._next += 1
            receiver = receivers[self._next % len(receivers)]
            poll = select.poll()
            poll.register(receiver, select.POLLOUT)
            if any(events == select.POLLOUT for _, events in poll.poll(0)):
                return receiver
        return None

    def __repr__(self) -> str:
        return f"<Handover {'open' if self.open else 'closed'}, {self.passed_on} connections passed on>"


class Receiver:
    """Takes over connections from a Handover from now on and until `close`. Made within the event loop.

    lost: connections in a row that the kernel closed because this process had no file descriptor left for them. The first one
    is logged, and their number when a connection arrives again.
    """

    def __init__(self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._sock = sock
        self._accepted = AcceptedConnections(make_protocol)
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.lost = 0
        sock.setblocking(False)
        self._loop.add_reader(sock, self._receive)

    def close(self) -> None:
        """Idempotent. Connections that were taken over stay open."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _receive(self) -> None:
        for _ in range(BATCH):
            try:
                mark, numbers, flags, _address = socket.recv_fds(self._sock, len(_MARK), 1)
            except BlockingIOError:
                return
            except OSError:
                mark, numbers, flags = b"", [], 0
            if not mark:  # the supervisor is gone
                self.close()
                return
            self._note(lost=bool(flags & socket.MSG_CTRUNC))
            for number in numbers:
                os.set_inheritable(number, False)
                self._accepted.add(socket.socket(fileno=number))

    def _note(self, *, lost: bool) -> None:
        """Log the first of the connections in a row that are lost, and their number when that is over."""
        if lost:
            self.lost += 1
            if self.lost == 1:
                log.warning("connections that are handed over are lost: this worker has no file descriptors left")
        elif self.lost:
            log.warning("connections that are handed over arrive again", extra={"lost": self.lost})
            self.lost = 0
