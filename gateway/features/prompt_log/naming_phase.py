"""Requests with the header `Prompt-Log`: their names are computed, verified, and given back with the answer.

    header, body ── names ──► expect is another head: 409, and nothing is generated
                          └─► the request goes on; its answer has the names, and its own (`log_tap.py`)

Other requests pay one look-up of a header. Small bodies are named in the event loop, in turns with other work, large ones in
the parser process (`job.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from gateway.admission.memory import parsing
from gateway.dialects.json_structure import signs
from gateway.errors import GatewayError
from gateway.features.prompt_log.header import HEADER, Wishes, invalid, wishes_of
from gateway.features.prompt_log.job import named
from gateway.features.prompt_log.log_tap import LogTap
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming.chain import head_name
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES, RESPONSES, LogNames
from gateway.parser.parsing import Parsing
from gateway.request.client import ClientReply, InternalRequest
from gateway.request.exchange import Exchange
from gateway.server.http.request_head import HeaderFields

OPERATION: Final = "prompt_log"
_NAME: Final = HEADER.lower().encode()
_QUICK_BYTES: Final = 1 << 18  # of a body that is named in the event loop: 1 ms, and 3 ms with so many signs
_QUICK_SIGNS: Final = 1 << 11
_FORMS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


class NamingPhase:
    """The phase (see the module). wall_clock: Unix seconds."""

    def __init__(self, parsing_: Parsing, metrics: PromptLogMetrics, wall_clock: Callable[[], float]) -> None:
        self._parsing = parsing_
        self._metrics = metrics
        self._wall_clock = wall_clock

    def concerns(self, exchange: Exchange) -> bool:
        """True if the request has the header, on a path where it counts. Runs in the background and messages of a WebSocket
        have the headers of another request.
        """
        request = exchange.request
        headers = request.headers
        # Nearly all requests end here: `get` would take three times as long, because it caches its result.
        if _NAME not in headers.raw if isinstance(headers, HeaderFields) else headers.get(HEADER) is None:
            return False
        return request.path in _FORMS and request.opened_by is None and not isinstance(request, InternalRequest)

    async def prepare(self, exchange: Exchange) -> None:
        """Names the request. Raises GatewayError 400, 409, 413, 500 or 503."""
        try:
            wishes = wishes_of(header_of(exchange))
            if wishes is not None:
                await self._name(exchange, wishes)
        except GatewayError as error:
            if error.members is not None:
                self._metrics.refused.add((error.code,))
            raise

    def in_background(self, exchange: Exchange) -> bool:
        """True if the request starts a run in the background, and has the header."""
        runs = exchange.dialect.in_background and bool(exchange.api.stores)
        return runs and self.concerns(exchange)

    async def refuse(self, exchange: Exchange) -> ClientReply | None:
        """Raises GatewayError 400 if a run in the background is to be named."""
        try:
            if wishes_of(header_of(exchange)) is not None:
                raise invalid("A run in the background has no names: leave the header out, or 'background'.", "background")
        except GatewayError as error:
            self._metrics.refused.add((error.code,))
            raise
        return None

    async def _name(self, exchange: Exchange, wishes: Wishes) -> None:
        if exchange.api.answers > 1:
            raise invalid("Several answers ('n') are no log: a log goes on with one answer.", "n")
        form = _FORMS[exchange.request.path]
        names = await self._names(exchange, form)
        self._metrics.requests.add(("expect" if wishes.expect is not None else "name",))
        if wishes.expect is not None and wishes.expect != names.chain:
            raise _diverged(names)
        LogTap(exchange, form, names, wishes.refused, self._wall_clock)

    async def _names(self, exchange: Exchange, form: str) -> LogNames:
        body, lease = exchange.api.body, exchange.request.lease
        if len(body) <= _QUICK_BYTES and signs(body) <= _QUICK_SIGNS:
            return await self._parsing.turns.take(partial(named, body, form))
        with parsing(lease, len(body)):
            found = await self._parsing.process.run((OPERATION, form), body, lease.account.client)
        frame, length, chain, latest = found
        return LogNames(frame, length, chain, tuple(latest))


def header_of(exchange: Exchange) -> str:
    """All lines of the header as one."""
    headers = exchange.request.headers
    return headers.joined(HEADER) if isinstance(headers, HeaderFields) else headers.get(HEADER) or ""


def _diverged(names: LogNames) -> GatewayError:
    """The message has no heads, because it is logged."""
    text = (
        "Prompt-Log: The head of this conversation is not the one that the client expects ('expect'), so nothing was generated."
        " 'heads' has the heads after the last entries: the first one that differs from the client's own shows the entry."
    )
    heads = [head_name(chain) for chain in names.latest]
    return GatewayError(409, "prompt_log_diverged", text, param="expect", members={"length": names.length, "heads": heads})
