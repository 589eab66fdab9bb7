"""Turns by their ids. The names of an ordinary response are computed at the first request for them, and stored.

resp_3 ──► the history of stored responses ──► names of those without names ──► stored
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from gateway.admission.memory import MemoryLease
from gateway.errors import GatewayError
from gateway.features.histories.histories import full
from gateway.features.histories.records import (
    TURN,
    UNANSWERED,
    ExpiredObjectError,
    FoundTurn,
    HistoryTooLargeError,
    StoredResponse,
    StoreFullError,
    TurnNames,
    UnknownObjectError,
)
from gateway.features.prompt_log.bases import expired_log, log_error
from gateway.features.prompt_log.job import response_names
from gateway.features.prompt_log.log_jobs import LogJobs, charge
from gateway.features.prompt_log.naming.chain import EMPTY, chain_named
from gateway.parser.parsing import Parsing

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

_IDS: Final = (TURN, "resp_")


def is_turn_id(name: str) -> bool:
    """True if a log may be named by this id."""
    return name.startswith(_IDS)


class IdentifiedTurns:
    """Finds turns by id."""

    def __init__(self, parsing: Parsing) -> None:
        self._jobs = LogJobs(parsing)

    async def find(self, store: TurnStore, owner: str, id_: str, max_bytes: int, lease: MemoryLease) -> tuple[bytes, FoundTurn]:
        """The chain of a turn, with its answer, and the turn. max_bytes: of its history.

        Raises GatewayError 400, 404, 410, 413, 500, 503 or 507.
        """
        try:
            turn, row = await store.turn_with_id(owner, id_)
            head = row.log.head
            if not head:
                head = await self._named(store, owner, await store.chain(owner, id_, max_bytes), lease)
        except UnknownObjectError:
            raise _unknown("It was not kept, was deleted, or belongs to other credentials.") from None
        except ExpiredObjectError as expired:
            raise expired_log(expired, "id") from None
        except HistoryTooLargeError as large:
            text = f"The log is too long to be named: {large.turns:,} turns, {large.size:,} bytes."
            raise log_error(413, "history_too_large", text, "id") from None
        except StoreFullError as failure:
            raise full(failure) from None
        chain = chain_named(head)
        assert chain is not None
        return chain, turn

    async def _named(self, store: TurnStore, owner: str, rows: list[StoredResponse], lease: MemoryLease) -> str:
        """Names the responses at the end of a history. Returns the head of the last one."""
        last = rows[-1]
        if last.status in UNANSWERED:
            raise _unknown("It has no answer.")
        if rows[0].conversation:
            raise _unknown("It is a part of a conversation, which is no log: its items can be deleted singly.")
        first = next((at for at in reversed(range(len(rows))) if rows[at].log.head), -1) + 1
        chain, open_ = EMPTY, list[str]()
        if first:
            before = rows[first - 1].log
            known = chain_named(before.head)
            assert known is not None
            chain, open_ = known, orjson.loads(before.open)[1] if before.open else []
        pieces = [piece for row in rows[first:] for piece in (row.input, row.output)]
        charge(lease, 2 * sum(map(len, pieces)))
        client = lease.account.client
        found_names = await self._jobs.do(response_names, pieces, client, list(map(len, pieces)), chain, open_, not first)
        named = {
            row.id: TurnNames(head=head, input_head=input_head, digests=bytes(digests), open=bytes(open_calls))
            for row, (input_head, head, digests, open_calls) in zip(rows[first:], found_names, strict=True)
        }
        await store.name_responses(owner, named)
        return named[last.id].head


def _unknown(why: str) -> GatewayError:
    return log_error(404, "prompt_log_not_found", f"The turn is not known as a log. {why}", "id")
