"""Work on long items and on their bodies, as operations of the parser process. `items.py` does the same on short ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.dialects.json_structure import MAX_STRUCTURE, exceeds, too_complex
from gateway.errors import GatewayError
from gateway.features.histories import conversation_fields, item_forms, references

MAX_ITEM_VALUES: Final = 4 * MAX_STRUCTURE  # of several stored turns, each with fewer than MAX_STRUCTURE values


def pick(joined: bytes, ids: Sequence[str], places: Mapping[str, int]) -> tuple[dict[str, bytes]]:
    """`item_forms.picked`. Raises GatewayError 413."""
    _require_items(joined)
    return (item_forms.picked(joined, set(ids), places),)


def enumerate_items(joined: bytes, most: int) -> tuple[list[tuple[str, bytes]] | None]:
    """`item_forms.listed`. Raises GatewayError 413."""
    _require_items(joined)
    return (item_forms.listed(joined, most),)


def page(joined: bytes, ids: Sequence[str], sizes: Sequence[int], query: Mapping[str, str]) -> tuple[bytes]:
    """`item_forms.input_items`. Raises GatewayError 400 or 413."""
    _require_items(joined)
    return (item_forms.input_items(joined, ids, sizes, query),)


def parse_conversation(body: bytes) -> conversation_fields.ConversationFields:
    """`conversation_fields.parse_fields`. Raises GatewayError 400 or 413."""
    if exceeds(body):
        raise too_complex()
    return conversation_fields.parse_fields(body)


def find_references(body: bytes) -> tuple[list[references.Reference]]:
    """`references.references_in`. Raises GatewayError 400."""
    return (references.references_in(body),)


def _require_items(joined: bytes) -> None:
    if exceeds(joined, MAX_ITEM_VALUES):
        text = f"It has more than {MAX_ITEM_VALUES:,} JSON values: too many to be read at once."
        raise GatewayError(413, "too_large", text)
