"""Bodies with a history written out, parsed again, so that the router sees the whole prompt."""

from __future__ import annotations

from typing import Final

from gateway.admission.memory import parsing
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.parser.parsing import Parsing
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import scope_of

HISTORY_SHARE: Final = 0.9  # of the largest body, which leaves room for the own turns


def max_history(live: Live) -> int:
    """The most bytes of a history."""
    return int(live.max_body * HISTORY_SHARE)


class WholeBodies:
    """Parses whole bodies."""

    def __init__(self, live: Live, parsing_: Parsing) -> None:
        self._live = live
        self._parsing = parsing_

    async def parsed(self, exchange: Exchange, api: ApiRequest) -> ApiRequest:
        """The request with its whole body. api: parsed from the client's body; has the whole body. Raises GatewayError."""
        lease, dialect, body = exchange.request.lease, exchange.dialect, api.body
        client = lease.account.client
        if self._parsing.turns.free:
            made = self._parsing.at_once(dialect, body, client=client)
        else:
            made = await self._parsing.in_turn(dialect, body, client=client)
        if made is None:
            with parsing(lease, len(body)):
                made = await self._parsing.parse(dialect, body, scope_of(self._live, exchange.caller), client)
        made.alias, made.session, made.keeps, made.strip_usage = api.alias, api.session, api.keeps, api.strip_usage
        return made
