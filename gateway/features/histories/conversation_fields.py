"""Bodies of requests to `/v1/conversations`: metadata, and items to be added. Pure."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

from gateway.dialects.responses.ids import MAX_ID_CHARS
from gateway.errors import bad_request
from gateway.features.histories.item_forms import shown, too_deep

MAX_ADDED: Final = 20  # items in one request
MAX_PAIRS: Final = 16  # entries of metadata
MAX_KEY, MAX_VALUE = 64, 512  # characters of a metadata key and value


class ConversationFields(NamedTuple):
    """metadata: JSON. items: (id, JSON) of each, in the form of lists; None: the body has no `items`."""

    metadata: bytes
    items: list[tuple[str, bytes]] | None


def parse_fields(body: bytes) -> ConversationFields:
    """Parse a body. Raises GatewayError 400. O(length)."""
    try:
        found = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise bad_request("The body must be a JSON object.")
    return ConversationFields(orjson.dumps(_metadata(found.get("metadata"))), _items(found.get("items")))


def _metadata(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if (
        isinstance(found, dict)
        and len(found) <= MAX_PAIRS
        and all(len(name) <= MAX_KEY and isinstance(value, str) and len(value) <= MAX_VALUE for name, value in found.items())
    ):
        return found
    text = f"at most {MAX_PAIRS} strings of at most {MAX_VALUE} characters, by names of at most {MAX_KEY}"
    raise bad_request(f"'metadata' must be an object: {text}.", "metadata")


def _items(found: Any) -> list[tuple[str, bytes]] | None:
    if found is None:
        return None
    if not isinstance(found, list) or len(found) > MAX_ADDED or not all(isinstance(item, dict) for item in found):
        raise bad_request(f"'items' must be a list of at most {MAX_ADDED} items.", "items")
    items = [shown(item) for item in found]
    for item in items:
        if len(item["id"]) > MAX_ID_CHARS:
            raise bad_request(f"The id of an item has at most {MAX_ID_CHARS} characters.", "items")
    try:
        return [(item["id"], orjson.dumps(item)) for item in items]
    except orjson.JSONEncodeError:
        raise too_deep() from None
