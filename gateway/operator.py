"""Operator endpoints under /warmroute/: what the gateway knows, and what it would do.

They answer clients on the loopback address, and others only with the admin key (WARMROUTE_ADMIN_KEY) as a bearer token. A
request that a proxy on this machine hands on counts as remote if the proxy says that it is one (Via, X-Forwarded-...) or keeps
the Host that its client asked for.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from gateway.api import openai
from gateway.body import read_body
from gateway.errors import GatewayError
from gateway.proxy import Proxy
from gateway.replicas import Fleet
from router import Candidate, Router

# Headers that a proxy in front leaves behind.
_FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP")


class Operator:
    """The handlers; `routes` mounts them."""

    def __init__(self, *, fleet: Fleet, router: Router, proxy: Proxy, admin_key: str, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._router = router
        self._proxy = proxy
        self._admin_key = admin_key
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/warmroute/replicas", self.replicas), web.post("/warmroute/route", self.route)]

    async def replicas(self, request: web.Request) -> web.Response:
        """Every replica: is it up, what does it serve, what is booked on it, what is it believed to hold."""
        self._allow(request)
        held = self._router.trie.held()
        rows = []
        for number, pool in enumerate(self._fleet.pools):
            for state in pool.replicas:
                load = self._router.ledger.of(state.name)
                rows.append(
                    {
                        "name": state.name,
                        "url": state.config.url,
                        "pool": number,
                        "up": state.up,
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
                )
        return _json({"replicas": rows})

    async def route(self, request: web.Request) -> web.Response:
        """A dry run: the decision for a chat or completion body, with every candidate's match, load and cost."""
        self._allow(request)
        raw = await read_body(request)
        api = openai.parse(openai.CHAT if b'"messages"' in raw else openai.COMPLETION, raw)
        target = self._fleet.target(api.model)
        target.require()
        decision, ranking = self._router.rank(self._proxy.prompt(api, request.headers), target.replicas, self._clock())
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
    """A client on this machine that asked for this machine: a foreign Host is a proxy's, or a page's with a rebound name."""
    if any(name in request.headers for name in _FORWARDED):
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


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value, option=orjson.OPT_INDENT_2), content_type="application/json")
