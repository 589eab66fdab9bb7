"""Passes accepted connections to the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from gateway.cluster.handshakes import Handshakes
from gateway.cluster.listener_tls import ListenerTls


class AcceptedConnections:
    """Gives accepted connections their transport and protocol."""

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ListenerTls | None = None,
        handshakes: Handshakes | None = None,
    ) -> None:
        """tls: None: without TLS. handshakes: default: with `tls`. Must be called within the event loop."""
        if handshakes is None and tls is not None:
            handshakes = Handshakes(make_protocol, tls)
        self._handshakes = handshakes
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, client: socket.socket) -> None:
        """Give this connection a transport and a protocol, which own it from now on."""
        client.setblocking(False)
        task = self._loop.create_task(self._hand_over(client), name="accept")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, client: socket.socket) -> None:
        try:
            if self._handshakes is not None:
                await self._handshakes.open(client)
            else:
                await self._loop.connect_accepted_socket(self._make_protocol, client)
        except (OSError, TimeoutError):  # the client has disconnected, or its handshake has failed
            client.close()
        except BaseException:  # the gateway ends
            client.close()
            raise

    async def wait(self) -> None:
        """Wait until all added connections have their transport."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"<AcceptedConnections of {len(self)} connections>"
