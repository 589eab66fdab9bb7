"""Requests about what the gateway keeps: its own answers, and requests that get the history that they go on with."""

from __future__ import annotations

from collections.abc import Callable

from gateway.config.live import Live
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


class Keeping:
    """See the top of this file. clock: monotonic seconds."""

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
        """Whether the gateway may have the answer itself."""
        dialect = exchange.dialect
        return self._recall.on and (dialect.kept_here or (dialect.in_background and bool(exchange.api.stores)))

    async def own(self, exchange: Exchange, lifecycle: Lifecycle) -> ClientReply | None:
        """The answer about something that the gateway keeps itself, or makes in the background. None: it is a replica's.

        lifecycle: runs background responses. Raises GatewayError.
        """
        api, record, subject = exchange.api, exchange.record, exchange.record.subject
        elsewhere = self._begin(exchange)
        if exchange.dialect.kept_here:
            answer = await self._recall.answer(exchange.request, api, exchange.caller, elsewhere=elsewhere)
        else:
            self._require_allowed(exchange, lifecycle)
            subject.model, subject.generates, subject.metered = api.model, False, False  # its run is logged by itself
            answer = await self._recall.start(exchange.request, api, exchange.caller, lifecycle.run, elsewhere=elsewhere)
        if answer is None:
            subject.generates = subject.metered = api.metered
            return None
        if isinstance(answer, FollowerStream):
            reply = await self._follow(exchange, answer)
        else:
            record.status, body = answer
            reply = self._replies.begin(exchange, record.status, body, JSON_LINE)
        record.answer.ok = record.answer.complete = not record.error
        return reply

    def _begin(self, exchange: Exchange) -> bool:
        """Whether a replica has the object that the request names."""
        if exchange.notes is not None:
            exchange.notes.enter(RECALL, self._clock())
        return self._objects.find(exchange.api.refers, exchange.caller) is not None

    def _require_allowed(self, exchange: Exchange, lifecycle: Lifecycle) -> None:
        """Whether a run may begin: what its key does not allow is refused here, for the run itself has no client to be told.

        Raises GatewayError 403, 404, 429 or 503.
        """
        api, grant = exchange.api, exchange.caller.grant
        if grant is not None:
            grant.require_model(api.model)
        target = self._fleet.target(api.model, api.alias)
        if grant is not None:
            grant.require_pool(target.pool)
        lifecycle.callers.require_welcome(exchange.caller)
        elsewhere = lifecycle.extensions.fallback
        (elsewhere.taker(target) if elsewhere is not None else target).require()

    async def _follow(self, exchange: Exchange, following: FollowerStream) -> ClientReply:
        """The events of a run, until it has ended."""
        record = exchange.record
        record.status, record.subject.stream = 200, True
        reply = self._replies.begin(exchange, 200, None, STREAM_LINES)

        def failed(error: GatewayError) -> bytes:
            record.error = error.message
            return exchange.dialect.error_event(self._replies.shown(exchange, error), None) or b""

        await self._recall.followers.send(following, reply, failed, charge_to(exchange.request), self._live.patience_s)
        return reply

    def concerns(self, exchange: Exchange) -> bool:
        """Whether a request has a history here, or may become one.

        Raises GatewayError 404 for a path that a replica may take for one of ours, past the check whose the object is.
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
        """Give the request its history. Raises GatewayError 400, 404, 410, 413 or 503."""
        exchange.api, exchange.tap = await self._recall.begin(exchange, elsewhere=self._begin(exchange))
