"""Operator endpoints that create, list, update, rotate, credit and revoke keys. Only the answers to a creation and a
rotation contain the secret.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from gateway.cluster.commands import ControlPlane
from gateway.cluster.messages import Perform
from gateway.config.parse import ConfigError, convert
from gateway.database.failures import StoreFailed
from gateway.errors import GatewayError, bad_request
from gateway.features.keys.keys import POLL_S, TOPIC, Keys
from gateway.features.keys.limits.calendar import day_text
from gateway.features.keys.record import MAX_GRACE_S, Credit, KeyNotFoundError, KeyRefusedError, KeySettings, shown_action
from gateway.features.keys.usage import usage_of
from gateway.server.http.request import HttpRequest
from gateway.server.operator import Operator
from gateway.server.routing import Response, Route, delete, get, post

if TYPE_CHECKING:  # it loads SQLAlchemy
    from gateway.features.keys.store import KeyStore

MAX_LISTED: Final = 1000  # keys in one answer
DEFAULT_GRACE_S: Final = 86_400.0

T = TypeVar("T")


class KeyEndpoints:
    """keys: None if keys are off. control: reaches all workers."""

    def __init__(self, keys: Keys | None, operator: Operator, control: ControlPlane) -> None:
        self._keys = keys
        self._operator = operator
        self._control = control

    def routes(self) -> list[Route]:
        return [
            get("/warmroute/actions", self.actions),
            get("/warmroute/keys", self.list),
            post("/warmroute/keys", self.create),
            Route(("PATCH",), "/warmroute/keys/{id}", self.update),
            post("/warmroute/keys/{id}/rotate", self.rotate),
            post("/warmroute/keys/{id}/credit", self.credit),
            delete("/warmroute/keys/{id}", self.revoke),
        ]

    async def list(self, request: HttpRequest) -> Response:
        """At most MAX_LISTED keys in the order of their ids, after the id in the query's `after`."""
        self._operator.allow(request)
        after = request.query.get("after", "")
        keys, more = await self._with_store(lambda store: store.list_page(after, MAX_LISTED))
        assert self._keys is not None, "or there is no store"
        rows = [{**key.shown(), "used": usage_of(self._keys, key.id)} for key in keys]
        return _json({"keys": rows, "has_more": more})

    async def actions(self, request: HttpRequest) -> Response:
        """At most MAX_LISTED actions of operators, the latest first; `before` in the query: of earlier ones, Unix seconds."""
        self._operator.allow(request)
        try:
            before = float(request.query.get("before", "inf"))
        except ValueError as error:
            raise bad_request("'before' must be a time in Unix seconds.", "before") from error
        found = await self._with_store(lambda store: store.latest_actions(MAX_LISTED, before))
        return _json({"actions": [shown_action(action) for action in found]})

    async def create(self, request: HttpRequest) -> Response:
        """The body has the fields of `record.KeySettings`."""
        body = await self._operator.body(request)
        try:
            settings = convert(KeySettings, body)
        except ConfigError as error:
            raise bad_request(str(error)) from error
        key, secret = await self._with_store(lambda store: store.create(settings))
        if request.action is not None:
            request.action["id"] = key.id
        return _json({"key": secret, **key.shown(), **await self._warning()}, status=201)

    async def update(self, request: HttpRequest) -> Response:
        """The body has those fields of `record.KeySettings` that change; null removes a limit, a list, a name or the expiry."""
        body = await self._operator.body(request)
        try:
            key = await self._with_store(lambda store: store.update(request.parameters["id"], body))
        except ConfigError as error:
            raise bad_request(str(error)) from error
        return _json({**key.shown(), **await self._warning()})

    async def rotate(self, request: HttpRequest) -> Response:
        """Body: {"grace_s"}, for how long the old secret stays valid."""
        body = await self._operator.body(request)
        if unknown := body.keys() - {"grace_s"}:
            raise bad_request(
                f"{min(unknown)[:100]!r} is not known: a rotation has 'grace_s', how many seconds the old secret stays valid."
            )
        grace_s = body.get("grace_s", DEFAULT_GRACE_S)
        if type(grace_s) not in (int, float) or not 0 <= grace_s <= MAX_GRACE_S:
            raise bad_request(f"'grace_s' must be a number of seconds from 0 to {MAX_GRACE_S:.0f}.", "grace_s")
        key, secret = await self._with_store(lambda store: store.rotate(request.parameters["id"], float(grace_s)))
        return _json({"key": secret, **key.shown(), **await self._warning()})

    async def credit(self, request: HttpRequest) -> Response:
        """Body: {"usd"}, by which today's budget (UTC) is raised, and so that of the month."""
        body = await self._operator.body(request)
        try:
            usd = convert(Credit, body).usd
        except ConfigError as error:
            raise bad_request(str(error)) from error
        today = day_text(self._keys.moment().day) if self._keys is not None else ""
        key = await self._with_store(lambda store: store.credit(request.parameters["id"], today, usd))
        return _json({**key.shown(), **await self._warning()})

    async def revoke(self, request: HttpRequest) -> Response:
        """After an answer of 200, no worker of this gateway accepts the key."""
        self._operator.allow(request)
        key = await self._with_store(lambda store: store.revoke(request.parameters["id"]))
        if reason := await self._unread():
            text = f"The key {key.id} is revoked in the database, but {reason} Until then a worker may accept it. Retry."
            raise GatewayError(503, "keys_unavailable", text, retry_after_s=1)
        return _json(key.shown())

    async def _warning(self) -> dict[str, str]:
        """A warning instead of an error, because the answer has a secret and must be delivered."""
        reason = await self._unread()
        return {"warning": f"The change is in the database, but {reason}"} if reason else {}

    async def _unread(self) -> str:
        """Makes all workers read the change. Returns "", or the reason for a failure as the end of a sentence."""
        try:
            await self._control.execute(Perform(TOPIC))
        except ConfigError as error:
            why = str(error)
        except GatewayError as error:
            why = error.code
        else:
            return ""
        return f"not all workers have read it ({why}). They try again every {POLL_S:.0f} s: see the log."

    async def _with_store(self, work: Callable[[KeyStore], Awaitable[T]]) -> T:
        """Runs work on the store. Raises GatewayError 404, 409 or 503."""
        if self._keys is None:
            raise GatewayError(409, "keys_not_kept", "There are no keys at this gateway (keys.url is off).")
        try:
            return await work(await self._keys.store())
        except KeyNotFoundError as error:
            raise GatewayError(404, "key_not_found", str(error), param="id") from error
        except KeyRefusedError as error:
            raise GatewayError(409, "key_refused", str(error), param="id") from error
        except StoreFailed as failure:
            text = f"The database of the keys failed: {failure}. Check the result with GET /warmroute/keys, and retry."
            raise GatewayError(503, "keys_unavailable", text, retry_after_s=1) from failure


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_INDENT_2), status, headers={"Cache-Control": "no-store"})
