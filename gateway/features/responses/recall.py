"""Stored histories in the life of a request: the history is inserted before a replica is chosen.

    parsed, with previous_response_id ──► the store: the earlier items ──► the body with all items ──► parsed again

So the router sees the whole prompt, and any replica can answer it. Requests that store and continue nothing (coding agents send
`store: false`) skip this, except for WebSocket messages: a connection remembers its latest response (`recent.py`), stored or
not, and its items are inserted in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from gateway.admission.memory import LARGE_BODY, MemoryLease
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.errors import bad_request
from gateway.features.histories.histories import Histories, sealed_issuer, too_large
from gateway.features.histories.history import History, written_out
from gateway.features.histories.kept import stored_answer
from gateway.features.histories.log_turn import LOG_TURN
from gateway.features.histories.recent import Lane
from gateway.features.histories.response_turn import Turn
from gateway.features.histories.whole import WholeBodies, max_history
from gateway.features.responses.api import Answer, StateApi
from gateway.features.responses.background.objects import queued_object
from gateway.features.runs.beginning import NewRun
from gateway.features.runs.following import Followers, FollowerStream, RunStreamRequest
from gateway.features.runs.run_request import RunRequest
from gateway.features.runs.runs import Runs, Serve
from gateway.parser.parsing import Parsing, edited
from gateway.request.client import Caller, ClientRequest
from gateway.request.exchange import Exchange, PoolBinding
from gateway.request.owner import owner


class Recall:
    """Inserts histories and answers requests for stored objects. clock: Unix seconds."""

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
        self._whole = WholeBodies(live, parsing_)
        self.store = histories.store
        self.on = histories.store is not None

    async def begin(self, exchange: Exchange, *, maybe_at_replica: bool) -> tuple[ApiRequest, Turn | None]:
        """The request with its history, and its turn. None: it goes unchanged to a replica.

        maybe_at_replica: a replica may have the named object. Raises GatewayError.
        """
        request, dialect, api, caller = exchange.request, exchange.dialect, exchange.api, exchange.caller
        client, body, lane = request.lease.account.client, api.body, _lane(request)
        history = History(await self._parsing.members(body, client))
        if history.background:
            if not dialect.in_background:
                raise bad_request("This request cannot run in the background.", "background")
            return api, None
        history.store = history.store and dialect.makes_objects
        log = LOG_TURN.get(exchange.record)
        if log is not None:
            turn: Turn | None = self._histories.logged(owner(request, caller), history, log)
        else:
            turn = await self._turn(request, history, api, caller, maybe_at_replica=maybe_at_replica)
        if turn is None:
            return api, None
        turn.client = client
        exchange.binding = exchange.binding or _binding(turn.issuers)
        if api.references and self.on:
            await self._resolve(request, history, turn, caller)
        if isinstance(request, RunRequest):
            request.run.join(turn)
        if turn.request_items is not None and len(turn.request_items) >= LARGE_BODY:
            request.lease.charge(len(turn.request_items))
            request.lease.head += len(turn.request_items)  # held until the answer is stored
        if lane is not None:
            _watch(request, history, turn, lane)
        passes_through = turn.client_history.store is None  # only a replica may store the answer
        if passes_through and not (turn.before or history.resolved):
            return api, turn
        size = sum(map(len, turn.before))
        if size >= LARGE_BODY:
            request.lease.charge(size)
        leaves = passes_through or not dialect.makes_objects
        request.identify()
        api.body = await edited(body, written_out(history, turn.before, keeps=leaves))
        api.keeps, api.refers = passes_through and api.keeps, ""
        done = turn if dialect.makes_objects else None
        if not (turn.before or history.resolved or history.conversation):  # removing the id does not change the prompt's keys
            return api, done
        return await self._whole.parsed(exchange, api), done

    async def start(
        self, request: ClientRequest, api: ApiRequest, caller: Caller, serve: Serve, *, maybe_at_replica: bool
    ) -> Answer | FollowerStream | None:
        """Starts a background run and returns the answer to its request. serve: `Lifecycle.run`.

        None: a replica has the continued object, so the request goes there. Raises GatewayError.
        """
        history = History(await self._parsing.members(api.body, request.lease.account.client))
        if not history.store:
            raise bad_request("A background response must be stored: 'store' must not be false.", "store")
        turn = await self._turn(request, history, api, caller, maybe_at_replica=maybe_at_replica)
        if turn is None:
            return None
        if (size := sum(map(len, turn.before))) >= LARGE_BODY:
            request.lease.charge(size)
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
        self, request: ClientRequest, api: ApiRequest, caller: Caller, *, maybe_at_replica: bool
    ) -> Answer | FollowerStream | None:
        """The answer to a request for stored objects. None: it is for a replica. Raises GatewayError."""
        owner_id, client, charge = owner(request, caller), request.lease.account.client, charge_to(request)
        found = await self._api.answer(
            request.method, request.target, api.body, owner_id, client, charge, maybe_at_replica=maybe_at_replica
        )
        return self.followers.find(found, client) if isinstance(found, RunStreamRequest) else found

    async def _turn(
        self, request: ClientRequest, history: History, api: ApiRequest, caller: Caller, *, maybe_at_replica: bool
    ) -> Turn | None:
        """The turn of the request in its history. None: only a replica has the history. Raises GatewayError."""
        lane, owner_id, turn = _lane(request), owner(request, caller), None
        items = lane.find(history.previous) if lane is not None and history.previous else None
        if items is not None:
            turn = self._histories.after(owner_id, history, items)
        elif self.on and (api.keeps or api.refers or api.references):
            turn = await self._histories.begin(owner_id, history, max_history(self._live), maybe_at_replica=maybe_at_replica)
        elif not (history.previous or history.conversation):
            turn = self._histories.fresh(owner_id, history)
            turn.disable()
        if turn is not None and not self.on:
            turn.disable()
        elif turn is not None and lane is not None and lane.warms:  # the client does not receive this answer
            turn.request_items = None
            turn.client_history.store = False if turn.client_history.store is not None else None
        return turn

    async def _resolve(self, request: ClientRequest, history: History, turn: Turn, caller: Caller) -> None:
        """Replaces references to items by the items."""
        client = request.lease.account.client
        references = await self._histories.reader.references(history.members.raw, client)
        ids = list(dict.fromkeys(id_ for _, _, id_ in references))
        max_bytes = max_history(self._live) - sum(map(len, turn.before))
        items = await self._histories.items(owner(request, caller), ids, max_bytes, charge_to(request), client)
        size = sum(len(items[id_]) for _, _, id_ in references)  # an item may be referenced several times
        if size > max_bytes:
            text = f"The items referenced by 'input' have {size:,} bytes in all; the maximum here is {max(0, max_bytes):,}."
            raise too_large(text, "input")
        if size + len(history.own) >= LARGE_BODY:
            request.lease.charge(size + len(history.own))
        history.resolve(await edited(*history.referring(references, items)))
        if turn.request_items is not None:
            known = (
                () if turn.parent == history.previous else turn.before
            )  # items missing in the store are stored with this response
            turn.request_items = b",".join([piece for piece in (*known, history.own) if piece])


def _binding(issuers: frozenset[str]) -> PoolBinding | None:
    """To the pool that can read the sealed parts of a log. Raises GatewayError 409 if that takes several."""
    if len(issuers) > 1:
        raise sealed_issuer(issuers)
    return PoolBinding(next(iter(issuers)), partial(sealed_issuer, issuers)) if issuers else None


async def run_request(api: ApiRequest, history: History, lease: MemoryLease) -> ApiRequest:
    """The request of a run: the client's request as an ordinary stream, with the values that the dialect would parse from the
    body.
    """
    values: Mapping[str, bytes] = {"background": b"false", "stream": b"true"}
    body = await edited(api.body, history.members.put_all(values))
    lease.charge(len(body))
    made = ApiRequest(api.model, api.prompt, api.salt, stream=True, metered=True, body=body)
    made.stores, made.keeps, made.refers, made.references = False, api.keeps, api.refers, api.references
    made.made, made.breakpoints, made.images, made.outline = api.made, api.breakpoints, api.images, api.outline
    made.countable, made.size, made.session, made.alias = api.countable, api.size, api.session, api.alias
    made.answers, made.output, made.textual = api.answers, api.output, api.textual
    made.adapter, made.steers = api.adapter, api.steers
    return made


def _lane(request: ClientRequest) -> Lane | None:
    return request.recent if isinstance(request.recent, Lane) else None


def _watch(request: ClientRequest, history: History, turn: Turn, lane: Lane) -> None:
    """Makes the lane remember the answer, if its history can be charged until then."""
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
    """A function that charges bytes to the request's lease. Raises GatewayError 503."""
    return request.lease.charge
