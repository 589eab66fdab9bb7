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
from gateway.errors import bad_request, over_budget
from gateway.parser.parsing import Parsing, edited
from gateway.request.background.following import Followers, Following
from gateway.request.background.run_request import RunRequest
from gateway.request.background.runs import Runs, Serve
from gateway.request.client import Caller, ClientRequest
from gateway.state.api import Again, Answer, StateApi
from gateway.state.histories import Histories, Turn, owner_of

HISTORY_SHARE: Final = 0.9  # of the largest body: the new items have to fit in, too


class Recall:
    """See the top of this file. clock: Unix seconds."""

    def __init__(
        self,
        live: Live,
        parsing_: Parsing,
        histories: Histories,
        runs: Runs,
        followers: Followers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.followers = followers
        self._live = live
        self._parsing = parsing_
        self._histories = histories
        self.runs = runs
        self._api = StateApi(histories, runs.stop, clock)
        self.store = histories.store
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
        turn = await self._begin(request, history, caller, elsewhere=elsewhere)
        if turn is None:
            return api, None
        if isinstance(request, RunRequest):
            request.run.join(turn)
        if turn.own is not None and len(turn.own) >= LARGE_BODY:
            _charge(request, len(turn.own))
            request.lease.head += len(turn.own)  # it is held until the answer is kept
        size = sum(map(len, turn.before))
        if size >= LARGE_BODY:
            _charge(request, size)
        api.body = await edited(body, written_out(history, turn.before))
        api.keeps, api.refers = False, ""  # at a replica nothing is kept
        if not turn.before:
            api.countable = api.countable or bool(history.conversation)
            return api, turn
        whole = await self._parse(request, dialect, api.body, scope)
        whole.alias, whole.session, whole.keeps = api.alias, api.session, False
        return whole, turn

    async def start(
        self, request: ClientRequest, api: ApiRequest, caller: Caller, serve: Serve, *, elsewhere: bool
    ) -> Answer | Following | None:
        """The answer to a request that asks for a run in the background, which has begun. serve: the lifecycle.

        None: a replica has what it goes on with, so it goes there. Raises GatewayError.
        """
        history = History(await self._parsing.members(api.body, request.lease.account.client))
        if not history.store:
            raise bad_request("A response in the background has to be stored: 'store' must not be false.", "store")
        if await self._begin(request, history, caller, elsewhere=elsewhere) is None:
            return None
        run = await self.runs.start(request, caller, api, history, _owner(request, caller), serve)
        return Following(run.log, None, None) if api.stream else (200, run.response)

    async def answer(
        self, request: ClientRequest, api: ApiRequest, caller: Caller, *, elsewhere: bool
    ) -> Answer | Following | None:
        """The gateway's own answer to a request about what it keeps. None: it is a replica's. Raises GatewayError."""
        owner = _owner(request, caller)
        found = await self._api.answer(request.method, request.target, api.body, owner, elsewhere=elsewhere)
        return self.followers.find(found) if isinstance(found, Again) else found

    async def _begin(self, request: ClientRequest, history: History, caller: Caller, *, elsewhere: bool) -> Turn | None:
        """Raises GatewayError."""
        most = int(self._live.max_body * HISTORY_SHARE)
        return await self._histories.begin(_owner(request, caller), history, most, elsewhere=elsewhere)

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
