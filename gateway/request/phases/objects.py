"""Objects that replicas keep (a response, a conversation): which replica has the one that a request names.

The router remembers it from the answers that went out, by the object's id and, where tenants are isolated, its tenant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.config.live import Live
from gateway.request.client import Caller
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import scope_of
from router import Router, session_key

_KIND: Final = "object"  # a number of one never is that of a session


class ReplicaObjects:
    """See the top of this file. clock: monotonic seconds, the router's."""

    def __init__(self, live: Live, router: Router, clock: Callable[[], float]) -> None:
        self._live = live
        self._router = router
        self._clock = clock

    def find(self, id_: str, caller: Caller) -> tuple[str, str] | None:
        """(replica, model) of an object that a request names; "" names none."""
        if not id_:
            return None
        return self._router.objects.find(self._number(id_, caller), self._clock())

    def answered(self, exchange: Exchange) -> None:
        """The answer is an object that later requests may name; and the replica knew the one that this request has named."""
        for id_ in (exchange.attempts.object, exchange.api.refers):
            if id_:
                replica = exchange.booking.chosen.replica
                self._router.stored(self._number(id_, exchange.caller), replica, exchange.api.model, self._clock())

    def _number(self, id_: str, caller: Caller) -> int:
        return session_key(id_, _KIND, *scope_of(self._live, caller))
