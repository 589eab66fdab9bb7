"""The current use of a key, as known to this process: for operators, and for its holder.

`GET /v1/usage` answers the holder of a key or token. It shows the caller's own numbers only, and does not count as a request,
so that a holder whose limit is reached can read why.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson

from gateway.accounting.money import dollars
from gateway.errors import GatewayError
from gateway.features.keys.grant import Grant
from gateway.features.keys.keys import Keys
from gateway.features.keys.limits.account import KeyLimits
from gateway.features.keys.limits.limiter import UNLIMITED
from gateway.features.keys.limits.rate import Rate
from gateway.features.keys.record import stamp
from gateway.request.callers import Callers
from gateway.server.http.request import HttpRequest
from gateway.server.routing import Response, Route, get


def usage_of(keys: Keys, id_: str) -> dict[str, Any] | None:
    """The use of a key, and the remainder of its limits. None: it was not used since the start, and has spent nothing this
    month. O(1).
    """
    account = keys.limiter.account(id_)
    if account is None:
        return None
    moment, grant = keys.moment(), keys.ring.grant(id_)
    limits = (grant.limits if grant is not None else None) or UNLIMITED
    return {
        "usd_day": dollars(account.spent(moment.day)),
        "usd_month": dollars(account.spent_in_month(moment.day)),
        "usd_reserved": dollars(account.reserved),
        "requests_left": _left(limits.requests, account.requests, moment.now),
        "uncached_tokens_left": _left(limits.tokens, account.tokens, moment.now),
    }


class OwnUsage:
    """`GET /v1/usage` (see the module)."""

    def __init__(self, keys: Keys, callers: Callers) -> None:
        self._keys = keys
        self._callers = callers

    def routes(self) -> list[Route]:
        return [get("/v1/usage", self.show)]

    async def show(self, request: HttpRequest) -> Response:
        await self._callers.look_up(request.headers)
        grant = self._callers.of(request).grant
        if not isinstance(grant, Grant):
            raise GatewayError(404, "usage_not_kept", "The usage is that of a key, and this request has none.")
        return Response(orjson.dumps(self._of(grant), option=orjson.OPT_INDENT_2), headers={"Cache-Control": "no-store"})

    def _of(self, grant: Grant) -> dict[str, Any]:
        limits, account = grant.limits or UNLIMITED, self._keys.limiter.account(grant.id)
        rates = (account.requests, account.tokens) if account is not None else (None, None)
        now = self._keys.moment().now
        return {
            "object": "usage",
            "key": grant.id,
            "tenant": grant.tenant,
            "models": list(grant.models),
            "pools": sorted(grant.pools),
            "expires_at": stamp(grant.expires_at),
            **self._spending(grant.id, limits),
            "requests_per_minute": _rate(limits.requests, rates[0], now),
            "uncached_tokens_per_minute": _rate(limits.tokens, rates[1], now),
        }

    def _spending(self, id_: str, limits: KeyLimits) -> dict[str, Any]:
        """By period: the spending, the budget, and the Unix time at which the period ends."""
        moment, account, wall = self._keys.moment(), self._keys.limiter.account(id_), self._keys.wall_clock()
        day, month = (account.spent(moment.day), account.spent_in_month(moment.day)) if account is not None else (0, 0)
        reserved = account.reserved if account is not None else 0
        return {
            "day": _period(day, reserved, limits.of_day(moment.day) if limits.day else 0, wall + moment.to_day_s),
            "month": _period(month, reserved, limits.of_month(moment.day) if limits.month else 0, wall + moment.to_month_s),
        }


def _period(spent: int, reserved: int, budget: int, ends: float) -> dict[str, Any]:
    left = dollars(max(0, budget - spent - reserved)) if budget else None
    ends_at = datetime.fromtimestamp(round(ends), UTC).isoformat().replace("+00:00", "Z")
    limit = dollars(budget) if budget else None
    return {
        "spent_usd": dollars(spent),
        "reserved_usd": dollars(reserved),
        "budget_usd": limit,
        "left_usd": left,
        "ends_at": ends_at,
    }


def _rate(limit: int, rate: Rate | None, now: float) -> dict[str, int] | None:
    left = _left(limit, rate, now)
    return None if left is None else {"limit": limit, "left": left}


def _left(limit: int, rate: Rate | None, now: float) -> int | None:
    """The rest of a limit, which may have changed since the key was used. rate: None: it was not used since the start."""
    if not limit:
        return None
    return limit if rate is None else rate.resized(limit).available(now)
