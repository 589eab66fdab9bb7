"""Where a prompt differs from an earlier one: `diagnostics.previous_message_id`, as in Anthropic's API.

    {"diagnostics": {"previous_message_id": "msg_1"}, ...}   ->   {"diagnostics": {"cache_miss_reason": {"type": ...}}, ...}

If a client sends the field, its prompts are stored by the ids of their answers, as a `Fingerprint`: digests of the prompt's
head, and the block keys of the whole prompt. The first part that differs is the reason, in the order of the prompt:

    model, tools, system, other fields (`unavailable`), messages: only if a block of the earlier prompt has changed

If nothing differs, the answer is null. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.diagnosis import NOTHING, Fingerprint
from gateway.dialects.json_edits import Edit, read_object
from gateway.dialects.prompt.batch import common_length
from gateway.errors import bad_request

FIELD: Final = "diagnostics"
PREVIOUS: Final = "previous_message_id"
MAX_ID_CHARS: Final = 256
_KEY: Final = 8  # bytes


def compared(before: Fingerprint | None, now: Fingerprint) -> bytes:
    """`diagnostics` of the answer, JSON. before: the earlier prompt, None if it is unknown. O(keys)."""
    if before is None:
        return _reason("previous_message_not_found")
    same, of = common_length(before.keys, now.keys) // _KEY, len(before.keys) // _KEY
    missed = before.tokens * (of - same) // of if of else before.tokens
    if before.model != now.model:
        return _reason("model_changed", before.tokens)
    for name, one, other in zip(("tools_changed", "system_changed", "unavailable"), before.head, now.head, strict=True):
        if one != other:
            return _reason(name, None if name == "unavailable" else missed)
    return _reason("messages_changed", missed) if same < of else NOTHING


def _reason(kind: str, missed: int | None = None) -> bytes:
    reason: dict[str, Any] = {"type": kind}
    if missed is not None:
        reason["cache_missed_input_tokens"] = missed
    return orjson.dumps({"cache_miss_reason": reason})


def previous_message(body: Mapping[str, Any]) -> str | None:
    """The previous message's id; "" for a first message; None if the body has no such field. Raises GatewayError 400."""
    asked = body.get(FIELD)
    if asked is None:
        return None
    if not isinstance(asked, dict):
        raise bad_request(f"'{FIELD}' must be an object.", FIELD)
    previous = asked.get(PREVIOUS)
    if previous is not None and not (isinstance(previous, str) and 0 < len(previous) <= MAX_ID_CHARS):
        where = f"{FIELD}.{PREVIOUS}"
        raise bad_request(f"{where} must be null or a string of 1 to {MAX_ID_CHARS} characters.", where)
    return previous or ""


def field_removal(raw: bytes) -> list[Edit]:
    """The edit that removes the field from a body, and changes no other byte. Raises GatewayError 400 if the body has it twice.
    O(length).
    """
    members = read_object(raw)
    start, end = members.spans[FIELD]
    before = max((stop for begin, stop in members.spans.values() if stop < start), default=0)
    after = min((begin for begin, _ in members.spans.values() if begin > end), default=0)
    if before:
        edit = (before, end, b"")  # with the comma before it
    elif after:
        edit = (raw.index(b"{") + 1, raw.index(b",", end) + 1, b"")
    else:
        edit = (raw.index(b"{") + 1, end, b"")
    rest = read_object(raw[: edit[0]] + raw[edit[1] :]).spans
    if FIELD in rest:
        raise bad_request(f"The body must not have '{FIELD}' twice.", FIELD)
    return [edit]
