"""GET /v1/models and /v1/models/NAME: in OpenAI's form, or in Anthropic's for a request with the header `anthropic-version`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from gateway.config.aliases import Aliases
from gateway.config.live import Live
from gateway.dialects.anthropic import errors
from gateway.dialects.api_request import MAX_MODEL_CHARS
from gateway.dialects.models.listing import Listing, alias_entry, anthropic_entry
from gateway.errors import GatewayError
from gateway.fleet.catalog import Catalog
from gateway.fleet.directory import Fleet
from gateway.request.callers import Callers
from gateway.request.rights import Rights
from gateway.server.http.request import HttpRequest
from gateway.server.routing import Response, Route, error_response, get
from gateway.upstream.loop_guard import VIA_HEADER, LoopGuard

MAX_LISTS: Final = 32  # cached lists of restricted keys
ANTHROPIC_HEADER: Final = "anthropic-version"


class Models:
    """Serves the list of available models and aliases."""

    def __init__(self, *, live: Live, fleet: Fleet, loops: LoopGuard, callers: Callers) -> None:
        self._live = live
        self._fleet = fleet
        self._loops = loops
        self._callers = callers
        self._granted: OrderedDict[tuple[tuple[str, ...], frozenset[str]], tuple[Listing, Listing]] = OrderedDict()
        self._listed: tuple[Catalog, Aliases | None, Listing] | None = None

    def routes(self) -> list[Route]:
        return [get("/v1/models", self._all), get("/v1/models/{model:.+}", self._one)]

    @property
    def listing(self) -> Listing:
        """The whole list. O(1) until a replica changes its models, or the configuration its aliases."""
        catalog, aliases = self._fleet.catalog, self._live.aliases
        known = self._listed
        if known is None or known[0] is not catalog or known[1] is not aliases:
            known = self._listed = catalog, aliases, Listing(catalog.entries, aliases)
        return known[2]

    def _listing_of(self, grant: Rights | None) -> Listing:
        """The models that a key may use. O(1) for recently requested lists, until the whole list changes."""
        whole = self.listing
        if grant is None or not (grant.models or grant.pools):
            return whole
        which = grant.models, grant.pools
        known = self._granted.get(which)
        if known is None or known[0] is not whole:
            entries = {name: entry for name, entry in self._fleet.catalog.entries.items() if self._may(grant, name)}
            known = self._granted[which] = whole, Listing(entries, self._live.aliases)
            if len(self._granted) > MAX_LISTS:
                self._granted.popitem(last=False)
        return known[1]

    def _may(self, grant: Rights, model: str) -> bool:
        if not grant.allows(model):
            return False
        try:
            return not grant.pools or grant.allows_pool(self._fleet.target(model).pool)
        except GatewayError:  # the model has just disappeared
            return False

    async def _all(self, request: HttpRequest) -> Response:
        def answer() -> bytes:
            self._loops.require_no_loop(request.headers.get(VIA_HEADER))
            listing = self._listing_of(self._callers.of(request).grant)
            if ANTHROPIC_HEADER not in request.fields:
                return listing.answer
            query = request.query
            return listing.page(query.get("after_id", ""), query.get("before_id", ""), query.get("limit", ""))

        await self._callers.look_up(request.headers)
        return _answered(request, answer)

    async def _one(self, request: HttpRequest) -> Response:
        name = request.parameters["model"]

        def answer() -> bytes:
            grant = self._callers.of(request).grant
            aliases = self._live.aliases if len(name) <= MAX_MODEL_CHARS else None  # requests refuse longer names
            model = (aliases.of(name) if aliases else "") or name
            if grant is not None:
                grant.require_model(model)
                if grant.pools:
                    grant.require_pool(self._fleet.target(model, "" if model == name else name).pool)
            entry = self._fleet.entry(model, "" if model == name else name)
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
