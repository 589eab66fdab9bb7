"""Operator endpoints under /warmroute/: the state of the replicas, changes to them, and dry runs.

They are on a listener of their own (`admin_listen`), and with an admin key (WARMROUTE_ADMIN_KEY) on the clients' port as well.
With a key every client needs it, also on this machine: as `Authorization: Bearer KEY` or as `X-Warmroute-Admin-Key: KEY`.
Without one they answer only direct clients on this machine, and only on their own listener, because a proxy in front of the
clients' port can look like such a client (`access.py`).

A draining replica gets no new requests, and is probed as before; once its count of requests in flight is 0, it can be taken
down. It drains until it is undrained, or the gateway restarts. An added replica stays until it is removed or the gateway
restarts; a reload drops it only if the new configuration names it itself, lacks its pool, or has no room for it. Permanent
replicas belong into the configuration. The URL of an added replica must not be link-local or a cloud's metadata service, unless
the configuration allows that: an operator could otherwise read there with the gateway's network identity. A removed replica
finishes its running requests.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.cluster.messages import Drain, Join, Leave
from gateway.config.live import Live
from gateway.config.parse import ConfigError, convert
from gateway.config.schema import AddedReplica
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.dialects.table import DRY_RUN, Dialects
from gateway.errors import GatewayError, bad_request, first_names
from gateway.fleet.directory import Target
from gateway.fleet.membership import CONFIGURATION, KEPT, OPERATORS
from gateway.fleet.state import ReplicaState
from gateway.parser.naming import find_outside
from gateway.parser.parsing import Parsing
from gateway.request.client import Caller, ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.extensions import Extensions
from gateway.request.phases.scopes import prompt_of, scope_of
from gateway.request.record import SettledRequest
from gateway.server.access import Access
from gateway.server.actions import KEY, LOCAL
from gateway.server.http.request import HttpRequest
from gateway.server.replica_rows import ReplicaRows
from gateway.server.routing import Response, Route, delete, get, post
from router import Candidate


class Operator:
    """The handlers; `routes` mounts them."""

    def __init__(
        self,
        *,
        live: Live,
        local: LocalControl,
        dialects: Dialects,
        parsing: Parsing,
        control: ControlPlane,
        access: Access,
        extensions: Extensions,
    ) -> None:
        """local: this process. control: all processes. extensions: of requests by features."""
        self._live = live
        self._dialects = dialects
        self._fleet = local.fleet
        self._membership = local.membership
        self._router = local.router
        self._rows = ReplicaRows(local)
        self._parsing = parsing
        self._control = control
        self._access = access
        self._extensions = extensions
        self._clock = local.clock

    def routes(self) -> list[Route]:
        return [
            get("/warmroute/replicas", self.replicas),
            post("/warmroute/replicas", self.add),
            delete("/warmroute/replicas/{name:.+}", self.remove),
            post("/warmroute/drain", self.drain),
            post("/warmroute/undrain", self.undrain),
            post("/warmroute/route", self.route),
        ]

    async def replicas(self, request: HttpRequest) -> Response:
        """Every replica: its health, models, bookings and believed cache; and every source."""
        self.allow(request)
        rows = list(self._rows.all())
        sources = [
            {"name": watch.name, "replicas": count, "problem": watch.problem or None, "note": watch.note or None}
            for watch, count in self._membership.state_of_sources()
        ]
        return _json({"replicas": rows, "sources": sources})

    async def add(self, request: HttpRequest) -> Response:
        """Add a replica: {"url", "name", "capacity_tokens", "engine", "weight", "ranks", "pool"}. Only the URL is required, and
        the pool if there are several.
        """
        body = await self.body(request)
        names = [pool.name for pool in self._fleet.pools]
        pool = body.pop("pool", names[0] if len(names) == 1 else None)
        if pool not in names:
            known = f"the name of a pool, which is one of {first_names(names)}"
            problem = "is needed" if pool is None else "is no pool's name"
            raise bad_request(f"'pool' {problem}: it must be {known}.", "pool")
        try:
            replica = convert(AddedReplica, body, ("pool",))
        except ConfigError as error:
            raise bad_request(str(error)) from error
        self._allow_url(replica)
        if any(segment in (".", "..") for segment in replica.name.split("/")):
            raise bad_request("'name' must not have '.' or '..' between slashes: no DELETE could name it.", "name")
        self._require_free(replica.name)
        try:
            await self._control.execute(Join(pool, replica))
        except ConfigError as error:
            self._require_free(replica.name)  # another operator was faster
            raise bad_request(str(error)) from error
        state = next(iter(self._fleet.all_named(replica.name)), None)
        if state is None or state.leaving or state.url != replica.url:
            text = f"The replica {replica.name!r} was added, and removed by another request or a reload before this answer."
            raise GatewayError(409, "replica_removed", text, param="name")
        row = self._rows.row(state, state.member.pool, self._router.trie.held())
        until = "it is removed, or the gateway restarts; write it into the configuration to keep it"
        if self._membership.source_of(replica.name) != OPERATORS:  # a reload has just named it
            until = "it is removed from the configuration"
        return _json({"replica": row, "until": until}, status=201)

    def _require_free(self, name: str) -> None:
        """Raises GatewayError 409 if a replica has this name."""
        if any(not known.leaving for known in self._fleet.all_named(name)):
            raise GatewayError(409, "replica_exists", f"There is a replica {name!r} already.", param="name")

    async def remove(self, request: HttpRequest) -> Response:
        """Remove an added replica: it gets no new requests, and running ones finish."""
        self.allow(request)
        state = self._named(request.parameters["name"])
        name = state.member.listed_as
        self._require_operators_own(name)
        try:  # also if it is leaving: another operator may be adding it again just now
            await self._control.execute(Leave(name))
        except ConfigError as error:
            self._require_operators_own(name)  # a reload may have just named it
            if not state.leaving:
                raise GatewayError(404, "replica_not_found", str(error), param="name") from error
        return _json({"name": name, "leaving": True, "inflight": self._inflight(state, name)})

    def _require_operators_own(self, name: str) -> None:
        """Raises GatewayError 409 if the configuration, or another source, names the replica, and so must remove it."""
        source = self._membership.source_of(name)
        if source not in (OPERATORS, None):
            where = {
                CONFIGURATION: "is in the configuration: remove it there",
                KEPT: "is kept from before the last reload, until a source of the new configuration answers: wait for it",
            }.get(source, f"has been found by the source {source!r}: remove it there")
            text = f"The replica {name!r} {where}, or drain it here (POST /warmroute/drain)."
            raise GatewayError(409, "replica_not_added", text, param="name")

    async def drain(self, request: HttpRequest) -> Response:
        """Stop new requests for a replica: {"name"}."""
        return await self._drain(request, on=True)

    async def undrain(self, request: HttpRequest) -> Response:
        """Resume new requests for a replica: {"name"}."""
        return await self._drain(request, on=False)

    async def _drain(self, request: HttpRequest, *, on: bool) -> Response:
        name = (await self.body(request)).get("name")
        if not isinstance(name, str):
            raise bad_request("'name' is needed: the name of a replica, as in GET /warmroute/replicas.", "name")
        state = self._named(name)
        await self._control.execute(Drain(name, on))
        if (found := next(iter(self._fleet.all_named(name)), None)) is not state:
            text = f"The replica {name!r} has been removed by another request or a reload before this answer."
            if found:
                text += f" Another replica has its name now, {found.url}, and {'is' if found.draining else 'is not'} draining."
            raise GatewayError(409, "replica_removed", text, param="name")
        return _json({"name": name, "draining": state.draining, "inflight": self._inflight(state, name)})

    def _inflight(self, state: ReplicaState, name: str) -> int:
        """The requests in flight at the replicas of this name. state: the first one."""
        names = {state.name, *(each.name for each in self._fleet.all_named(name))}
        return sum(self._router.ledger.of(each).inflight for each in names)

    def _named(self, name: str) -> ReplicaState:
        if states := self._fleet.all_named(name):
            return states[0]
        known = first_names([state.name for state in self._fleet.replicas])
        raise GatewayError(404, "replica_not_found", f"There is no replica {name[:100]!r}; there are: {known}.", param="name")

    async def body(self, request: HttpRequest) -> dict[str, Any]:
        """The JSON object in the body of an authorized request."""
        self.allow(request)
        try:
            body = orjson.loads(await self._raw_body(request))
        except orjson.JSONDecodeError as error:
            raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise bad_request("The body must be a JSON object.")
        if request.action is not None:
            request.action["body"] = dict(body)
        return body

    async def _raw_body(self, request: ClientRequest) -> bytes:
        limits = self._live.config.limits
        return await request.read(max_bytes=limits.body_mb << 20, within_s=limits.body_s, opaque=False)

    async def route(self, request: HttpRequest) -> Response:
        """A dry run: the decision for a body, with every candidate's match, load and cost.

        The body is a chat or a completion, recognised by its fields; for another API, its path is in the query. A stored
        history is written out, as for a real request.
        """
        self.allow(request, reads=True)
        raw = await self._raw_body(request)
        dialect = self._dialects.known(request.query["path"]) if "path" in request.query else DRY_RUN
        exchange = Exchange(request, dialect, SettledRequest("", request.path, self._clock()))
        exchange.caller = caller = request.caller()
        exchange.api = await self._parse(dialect, request, raw, caller)
        for preparer in self._extensions.preparers:
            if preparer.concerns(exchange):
                await preparer.prepare(exchange)
        api = exchange.api
        way, target = await self._goes_to(exchange)
        target.require()
        prompt = prompt_of(self._live, api, caller, target.label, request.lease.account.client, target.adapter_of(api))
        decision, ranking = self._router.rank(prompt, target.replicas, self._clock())
        return _json(
            {
                **({"fallback": way} if way else {}),
                "model": api.model,
                **({"model_alias": api.alias[:100]} if api.alias else {}),
                "policy": self._router.policy_name,
                "replica": decision.best.replica,
                "reason": decision.reason,
                "promise": decision.promise,
                "promised_tokens": decision.promised_tokens,
                "estimated_prompt_tokens": decision.prompt_tokens,
                "candidates": [_candidate(candidate) for candidate in ranking],
            }
        )

    async def _parse(self, dialect: Dialect, request: ClientRequest, raw: bytes, caller: Caller) -> ApiRequest:
        """Parse as for a real request: aliases are replaced."""
        aliases, client = self._live.aliases, request.lease.account.client
        api = await self._parsing.in_turn(dialect, raw, aliases, client)
        if api is None:
            api = await self._parsing.parse(dialect, raw, scope_of(self._live, caller), client, aliases)
        if not (api.model or dialect.strict):
            await find_outside(api, request.headers.get("Content-Type") or "", request.target, aliases)
        return api

    async def _goes_to(self, exchange: Exchange) -> tuple[str, Target]:
        """The way to the pool that would take the request, and its target; the request then names that pool's model."""
        own, fallback = self._fleet.target(exchange.api.model, exchange.api.alias), self._extensions.fallback
        return await fallback.foreseen(exchange, own) if fallback is not None else ("", own)

    def _allow_url(self, replica: AddedReplica) -> None:
        """Raises GatewayError 403 for a forbidden URL. Addresses of names are checked at each connection (`dialer.py`)."""
        if replica.link_local:
            text = "The URL is link-local or a cloud's metadata service: only the configuration may name it."
            raise GatewayError(403, "forbidden_url", text, param="url")

    def allow(self, request: HttpRequest, *, reads: bool | None = None) -> None:
        """Check the authorization. reads: the request changes nothing, as the read-only key may; None: as its method says.
        Another request is an action (`actions.py`). Raises GatewayError 401 or 403.
        """
        if not (self._access.guarded or request.connection.for_operators):
            text = (
                "Operator endpoints are not on this port but on the admin listener (admin_listen), or need WARMROUTE_ADMIN_KEY."
            )
            raise GatewayError(403, "forbidden", text)
        if reads is None:
            reads = request.method in ("GET", "HEAD")
        self._access.require_operator(request, reads=reads)
        if not reads:
            request.action = {"by": KEY if self._access.guarded else LOCAL}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {**candidate._asdict(), "cost": {**candidate.cost._asdict(), "total_s": candidate.cost.total_s}}


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_INDENT_2), status)
