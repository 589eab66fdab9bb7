"""TLS handshakes of accepted connections, without holding up the event loop.

    accepted ──► first bytes of the client ──► PER_TURN in one turn of the loop ──► handshake ──► the server's protocol
       │                  ├── of plain HTTP: 400, closed     │                          │
       │                  └── none within HANDSHAKE_S ───────┬──────────────────────────┘
       └── beyond MAX_OPENING, or a client's share ──────────┴──► closed

The costly step is the answer to the client's first bytes: a signature, up to some milliseconds with a large RSA key. Its number
in one turn of the loop is bounded, so that running streams go on between handshakes. A connection counts for the gateway's
limit of connections from the end of its handshake on; until then it counts here, likewise shared by clients.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import client_of
from gateway.cluster.listener_tls import ListenerTls

PER_TURN: Final = 4
MAX_OPENING: Final = 2048  # connections before the end of their handshake
HANDSHAKE_S: Final = 10.0
SHUTDOWN_S: Final = 10.0  # for the client's answer to the end of a connection
_ERROR: Final = b'{"error":{"message":"This port speaks TLS. Use https://","type":"invalid_request_error","param":null,"code":"invalid_http"}}'
_PLAIN: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
    % (len(_ERROR), _ERROR)
)
_FIRST: Final = 64 << 10  # bytes of a plain request that are read: unread ones could cost the client its answer


class Handshakes:
    """Handshakes of one listening socket. To be created in the event loop."""

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ListenerTls,
        *,
        handshake_s: float = HANDSHAKE_S,
        max_opening: int = MAX_OPENING,
    ) -> None:
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._turns: deque[asyncio.Future[None]] = deque()
        self.opening = ConnectionLimit(max_opening)

    async def open(self, client: socket.socket) -> None:
        """Give a connection its transport and protocol after its handshake. Raises OSError or TimeoutError if there is none;
        the caller closes the socket.
        """
        name = client_of(client.getpeername())
        if not self.opening.admit(name):
            raise ConnectionAbortedError("too many connections without a handshake")
        try:
            async with asyncio.timeout(self._handshake_s):
                await self._first_bytes(client)
                if client.recv(1, socket.MSG_PEEK).isalpha():  # a method of HTTP without TLS: no record of TLS begins so
                    client.recv(_FIRST)
                    client.send(_PLAIN)
                    raise ConnectionAbortedError("a request without TLS")
                await self._turn()
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                client,
                ssl=self._tls.context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        finally:
            self.opening.release(name)

    async def _first_bytes(self, client: socket.socket) -> None:
        """Wait until the client has sent something. Before that, it costs neither a transport nor a turn."""
        readable: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(client, _set, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(client)

    async def _turn(self) -> None:
        """Wait until this handshake may begin."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        if not self._turns:
            self._loop.call_soon(self._begin)
        self._turns.append(waiter)
        await waiter

    def _begin(self) -> None:
        begun = 0
        while self._turns and begun < PER_TURN:
            waiter = self._turns.popleft()
            if not waiter.done():
                waiter.set_result(None)
                begun += 1
        if self._turns:
            self._loop.call_soon(self._begin)

    def __repr__(self) -> str:
        return f"<Handshakes {self.opening.open} open, {len(self._turns)} wait for their turn>"


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
