"""The server of one listening port: makes the connections, counts them, closes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget
from gateway.cluster.listener_tls import ListenerTls
from gateway.config.live import Live
from gateway.dialects.table import DIALECTS
from gateway.errors import GatewayError
from gateway.server.errors import raw_response
from gateway.server.http.connection import ClientConnection, Handler

FAST_PATHS: Final = frozenset([path for path, dialect in DIALECTS.items() if dialect.strict])
_NO_PATHS: Final[frozenset[str]] = frozenset()


class ClientServer:
    """Serves one port. Requests go to `handler`; POSTs to FAST_PATHS to `fast_handler`, which bypasses the routes.

    tls: of its connections; None: without.
    """

    def __init__(
        self,
        handler: Handler,
        fast_handler: Handler | None,
        *,
        live: Live,
        budget: Budget,
        connection_limit: ConnectionLimit,
        refusal: Callable[[], GatewayError],
        for_operators: bool = False,
    ) -> None:
        """fast_handler: None: all requests go to `handler`, and idle connections are closed for new ones. budget: memory of
        requests. refusal: makes the answer to a connection beyond the limit. for_operators: on the admin listener.
        """
        self._live = live
        self._refusal = refusal
        self._closes_idle = fast_handler is None
        self._connections = dict[ClientConnection, None]()
        self.handler = handler
        self.fast_handler = fast_handler or handler
        self.fast_paths = FAST_PATHS if fast_handler else _NO_PATHS
        self.for_operators = for_operators
        self.tls: ListenerTls | None = None
        self.connection_limit = connection_limit
        self.budget = budget

    @property
    def connections(self) -> list[ClientConnection]:
        """All connections, the oldest first."""
        return list(self._connections)

    def add(self, connection: ClientConnection) -> None:
        self._connections[connection] = None

    def discard(self, connection: ClientConnection) -> None:
        del self._connections[connection]

    def admit(self, client: str) -> bool:
        """Count a connection of this client, if it may have one more, or if an idle connection can be closed for it.

        Only the side listeners close idle connections. They allow few connections, and idle clients must not lock out operators
        and Prometheus. The client's own connections are closed first, oldest first.
        """
        if self.connection_limit.admit(client):
            return True
        if not self._closes_idle:
            return False
        idle = [each for each in self._connections if each.client and each.idle]
        oldest = next((each for each in idle if each.client == client), None)
        if oldest is None and not self.connection_limit.of(client):
            oldest = next(iter(idle), None)
        if oldest is None:
            return False
        oldest.make_room(client)
        return True

    @property
    def busy(self) -> bytes:
        """The answer to a refused connection."""
        return raw_response(self._refusal())

    @property
    def max_body(self) -> int:
        """Maximum bytes of a body."""
        return self._live.max_body

    @property
    def idle_s(self) -> float:
        """Limit on the time that a connection is idle or sends one request's head."""
        return self._live.config.limits.client_idle_s

    def __call__(self) -> ClientConnection:
        """A new connection, as its transport's protocol."""
        return ClientConnection(self, asyncio.get_running_loop())

    def close_idle(self) -> bool:
        """See `CloseIdle` in `request/running.py`."""
        others = False
        for each in self.connections:
            if each.idle:
                each.close()
            else:
                others = True
        return others

    async def shutdown(self, timeout_s: float) -> None:
        """End all connections: running requests have timeout_s to finish, and as long to be cancelled."""
        self.close_idle()
        tasks = [task for each in self.connections if (task := each.task)]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=timeout_s)
        for each in self.connections:
            each.abort()
        await asyncio.sleep(0)  # connections close in the next turn of the event loop

    def __repr__(self) -> str:
        return f"<ClientServer {len(self._connections)} connections>"
