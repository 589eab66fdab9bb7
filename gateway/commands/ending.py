"""Signals of a serving gateway: leaving, stop, hurry.

    SIGTERM ──► leaving, for `limits.drain_accept_s` ──► stop        SIGINT ──► stop        a second signal ──► hurry

The sender of SIGTERM (a kubelet, systemd, an operator) does not wait until balancers have taken the gateway out: new
connections arrive for a while, and have to be answered. SIGINT comes from a person at a terminal. A gateway that does not serve
yet ends at once.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Protocol

from gateway.config.schema import Config


class ServingGateway(Protocol):
    """A gateway that answers requests. config: the present one."""

    @property
    def config(self) -> Config: ...

    def begin_leaving(self) -> None:
        """Tell clients to use other gateways; until `stop` all are served."""


class ServingEnd:
    """The end of serving (see the module). serving: the gateway, None before it serves. stop: end. hurry: end all waiting."""

    def __init__(self) -> None:
        self.serving: ServingGateway | None = None
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._signalled = False

    def on_signal(self, number: int) -> None:
        """Handle SIGTERM or SIGINT."""
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
