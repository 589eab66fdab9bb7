"""What the gateway keeps, in a request's life: its history is written out before a replica is chosen.

    parsed, with previous_response_id ──► the store: the items before ──► the body with all of them ──► parsed again

So the router sees the whole prompt, and any replica can answer it. Requests that keep nothing and go on with nothing (coding
agents send `store: false`) never come here, but for the messages of a WebSocket: their connection remembers its newest response
(`recent.py`), whether anything is kept or not, and what it remembers is written out in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from gateway.admission.memory import LARGE_BODY, MemoryLease, parsing
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.errors import bad_request, over_budget
from gateway.features.histories.histories import Histories, Turn, too_large
from gateway.features.histories.history import History, written_out
from gateway.features.histories.kept import stored_answer
from gateway.features.histories.recent import Lane
from gateway.features.responses.api import Answer, StateApi
from gateway.features.responses.background.objects import queued_object
from gateway.features.runs.beginning import NewRun, charge
from gateway.features.runs.following import Followers, FollowerStream, RunStreamRequest
from gateway.features.runs.run_request import RunRequest
from gateway.features.runs.runs import Runs, Serve
from gateway.parser.parsing import Parsing, edited
from gateway.request.client import Caller, ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.owner import owner
from gateway.request.phases.scopes import scope_of

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
        self._api = StateApi(histories, runs, clock)
        self.store = histories.store
        self.on = histories.store is not None

    async def begin(self, exchange: Exchange, *, elsewhere: bool) -> tuple[ApiRequest, Turn | None]:
        """The request with its history, and its part in it; None: it goes to a replica as it is.

        elsewhere: a replica may have the object that it names. Raises GatewayError.
        """
        request, dialect, api, caller = exchange.request, exchange.dialect, exchange.api, exchange.caller
        client, body, lane = request.lease.account.client, api.body, _lane(request)
        history = History(await self._parsing.members(body, client))
        if history.background:
            if not dialect.in_background:
                raise bad_request("This does not run in the background.", "background")
            return api, None
        history.store = history.store and dialect.makes_objects
        turn = await self._turn(request, history, api, caller, elsewhere=elsewhere)
        if turn is None:
            return api, None
        turn.client = client
        if api.references and self.on:
            await self._resolve(request, history, turn, caller)
        if isinstance(request, RunRequest):
            request.run.join(turn)
        if turn.own is not None and len(turn.own) >= LARGE_BODY:
            _charge(request, len(turn.own))
            request.lease.head += len(turn.own)  # it is held until the answer is kept
        if lane is not None:
            _watch(request, history, turn, lane)
        passes = turn.told.store is None  # what is kept is kept by a replica, if at all
        if passes and not (turn.before or history.resolved):
            return api, turn
        size = sum(map(len, turn.before))
        if size >= LARGE_BODY:
            _charge(request, size)
        leaves = passes or not dialect.makes_objects
        api.body = await edited(body, written_out(history, turn.before, keeps=leaves))
        api.keeps, api.refers = passes and api.keeps, ""
        done = turn if dialect.makes_objects else None
        if not (turn.before or history.resolved or history.conversation):  # the key of an id is none of the prompt without it
            return api, done
        whole = await self._parse(request, dialect, api.body, scope_of(self._live, caller))
        whole.alias, whole.session, whole.keeps = api.alias, api.session, api.keeps
        return whole, done

    async def start(
        self, request: ClientRequest, api: ApiRequest, caller: Caller, serve: Serve, *, elsewhere: bool
    ) -> Answer | FollowerStream | None:
        """The answer to a request that asks for a run in the background, which has begun. serve: `Lifecycle.run`.

        None: a replica has what it goes on with, so it goes there. Raises GatewayError.
        """
        history = History(await self._parsing.members(api.body, request.lease.account.client))
        if not history.store:
            raise bad_request("A response in the background has to be stored: 'store' must not be false.", "store")
        turn = await self._turn(request, history, api, caller, elsewhere=elsewhere)
        if turn is None:
            return None
        if (size := sum(map(len, turn.before))) >= LARGE_BODY:
            _charge(request, size)
        if api.references:
            await self._resolve(request, history, turn, caller)
        new = NewRun(
            owner=owner(request, caller),
            previous=history.previous,
            conversation=history.conversation,
            input=history.own,
            queued=partial(queued_object, history=history, model=api.model),
            request=partial(run_request, api, history),
        )
        run = await self.runs.start(request, caller, new, serve)
        return FollowerStream(run.log, None, None) if api.stream else (200, run.response)

    async def answer(
        self, request: ClientRequest, api: ApiRequest, caller: Caller, *, elsewhere: bool
    ) -> Answer | FollowerStream | None:
        """The gateway's own answer to a request about what it keeps. None: it is a replica's. Raises GatewayError."""
        whose, client, charge = owner(request, caller), request.lease.account.client, charge_to(request)
        found = await self._api.answer(request.method, request.target, api.body, whose, client, charge, elsewhere=elsewhere)
        return self.followers.find(found, client) if isinstance(found, RunStreamRequest) else found

    async def _turn(
        self, request: ClientRequest, history: History, api: ApiRequest, caller: Caller, *, elsewhere: bool
    ) -> Turn | None:
        """The request's part in its history. None: only a replica has what it goes on with. Raises GatewayError."""
        lane, whose, turn = _lane(request), owner(request, caller), None
        items = lane.find(history.previous) if lane is not None and history.previous else None
        if items is not None:
            turn = self._histories.after(whose, history, items)
        elif self.on and (api.keeps or api.refers or api.references):
            turn = await self._histories.begin(whose, history, self._most, elsewhere=elsewhere)
        elif not (history.previous or history.conversation):
            turn = self._histories.fresh(whose, history)
            turn.passing()
        if turn is not None and not self.on:
            turn.passing()
        elif turn is not None and lane is not None and lane.warms:  # it has an answer that its client does not know
            turn.own = None
            turn.told.store = False if turn.told.store is not None else None
        return turn

    async def _resolve(self, request: ClientRequest, history: History, turn: Turn, caller: Caller) -> None:
        """Write out the items that the request has by their ids alone."""
        client = request.lease.account.client
        references = await self._parsing.references(history.members.raw, client)
        ids = list(dict.fromkeys(id_ for _, _, id_ in references))
        most = self._most - sum(map(len, turn.before))
        items = await self._histories.items(owner(request, caller), ids, most, charge_to(request), client)
        size = sum(len(items[id_]) for _, _, id_ in references)  # one item may be meant many times
        if size > most:
            text = f"The items that 'input' refers to have {size:,} bytes, written out; here {max(0, most):,} are the most."
            raise too_large(text, "input")
        if size + len(history.own) >= LARGE_BODY:
            _charge(request, size + len(history.own))
        history.resolve(await edited(*history.referring(references, items)))
        if turn.own is not None:
            known = () if turn.parent == history.previous else turn.before  # what the store lacks is kept with it
            turn.own = b",".join([piece for piece in (*known, history.own) if piece])

    @property
    def _most(self) -> int:
        """Bytes of a history."""
        return int(self._live.max_body * HISTORY_SHARE)

    async def _parse(self, request: ClientRequest, dialect: Dialect, body: bytes, scope: tuple[str, ...]) -> ApiRequest:
        free = self._parsing.turns.free
        api = self._parsing.at_once(dialect, body) if free else await self._parsing.in_turn(dialect, body)
        if api is None:
            with parsing(request.lease, len(body)):
                api = await self._parsing.parse(dialect, body, scope, request.lease.account.client)
        return api


