"""Requests for stored runs: their methods and queries."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl

from gateway.errors import GatewayError, bad_request
from gateway.features.histories.item_forms import MAX_FIELDS

MAX_DIGITS: Final = 15  # in an event's number


def require_method(method: str, *allowed: str) -> None:
    """Raises GatewayError 405."""
    if method not in allowed:
        raise GatewayError(405, "method_not_allowed", f"This path takes {', '.join(allowed)}.")


def fields_of(query: str) -> dict[str, str]:
    """The fields of a query. Raises GatewayError 400."""
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError:
        raise bad_request("The query has too many fields.") from None


def event_number(text: str | None) -> int | None:
    """The field `starting_after`. Raises GatewayError 400."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise bad_request("'starting_after' must be the number of an event.", "starting_after")
    return int(text)
