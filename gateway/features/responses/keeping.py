"""Requests about what the gateway keeps: its own answers, and requests that get the history that they go on with."""

from __future__ import annotations

from collections.abc import Callable

from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.dialects.responses.ids import is_disguised
from gateway.errors import GatewayError
from gateway.features.fallback_pools.chain import foreseen
from gateway.features.histories.histories import Turn
from gateway.features.keys.limiting import Limiting
from gateway.features.responses.recall import Recall, charge_to
from gateway.features.runs.following import Following
from gateway.features.runs.runs import Serve
from gateway.features.tracing.trace import RECALL
from gateway.fleet.directory import Fleet
from gateway.request.client import Caller, ClientReply, ClientRequest
from gateway.request.phases.objects import ReplicaObjects
from gateway.request.phases.replies import JSON_LINE, STREAM_LINES, Replies
from gateway.request.phases.scopes import scope_of
from gateway.request.record import SettledRequest


class Keeping:
    """See the top of this file. clock: monotonic seconds."""

    def __init__(
        self,
        live: Live,
        fleet: Fleet,
        recall: Recall,
        objects: ReplicaObjects,
        replies: Replies,
        limiting: Limiting,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._recall = recall
        self._objects = objects
        self._replies = replies
        self._limiting = limiting
        self._clock = clock

    def owns(self, dialect: Dialect, api: ApiRequest) -> bool:
        """Whether the gateway may have the answer itself."""
        return self._recall.on and (dialect.kept_here or (dialect.in_background and bool(api.stores)))

    async def own(
        self, request: ClientRequest, dialect: Dialect, api: ApiRequest, caller: Caller, record: SettledRequest, serve: Serve
    ) -> ClientReply | None:
        """The answer about something that the gateway keeps itself, or makes in the background. None: it is a replica's.

        serve: the lifecycle, for what runs in the background. Raises GatewayError.
        """
        record.enter(RECALL, self._clock)
        elsewhere = self._objects.find(api.refers, caller) is not None
        if dialect.kept_here:
            answer = await self._recall.answer(request, api, caller, elsewhere=elsewhere)
        else:
            self._require_allowed(api, caller)
            record.model, record.generates, record.metered = api.model, False, False  # its run is logged by itself
            answer = await self._recall.start(request, api, caller, serve, elsewhere=elsewhere)
        if answer is None:
            record.generates = record.metered = api.metered
            return None
        if isinstance(answer, Following):
            reply = await self._follow(request, dialect, record, answer)
        else:
            record.status, body = answer
            reply = self._replies.begin(request, record, record.status, body, JSON_LINE)
        record.ok = record.complete = not record.error
        return reply

    def _require_allowed(self, api: ApiRequest, caller: Caller) -> None:
        """Whether a run may begin: what its key does not allow is refused here, for the run itself has no client to be told.

        Raises GatewayError 403, 404, 429 or 503.
        """
        grant = caller.grant
        if grant is not None:
            grant.require_model(api.model)
        target = self._fleet.target(api.model, api.alias)
        if grant is not None:
            grant.require_pool(target.pool)
            self._limiting.require(grant)
        foreseen(self._fleet, target, self._clock())[1].require()

    async def _follow(
        self, request: ClientRequest, dialect: Dialect, record: SettledRequest, following: Following
    ) -> ClientReply:
        """The events of a run, until it has ended."""
        record.status, record.stream = 200, True
        reply = self._replies.begin(request, record, 200, None, STREAM_LINES)

        def failed(error: GatewayError) -> bytes:
            record.error = error.message
            return dialect.error_event(self._replies.shown(request, record, error), None) or b""

        await self._recall.followers.send(following, reply, failed, charge_to(request), self._live.patience_s)
        return reply

    def concerns(self, request: ClientRequest, dialect: Dialect, api: ApiRequest) -> bool:
        """Whether a request has a history here, or may become one.

        Raises GatewayError 404 for a path that a replica may take for one of ours, past the check whose the object is.
        """
        if dialect.strict:
            return self._recall.concerns(request, api)
        if self._recall.on and is_disguised(request.target):
            text = "Paths of responses and conversations have no empty segments, no slash at their end and no encoded slashes."
            raise GatewayError(404, "not_found", text)
        return False

    async def begin(
        self, request: ClientRequest, dialect: Dialect, api: ApiRequest, caller: Caller, record: SettledRequest | None = None
    ) -> tuple[ApiRequest, Turn | None]:
        """The request with its history. record: None for a dry run. Raises GatewayError 400, 404, 410, 413 or 503."""
        if record is not None:
            record.enter(RECALL, self._clock)
        elsewhere = self._objects.find(api.refers, caller) is not None
        return await self._recall.begin(request, dialect, api, caller, scope_of(self._live, caller), elsewhere=elsewhere)
