"""`POST /v1/logs`: a turn without an answer, appended to a kept log: an import, what a client has to add, or a merge.

copy: {from, since} ── the entries of another log after `since` ──┐
body: {messages: [own turns]} ────────────────────────────────────┴──► {messages: [copied turns, own turns]} ──► a turn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson

from gateway.config.live import Live
from gateway.database.failures import StoreError, StoreFailed
from gateway.errors import GatewayError
from gateway.features.histories.histories import full, sealed_issuer
from gateway.features.histories.log_turn import LATER_S
from gateway.features.histories.records import FoundTurn, StoreFullError
from gateway.features.histories.whole import max_history
from gateway.features.prompt_log.base_phase import log_length, ref_move
from gateway.features.prompt_log.bases import (
    Base,
    base_of,
    found_turns,
    issuers_of,
    log_error,
    open_calls,
    outline_of,
)
from gateway.features.prompt_log.divergence import Divergence, diverged
from gateway.features.prompt_log.header import Wishes, invalid
from gateway.features.prompt_log.job import AppendRequest, appended, copied
from gateway.features.prompt_log.kept_turn import KeptTurn
from gateway.features.prompt_log.log_jobs import LogJobs, charge
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import DIGEST, EMPTY, chain_named, head_name
from gateway.features.prompt_log.own_turns import OwnTurns
from gateway.features.prompt_log.turns.answers import COMPLETED, AnswerTurn
from gateway.features.prompt_log.turns.joining import body_of_log
from gateway.features.prompt_log.turns.own_turn import OwnTurn
from gateway.parser.parsing import Parsing
from gateway.request.exchange import Exchange
from gateway.request.owner import owner

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

OPERATION: Final = "prompt_log.appended"
_EMPTY_BODY: Final = b"{}"


class LogAppender:
    """Answers these requests. wall_clock: Unix seconds."""

    def __init__(self, live: Live, parsing: Parsing, metrics: PromptLogMetrics, wall_clock: Callable[[], float]) -> None:
        self._live = live
        self._parsing = parsing
        self._own_turns = OwnTurns(parsing)
        self._jobs = LogJobs(parsing)
        self._divergence = Divergence(parsing)
        self._metrics = metrics
        self._wall_clock = wall_clock

    async def answer(self, exchange: Exchange, store: TurnStore) -> bytes:
        """Raises GatewayError and StoreFailed."""
        asked, lease = await self._asked(exchange), exchange.request.lease
        chain, owner_id = _chain(asked.base), owner(exchange.request, exchange.caller)
        turns: Sequence[FoundTurn] = ()
        if chain != EMPTY:
            turns = await found_turns(store, owner_id, chain, asked.form)
        body = exchange.api.body[asked.start : asked.end] or _EMPTY_BODY
        charge(lease, 2 * len(body))
        bases = [open_calls(turn) for turn in turns]
        own = await self._own_turns.of(body, asked.form, chain, bases, lease)
        if asked.source:
            own = await self._with_copied(exchange, store, asked, own, bases)
        if not own.digests:
            raise invalid("There are no turns to append.", "body")
        turn = turns[own.base] if turns else FoundTurn("", asked.form, at_input=False, open=b"[]")
        expect = _chain(asked.expect) if asked.expect else own.chain
        reads = outline_of if expect == own.chain else base_of
        base = await reads(store, owner_id, turn, max_history(self._live)) if turns else Base([], b"")
        charge(lease, sum(map(len, base.before)))
        length = log_length(base.digests, own.digests)
        if expect != own.chain:
            received = Base([*base.before, own.stored], base.digests + own.digests)
            difference = await self._divergence.first_difference(
                store, owner_id, expect, received, asked.form, lease, max_history(self._live)
            )
            latest = await self._jobs.latest(base, lease.account.client)
            raise diverged(length, [*latest, *own.latest], difference)
        kept = KeptTurn(turn, (), own, None, Wishes(keep=True, ttl_s=float(asked.ttl)), self._metrics)
        kept.request_id = exchange.record.id
        issuers = await issuers_of(store, owner_id, own)
        if len(issuers) > 1:
            raise sealed_issuer(issuers)
        kept.issuer = "".join(issuers)
        move = ref_move(asked.ref, chain, own) if asked.ref else None
        try:
            row = kept.row(owner_id, self._wall_clock(), AnswerTurn(b"", [], list(own.open)), COMPLETED)
            expires_at = await store.put_turn(row, own.framed, float(asked.ttl), move, late_s=LATER_S)
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
        moved = {} if move is None else {"ref": move.moved}
        return orjson.dumps(told | {"appended": len(own.digests) // DIGEST} | moved)

    async def _asked(self, exchange: Exchange) -> AppendRequest:
        """Raises GatewayError 400 or 413."""
        raw, client = exchange.api.body, exchange.request.lease.account.client
        if self._parsing.is_quick(raw, client):
            return await self._parsing.turns.take(partial(appended, raw), client)
        return AppendRequest(*await self._parsing.process.run((OPERATION,), raw, client))

    async def _with_copied(
        self, exchange: Exchange, store: TurnStore, asked: AppendRequest, own: OwnTurn, bases: list[list[str]]
    ) -> OwnTurn:
        """The turn with the entries of another log before its own. Raises GatewayError."""
        owner_id, lease = owner(exchange.request, exchange.caller), exchange.request.lease
        client = lease.account.client
        turn = (await found_turns(store, owner_id, _chain(asked.source), asked.form, "from"))[0]
        source = await base_of(store, owner_id, turn, max_history(self._live))
        charge(lease, 3 * sum(map(len, source.before)))
        first, _, latest = await self._jobs.chains(source, _chain(asked.since), 0, client)
        if first < 0:
            raise not_before(source, latest)
        sizes = list(map(len, source.before))
        whole, elements = await self._jobs.do(copied, source.before, client, asked.form, sizes, source.length, first)
        if not whole:
            raise invalid("'since' ends within a message: copy from an entry before it.", "since")
        body = body_of_log("", asked.form, own.framed, [bytes(elements), own.stored])
        if len(body) > self._live.max_body:
            raise log_error(413, "history_too_large", "The copied turns are too long (limits.body_mb).", "copy")
        made = await self._own_turns.of(body, asked.form, _chain(asked.base), bases, lease)
        if made.leading != own.leading:
            raise invalid("The copied turns begin with a system text, which would be in the frame.", "since")
        return made


def not_before(base: Base, latest: Sequence[bytes]) -> GatewayError:
    """The error of a head that is not in a log. latest: the chains after its last entries."""
    text, heads = "The log does not go on from 'since'.", [head_name(each) for each in latest]
    return log_error(409, "prompt_log_diverged", text, "since", length=base.length, heads=heads)


def _chain(head: str) -> bytes:
    """The chain of a head, which is well-formed; that of the empty log for ""."""
    chain = chain_named(head) if head else EMPTY
    assert chain is not None
    return chain
