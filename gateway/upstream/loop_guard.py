"""Loop detection: a gateway recognises requests that it has forwarded itself.

The URL of a replica may lead back to the gateway, by a name or an address that the configuration check cannot compare, or
through another gateway. Each request would then loop until the gateway is full. So every request to a replica, probes
included, carries the header

    X-Warmroute-Via: <ids of the gateways that it has passed, the latest last>

and a request that arrives with the gateway's own id, or with MAX_GATEWAYS ids, is answered 508. Ids are random; all workers of
a gateway share one. A client that forges the header gets 508, or shortens its own chain of gateways.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from gateway.errors import GatewayError

VIA_HEADER: Final = "X-Warmroute-Via"
LOOP_DETECTED: Final = 508
MAX_GATEWAYS: Final = 4  # maximum for one request

_IDS: Final = re.compile(r"[0-9a-f]{16}(?:, ?[0-9a-f]{16})*")
_MAX_LENGTH: Final = MAX_GATEWAYS * 18


def new_id() -> str:
    """A random gateway id: 16 hex digits."""
    return secrets.token_hex(8)


class LoopGuard:
    """Checks the Via header of incoming requests, and writes it for upstream ones. id: of this gateway (default: a new one)."""

    __slots__ = ("id",)

    def __init__(self, id_: str = "") -> None:
        self.id = id_ or new_id()

    def require_no_loop(self, via: str | None) -> None:
        """Check an incoming request. via: its header. Raises GatewayError 508."""
        if via is None:
            return
        if len(via) > _MAX_LENGTH or not _IDS.fullmatch(via):
            raise _loop(f"The header {VIA_HEADER} is not a list of at most {MAX_GATEWAYS} gateways.")
        if self.id in via:
            raise _loop("The request has passed this gateway before: the URL of a replica leads back to the gateway.")
        if via.count(",") + 1 >= MAX_GATEWAYS:
            raise _loop(f"The request has passed {MAX_GATEWAYS} gateways, which is the limit.")

    def line(self, via: str | None = None) -> str:
        """The header line for a replica. via: the header of the forwarded request, None without."""
        return f"{VIA_HEADER}: {via}, {self.id}\r\n" if via else f"{VIA_HEADER}: {self.id}\r\n"

    def __repr__(self) -> str:
        return f"<LoopGuard {self.id}>"


def _loop(message: str) -> GatewayError:
    return GatewayError(LOOP_DETECTED, "loop_detected", message)
