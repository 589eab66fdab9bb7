"""The current use of a key, for operators, as known to this process."""

from __future__ import annotations

from typing import Any

from gateway.accounting.money import dollars
from gateway.features.keys.keys import Keys


def usage_of(keys: Keys, id_: str) -> dict[str, Any] | None:
    """The use of a key, and the remainder of its limits. None: the key has no limits, or was not used since the start. O(1)."""
    account = keys.limiter.account(id_)
    if account is None:
        return None
    moment = keys.moment()
    requests, tokens = account.requests, account.tokens
    return {
        "usd_day": dollars(account.spent(moment.day)),
        "usd_month": dollars(account.spent_in_month(moment.day)),
        "usd_reserved": dollars(account.reserved),
        "requests_left": None if requests is None else requests.available(moment.now),
        "uncached_tokens_left": None if tokens is None else tokens.available(moment.now),
    }
