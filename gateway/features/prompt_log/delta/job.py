"""Outlines of large bodies, as an operation of the parser process."""

from __future__ import annotations

from typing import Any

from gateway.dialects.json_structure import exceeds, too_complex
from gateway.features.prompt_log.delta.digests import DigestMemo, ElementDigests, SeenValue
from gateway.features.prompt_log.delta.outline import ScannedBody
from gateway.features.prompt_log.naming.canonical import NoNameError


def outlined(body: bytes, form: str, seed: int) -> tuple[bool, tuple[Any, ...], list[tuple[Any, ...]]]:
    """(the log has a name, the fields of the outline, the values to remember). Raises GatewayError 413."""
    if exceeds(body):
        raise too_complex()
    memo = DigestMemo()
    try:
        frame, framed, list_at, places, *rest = ScannedBody(body, form, memo, seed).outline().fields
    except NoNameError:
        return False, (), []
    return True, (frame, framed, list_at, tuple(map(tuple, places)), *rest), [(key, _plain(value)) for key, value in memo]


def _plain(value: Any) -> tuple[Any, ...]:
    if isinstance(value, ElementDigests):
        return "element", value.calls, value.system, value.digests
    return ("value", value.kind, value.following) if isinstance(value, SeenValue) else ("name", value)
