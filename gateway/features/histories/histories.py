"""The histories of requests: reads the items before a request from the store, and stores its answer.

    a body with previous_response_id or conversation ── begin ──► Turn: the items before it
    the complete answer ── Turn.keep ──► stored, before the client gets its end

A replica stores nothing for such a request, so any replica can answer the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.database.failures import StoreError, StoreFailed
from gateway.dialects.log_names import A_HEAD, HEAD
from gateway.errors import GatewayError
from gateway.features.histories.history import CONVERSATION, PREVIOUS, History
from gateway.features.histories.kept import StoredAnswer, stored_answer
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.log_turn import LogTurn
from gateway.features.histories.records import (
    RESPONSES,
    UNANSWERED,
    ExpiredObjectError,
    HistoryTooLargeError,
    Item,
    ItemReader,
    RunEnd,
    StoredResponse,
    StoreFullError,
    UnknownObjectError,
)
from gateway.features.histories.response_turn import Turn
from gateway.telemetry.counters import Counter

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

Charge = Callable[[int], None]
log = logging.getLogger("warmroute.state")

RETRY_S: Final = 5
_WHY_UNKNOWN: Final = "It was not stored, has expired, or belongs to other credentials. Send the whole input."
STORE_RESULTS: Final = ("kept", "failed", "unfit", "repeated")
SEALED_ISSUER: Final = "sealed_issuer"
_SEALED: Final = b"encrypted_content"
MAX_TURN: Final = 10_000  # items that one turn adds to a conversation


class Histories:
    """The histories in one store. store: None: the store is off. reader: reads items. kept, replayed: counters by result.
    clock: Unix seconds.
    """

    def __init__(
        self,
        store: LazyStore[TurnStore] | None,
        reader: ItemReader,
        kept: Counter,
        replayed: Counter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.reader = reader
        self._kept = kept
        self._replayed = replayed
        self._clock = clock
        self._repeat_logged = False  # an engine has repeated an id
        for result in STORE_RESULTS if store else ():
            kept.add((result,), 0)

    async def begin(self, owner: str, history: History, max_bytes: int, *, maybe_at_replica: bool) -> Turn | None:
        """Start the turn of a request; None: the history may be at a replica. max_bytes: of a history. maybe_at_replica: a
        replica may have an object that the store does not have.

        Raises GatewayError: 400, 404, 410, 413, 503.
        """
        if not (history.previous or history.conversation):
            return self.fresh(owner, history)
        issuers = frozenset[str]()
        named = A_HEAD if history.previous.startswith(HEAD) else history.previous or history.conversation
        try:
            store = await self.open()
            if history.previous:
                before = list[bytes]()
                if history.previous.startswith(HEAD):
                    history.previous = await _response_at(store, owner, history.previous)
                chain = await store.chain(owner, history.previous, max_bytes)
                if chain[-1].log.form != RESPONSES:
                    raise UnknownObjectError(history.previous)
                _require_answer(chain[-1])
                for each in chain:
                    before += (each.input, each.output)
                if named == A_HEAD:
                    issuers = frozenset(each.log.issuer for each in chain if each.log.issuer and _has_sealed(each))
            else:
                before = await store.conversation_input(owner, history.conversation, max_bytes)
        except UnknownObjectError as unknown:
            if maybe_at_replica and unknown.id == named:
                return None
            self._replayed.add(("unknown",))
            raise _unknown(named, unknown.id, conversation=not history.previous) from None
        except ExpiredObjectError as expired:
            self._replayed.add(("expired",))
            raise expired_error(expired, PREVIOUS if history.previous else CONVERSATION) from None
        except HistoryTooLargeError as large:
            self._replayed.add(("too_large",))
            text = f"The history of {named[:100]!r} is too long to be replayed: {large.turns:,} turns, {large.size:,} bytes."
            raise GatewayError(413, "history_too_large", f"{text} Start a new one, with a summary.") from None
        except StoreFailed as failure:
            self._replayed.add(("failed",))
            raise unavailable(failure) from None
        self._replayed.add(("found",))
        turn = Turn(self.keep, owner, history, before)
        turn.issuers = issuers
        return turn

    def fresh(self, owner: str, history: History) -> Turn:
        """A turn without a history before it."""
        return Turn(self.keep, owner, history, [])

    def after(self, owner: str, history: History, items: bytes) -> Turn:
        """A turn after items that are not in the store. If its answer is stored, these items are stored as part of its
        input.
        """
        self._replayed.add(("connection",))
        turn = Turn(self.keep, owner, history, [items])
        turn.parent = ""
        if turn.request_items is not None:
            turn.request_items = _joined(items, turn.request_items)
        return turn

    def logged(self, owner: str, history: History, log: LogTurn) -> Turn:
        """A turn of a prompt log. Its answer is stored if the client or the log wants it; it tells the client its own wish."""
        wished, history.store = history.store, history.store or log.keeps
        if log.own is not None:
            history.own = log.own
        turn = Turn(self.keep, owner, history, log.before)
        turn.client_history.store = wished
        turn.log, turn.parent = log, log.parent
        if turn.request_items is not None:
            turn.request_items = log.stored
        return turn

    async def items(self, owner: str, ids: Sequence[str], max_bytes: int, charge: Charge, client: str) -> dict[str, bytes]:
        """All items (JSON) with these ids.

        max_bytes: of the responses and conversations to read. charge: called with the size first. Raises GatewayError 404, 413,
        500 or 503.
        """
        pick = partial(self.reader.picked, client=client)
        try:
            found = await (await self.open()).items_by_id(owner, ids, max_bytes, charge, pick)
        except HistoryTooLargeError as large:
            text = f"The items referenced by 'input' are in responses of {large.size:,} bytes: send the items themselves."
            raise too_large(text, "input") from None
        except StoreFailed as failure:
            raise unavailable(failure) from None
        for id_ in ids:
            if id_ not in found:
                text = (
                    f"Item with id {id_[:100]!r} not found. Items are not stored when 'store' is false: send the item itself."
                )
                raise GatewayError(404, "item_not_found", text, param="input")
        return found

    async def keep(self, owner: str, turn: Turn, response: bytes) -> bool:
        """See `Turn.keep`."""
        if turn.request_items is None:
            return False
        found = stored_answer(response)
        if found is None:
            self._kept.add(("unfit",))
            if turn.log is not None:
                turn.log.ended("unfit")
            return False
        client_history = turn.client_history
        items: list[Item] | None = []
        if client_history.conversation:
            joined = _joined(turn.request_items, found.output)
            try:
                found_items = await self.reader.listed(joined, MAX_TURN, turn.client)
            except GatewayError as failure:
                return self._log_failure(client_history.id or found.id, failure.message)
            items = None if found_items is None else [Item(*each) for each in found_items]
        if items is None:
            self._kept.add(("unfit",))
            return False
        try:
            kept = await self._write(owner, turn, turn.request_items, found, items)
        except StoreError as error:
            if not isinstance(error, StoreFailed):
                turn.unwritten = None  # a retry would fail, too
            if turn.log is not None:
                turn.log.ended("full" if isinstance(error, StoreFullError) else "failed")
            return self._log_failure(client_history.id or found.id, str(error))
        if kept:
            self._kept.add(("kept",))
        return kept

    def _log_failure(self, id_: str, reason: str) -> bool:
        self._kept.add(("failed",))
        log.warning("a response was not stored", extra={"response": id_, "reason": reason})
        return False

    def _count_repeated_id(self, id_: str) -> None:
        """Count a response with the id of an earlier stored response; later turns refer to the earlier one. Logged once."""
        self._kept.add(("repeated",))
        if not self._repeat_logged:
            self._repeat_logged = True
            text = "a response was not stored: the engine gave it the id of an earlier response (logged once)"
            log.warning(text, extra={"response": id_})

    async def _write(self, owner: str, turn: Turn, request_items: bytes, found: StoredAnswer, items: list[Item]) -> bool:
        """Write the answer. False: its run has ended, or its id exists. Raises StoreError."""
        client_history = turn.client_history
        response = client_history.edited(found.response, stored=True)
        if turn.finish is not None:
            end = RunEnd(found.status, found.output, response, found.names)
            turn.unwritten = end, items
            kept = await turn.finish(end, items, client_history.conversation)
            turn.unwritten = None
            return kept
        stored = StoredResponse(
            owner=owner,
            id=found.id,
            parent=turn.parent,
            conversation=client_history.conversation,
            created_at=self._clock(),
            status=found.status,
            input=request_items,
            output=found.output,
            names=found.names,
            response=response,
        )
        assert self.store is not None
        store = await (self.store.get_soon() if turn.log is not None else self.store.get())
        if turn.log is not None and (names := turn.log.named(found.output)) is not None:
            await turn.log.put(store, replace(stored, log=names, request_id=turn.log.request_id))
            return True
        kept = await store.put(stored, items)
        if not kept:
            self._count_repeated_id(found.id)
        return kept

    async def open(self) -> TurnStore:
        """Raises StoreFailed."""
        assert self.store is not None
        return await self.store.get()


async def _response_at(store: TurnStore, owner: str, head: str) -> str:
    """The id of the newest response with this head. Raises UnknownObjectError or ExpiredObjectError, without the head, because
    errors are logged.
    """
    try:
        turns = await store.turns_at(owner, head)
    except UnknownObjectError:
        turns = ()
    except ExpiredObjectError as expired:
        raise ExpiredObjectError(A_HEAD, expired.ttl_s, expired.at) from None
    found = next((turn.id for turn in turns if turn.form == RESPONSES and not turn.at_input), None)
    if found is None:
        raise UnknownObjectError(A_HEAD)
    return found


def too_large(text: str, param: str) -> GatewayError:
    return GatewayError(413, "history_too_large", text, param=param)


def unavailable(failure: StoreFailed) -> GatewayError:
    text = f"Stored responses cannot be read or written: {failure}. Retry; see the log, and state.url."
    return GatewayError(
        503, "state_unavailable", text, retry_after_s=RETRY_S, public="The gateway's store does not answer. Retry."
    )


def sealed_issuer(issuers: Iterable[str]) -> GatewayError:
    """The error for sealed parts of a log that the request's pool cannot read."""
    names = ", ".join(sorted(issuers))
    text = f"Prompt-Log: The log has sealed parts of {names}, which no other pool can read. Ask for a model of that pool."
    return GatewayError(409, SEALED_ISSUER, text, param="model", members={"issuer": names})


