"""Priorities of requests at engines that schedule by them: how a request names its own, and how an engine refuses it.

Engines differ in the order of values, and in when they schedule by them (`fleet/engines.py`). Where its settings show that an
engine does, each request names its priority, because the engine may put requests without one behind all others. Where nothing
shows it, only a priority other than 0 is sent: such engines take 0 for none.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.admission.pool_queue import granted_priority
from gateway.dialects.salts import with_member
from gateway.fleet.state import PRIORITY_FIELD, ReplicaState
from gateway.request.client import Headers
from gateway.request.exchange import Exchange
from gateway.upstream.client import ReplicaCall

PRIORITY_HEADER: Final = "X-Priority"
_STATUSES: Final = frozenset([200, 400, 503])  # 200: of a stream that begins with the error
# vLLM: "Got priority 5 but Priority scheduling is not enabled."; SGLang: "Using priority is disabled for this server."
_REFUSAL: Final = re.compile(rb"priority(?: scheduling)? is (?:not enabled|disabled)", re.IGNORECASE)
# An engine's error, or a stream that begins with one. An answer that repeats a client's words begins otherwise.
_ERROR: Final = re.compile(rb'\s*(?:event: *error\s+)?(?:data: *)?\{\s*(?:"error"\s*:|"(?:object|type)"\s*:\s*"error")')


def priority_for(exchange: Exchange, state: ReplicaState) -> int | None:
    """The value of the request's priority for the engine of this replica; None: it gets none. Raises GatewayError 400."""
    api, grant, header = exchange.api, exchange.caller.grant, exchange.request.derived(_header)
    value = 0 if header is None and grant is None else granted_priority(header, None if grant is None else grant.priority)
    if not value and (api.steers or not state.engine.settings):  # `steers`: the client may have set its own
        return None
    return state.facts.priority * value if api.metered else None


def _header(headers: Headers) -> str | None:
    return headers.get(PRIORITY_HEADER)


def with_priority(call: ReplicaCall, value: int) -> ReplicaCall:
    """The call with this priority: in the body, and for vLLM's Messages in a header."""
    named = call.with_headers(b"%bX-Vllm-Priority: %d\r\n" % (call.headers, value))
    body = with_member(call.body, b'"%b":%d' % (PRIORITY_FIELD.encode(), value))
    return named if body is None else named.with_body(body)


def may_refuse(status: int) -> bool:
    """True if an answer with this status may refuse the priority."""
    return status in _STATUSES


def is_priority_refusal(begin: bytes) -> bool:
    """True if an answer that begins so may refuse the priority. A client can provoke such words."""
    return _ERROR.match(begin) is not None and _REFUSAL.search(begin) is not None
