"""Accepts the connections of a worker that does not accept, and passes them to other workers.

    listener of a silent worker ──► Handover (supervisor): accept ──► socket pair, SCM_RIGHTS ──► Receiver (another worker)

The kernel distributes new connections over the listeners of all workers, including a hung one. Its listener stays open and is
shared for a while: a merely slow worker continues to accept, and while no other worker is healthy, connections wait as before.
The file descriptors of connections are in the supervisor for a moment only.

A connection is lost if the receiving worker ends before it takes the connection, or has no free file descriptor: the kernel
then closes it, and the client gets a reset. While the supervisor has no free file descriptor, connections wait in the queue.
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
from gateway.cluster.listener_tls import ListenerTls
from gateway.errors import OUT_OF_RESOURCES

log = logging.getLogger("warmroute.workers")

BATCH: Final = 64  # connections per iteration of the event loop
PAUSE_S: Final = 0.02  # pause while no receiver has room, or this process lacks file descriptors or memory
_MARK: Final = b"c"  # a file descriptor must be sent with at least one byte


class Handover:
    """Accepts on the listeners of one worker from its creation until `close`. To be created in the event loop."""

    def __init__(self, listeners: Sequence[socket.socket], receivers: Callable[[], Sequence[socket.socket]]) -> None:
        """receivers: returns the sockets of the workers that are healthy now."""
        self._listeners = tuple(listeners)
        self._receivers = receivers
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._retry: asyncio.TimerHandle | None = None
        self.open = True
        self.passed_on = 0
        self._watch()

    def has_waiting(self) -> bool:
        """True if a connection waits to be accepted. O(listeners)."""
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
        """To be called before the listeners are closed. Idempotent."""
        if self.open:
            self.open = False
            self._unwatch()

    def _accept(self, listener: socket.socket) -> None:
        receivers = self._receivers()
        if not receivers:  # no worker is healthy: connections wait in the queue
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
                if error.errno in OUT_OF_RESOURCES:  # the listener stays readable, so without a pause this would repeat at once
                    self._pause()
                return  # otherwise no connection waits
            with client, contextlib.suppress(OSError):  # the worker has just ended, and the connection is lost
                socket.send_fds(receiver, [_MARK], [client.fileno()])
                self.passed_on += 1

    def _writable(self, receivers: Sequence[socket.socket]) -> socket.socket | None:
        """The next receiver with room for a file descriptor."""
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
    """Takes connections from a Handover, from its creation until `close`. To be created in the event loop.

    lost: consecutive connections that the kernel closed because this process had no free file descriptor. The first one is
    logged, and their number when a connection arrives again.
    """

    def __init__(
        self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: ListenerTls | None = None
    ) -> None:
        self._sock = sock
        self._accepted = AcceptedConnections(make_protocol, tls)
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.lost = 0
        sock.setblocking(False)
        self._loop.add_reader(sock, self._receive)

    def close(self) -> None:
        """Idempotent. Accepted connections stay open."""
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
            if not mark:  # the supervisor has ended
                self.close()
                return
            self._count_lost(lost=bool(flags & socket.MSG_CTRUNC))
            for number in numbers:
                os.set_inheritable(number, False)
                self._accepted.add(socket.socket(fileno=number))

    def _count_lost(self, *, lost: bool) -> None:
        """Logs the first of consecutive lost connections, and their number when they end."""
        if lost:
            self.lost += 1
            if self.lost == 1:
                log.warning("connections that are handed over are lost: this worker has no file descriptors left")
        elif self.lost:
            log.warning("connections that are handed over arrive again", extra={"lost": self.lost})
            self.lost = 0
