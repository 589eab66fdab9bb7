"""`POST /v1/logs`: a turn without an answer, appended to a kept log: an import, or what a client has to add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson

from gateway.admission.memory import LARGE_BODY
from gateway.database.failures import StoreError, StoreFailed
from gateway.errors import over_budget
from gateway.features.histories.histories import full
from gateway.features.histories.records import FoundTurn, StoreFullError
from gateway.features.prompt_log.base_phase import diverged, log_length
from gateway.features.prompt_log.bases import base_of, found_turns, issuers_of, log_error, open_calls, sealed_issuer
from gateway.features.prompt_log.header import Wishes, invalid
from gateway.features.prompt_log.job import appended
from gateway.features.prompt_log.kept_turn import KeptTurn
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import DIGEST, EMPTY, chain_named, head_name
from gateway.features.prompt_log.own_turns import OwnTurns
from gateway.features.prompt_log.turns.answers import COMPLETED, AnswerTurn
from gateway.parser.parsing import Parsing
from gateway.request.exchange import Exchange
from gateway.request.owner import owner

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

OPERATION: Final = "prompt_log.appended"
MAX_HISTORY: Final = 1 << 30  # bytes of a base; only the lengths of its digests are looked at


class LogAppender:
    """Answers these requests. wall_clock: Unix seconds."""

    def __init__(self, parsing: Parsing, metrics: PromptLogMetrics, wall_clock: Callable[[], float]) -> None:
        self._parsing = parsing
        self._own_turns = OwnTurns(parsing)
        self._metrics = metrics
        self._wall_clock = wall_clock

    async def answer(self, exchange: Exchange, store: TurnStore) -> bytes:
        """Raises GatewayError and StoreFailed."""
        raw, lease = exchange.api.body, exchange.request.lease
        client = lease.account.client
        if self._parsing.is_quick(raw, client):
            found = await self._parsing.turns.take(partial(appended, raw), client)
        else:
            found = await self._parsing.process.run((OPERATION,), raw, client)
        form, base_head, expected, ttl, start, end = found
        if end - start >= LARGE_BODY and not lease.grow(2 * (end - start)):
            raise over_budget(0, lease.account.largest)
        chain, expect, owner_id = _head(base_head, "base"), _head(expected, "expect"), owner(exchange.request, exchange.caller)
        turns: Sequence[FoundTurn] = () if chain == EMPTY else await found_turns(store, owner_id, chain, form)
        own = await self._own_turns.of(raw[start:end], form, chain, [open_calls(turn) for turn in turns], lease)
        if not own.digests:
            raise invalid("The body has no turns.", "body")
        turn = turns[own.base] if turns else FoundTurn("", form, at_input=False, open=b"[]")
        base = await base_of(store, owner_id, turn, MAX_HISTORY) if turns else None
        length = log_length(base.digests if base else b"", own.digests)
        if expected and expect != own.chain:
            raise diverged(length, [*(base.latest() if base else ()), *own.latest])
        kept = KeptTurn(turn, (), own, None, Wishes(keep=True, ttl_s=float(ttl)), self._metrics)
        issuers = await issuers_of(store, owner_id, own)
        if len(issuers) > 1:
            raise sealed_issuer(issuers)
        kept.issuer = "".join(issuers)
        try:
            row = kept.row(owner_id, self._wall_clock(), AnswerTurn(b"", [], list(own.open)), COMPLETED)
            expires_at = await store.put_turn(row, own.framed, float(ttl))
        except NoNameError as error:
            raise invalid(f"This conversation has no name: {error.reason}.", "body") from None
        except StoreFullError as failure:
            raise full(failure) from None
        except StoreFailed:
            raise
        except StoreError:
            raise log_error(404, "prompt_log_not_found", "The base is gone.") from None
        kept.ended("kept", expires_at)
        told = {"head": head_name(own.chain), "frame": own.frame, "length": length, "expires_at": int(expires_at)}
        return orjson.dumps(told | {"appended": len(own.digests) // DIGEST})


def _head(head: str, name: str) -> bytes:
    """The chain of a head; that of the empty log for "". Raises GatewayError 400."""
    chain = chain_named(head) if head else EMPTY
    if chain is None:
        raise invalid(f"{name!r} must be a head, such as pl1_9fIC...", name)
    return chain
