"""Requests for stored objects: answers of the gateway, and requests that continue a stored history."""

from __future__ import annotations

from collections.abc import Callable

from gateway.config.live import Live
from gateway.dialects.events.sse import comment
from gateway.dialects.responses.ids import is_disguised
from gateway.errors import GatewayError
from gateway.features.responses.recall import Recall, charge_to
from gateway.features.runs.following import FollowerStream
from gateway.fleet.directory import Fleet
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.lifecycle import Lifecycle
from gateway.request.notes import RECALL
from gateway.request.phases.objects import ReplicaObjects
from gateway.request.phases.replies import JSON_LINE, STREAM_LINES, Replies


class StoredObjects:
    """The phase that answers or prepares such requests. clock: monotonic seconds."""

    def __init__(
        self, live: Live, fleet: Fleet, recall: Recall, objects: ReplicaObjects, replies: Replies, clock: Callable[[], float]
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._recall = recall
        self._objects = objects
        self._replies = replies
        self._clock = clock

    def owns(self, exchange: Exchange) -> bool:
        """True if the gateway may have the answer itself."""
        dialect = exchange.dialect
        return self._recall.on and (dialect.kept_here or (dialect.in_background and bool(exchange.api.stores)))

    async def answer_own(self, exchange: Exchange, lifecycle: Lifecycle) -> ClientReply | None:
        """Answers a request for a stored object, or starts a background response. None: the request is for a replica.

        lifecycle: runs background responses. Raises GatewayError.
        """
        api, record, subject = exchange.api, exchange.record, exchange.record.subject
        maybe_at_replica = self._find_at_replica(exchange)
        if exchange.dialect.kept_here:
            record.answer.own = True
            for enter in lifecycle.extensions.entering:  # limits of its key; a background run enters by itself
                enter(exchange)
            answer = await self._recall.answer(exchange.request, api, exchange.caller, maybe_at_replica=maybe_at_replica)
        else:
            self._require_allowed(exchange, lifecycle)
            subject.model, subject.generates, subject.metered = api.model, False, False  # the run has its own log line
            answer = await self._recall.start(
                exchange.request, api, exchange.caller, lifecycle.run, maybe_at_replica=maybe_at_replica
            )
        if answer is None:
            record.answer.own = False
            subject.generates = subject.metered = api.metered
            return None
        if isinstance(answer, FollowerStream):
            reply = await self._follow(exchange, answer)
        else:
            record.status, body = answer
            reply = self._replies.begin(exchange, record.status, body, JSON_LINE)
        record.answer.ok = record.answer.complete = not record.error
        return reply

    def _find_at_replica(self, exchange: Exchange) -> bool:
        """True if a replica has the object of the request."""
        if exchange.notes is not None:
            exchange.notes.enter(RECALL, self._clock())
        return self._objects.find(exchange.api.refers, exchange.caller) is not None

    def _require_allowed(self, exchange: Exchange, lifecycle: Lifecycle) -> None:
        """Checks the rights for a run before it starts, because the run has no client to receive an error.

        Raises GatewayError 403, 404, 429 or 503.
        """
        api, grant = exchange.api, exchange.caller.grant
        if grant is not None:
            grant.require_models_of(api)
        target = self._fleet.target(api.model, api.alias)
        if grant is not None:
            grant.require_pool(target.pool)
        lifecycle.callers.require_welcome(exchange.caller)
        fallback = lifecycle.extensions.fallback
        (fallback.taker(target) if fallback is not None else target).require()

    async def _follow(self, exchange: Exchange, stream: FollowerStream) -> ClientReply:
        """Sends the events of a run until it has ended."""
        record = exchange.record
        record.status, record.subject.stream = 200, True
        reply = self._replies.begin(exchange, 200, None, STREAM_LINES)

        def failed(error: GatewayError) -> bytes:
            record.error = error.message
            return exchange.dialect.error_event(self._replies.shown(exchange, error), None) or b""

        def pulse() -> bytes:
            record.answer.pulses += 1
            return comment("running")

        await self._recall.followers.send(stream, reply, failed, charge_to(exchange.request), self._live, pulse)
        return reply

    def concerns(self, exchange: Exchange) -> bool:
        """True if the request has a stored history, or may start one.

        Raises GatewayError 404 for a path that a replica may interpret as one of ours, bypassing the check of the owner.
        """
        if exchange.dialect.strict:
            api = exchange.api
            keeps = self._recall.on and (api.keeps or bool(api.refers) or api.references)
            return keeps or exchange.request.recent is not None
        if self._recall.on and is_disguised(exchange.request.target):
            text = "Paths of responses and conversations have no empty segments, no slash at their end and no encoded slashes."
            raise GatewayError(404, "not_found", text)
        return False

    async def prepare(self, exchange: Exchange) -> None:
        """Adds the stored history to the request. Raises GatewayError 400, 404, 410, 413 or 503."""
        exchange.api, exchange.tap = await self._recall.begin(exchange, maybe_at_replica=self._find_at_replica(exchange))
