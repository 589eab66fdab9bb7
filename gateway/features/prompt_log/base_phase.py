"""Requests with the header `Prompt-Log`: the phase that reads the header, and puts the base before the body.

    header ── base ──► the store: the turns with this head ──► the stored turns, the frame ──► the whole body, parsed again
          └── expect is another head: 409, and nothing is generated

So the router sees the whole prompt, and any replica can answer it. Other requests pay one look-up of a header. In Responses the
history of stored responses joins the turns (`histories/log_turn.py`), for these are responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.admission.memory import LARGE_BODY
from gateway.config.live import Live
from gateway.database.failures import StoreFailed
from gateway.dialects.json_edits import Edit
from gateway.errors import GatewayError
from gateway.features.histories.histories import SEALED_ISSUER, sealed_issuer
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.log_turn import LOG_TURN
from gateway.features.histories.records import FoundTurn, RefMove
from gateway.features.histories.whole import WholeBodies, max_history
from gateway.features.prompt_log.bases import (
    Base,
    base_of,
    found_turns,
    frame_of,
    issuers_of,
    log_error,
    not_answering,
    open_calls,
    wrong_form,
)
from gateway.features.prompt_log.divergence import Divergence, diverged
from gateway.features.prompt_log.header import Wishes, invalid, logs_off, wishes_of
from gateway.features.prompt_log.identified import IdentifiedTurns, is_turn_id
from gateway.features.prompt_log.kept_turn import KeptTurn
from gateway.features.prompt_log.log_jobs import LogJobs
from gateway.features.prompt_log.log_request import FORMS_BY_PATH, LOG_REQUEST, LogRequest, count_refusal
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming.chain import DIGEST, EMPTY, chain_named, frame_name, head_name
from gateway.features.prompt_log.naming.entries import MAX_ENTRIES
from gateway.features.prompt_log.naming.forms import RESPONSES
from gateway.features.prompt_log.once.request import OnceRequest
from gateway.features.prompt_log.own_turns import OwnTurns
from gateway.features.prompt_log.quick_looks import header_of
from gateway.features.prompt_log.turns.joining import frame_edits, joined
from gateway.features.prompt_log.turns.own_turn import OwnTurn
from gateway.parser.parsing import Parsing, edited
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange, PoolBinding
from gateway.request.extensions import Phase
from gateway.request.named_log import BASE, NAMED_LOG, WHOLE, NamedLog
from gateway.request.owner import owner

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

_EMPTY_FRAME: Final = frame_name({})


class BasePhase:
    """The phase (see the module). store: None: turns are not kept here. entering: as in `Extensions`."""

    def __init__(
        self,
        live: Live,
        parsing_: Parsing,
        store: LazyStore[TurnStore] | None,
        metrics: PromptLogMetrics,
        entering: Sequence[Phase],
    ) -> None:
        self._live = live
        self._parsing = parsing_
        self._own_turns = OwnTurns(parsing_)
        self._jobs = LogJobs(parsing_)
        self._divergence = Divergence(parsing_)
        self._whole = WholeBodies(live, parsing_)
        self._identified = IdentifiedTurns(parsing_)
        self._store = store
        self._entering = entering
        self._metrics = metrics

    def wishes(self, exchange: Exchange) -> Wishes | None:
        """Raises GatewayError 400."""
        return wishes_of(header_of(exchange))

    async def prepare(self, exchange: Exchange) -> None:
        """Puts the base before the body. Raises GatewayError 400, 404, 409, 410, 413, 500 or 503."""
        try:
            wishes = wishes_of(header_of(exchange))
            if wishes is not None:
                for enter in self._entering:  # limits of its key: also a request that is refused reads the store
                    enter(exchange)
                await self._prepare(exchange, wishes)
        except GatewayError as error:
            count_refusal(exchange, error, self._metrics)
            raise

    async def refuse(self, exchange: Exchange) -> ClientReply | None:
        """Raises GatewayError 400 if a run in the background is to be named."""
        try:
            if wishes_of(header_of(exchange)) is not None:
                raise invalid("A run in the background has no names: leave the header out, or 'background'.", "background")
        except GatewayError as error:
            self._metrics.refused.add((error.code,))
            raise
        return None

    async def _prepare(self, exchange: Exchange, wishes: Wishes) -> None:
        if exchange.api.answers > 1:
            raise invalid("Several answers ('n') are no log: a log goes on with one answer.", "n")
        request = LogRequest(wishes, FORMS_BY_PATH[exchange.request.path])
        if wishes.ref:
            request.told["ref"] = False
        if wishes.keep:
            request.told["kept"] = False
        if wishes.stores:
            await self._stored(exchange, request)
        self._metrics.requests.add((wishes.kind,))
        LOG_REQUEST.set(exchange.record, request)

    async def _stored(self, exchange: Exchange, request: LogRequest) -> None:
        """A request that needs the store of turns: now, or only to keep its turn after the answer."""
        wishes, form, lease = request.wishes, request.form, exchange.request.lease
        reads = wishes.base is not None or wishes.frame != "" or exchange.api.refers != ""
        if self._store is None:
            if wishes.base is not None or wishes.frame:
                raise logs_off("This gateway keeps no logs (state).", "frame" if wishes.base is None else "base")
            return
        owner_id, store, found = owner(exchange.request, exchange.caller), None, list[FoundTurn]()
        try:
            self._store.begin()
            if reads:
                store = await self._store.get()
            chain, named = await self.base(exchange, form, wishes)
            if store is not None and chain != EMPTY:
                found += await found_turns(store, owner_id, chain, form) if named is None else [named]
            bases = [open_calls(turn) for turn in found]
            own = await self._own_turns.of(exchange.api.body, form, chain, bases, lease, named=bool(wishes.frame))
            differs = wishes.expect not in (None, own.chain)
            if store is None and (own.sealed or differs):
                store = await self._store.get_soon()
        except StoreFailed as failure:
            if reads:
                raise not_answering(failure) from None
            return  # the answer is whole, and not kept
        turn = found[own.base] if found else FoundTurn("", form, at_input=False, open=b"[]")
        base, framed = Base([], b""), b""
        if store is not None:
            base, framed = await self._read(exchange, store, request, turn, own, differs=differs)
        length = log_length(base.digests, own.digests)
        request.names = own.chain, wishes.frame or own.frame, length
        sent = WHOLE if chain == EMPTY else BASE
        NAMED_LOG.set(exchange.record, NamedLog(length, sent, (base.digests, own.digests)))
        request.turn = await self._join(exchange, request, own, turn, base.before, framed)
        if wishes.ref:
            request.turn.move = ref_move(wishes.ref, chain, own)

    async def _read(
        self, exchange: Exchange, store: TurnStore, request: LogRequest, turn: FoundTurn, own: OwnTurn, *, differs: bool
    ) -> tuple[Base, bytes]:
        """The base up to a found turn, and the frame. Binds a request with sealed parts to their pool. differs: another head is
        expected. Raises GatewayError.
        """
        wishes, owner_id, lease = request.wishes, owner(exchange.request, exchange.caller), exchange.request.lease
        base = await base_of(store, owner_id, turn, max_history(self._live)) if turn.id else Base([], b"")
        sealed_by = await issuers_of(store, owner_id, own)
        request.sealed_by = next(iter(sealed_by)) if len(sealed_by) == 1 else ""
        if issuers := base.issuers | sealed_by:
            exchange.binding = self._binding(issuers, strict=not wishes.unbound)
        if differs and wishes.expect is not None:
            length = log_length(base.digests, own.digests)
            received = Base([*base.before, own.stored], base.digests + own.digests)
            difference = await self._divergence.first_difference(
                store, owner_id, wishes.expect, received, request.form, lease, max_history(self._live)
            )
            latest = await self._jobs.latest(base, lease.account.client)
            raise diverged(length, [*latest, *own.latest], difference)
        if not wishes.frame or wishes.frame == _EMPTY_FRAME:
            return base, b""
        return base, await frame_of(store, owner_id, wishes.frame, request.form)

    async def _join(
        self, exchange: Exchange, request: LogRequest, own: OwnTurn, turn: FoundTurn, before: list[bytes], framed: bytes
    ) -> KeptTurn:
        """Sets the request's whole body. Returns its turn."""
        api, form, wishes = exchange.api, request.form, request.wishes
        edits, leading = list[Edit](), b""
        if framed:
            members = await self._parsing.members(api.body, exchange.request.lease.account.client)
            edits, leading = frame_edits(members, form, framed)
        pieces = [piece for piece in (leading, *before) if piece]
        in_history = form == RESPONSES and bool(pieces)  # the history of stored responses puts them into the body
        own_bytes = own.sent(api.body) if in_history else None
        kept = KeptTurn(turn, [own.leading, *pieces] if in_history else (), own, own_bytes, wishes, self._metrics)
        kept.request_id, kept.sealed_by = exchange.record.id, request.sealed_by
        if isinstance(exchange.request, OnceRequest):
            exchange.request.run.join(kept)
        if form != RESPONSES:
            edits += joined(own, pieces)
        size = sum(map(len, pieces)) + len(framed)
        if size and size + len(api.body) > self._live.max_body:
            text = f"With its log and frame the body has {size + len(api.body):,} bytes (limits.body_mb). Start a new log."
            raise log_error(413, "history_too_large", text)
        if size >= LARGE_BODY and form != RESPONSES:
            exchange.charge(size)
        exchange.request.identify()
        api.body = await edited(api.body, edits)
        if form == RESPONSES:
            api.keeps, api.refers = True, ""
            LOG_TURN.set(exchange.record, kept)
        elif edits:
            exchange.api = await self._whole.parsed(exchange, api)
        return kept

    def _binding(self, issuers: frozenset[str], *, strict: bool) -> PoolBinding | None:
        """Binds a request to the pool that can read its sealed parts. Raises GatewayError 409 if that takes several, and the
        request is strict; else None.
        """

        def refusal() -> GatewayError:
            self._metrics.refused.add((SEALED_ISSUER,))
            return sealed_issuer(issuers)

        if len(issuers) > 1:
            if strict:
                raise sealed_issuer(issuers)
            return None
        return PoolBinding(next(iter(issuers)), refusal, strict=strict)

    async def base(self, exchange: Exchange, form: str, wishes: Wishes) -> tuple[bytes, FoundTurn | None]:
        """The chain of the base, that of the empty log without one; and its turn, if the request names that by its id. Raises
        GatewayError 400, 404, 409, 410, 413, 500, 503 or 507, and StoreFailed.
        """
        previous, turn = exchange.api.refers, None
        if form != RESPONSES or not previous:
            return wishes.base or EMPTY, None
        chain = chain_named(previous)
        if chain is None:
            chain, turn = await self._previous(exchange, previous)
        if wishes.base not in (None, chain):
            raise invalid("'base' and 'previous_response_id' are two bases.", "base")
        return chain, turn

    async def _previous(self, exchange: Exchange, id_: str) -> tuple[bytes, FoundTurn]:
        """The log up to the response with this id. Raises GatewayError and StoreFailed."""
        if self._store is None or not is_turn_id(id_):
            text = "With these members a log goes on from a kept response, or from a head, and not from a conversation."
            raise invalid(text, "previous_response_id")
        store, owner_id = await self._store.get(), owner(exchange.request, exchange.caller)
        try:
            chain, turn = await self._identified.find(store, owner_id, id_, max_history(self._live), exchange.request.lease)
        except GatewayError as error:
            error.param = "previous_response_id"
            raise
        if turn.form != RESPONSES:
            raise wrong_form(turn.form, "previous_response_id")
        return chain, turn


def ref_move(name: str, chain: bytes, own: OwnTurn) -> RefMove:
    """The move of a ref to the head of a turn: from the base, and from any beginning of the log among its latest ones."""
    return RefMove(name, [head_name(each) for each in (chain, *own.latest)])


def log_length(base: bytes, own: bytes) -> int:
    """The number of entries with these digests. Raises GatewayError 400."""
    length = (len(base) + len(own)) // DIGEST
    if length > MAX_ENTRIES:
        raise invalid(f"This conversation has no name: there are more than {MAX_ENTRIES:,} entries.", "base")
    return length
