"""Finds the model of a request outside of a JSON body: in a form, then in the query.

An alias is refused there, because it cannot be replaced by the model's own name: the replica would get a name that the operator
uses for another model.
"""

from __future__ import annotations

import asyncio

from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.models.outside import form_model, query_model
from gateway.errors import bad_request


async def find_outside(api: ApiRequest, content_type: str, target: str, aliases: Aliases | None) -> None:
    """Sets the request's model. Large bodies are searched piece by piece. Raises GatewayError 400."""
    form = form_model(api.body, content_type)
    while form is not None and form.step():  # noqa: ASYNC110  (there is no event: other requests have their turns)
        await asyncio.sleep(0)
    name = (form.name if form else "") or query_model(target)
    if name and aliases is not None and aliases.of(name) not in ("", name):
        text = f"{name[:100]!r} is an alias (model_aliases), which only JSON bodies can use: name the model itself"
        text += " (the alias's 'root' in GET /v1/models)."
        raise bad_request(text, "model", "alias_not_supported")
    api.model = name