def full(failure: StoreFullError) -> GatewayError:
    code, status = ("too_many_stored", 413) if failure.of_owner else ("storage_full", 507)
    return GatewayError(status, code, f"Nothing more can be stored: {failure}. Delete some objects.")


def expired_error(expired: ExpiredObjectError, param: str | None = None) -> GatewayError:
    days = expired.ttl_s / 86_400
    lifetime = f"{days:g} days" if days >= 1 else f"{expired.ttl_s:g} s"
    text = f"{expired.id[:100]!r} has expired: it was stored for {lifetime} after its last use (state.ttl_s)."
    return GatewayError(410, "expired", text, param=param)


def _unknown(named: str, missing: str, *, conversation: bool) -> GatewayError:
    """The error in OpenAI's words. missing: the first missing response of the history."""
    if conversation:
        return GatewayError(
            404, "conversation_not_found", f"Conversation with id {named[:100]!r} not found.", param=CONVERSATION
        )
    why = f"not found. {_WHY_UNKNOWN}"
    if missing != named:
        why = f"has lost its history: the earlier response {missing[:100]!r} was deleted. Send the whole input."
    text = f"Previous response with id {named[:100]!r} {why}"
    return GatewayError(400, "previous_response_not_found", text, param=PREVIOUS)


def _require_answer(response: StoredResponse) -> None:
    """Check that a response has an answer to continue. Raises GatewayError 400 (a background run may have none yet)."""
    if response.status in UNANSWERED:
        text = f"Previous response with id {response.id!r} has no output to continue: its status is {response.status!r}."
        raise GatewayError(400, "previous_response_not_completed", text, param=PREVIOUS)


def _has_sealed(response: StoredResponse) -> bool:
    return _SEALED in response.input or _SEALED in response.output


def _joined(*pieces: bytes) -> bytes:
    return b",".join(piece for piece in pieces if piece)
