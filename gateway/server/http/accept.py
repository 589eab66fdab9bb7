"""Accepts clients' connections: up to BATCH from each listening socket in one iteration of the event loop.

The event loops' own servers do not suit a gateway under load. libuv, and so uvloop, accepts one connection per iteration, and
an iteration reads and writes all ready connections: tens of milliseconds with large bodies. Of 200 clients that connect at
once the last one then waits for 200 iterations (seconds), and while the kernel's queue is full, further connections are
dropped and retried after 1, 3 and 7 s. uvloop also closes its server for good when `accept` reports a shortage of memory.

So a listening socket is watched by `add_reader`, and each connection is passed to the loop by `connect_accepted_socket`:

    readable ──► accept until none is left, at most BATCH ──► one task per connection: transport and protocol are made
       └──► no file descriptors or memory left: not watched for RETRY_S; clients wait in the kernel's queue

BATCH bounds how long open connections wait for new ones: a connection costs about 0.1 ms.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from gateway.cluster.accepted import AcceptedConnections
from gateway.cluster.listener_tls import ListenerTls
from gateway.errors import OUT_OF_RESOURCES

log = logging.getLogger("warmroute.gateway")

BATCH: Final = 64
LAST_BATCHES: Final = 64  # limit for the last round, so that new connections cannot delay the gateway's end
LAST_S: Final = 0.1  # more than a round trip to a client
RETRY_S: Final = 1.0


class Acceptor:
    """Accepts on one listening socket, which it owns, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ListenerTls | None = None,
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        """listener: bound and listening. tls: None: without TLS. Called within the event loop."""
        self._listener = listener
        self._retry_s = retry_s
        self._loop = loop = asyncio.get_running_loop()
        self._accepted = AcceptedConnections(make_protocol, tls)
        self._retry: asyncio.TimerHandle | None = None
        self._open = True
        listener.setblocking(False)
        loop.add_reader(listener, self._accept)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The listening socket; none once it is closed."""
        return (self._listener,) if self._open else ()

    async def finish(self) -> None:
        """Accept the connections that the kernel has established, then `close`. After `refuse_new` this loses none: begun ones
        have LAST_S.
        """
        await asyncio.sleep(LAST_S)
        for _ in range(LAST_BATCHES):
            if self._retry or not self._accept():
                break
        self.close()

    def close(self) -> None:
        """Stop accepting. Accepted connections stay open. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._retry:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Wait until all accepted connections have their transport."""
        await self._accepted.wait()

    def _accept(self) -> bool:
        """Accept a batch. True if there may be more."""
        for _ in range(BATCH):
            try:
                client, _address = self._listener.accept()
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    self._pause(error)
                    return False
                continue  # this client has disconnected already: ECONNABORTED and the network's errors
            self._accepted.add(client)
        return True

    def _pause(self, error: OSError) -> None:
        log.error("cannot accept connections", extra={"error": str(error), "retry_s": self._retry_s})
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(self._retry_s, self._resume)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def __repr__(self) -> str:
        state = "closed" if not self._open else "paused" if self._retry else "accepting"
        return f"<Acceptor {state}, {len(self._accepted)} opening>"
