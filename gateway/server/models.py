"""GET /v1/models and /v1/models/NAME: in OpenAI's form, or in Anthropic's for a request with the header `anthropic-version`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from gateway.config.aliases import Aliases
from gateway.config.live import Live
from gateway.dialects.anthropic import errors
from gateway.dialects.api_request import MAX_MODEL_CHARS
from gateway.dialects.models.listing import Listing, OwnModels, alias_entry, anthropic_entry
from gateway.errors import GatewayError
from gateway.fleet.catalog import Catalog
from gateway.fleet.directory import Fleet
from gateway.request.callers import Callers
from gateway.request.client import ClientReply
from gateway.request.rights import Rights
from gateway.server.http.request import HttpRequest
from gateway.server.routing import Handler, Response, Route, error_response, get
from gateway.upstream.loop_guard import VIA_HEADER, LoopGuard

MAX_LISTS: Final = 32  # cached lists of restricted keys
ANTHROPIC_HEADER: Final = "anthropic-version"


class Models:
    """Serves the list of available models and aliases. own: models that features serve; replicas' models of their names are
    not reached, and not listed.
    """

    def __init__(self, *, live: Live, fleet: Fleet, loops: LoopGuard, callers: Callers, own: Sequence[OwnModels] = ()) -> None:
        self._live = live
        self._fleet = fleet
        self._loops = loops
        self._callers = callers
        self._own = own
        self._granted: OrderedDict[tuple[tuple[str, ...], frozenset[str]], tuple[Listing, Listing]] = OrderedDict()
        self._listed: tuple[Catalog, Aliases | None, list[Mapping[str, bytes]], Listing] | None = None

    def routes(self, forward: Handler) -> list[Route]:
        """forward: sends a request to a replica."""
        return [
            get("/v1/models", partial(self._or_forwarded, self._all, forward)),
            get("/v1/models/{model:.+}", partial(self._or_forwarded, self._one, forward)),
        ]

    @property
    def listing(self) -> Listing:
        """The whole list. O(1) until a replica or a feature changes its models, or the configuration its aliases."""
        catalog, aliases, own = self._fleet.catalog, self._live.aliases, [each.entries for each in self._own]
        known = self._listed
        if known is None or known[0] is not catalog or known[1] is not aliases or known[2] != own:
            known = self._listed = catalog, aliases, own, Listing(self._entries(), aliases)
        return known[3]

    def _entries(self) -> Mapping[str, bytes]:
        """All models without aliases."""
        entries: Mapping[str, bytes] = self._fleet.catalog.entries
        for own in self._own:
            entries = {**entries, **own.entries}
        return entries

    def _own_entry(self, model: str) -> bytes | None:
        return next((own.entries[model] for own in self._own if model in own.entries), None)

    def _listing_of(self, grant: Rights | None) -> Listing:
        """The models that a key may use. O(1) for recently requested lists, until the whole list changes."""
        whole = self.listing
        if grant is None or not (grant.models or grant.pools):
            return whole
        which = grant.models, grant.pools
        known = self._granted.get(which)
        if known is None or known[0] is not whole:
            entries = {name: entry for name, entry in self._entries().items() if self._may(grant, name)}
            known = self._granted[which] = whole, Listing(entries, self._live.aliases)
            if len(self._granted) > MAX_LISTS:
                self._granted.popitem(last=False)
        return known[1]

    def _may(self, grant: Rights, model: str) -> bool:
        if not grant.allows(model):
            return False
        if self._own_entry(model) is not None:
            return True  # no pool serves it
        try:
            return not grant.pools or grant.allows_pool(self._fleet.target(model).pool)
        except GatewayError:  # the model has just disappeared
            return False

    def _counted(self, request: HttpRequest) -> Rights | None:
        """The rights of the caller, whose request is counted. Raises GatewayError 400, 401, 429 or 503."""
        caller = self._callers.of(request)
        self._callers.count(caller)
        return caller.grant

    async def _or_forwarded(self, answer: Handler, forward: Handler, request: HttpRequest) -> Response | ClientReply:
        """The answer; that of a replica if the replicas list their models only to holders of keys, as clients may be."""
        if self._fleet.shows_models_to_keys and not self._entries():
            await self._callers.look_up(request.headers)
            try:
                restricted = self._callers.of(request).grant is not None
            except GatewayError:
                restricted = True
            if not restricted:
                return await forward(request)
        return await answer(request)

    async def _all(self, request: HttpRequest) -> Response:
        def answer() -> bytes:
            self._loops.require_no_loop(request.headers.get(VIA_HEADER))
            listing = self._listing_of(self._counted(request))
            if ANTHROPIC_HEADER not in request.fields:
                return listing.answer
            query = request.query
            return listing.page(query.get("after_id", ""), query.get("before_id", ""), query.get("limit", ""))

        await self._callers.look_up(request.headers)
        return _answered(request, answer)

    async def _one(self, request: HttpRequest) -> Response:
        name = request.parameters["model"]

        def answer() -> bytes:
            grant = self._counted(request)
            aliases = self._live.aliases if len(name) <= MAX_MODEL_CHARS else None  # requests refuse longer names
            model = (aliases.of(name) if aliases else "") or name
            alias, entry = "" if model == name else name, self._own_entry(model)
            if grant is not None:
                grant.require_model(model)
                if grant.pools and entry is None:
                    grant.require_pool(self._fleet.target(model, alias).pool)
            if entry is None:
                entry = self._fleet.entry(model, alias)
            if ANTHROPIC_HEADER in request.fields:
                return anthropic_entry(name, entry)
            return entry if model == name else alias_entry(name, model, entry)

        await self._callers.look_up(request.headers)
        return _answered(request, answer)


def _answered(request: HttpRequest, answer: Callable[[], bytes]) -> Response:
    try:
        return Response(answer())
    except GatewayError as error:
        response = error_response(error)
        if ANTHROPIC_HEADER in request.fields:
            response.body = errors.error_body(error)
        return response
