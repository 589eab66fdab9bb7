"""The turn of one request in a log, from its base to its stored row.

base, body ── base_phase.py ──► KeptTurn ── answer ──► names ── TurnKeeper, or the history of Responses ──► a row
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import orjson

from gateway.database.failures import StoreError, StoreFailed
from gateway.dialects.finished_answer import FinishedAnswer
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.log_turn import LogTurn
from gateway.features.histories.records import TURN, FoundTurn, StoredResponse, StoreFullError, TurnNames
from gateway.features.prompt_log.header import Wishes
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import chains_of, digest_of, head_name
from gateway.features.prompt_log.naming.entries import Entry
from gateway.features.prompt_log.turns.answers import AnswerTurn, response_answer
from gateway.features.prompt_log.turns.own_turn import OwnTurn

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

MAX_OPEN: Final = 64 << 10  # bytes of ids
_ID_CHARS: Final = 32

log = logging.getLogger("warmroute.state")


class KeptTurn(LogTurn):
    """A turn with its names. base: an empty id: none. own: what the request adds. own_bytes: as in `LogTurn.own`. issuer: the
    name of the pool that answers. sealed_by: of the pool that has made the own sealed parts, "": the same. answered: the answer
    of a stream of Responses, as its events have it. facts: about the answer, to be stored beside it. generation: of a token,
    "": none. result: of a whole answer, as in `ended`. metrics: count the result.
    """

    def __init__(
        self,
        base: FoundTurn,
        before: Sequence[bytes],
        own: OwnTurn,
        own_bytes: bytes | None,
        wishes: Wishes,
        metrics: PromptLogMetrics,
    ) -> None:
        super().__init__(base.id, before, own_bytes, own.stored, keeps=wishes.keep, framed=own.framed, ttl_s=wishes.ttl_s)
        self.own_turn = own
        self.form = base.form
        self.frame = wishes.frame or own.frame
        self.issuer = self.sealed_by = ""
        self.answered: FinishedAnswer | None = None
        self.facts = b""
        self.generation = ""
        self.result = ""
        self._after_input = base.at_input
        self._metrics = metrics

    def named(self, output: bytes) -> TurnNames | None:
        try:
            if not output and self.answered is not None and self.answered.parts:
                raise NoNameError("the engine leaves the answer out at the end of its stream")
            answer = response_answer(output, self.own_turn.open)
            return self.names(answer)
        except NoNameError:
            self.ended("unfit")
            return None

    def names(self, answer: AnswerTurn) -> TurnNames:
        """The names with this answer. Raises NoNameError."""
        own = self.own_turn
        digests = b"".join(map(digest_of, answer.entries))
        *_, chain = own.chain, *chains_of(digests, own.chain)
        open_ = orjson.dumps([own.open, answer.open]) if own.open or answer.open else b""
        if len(open_) > MAX_OPEN:
            raise NoNameError("too many calls have no result")
        return TurnNames(
            head=head_name(chain),
            input_head=head_name(own.chain),
            form=self.form,
            frame=self.frame,
            after_input=self._after_input,
            issuer=self.issuer if _has_sealed(answer.entries) else (self.sealed_by or self.issuer) if own.sealed else "",
            digests=own.digests + digests,
            open=open_,
        )

    def ended(self, result: str, expires_at: float | None = None) -> None:
        self.result, self.expires_at = result, expires_at
        self._metrics.turns.add((result,))

    def row(self, owner: str, now: float, answer: AnswerTurn, status: str) -> StoredResponse:
        """The row of a turn of chat or Messages. Raises NoNameError. Its id is a digest of its place and its bytes, so the same
        turn again is the same row. A generation counts, too: a token has the answer of its own, with its facts.
        """
        names = self.names(answer)
        place = f"{self.form} {self.frame} {self.parent} {self._after_input} {len(self.stored)}\n".encode()
        digest = sha256(b"".join([place, self.stored, answer.output, self.generation.encode()])).hexdigest()
        return StoredResponse(
            owner=owner,
            id=f"{TURN}{digest[:_ID_CHARS]}",
            parent=self.parent,
            created_at=now,
            status=status,
            input=self.stored,
            output=answer.output,
            response=self.facts,
            log=names,
            request_id=self.request_id,
        )

    def __repr__(self) -> str:
        return f"<KeptTurn in {self.form} after {len(self.before)} pieces>"


class TurnKeeper:
    """Stores the turns of one owner. clock: Unix seconds."""

    def __init__(self, store: LazyStore[TurnStore], owner: str, clock: Callable[[], float]) -> None:
        self._store = store
        self._owner = owner
        self._clock = clock

    async def keep(self, turn: KeptTurn, answer: AnswerTurn, status: str) -> None:
        """Stores a turn with its answer; it is durable if it has an expiry then. Raises NoNameError."""
        row = turn.row(self._owner, self._clock(), answer, status)
        try:
            await turn.put(await self._store.get_soon(), row)
        except StoreFullError:
            turn.ended("full")
        except StoreError as error:
            turn.ended("failed")
            reason = str(error) if isinstance(error, StoreFailed) else type(error).__name__  # no id of an object
            log.warning("a turn was not kept", extra={"reason": reason})


def _has_sealed(entries: Sequence[Entry]) -> bool:
    return any("sealed" in entry for entry in entries)
