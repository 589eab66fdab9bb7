"""The form of a request that is expected to return, for engines that take retention hints (`EngineProfile.retains`).

A request whose headers name its session is probably followed by another turn; one without is often the only one. A hint of the
client itself counts in its place. A translated request gets none: another form has it.
"""

from __future__ import annotations

from typing import Final

from gateway.dialects.salts import is_object, with_member
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.request.forms import Form
from gateway.upstream.client import ReplicaCall

HINT: Final = b'"cache_retention":"5m"'
_OWN: Final = (b"cache_retention", b"prompt_cache_options")  # the first is also the end of OpenAI's name


class RetainingForm(Form):
    """The native form with the hint."""

    def call(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall) -> ReplicaCall:
        call = super().call(exchange, replica, call)
        if not is_object(call.body) or any(name in call.body for name in _OWN):
            return call
        exchange.charge_copy(call.body)
        body = with_member(call.body, HINT)
        return call if body is None else call.with_body(body)


_RETAINING: Final = RetainingForm()


def retaining(exchange: Exchange, replica: ReplicaState, _now: float) -> Form | None:
    """The form for this replica; None: it takes no hint, or the request names no session, or generates nothing."""
    wanted = replica.engine.retains and exchange.caller.session and exchange.api.metered and not exchange.request.upgrades
    return _RETAINING if wanted else None
