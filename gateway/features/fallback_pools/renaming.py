"""A request that goes to another model than it names: that model's name is put into it, and all that depends on the name is
made again, as if the client had written it.

The prompt's block keys are seeded with the model's name, and the canonical prompt is dropped once they are made. So the body is
parsed again, as it was the first time: a large one in the parser process. What the first parsing has found and no longer stands
in the body (that the client did not ask for usage, the object that the request goes on with) stays.
"""

from __future__ import annotations

from gateway.admission.memory import MemoryLease, parsing
from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.parser.parsing import Parsing
from gateway.request.client import ClientRequest
from gateway.request.phases.reading import find_outside


async def rename(
    parsing_: Parsing, dialect: Dialect, request: ClientRequest, api: ApiRequest, model: str, scope: tuple[str, ...]
) -> bool:
    """Whether the request names that model now; else it is as it was. scope: seeds the block keys. Raises GatewayError."""
    aliases = Aliases({api.model: model})
    again = await parsed_again(parsing_, dialect, request.lease, api.body, scope, aliases)
    if not (again.model or dialect.strict):
        await find_outside(request, again, aliases)
    if again.model != model:
        return False
    api.model, api.body, api.billing = again.model, again.body, again.billing
    api.prewarm, api.diagnosis = again.prewarm, again.diagnosis
    api.outline = again.outline
    api.prompt, api.made, api.breakpoints = again.prompt, again.made, again.breakpoints
    return True


async def parsed_again(
    parsing_: Parsing, dialect: Dialect, lease: MemoryLease, body: bytes, scope: tuple[str, ...], aliases: Aliases
) -> ApiRequest:
    """The body, with the names that these aliases stand for. Raises GatewayError."""
    api = await parsing_.in_turn(dialect, body, aliases)
    if api is not None:
        return api
    with parsing(lease, len(body)):
        return await parsing_.parse(dialect, body, scope, lease.account.client, aliases)
