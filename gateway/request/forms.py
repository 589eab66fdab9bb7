"""Forms of a request: what a replica is sent, and what reads its answer. Chosen once per attempt.

    extensions.forms, asked in turn ── the first form ──► prepare ──┐
                                    └─ none: NATIVE ────────────────┴──► call ──► the replica ──► exchange.answers

The native form is the client's own dialect, with what this replica's engine has to have or must not see. A form that rewrites
the request leaves the new body with the exchange (`Exchange.rewrite`): further replicas that need it get the same one. A form
is one object for all requests; the `Answers` that it sets are those of one request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.dialects.dialect import AnswerCollector
from gateway.dialects.json_edits import apply
from gateway.dialects.salts import is_object, salted
from gateway.errors import ReplicaFailure
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.upstream.client import ReplicaAnswer, ReplicaCall

EVENT_STREAM: Final = "text/event-stream"


class Form:
    """The native form, and the base class of others."""

    async def prepare(self, exchange: Exchange) -> None:
        """To be called before `call`, but for the native form. Raises GatewayError."""

    def call(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall) -> ReplicaCall:
        """The call as it goes to this replica; sets `exchange.answers`. Native: without the client's billing line, if its pool
        wants that, with a token to generate, if its engine has to have one, and with the salt, if it knows what to do with it.

        Raises GatewayError if there is no room for the copy of a large body, ReplicaFailure if the engine cannot do it.
        """
        api, body = exchange.api, call.body
        exchange.answers = exchange.dialect
        edits = api.billing if api.billing and exchange.target.strip_billing_header else []
        if api.prewarm and not replica.engine.prewarms:
            edits = edits + api.prewarm
        if api.diagnosis and exchange.diagnoses:
            edits = edits + api.diagnosis.edits
        if edits:
            exchange.charge_copy(body)
            call = call.with_body(apply(body, edits))
        if not exchange.salt or not replica.engine.salts:
            return call
        if is_object(call.body):
            exchange.charge_copy(call.body)
        with_salt = salted(call.body, exchange.salt)
        return call if with_salt is None else call.with_body(with_salt)


NATIVE: Final = Form()
FormOf = Callable[[Exchange, ReplicaState, float], Form | None]


async def collected(answer: ReplicaAnswer, collector: AnswerCollector, charge: Callable[[int], None]) -> bytes:
    """The plain answer of an engine that is always asked for a stream: it notices only while it streams that nobody wants the
    rest. charge: called with the size of each piece; may raise. Raises ReplicaFailure.
    """
    if answer.content_type != EVENT_STREAM:
        raise not_streamed(answer)
    while True:
        data = answer.take()
        charge(len(data))
        collector.feed(data)
        if collector.over or answer.complete:
            break
        await answer.more()
    collector.finish()
    return collector.answer()


def not_streamed(answer: ReplicaAnswer) -> ReplicaFailure:
    return ReplicaFailure("garbage", f"asked for a stream, it answers with {answer.content_type or 'no content type'!r}")
