"""Objects stored by replicas (a response, a conversation): the replica of the object that a request names.

The router remembers it from the delivered answers, by the object's id and, if tenants are isolated, its tenant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.config.live import Live
from gateway.request.client import Caller
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import scope_of
from router import Router, session_key

_KIND: Final = "object"  # keeps the numbers of objects and sessions apart


class ReplicaObjects:
    """Replicas of stored objects (see the module). clock: monotonic seconds, the router's."""

    def __init__(self, live: Live, router: Router, clock: Callable[[], float]) -> None:
        self._live = live
        self._router = router
        self._clock = clock

    def find(self, id_: str, caller: Caller) -> tuple[str, str] | None:
        """(replica, model) of the object with this id; None if it is unknown or the id is ""."""
        if not id_:
            return None
        return self._router.objects.find(self._number(id_, caller), self._clock())

    def answered(self, exchange: Exchange) -> None:
        """Remember the replica of the answer's object, and of the object that the request named."""
        for id_ in (exchange.attempts.object, exchange.api.refers):
            if id_:
                self.note(exchange, id_)

    def note(self, exchange: Exchange, id_: str) -> None:
        """The chosen replica has the object with this id."""
        replica = exchange.booking.chosen.replica
        self._router.stored(self._number(id_, exchange.caller), replica, exchange.api.model, self._clock())

    def _number(self, id_: str, caller: Caller) -> int:
        return session_key(id_, _KIND, *scope_of(self._live, caller))
