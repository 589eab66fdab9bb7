"""Replaces the model's name in a request, and recomputes all derived values, as if the client had sent that name.

The prompt's block keys are seeded with the model's name, and the canonical prompt is dropped when they are made. So the body is
parsed again like the first time: a large one in the parser process. Results of the first parse that the body no longer contains
(that the client did not ask for usage, the continued object) stay. A name in a form or in a query is not replaced.
"""

from __future__ import annotations

from gateway.admission.memory import MemoryLease, parsing
from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.parser.parsing import Parsing
from gateway.request.client import ClientRequest


async def rename(
    parsing_: Parsing, dialect: Dialect, request: ClientRequest, api: ApiRequest, model: str, scope: tuple[str, ...]
) -> bool:
    """Renames the model. False: the request does not contain the name, and is unchanged. scope: seeds the block keys. Raises
    GatewayError.
    """
    aliases = Aliases({api.model: model})
    reparsed = await parse_again(parsing_, dialect, request.lease, api.body, scope, aliases)
    if reparsed.model != model:
        return False
    request.identify()
    api.model, api.body, api.billing = reparsed.model, reparsed.body, reparsed.billing
    api.prewarm, api.diagnosis = reparsed.prewarm, reparsed.diagnosis
    api.outline = reparsed.outline
    api.prompt, api.made, api.breakpoints = reparsed.prompt, reparsed.made, reparsed.breakpoints
    return True


async def parse_again(
    parsing_: Parsing, dialect: Dialect, lease: MemoryLease, body: bytes, scope: tuple[str, ...], aliases: Aliases
) -> ApiRequest:
    """Parses the body again, with these aliases replaced. Raises GatewayError."""
    api = await parsing_.in_turn(dialect, body, aliases, lease.account.client)
    if api is not None:
        return api
    with parsing(lease, len(body)):
        return await parsing_.parse(dialect, body, scope, lease.account.client, aliases)