async def run_request(api: ApiRequest, history: History, lease: MemoryLease) -> ApiRequest:
    """The request of a run: that of the client as an ordinary stream. It is what the dialect would read in the body."""
    values: Mapping[str, bytes] = {"background": b"false", "stream": b"true"}
    body = await edited(api.body, history.members.put_all(values))
    charge(lease, len(body))
    made = ApiRequest(api.model, api.prompt, api.salt, stream=True, metered=True, body=body)
    made.stores, made.keeps, made.refers, made.references = False, api.keeps, api.refers, api.references
    made.made, made.breakpoints, made.images, made.outline = api.made, api.breakpoints, api.images, api.outline
    made.countable, made.size, made.session, made.alias = api.countable, api.size, api.session, api.alias
    return made


def _lane(request: ClientRequest) -> Lane | None:
    return request.recent if isinstance(request.recent, Lane) else None


def _watch(request: ClientRequest, history: History, turn: Turn, lane: Lane) -> None:
    """Have the lane remember the answer, if there is room for its history until that is here."""
    lease, size = request.lease, sum(map(len, turn.before)) + len(history.own)
    if size <= lane.largest and lease.account.grants(size) and lease.grow(size):
        lease.head += size
        turn.remember = partial(_remember, lane, tuple(turn.before), history.own)


def _remember(lane: Lane, before: tuple[bytes, ...], own: bytes, response: bytes) -> None:
    found = stored_answer(response)
    if found is not None:
        output = b"" if lane.warms else found.output
        lane.remember(found.id, b",".join([piece for piece in (*before, own, output) if piece]))


def charge_to(request: ClientRequest) -> Callable[[int], None]:
    """What charges bytes to the request's lease. Raises GatewayError 413 or 503."""
    return partial(_charge, request)


def _charge(request: ClientRequest, size: int) -> None:
    if not request.lease.grow(size):
        raise over_budget(0, request.lease.account.largest)
