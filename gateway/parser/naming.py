"""Requests whose model is not named in a JSON body: it is looked for in a form, then in the query. Aliases are replaced."""

from __future__ import annotations

import asyncio

from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.models.outside import form_model, query_model, quoted
from gateway.parser.parsing import edited


async def name_outside(api: ApiRequest, content_type: str, target: str, aliases: Aliases | None) -> str:
    """Find the model's name, and put its own name in the place of an alias. Returns the target, with that name in its query.

    A form goes first. Large bodies are searched and copied piece by piece while the loop runs.
    """
    form = form_model(api.body, content_type)
    if form is not None:
        while form.step():  # noqa: ASYNC110  (there is no event: other requests have their turns)
            await asyncio.sleep(0)
        if form.name:
            api.model = form.name
            if model := _replaced(api, aliases):
                api.body = await edited(api.body, [(form.start, form.end, model.encode())])
            return target
    if "?" in target:
        name, start, end = query_model(target)
        if name:
            api.model = name
            if model := _replaced(api, aliases):
                return target[:start] + quoted(model) + target[end:]
    return target


def _replaced(api: ApiRequest, aliases: Aliases | None) -> str:
    """The model's own name, if the request has another one for it; else ""."""
    model = aliases.of(api.model) if aliases else ""
    if not model or model == api.model:
        return ""
    api.alias, api.model = api.model, model
    return model
