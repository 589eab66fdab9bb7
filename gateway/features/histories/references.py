"""Input items that refer to stored items: `{"type": "item_reference", "id": "msg_1"}`, or the id alone. Pure.

A scan finds them in the body, and they are replaced there; no other byte changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.dialects.json_edits import Edit, read_list, read_object
from gateway.dialects.responses.ids import MAX_ID_CHARS, is_id, is_reference
from gateway.errors import bad_request

MAX_REFERENCES: Final = 1000  # in one request
_LONGEST: Final = 4096  # bytes of a reference: an id of MAX_ID_CHARS with escapes, and its type

Reference = tuple[int, int, str]
"""(start, end, id)"""


def references_in(body: bytes) -> list[Reference]:
    """The references in a body that `Responses.parse` has accepted, in order. Raises GatewayError 400. O(length)."""
    found = list[Reference]()
    span = read_object(body).spans.get("input")
    if span is None or body[span[0] : span[0] + 1] != b"[":
        return found
    for index, (start, end) in enumerate(read_list(body, span[0])[0]):
        if end - start > _LONGEST:
            continue
        item = orjson.loads(body[start:end])
        if isinstance(item, dict) and is_reference(item):
            found.append((start, end, _id(item, index)))
            if len(found) > MAX_REFERENCES:
                raise bad_request(f"'input' may refer to {MAX_REFERENCES:,} items at most.", "input")
    return found


def replaced(references: Sequence[Reference], items: Mapping[str, bytes]) -> list[Edit]:
    """The edits that replace the references. items: JSON of all of them, by id."""
    return [(start, end, items[id_]) for start, end, id_ in references]


def _id(item: Mapping[str, Any], index: int) -> str:
    found = item.get("id")
    if not is_id(found):
        where = f"input[{index}].id"
        raise bad_request(f"{where} must be the id of an item: a string of 1 to {MAX_ID_CHARS} printable characters.", where)
    return found
