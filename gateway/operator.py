"""Operator endpoints under /warmroute/: what the gateway knows, and what it would do.

They answer clients on the loopback address, and others only with the admin key (WARMROUTE_ADMIN_KEY) as a bearer token. A
request that a proxy on this machine hands on counts as remote if the proxy says that it is one (Via, X-Forwarded-...) or keeps
the Host that its client asked for; so does one that a page from elsewhere has a browser on this machine send (Origin).

A replica that drains gets no new requests, and is probed as before; when its count of requests in flight is 0, it can be taken
down. It drains until it is told otherwise, or the gateway restarts. A replica that was added stays until the next reload or
restart: what is to last belongs into the configuration.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from gateway.api import openai
from gateway.body import read_body
from gateway.config import ReplicaConfig
from gateway.errors import GatewayError, bad_request
from gateway.everywhere import Drain, Everywhere, Join
from gateway.probe import ReplicaState
from gateway.proxy import Proxy
from gateway.replicas import Fleet
from gateway.typed import ConfigError, convert
from router import Candidate, Router

# Headers that a proxy in front leaves behind.
_FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP")


class Operator:
    """The handlers; `routes` mounts them."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        router: Router,
        proxy: Proxy,
        everywhere: Everywhere,
        admin_key: str,
        body_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._proxy = proxy
        self._everywhere = everywhere
        self._admin_key = admin_key
        self.body_s = body_s
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/warmroute/replicas", self.replicas),
            web.post("/warmroute/replicas", self.add),
            web.post("/warmroute/drain", self.drain),
            web.post("/warmroute/undrain", self.undrain),
            web.post("/warmroute/route", self.route),
        ]

    async def replicas(self, request: web.Request) -> web.Response:
        """Every replica: is it up, what does it serve, what is booked on it, what is it believed to hold."""
        self._allow(request)
        held = self._router.trie.held()
        rows = [self._row(state, number, held) for number, pool in enumerate(self._fleet.pools) for state in pool.replicas]
        rows += [self._row(state, None, held) for state in self._fleet.leaving]
        return _json({"replicas": rows})

    def _row(self, state: ReplicaState, pool: int | None, held: Mapping[str, int]) -> dict[str, Any]:
        load = self._router.ledger.of(state.name)
        return {
            "name": state.name,
            "url": state.config.url,
            "pool": pool,
            "up": state.up,
            "draining": state.draining,
            "leaving": state.leaving,
            "error": state.error,
            "models": list(state.models),
            "inflight": load.inflight,
            "decoding": load.decoding,
            "booked_tokens": load.booked_tokens,
            "prefill_tokens_per_second": round(load.rate.value, 1),
            "engine": state.facts.engine.name,
            "engine_running": state.facts.running,
            "engine_waiting": state.facts.waiting,
            "engine_kv_tokens": state.facts.kv_tokens,
            "capacity_tokens": state.capacity_tokens,
            "learned_capacity_blocks": self._router.learned_capacity(state.name),
            "held_blocks": held.get(state.name, 0),
        }

    async def add(self, request: web.Request) -> web.Response:
        """A replica joins: {"url", "name", "capacity_tokens", "pool"}, all but the URL optional (the pool if there is one)."""
        body = await self._body(request)
        number = body.pop("pool", 0 if len(self._fleet.pools) == 1 else None)
        if not isinstance(number, int) or isinstance(number, bool):
            raise bad_request("'pool' is needed: the number of a pool, from 0.", "pool")
        try:
            replica = convert(ReplicaConfig, body, "")
            if (known := self._fleet.named(replica.name)) and not known.leaving:
                raise GatewayError(409, "replica_exists", f"There is a replica {replica.name!r} already.", param="name")
            await self._everywhere.do(Join(number, replica))
        except ConfigError as error:
            raise bad_request(str(error)) from error
        row = self._row(self._named(replica.name), number, self._router.trie.held())
        until = "the next reload or restart; write it into the configuration to keep it"
        return _json({"replica": row, "until": until}, status=201)

    async def drain(self, request: web.Request) -> web.Response:
        """No new requests for a replica: {"name"}."""
        return await self._drain(request, on=True)

    async def undrain(self, request: web.Request) -> web.Response:
        """It takes requests again: {"name"}."""
        return await self._drain(request, on=False)

    async def _drain(self, request: web.Request, *, on: bool) -> web.Response:
        name = (await self._body(request)).get("name")
        if not isinstance(name, str):
            raise bad_request("'name' is needed: that of a replica, as GET /warmroute/replicas shows it.", "name")
        state = self._named(name)
        await self._everywhere.do(Drain(name, on))
        return _json({"name": name, "draining": state.draining, "inflight": self._router.ledger.of(name).inflight})

    def _named(self, name: str) -> ReplicaState:
        if state := self._fleet.named(name):
            return state
        known = ", ".join(state.name for state in self._fleet.replicas)
        raise GatewayError(404, "replica_not_found", f"There is no replica {name[:100]!r}; there are: {known}.", param="name")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        """The JSON object that an allowed request brings."""
        self._allow(request)
        try:
            body = orjson.loads(await read_body(request, self.body_s))
        except orjson.JSONDecodeError as error:
            raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise bad_request("The body must be a JSON object.")
        return body

    async def route(self, request: web.Request) -> web.Response:
        """A dry run: the decision for a chat or completion body, with every candidate's match, load and cost."""
        self._allow(request)
        raw = await read_body(request, self.body_s)
        api = openai.parse(openai.CHAT if b'"messages"' in raw else openai.COMPLETION, raw)
        target = self._fleet.target(api.model)
        target.require()
        prompt = self._proxy.prompt(api, request.headers, target.label)
        decision, ranking = self._router.rank(prompt, target.replicas, self._clock())
        return _json(
            {
                "model": api.model,
                "policy": self._router.policy_name,
                "replica": decision.best.replica,
                "reason": decision.reason,
                "estimated_prompt_tokens": decision.prompt_tokens,
                "candidates": [_candidate(candidate) for candidate in ranking],
            }
        )

    def _allow(self, request: web.Request) -> None:
        """Raises GatewayError 401 or 403."""
        if _is_local(request):
            return
        if not self._admin_key:
            text = "Operator endpoints answer loopback clients only; set WARMROUTE_ADMIN_KEY to open them to others."
            raise GatewayError(403, "forbidden", text)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._admin_key.encode()):
            raise GatewayError(401, "invalid_admin_key", "Send the admin key as 'Authorization: Bearer KEY'.")


def _is_local(request: web.Request) -> bool:
    """A client on this machine that asked for this machine: a foreign Host is a proxy's, or a page's with a rebound name; a
    foreign Origin is a page's that makes its reader's browser ask.
    """
    if any(name in request.headers for name in _FORWARDED):
        return False
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return False
    return _is_loopback(request.remote or "") and _is_loopback(request.url.host or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {**candidate._asdict(), "cost": {**candidate.cost._asdict(), "total_s": candidate.cost.total_s}}


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2)
    return web.Response(status=status, body=body, content_type="application/json")
