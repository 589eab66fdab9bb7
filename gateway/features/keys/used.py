"""What keys have used of their limits, as operators see it: by what this gateway has counted and read."""

from __future__ import annotations

from typing import Any

from gateway.accounting.money import dollars
from gateway.features.keys.keys import Keys


def used_of(keys: Keys, id_: str) -> dict[str, Any] | None:
    """None: the key has no limits, or was not used since the gateway began. O(1)."""
    account = keys.limiter.account(id_)
    if account is None:
        return None
    moment = keys.moment()
    requests, tokens = account.requests, account.tokens
    return {
        "usd_day": dollars(account.spent(moment.day)),
        "usd_month": dollars(account.spent_in_month(moment.day)),
        "usd_reserved": dollars(account.reserved),
        "requests_left": None if requests is None else requests.left(moment.now),
        "uncached_tokens_left": None if tokens is None else tokens.left(moment.now),
    }
