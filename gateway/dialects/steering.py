"""Members of bodies that steer engines, not the model: where a request is computed, from where its KV cache comes, before whom.

Clients could have an engine connect to any host (`kv_transfer_params`), forge counts of cached tokens, crash a scheduler with a
bootstrap room that is in use, or overtake others. So they are cut out of what clients send, unless `routing.client_fields`
names them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, get_args

from gateway.config.kinds import SteeringField
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.json_edits import Edit, apply, moved

STEERING: Final[frozenset[str]] = frozenset(get_args(SteeringField))


def steers(names: Collection[str]) -> bool:
    """True if the members of a body include one of STEERING. O(len(STEERING))."""
    return not STEERING.isdisjoint(names)


def cut(api: ApiRequest, edits: Sequence[Edit]) -> None:
    """Cut these spans out of the request's body, and move its later edits. edits: in the order of the body."""
    api.body = apply(api.body, edits)
    for start, end, _ in reversed(edits):
        api.billing, api.prewarm = moved(api.billing, end, start - end), moved(api.prewarm, end, start - end)
        if api.diagnosis:
            api.diagnosis.edits = moved(api.diagnosis.edits, end, start - end)
