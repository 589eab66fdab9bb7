"""What the gateway keeps, in a request's life: its history is written out before a replica is chosen.

    parsed, with previous_response_id ──► the store: the items before ──► the body with all of them ──► parsed again

So the router sees the whole prompt, and any replica can answer it. Requests that keep nothing and go on with nothing (coding
agents send `store: false`) never come here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gateway.admission.memory import LARGE_BODY, parsing
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.dialects.responses.history import History, written_out
from gateway.errors import over_budget
from gateway.parser.parsing import Parsing, edited
from gateway.request.client import Caller, ClientRequest
from gateway.state.api import Answer, StateApi
from gateway.state.histories import Histories, Turn, owner_of

HISTORY_SHARE: Final = 0.9  # of the largest body: the new items have to fit in, too


class Recall:
    """See the top of this file. clock: Unix seconds."""

    def __init__(self, live: Live, parsing_: Parsing, histories: Histories, clock: Callable[[], float] = time.time) -> None:
        self._live = live
        self._parsing = parsing_
        self._histories = histories
        self._api = StateApi(histories, clock)
        self.on = histories.store is not None

    async def begin(
        self,
        request: ClientRequest,
        dialect: Dialect,
        api: ApiRequest,
        caller: Caller,
        scope: tuple[str, ...],
        *,
        elsewhere: bool,
    ) -> tuple[ApiRequest, Turn | None]:
        """The request with its history, and its part in it; None: it goes to a replica as it is.

        scope: seeds its block keys. elsewhere: a replica may have the object that it names. Raises GatewayError.
        """
        client, body = request.lease.account.client, api.body
        history = History(await self._parsing.members(body, client))
        if history.background:
            return api, None
        history.store = history.store and dialect.makes_objects
        most = int(self._live.max_body * HISTORY_SHARE)
        turn = await self._histories.begin(_owner(request, caller), history, most, elsewhere=elsewhere)
        if turn is None:
            return api, None
        if api.references:
            await self._resolve(request, history, turn, _owner(request, caller), most)
        if turn.own is not None and len(turn.own) >= LARGE_BODY:
            _charge(request, len(turn.own))
            request.lease.head += len(turn.own)  # it is held until the answer is kept
        size = sum(map(len, turn.before))
        if size >= LARGE_BODY:
            _charge(request, size)
        api.body = await edited(body, written_out(history, turn.before, storable=dialect.makes_objects))
        api.keeps, api.refers = False, ""  # at a replica nothing is kept
        done = turn if dialect.makes_objects else None
        if not (turn.before or history.resolved):
            api.countable = api.countable or bool(history.conversation)
            return api, done
        whole = await self._parse(request, dialect, api.body, scope)
        whole.alias, whole.session, whole.keeps = api.alias, api.session, False
        return whole, done

    async def answer(self, request: ClientRequest, api: ApiRequest, caller: Caller, *, elsewhere: bool) -> Answer | None:
        """The gateway's own answer to a request about what it keeps. None: it is a replica's. Raises GatewayError."""
        return await self._api.answer(request.method, request.target, api.body, _owner(request, caller), elsewhere=elsewhere)

    async def _resolve(self, request: ClientRequest, history: History, turn: Turn, owner: str, most: int) -> None:
        """Write out the items that the request has by their ids alone."""
        references = await self._parsing.references(history.members.raw, request.lease.account.client)
        ids = list(dict.fromkeys(id_ for _, _, id_ in references))
        history.resolve(references, await self._histories.items(owner, ids, most - sum(map(len, turn.before))))
        if turn.own is not None:
            turn.own = history.own
        if len(history.own) >= LARGE_BODY:
            _charge(request, len(history.own))

    async def _parse(self, request: ClientRequest, dialect: Dialect, body: bytes, scope: tuple[str, ...]) -> ApiRequest:
        free = self._parsing.turns.free
        api = self._parsing.at_once(dialect, body) if free else await self._parsing.in_turn(dialect, body)
        if api is None:
            with parsing(request.lease, len(body)):
                api = await self._parsing.parse(dialect, body, scope, request.lease.account.client)
        return api


def _owner(request: ClientRequest, caller: Caller) -> str:
    headers = request.headers
    return owner_of(caller.tenant, headers.get("Authorization"), headers.get("X-Api-Key"))


def _charge(request: ClientRequest, size: int) -> None:
    if not request.lease.grow(size):
        raise over_budget(0, request.lease.account.largest)
