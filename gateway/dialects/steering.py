"""Members of bodies that steer engines, not the model: where a request is computed, from where its KV cache comes, before whom.

Clients could have an engine connect to any host (`kv_transfer_params`), forge counts of cached tokens, crash a scheduler with a
bootstrap room that is in use, or overtake others. So they are cut out of what clients send, unless `routing.client_fields`
names them. vLLM takes transfer parameters from `vllm_xargs`, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, get_args

from gateway.config.kinds import SteeringField
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.json_edits import Edit, apply, cuts, moved, read_object

STEERING: Final[frozenset[str]] = frozenset(get_args(SteeringField))
INNER: Final = "vllm_xargs"


def steers(members: dict[str, Any]) -> bool:
    """True if the members of a body include one of STEERING, or may do so in INNER. members: values, or their spans.
    O(members).
    """
    if not STEERING.isdisjoint(members):
        return True
    inner = members.get(INNER)
    return inner is not None and not (isinstance(inner, dict) and STEERING.isdisjoint(inner))


def cuts_of(raw: bytes, names: Collection[str]) -> list[Edit]:
    """The edits that cut all members with these names out of a body and its INNER, in its order. O(length)."""
    edits = cuts(raw, names)
    start, end = read_object(raw).spans.get(INNER, (0, 0))
    if raw[start : start + 1] == b"{" and start:
        edits += [(start + first, start + last, new) for first, last, new in cuts(raw[start:end], names)]
        edits.sort()
    return edits


def cut(api: ApiRequest, edits: Sequence[Edit]) -> None:
    """Cut these spans out of the request's body, and move its later edits. edits: in the order of the body."""
    api.body = apply(api.body, edits)
    for start, end, _ in reversed(edits):
        api.billing, api.prewarm = moved(api.billing, end, start - end), moved(api.prewarm, end, start - end)
        if api.diagnosis:
            api.diagnosis.edits = moved(api.diagnosis.edits, end, start - end)
