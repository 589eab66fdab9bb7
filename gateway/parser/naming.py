"""Finds the model of a request outside of a JSON body: in a form, then in the query.

An alias is refused there, because it cannot be replaced by the model's own name: the replica would get a name that the operator
uses for another model. A caller that may use some models only is refused if the engine might read another model than the
gateway: in a form that readers read differently, in a query with several models, or in a query beside a body that may be JSON
to the engine, which reads the model there (UTF-16, NaN, half of a surrogate pair), or takes its own one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.models.outside import FormModel, form_model, is_usual, may_be_object, query_models
from gateway.errors import GatewayError, bad_request

_COUNTED: Final = 1 << 20  # bytes in one turn of the event loop


async def find_outside(
    api: ApiRequest, content_type: str, target: str, aliases: Aliases | None, *, restricted: bool = False
) -> None:
    """Sets the request's model. Large bodies are searched piece by piece. restricted: the caller may use some models only.
    Raises GatewayError 400 or 403.
    """
    form = form_model(api.body, content_type)
    while form is not None and form.step():  # noqa: ASYNC110  (there is no event: other requests have their turns)
        await asyncio.sleep(0)
    asked = query_models(target)
    if restricted and not (is_usual(content_type) and len(set(asked)) < 2 and await _is_clear(api.body, form, asked)):
        text = "The key is restricted to some models, and the model is not clear. Name it in the JSON object, in one field of"
        text += " the form, or once in the query, as usual clients do."
        raise GatewayError(403, "model_not_clear", text, param="model")
    name = (form.name if form else "") or (asked[-1] if asked else "")
    if name and aliases is not None and aliases.of(name) not in ("", name):
        text = f"{name[:100]!r} is an alias (model_aliases), which only JSON bodies can use: name the model itself"
        text += " (the alias's 'root' in GET /v1/models)."
        raise bad_request(text, "model", "alias_not_supported")
    api.model = name


async def _is_clear(body: bytes, form: FormModel | None, asked: Sequence[str]) -> bool:
    """True if no engine reads another model in the body than the gateway does there or in the query (`asked`)."""
    return not (asked and may_be_object(body)) if form is None else await _is_plain(form)


async def _is_plain(form: FormModel) -> bool:
    """True if all readers find the same fields: no delimiter has other line ends, or follows the end of the form."""
    if not form.plain:
        return False
    body, mark, seen = form.body, form.mark, 0
    for start in range(0, len(body), _COUNTED):
        seen += body.count(mark, start, start + _COUNTED + len(mark) - 1)
        await asyncio.sleep(0)
    return seen == form.delimiters
