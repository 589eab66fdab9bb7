"""The first two phases: identify the sender of a request, and parse its body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.admission.cors import is_rebound, require_origin
from gateway.admission.memory import parsing
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.models.outside import is_form
from gateway.dialects.steering import STEERING, cut
from gateway.dialects.table import generates
from gateway.errors import GatewayError
from gateway.parser.naming import find_outside
from gateway.parser.parsing import Parsing
from gateway.request.callers import Callers
from gateway.request.client import Caller, ClientRequest, Headers
from gateway.request.exchange import Exchange
from gateway.request.notes import PARSE, RECEIVE
from gateway.request.phases.objects import ReplicaObjects
from gateway.request.phases.scopes import scope_of
from gateway.request.record import bounded, tenant_label
from gateway.upstream.loop_guard import VIA_HEADER, LoopGuard

_MODELS_PATH: Final = "/v1/models"
_READS: Final = ("GET", "HEAD")
_TWICE: Final = "/v1/v1/"  # from clients that add /v1 to a base URL with /v1: Anthropic's do, OpenAI's do not
_UNASKED: Final = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_SOCKET_PATH: Final = "/v1/responses"


class ReadPhases:
    """The phases identify and parse. clock: monotonic seconds."""

    def __init__(
        self,
        live: Live,
        parsing_: Parsing,
        objects: ReplicaObjects,
        callers: Callers,
        loops: LoopGuard,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._parsing = parsing_
        self._objects = objects
        self._callers = callers
        self._loops = loops
        self._clock = clock

    async def look_up(self, exchange: Exchange) -> None:
        """`identify`, after fetching the keys that a token of an issuer may need. Raises the same errors."""
        await self._callers.look_up(exchange.request.headers)
        self.identify(exchange)

    def identify(self, exchange: Exchange) -> None:
        """Set the caller, and check the path. Raises GatewayError 400, 401, 403, 404, 405, 503 or 508."""
        request, record = exchange.request, exchange.record
        exchange.caller = caller = self._callers.of(request)
        record.sender.tenant = tenant_label(caller.tenant)
        if caller.grant is not None:
            record.sender.key = caller.grant.id
        elif (origin := request.headers.get("Origin")) and _is_foreign(request, origin):
            require_origin(self._live.cors_origins, origin)
        self._loops.require_no_loop(request.headers.get(VIA_HEADER))
        if record.path == _MODELS_PATH and request.method not in _READS:  # GET and HEAD come here to be forwarded only
            raise GatewayError(405, "method_not_allowed", f"{record.path} takes GET, HEAD.")
        if not exchange.dialect.strict:
            if record.path.startswith(_TWICE):
                why = "the client adds /v1 to its base URL, which must end without it"
                raise GatewayError(404, "not_found", f"There is nothing at {record.path[:100]}: {why}.")
        elif request.method != "POST":
            socket = " A WebSocket has 'Upgrade: websocket', which a proxy may drop." if record.path == _SOCKET_PATH else ""
            raise GatewayError(405, "method_not_allowed", f"{record.path} takes POST.{socket}")

    def known(self, exchange: Exchange, caller: Caller, api: ApiRequest) -> None:
        """Both phases for a request without bytes (`Lifecycle.run`)."""
        exchange.caller, exchange.api, exchange.parsed, sender = caller, api, True, exchange.record.sender
        sender.tenant = tenant_label(caller.tenant)
        if caller.grant is not None:
            sender.key = caller.grant.id
        if exchange.notes is not None:
            exchange.notes.enter(PARSE, self._clock())
        _describe(exchange)

    async def parse(self, exchange: Exchange) -> None:
        """Read and parse the body. Raises GatewayError 400, 408, 413, 415 or 503."""
        request, dialect, record = exchange.request, exchange.dialect, exchange.record
        if exchange.notes is not None:
            exchange.notes.enter(PARSE if request.here else RECEIVE, self._clock())
        raw = request.take() if request.here else await self._read(exchange)
        parsing_, aliases, client = self._parsing, self._live.aliases, request.lease.account.client
        now = parsing_.turns.free
        api = parsing_.at_once(dialect, raw, aliases, client) if now else await parsing_.in_turn(dialect, raw, aliases, client)
        if api is None:
            with parsing(request.lease, len(raw)):
                api = await self._parsing.parse(dialect, raw, scope_of(self._live, exchange.caller), client, aliases)
        exchange.api, exchange.parsed = api, True
        if names := steering_of(api, self._live):
            exchange.charge_copy(api.body)
            await drop_steering(api, names, self._parsing, client)
        if not dialect.strict:
            grant, kind = exchange.caller.grant, request.headers.get("Content-Type") or ""
            restricted = grant is not None and bool(grant.models)
            if not api.model or (restricted and is_form(kind)):  # to an engine an object in a form may be a field of it
                await find_outside(api, kind, request.target, aliases, restricted=restricted)
            api.refers = dialect.refers(record.path)
            if not api.model and (known := self._objects.find(api.refers, exchange.caller)):
                api.model = known[1]
        _describe(exchange)

    async def _read(self, exchange: Exchange) -> bytes:
        limits = self._live.config.limits
        opaque = not exchange.dialect.strict
        raw = await exchange.request.read(max_bytes=self._live.max_body, within_s=limits.body_s, opaque=opaque)
        exchange.record.begun = self._clock()  # the client's upload takes time; only the gateway's own time counts
        if exchange.notes is not None:
            exchange.notes.enter(PARSE, self._clock())
        return raw


def steering_of(api: ApiRequest, live: Live) -> frozenset[str]:
    """The members that are to be cut out of a request, because they steer engines; empty: it has none of them."""
    return STEERING - live.client_fields if api.steers else frozenset()


async def drop_steering(api: ApiRequest, names: frozenset[str], parsing_: Parsing, client: str) -> None:
    """Cut these members out of a request. client: whose share of the loop it takes. Raises GatewayError."""
    cut(api, await parsing_.cuts(api.body, sorted(names), client))
    api.steers = names != STEERING


def _is_foreign(request: ClientRequest, origin: str) -> bool:
    """True for a web page that may use a gateway without keys only if its configuration allows that."""
    headers = request.headers
    if request.method == "POST" and _is_unasked(headers, origin):
        return True
    return request.local and is_rebound(origin, headers.get("Host") or "")


def _is_unasked(headers: Headers, origin: str) -> bool:
    """True if a browser sends such a POST for any web page that its user visits, without asking the gateway first (Fetch,
    section 2.2.2), and the page is not of the gateway's own host.
    """
    kind, site = (headers.get("Content-Type") or "").lower(), headers.get("Sec-Fetch-Site")
    if kind and not kind.startswith(_UNASKED):
        return False
    return site != "same-origin" if site else origin.partition("://")[2] != headers.get("Host")


def _describe(exchange: Exchange) -> None:
    """Copies properties of the parsed request into its record."""
    api, subject = exchange.api, exchange.record.subject
    subject.stream, subject.metered, subject.countable, subject.alias = api.stream, api.metered, api.countable, api.alias
    if session := exchange.caller.session or api.session:
        sender = exchange.record.sender
        sender.session = bounded(session)
        if exchange.caller.agent or exchange.caller.parent:
            sender.agent, sender.parent = bounded(exchange.caller.agent), bounded(exchange.caller.parent)
    posts = exchange.request.method == "POST"
    subject.generates = api.metered or (posts and generates(subject.endpoint, has_prompt=api.has_prompt))
