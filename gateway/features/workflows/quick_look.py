"""A look at each request, compiled: nearly all have another model and another path."""

from __future__ import annotations

from typing import Final

from gateway.features.workflows.section import MODEL_PREFIX
from gateway.request.exchange import Exchange

PATH: Final = "/v1/workflows"
_BELOW: Final = f"{PATH}/"
_PREFIX: Final = MODEL_PREFIX
_LAST: Final = len(MODEL_PREFIX) - 1
_END: Final = MODEL_PREFIX[_LAST]


def is_for_workflow(exchange: Exchange) -> bool:
    """True if the model is a workflow, or the path is an endpoint of workflows."""
    api = exchange.api
    model = api.model
    # One character first: `startswith` takes ten times as long.
    if len(model) > _LAST and model[_LAST] == _END and model.startswith(_PREFIX):
        return True
    if api.metered:
        return False
    path = exchange.record.path
    return path.startswith(PATH) and (path == PATH or path.startswith(_BELOW))
