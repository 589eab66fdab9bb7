"""Requests with the header `Prompt-Log`: the phase that names requests without a base, and taps all answers.

    header, whole body ── names ──► expect is another head: 409, and nothing is generated
                                └─► the request goes on; its answer has the names, and its own (`log_tap.py`)

It comes after the histories of stored responses, so names are of the whole history. Small bodies are named in the event loop,
in turns with other work, large ones in the parser process (`job.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gateway.admission.memory import parsing
from gateway.config.live import Live
from gateway.database.failures import StoreFailed
from gateway.errors import GatewayError
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.whole import max_history
from gateway.features.prompt_log.bases import Base
from gateway.features.prompt_log.divergence import Divergence, diverged
from gateway.features.prompt_log.job import named
from gateway.features.prompt_log.kept_turn import TurnKeeper
from gateway.features.prompt_log.log_request import LOG_REQUEST, count_refusal
from gateway.features.prompt_log.log_tap import LogTap
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming.chain import EMPTY
from gateway.features.prompt_log.naming.forms import LogNames
from gateway.features.prompt_log.own_turns import OwnTurns, is_named_at_once
from gateway.parser.parsing import Parsing
from gateway.request.exchange import Exchange
from gateway.request.named_log import NAMED_LOG, WHOLE, NamedLog
from gateway.request.owner import owner

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

OPERATION: Final = "prompt_log"


class NamingPhase:
    """The phase (see the module). store: None: turns are not kept here. wall_clock: Unix seconds."""

    def __init__(
        self,
        live: Live,
        parsing_: Parsing,
        store: LazyStore[TurnStore] | None,
        metrics: PromptLogMetrics,
        wall_clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._parsing = parsing_
        self._own_turns = OwnTurns(parsing_)
        self._divergence = Divergence(parsing_)
        self._store = store
        self._metrics = metrics
        self._wall_clock = wall_clock

    async def prepare(self, exchange: Exchange) -> None:
        """Names the request. Raises GatewayError 400, 409, 413, 500 or 503."""
        request = LOG_REQUEST.get(exchange.record)
        assert request is not None
        try:
            if request.names is None:
                names = await self._names(exchange, request.form)
                expect = request.wishes.expect
                if expect is not None and expect != names.chain:
                    difference = await self._difference(exchange, request.form, expect)
                    raise diverged(names.length, names.latest, difference)
                request.names = names.chain, names.frame, names.length
                NAMED_LOG.set(exchange.record, NamedLog(names.length, WHOLE, (names.digests,)))
        except GatewayError as error:
            count_refusal(exchange, error, self._metrics)
            raise
        keeper = None
        if self._store is not None and request.turn is not None:
            keeper = TurnKeeper(self._store, owner(exchange.request, exchange.caller), self._wall_clock)
        LogTap(exchange, request, keeper, self._wall_clock)

    async def _difference(self, exchange: Exchange, form: str, expect: bytes) -> dict[str, Any] | None:
        """The first difference to the expected log, if that is kept here."""
        if self._store is None:
            return None
        lease, owner_id = exchange.request.lease, owner(exchange.request, exchange.caller)
        try:
            store = await self._store.get()
            own = await self._own_turns.of(exchange.api.body, form, EMPTY, (), lease)
        except (StoreFailed, GatewayError):
            return None
        received, most = Base([own.stored], own.digests), max_history(self._live)
        return await self._divergence.first_difference(store, owner_id, expect, received, form, lease, most)

    async def _names(self, exchange: Exchange, form: str) -> LogNames:
        body, lease = exchange.api.body, exchange.request.lease
        if is_named_at_once(body):
            return await self._parsing.turns.take(partial(named, body, form), lease.account.client)
        with parsing(lease, len(body)):
            found = await self._parsing.process.run((OPERATION, form), body, lease.account.client)
        frame, length, chain, latest, digests = found
        return LogNames(frame, length, chain, tuple(latest), bytes(digests))
