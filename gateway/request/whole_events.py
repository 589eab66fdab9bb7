"""Splits a reply into whole events: one message for each on a WebSocket, one number for each in a run's log.

    bytes of a stream ──► feed ──► complete events, to be passed on ──► charge: for the held bytes of the next one

An incomplete event is charged to the request's lease beyond UNCHARGED, so that many slow or endless events stay within the
memory budget.
"""

from __future__ import annotations

from typing import Final

from gateway.admission.memory import MemoryLease
from gateway.dialects.events.splitter import Splitter

UNCHARGED: Final = 64 << 10  # bytes of an incomplete event


class WholeEvents:
    """Splits one reply (see the module)."""

    __slots__ = ("_charged", "_lease", "_splitter")

    def __init__(self, lease: MemoryLease) -> None:
        self._lease = lease
        self._splitter = Splitter()
        self._charged = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by these bytes. Call `charge` once they have been passed on."""
        return self._splitter.feed(data)

    @property
    def held(self) -> int:
        """Bytes of the incomplete event."""
        return self._splitter.held

    def charge(self) -> None:
        """Charge the held bytes. Without memory for them, they are dropped, and GatewayError 413 or 503 is raised."""
        more = max(0, self._splitter.held - UNCHARGED) - self._charged
        if more > 0 and not self._lease.grow(more):
            refusal = self._lease.refusal(more)
            self.drop()
            raise refusal
        if more < 0:
            self._lease.shrink(-more)
        self._charged += more

    def finish(self) -> list[bytes]:
        """The end of the stream. Returns its last event, which may lack its end."""
        events = self._splitter.feed(b"\n\n") if self._splitter.held else []
        self.drop()
        return events

    def drop(self) -> None:
        """Forget the incomplete event. Idempotent."""
        self._splitter.drop()
        self._lease.shrink(self._charged)
        self._charged = 0

    def __repr__(self) -> str:
        return f"<WholeEvents {self._splitter!r}>"
