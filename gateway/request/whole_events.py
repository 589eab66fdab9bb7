"""Replies that are read event by event, not byte by byte: a message for each on a WebSocket, a number for each in a run's log.

    bytes of a stream ──► feed ──► the events that are whole, to go on ──► charge: for what is held of the next one

An event that is not whole is charged to the request's lease beyond UNCHARGED, so that many slow or endless ones stay within
the memory budget.
"""

from __future__ import annotations

from typing import Final

from gateway.admission.memory import MemoryLease
from gateway.dialects.events.splitter import Splitter
from gateway.errors import over_budget

UNCHARGED: Final = 64 << 10  # bytes of an event that is not whole


class WholeEvents:
    """See the top of this file."""

    __slots__ = ("_charged", "_lease", "_splitter")

    def __init__(self, lease: MemoryLease) -> None:
        self._lease = lease
        self._splitter = Splitter()
        self._charged = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Once they have gone on, `charge`."""
        return self._splitter.feed(data)

    @property
    def held(self) -> int:
        """Bytes of an event that is not whole."""
        return self._splitter.held

    def charge(self) -> None:
        """Raises GatewayError 413 or 503 without memory for what is held, which is dropped."""
        more = max(0, self._splitter.held - UNCHARGED) - self._charged
        if more > 0 and not self._lease.grow(more):
            self.drop()
            raise over_budget(0, self._lease.account.largest)
        if more < 0:
            self._lease.shrink(-more)
        self._charged += more

    def finish(self) -> list[bytes]:
        """The stream is over: its last event, which may lack its end."""
        events = self._splitter.feed(b"\n\n") if self._splitter.held else []
        self.drop()
        return events

    def drop(self) -> None:
        """What is not whole never will be. Idempotent."""
        self._splitter.drop()
        self._lease.shrink(self._charged)
        self._charged = 0

    def __repr__(self) -> str:
        return f"<WholeEvents {self._splitter!r}>"
