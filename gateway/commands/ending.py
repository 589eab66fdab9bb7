"""What signals do to a gateway that serves: when it leaves its balancers, stops, and hurries.

    SIGTERM ──► leaving, for `limits.drain_accept_s` ──► stop        SIGINT ──► stop        a second signal ──► hurry

Whoever sends SIGTERM (a kubelet, systemd, an operator) does not wait until balancers have taken the gateway out: new
connections come for a while, and have to be answered. SIGINT is a person's at a terminal. A gateway that does not serve yet
ends at once.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Protocol

from gateway.config.schema import Config


class ServingGateway(Protocol):
    """A gateway that answers requests. config: the one in force."""

    @property
    def config(self) -> Config: ...

    def begin_leaving(self) -> None:
        """Clients should use other gateways; until `stop` all are served."""


class ServingEnd:
    """See the top of this file. serving: None: not yet. stop: end. hurry: without waiting for anything."""

    def __init__(self) -> None:
        self.serving: ServingGateway | None = None
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._signalled = False

    def on_signal(self, number: int) -> None:
        """SIGTERM or SIGINT."""
        if self._signalled:
            self.stop.set()
            self.hurry.set()
            return
        self._signalled = True
        accept_s = 0.0
        if number == signal.SIGTERM and self.serving:
            self.serving.begin_leaving()
            accept_s = self.serving.config.limits.drain_accept_s
        if accept_s:
            asyncio.get_running_loop().call_later(accept_s, self.stop.set)
        else:
            self.stop.set()
