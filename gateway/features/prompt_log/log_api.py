"""The endpoints below /v1/logs, for turns that are kept here. A log is named by its head.

POST   /v1/logs                                    turns without an answer (`appending.py`)
GET    /v1/logs/HEAD                               the log, and what goes on from it
GET    /v1/logs/HEAD/entries?since=HEAD&limit=N    its entries, with their bytes
DELETE /v1/logs/HEAD[?tree=true]                   its turns; tree: and all turns that are connected with them
GET, PUT, DELETE /v1/logs/refs/NAME                names that can be moved (`ref_api.py`)

The request's log line has no head: its path is shown without it (`dialects/table.py: UNLOGGED`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

import orjson

from gateway.admission.memory import LARGE_BODY
from gateway.config.live import Live
from gateway.database.failures import StoreFailed
from gateway.dialects.table import UNLOGGED
from gateway.errors import GatewayError, over_budget
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.records import FoundTurn
from gateway.features.prompt_log.appending import LogAppender
from gateway.features.prompt_log.bases import HISTORY_SHARE, Base, base_of, found_turns, log_error, not_answering
from gateway.features.prompt_log.header import invalid
from gateway.features.prompt_log.job import entries
from gateway.features.prompt_log.naming.chain import DIGEST, chain_named, chains_of, head_name
from gateway.features.prompt_log.ref_api import LogAnswer, ref_answer
from gateway.parser.parsing import Parsing
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.extensions import Phase
from gateway.request.owner import owner
from gateway.request.phases.replies import JSON_LINE, Replies

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

OPERATION: Final = "prompt_log.entries"
PATH: Final = "/v1/logs"
REFS: Final = f"{PATH}/refs/"
MAX_LIMIT: Final = 100
MAX_FIELDS: Final = 16  # of a query
_PATH: Final = re.compile(rf"{PATH}/([^/]{{1,100}})(?:/(entries))?")
_NUMBER: Final = re.compile(r"[0-9]{1,3}")


class LogApi:
    """Answers these requests. entering: the limits of a key. store: None: turns are not kept here."""

    def __init__(
        self,
        live: Live,
        parsing: Parsing,
        store: LazyStore[TurnStore] | None,
        append: LogAppender,
        replies: Replies,
        entering: list[Phase],
    ) -> None:
        self._append = append
        self._live = live
        self._parsing = parsing
        self._store = store
        self._replies = replies
        self._entering = entering

    def claims(self, exchange: Exchange) -> bool:
        """True if the request is for a log."""
        return exchange.record.path in (PATH, UNLOGGED) and self._store is not None

    async def answer(self, exchange: Exchange) -> ClientReply:
        """Raises GatewayError."""
        record = exchange.record
        record.answer.own = True
        record.subject.generates = record.subject.metered = False
        for enter in self._entering:
            enter(exchange)
        path, _, query = exchange.request.target.partition("?")
        if path == PATH and exchange.request.method != "POST":
            raise GatewayError(405, "method_not_allowed", f"{PATH} takes POST.")
        assert self._store is not None
        try:
            found = await self._at(exchange, await self._store.get(), path, query)
        except StoreFailed as failure:
            raise not_answering(failure) from None
        record.status = 200
        reply = self._replies.begin(exchange, 200, found.body, JSON_LINE + found.lines)
        record.answer.ok = record.answer.complete = True
        return reply

    async def _at(self, exchange: Exchange, store: TurnStore, path: str, query: str) -> LogAnswer:
        """The answer at a path. Raises GatewayError and StoreFailed."""
        if path == PATH:
            return LogAnswer(await self._append.answer(exchange, store))
        if path.startswith(REFS):
            return await ref_answer(exchange, store, path.removeprefix(REFS))
        found = _PATH.fullmatch(path)
        chain = chain_named(found[1]) if found is not None else None
        if found is None or chain is None:
            raise log_error(404, "not_found", f"A log is at {PATH}/HEAD, with the head of a kept turn.", "")
        return LogAnswer(await self._answered(exchange, store, chain, found[2] or "", _query(query)))

    async def _answered(self, exchange: Exchange, store: TurnStore, chain: bytes, below: str, asked: dict[str, str]) -> bytes:
        owner_id, method = owner(exchange.request, exchange.caller), exchange.request.method
        if method not in (("GET",) if below else ("GET", "DELETE")):
            raise GatewayError(405, "method_not_allowed", "A log takes GET and DELETE, its entries GET.")
        if method == "DELETE":
            count = await store.delete_turns(owner_id, head_name(chain), tree=asked.get("tree") in ("true", "1"))
            if not count:
                raise log_error(404, "prompt_log_not_found", "The log is not known.", "")
            return orjson.dumps({"deleted": count})
        turns = await found_turns(store, owner_id, chain)
        turn = turns[0]
        base = await base_of(store, owner_id, turn, int(self._live.max_body * HISTORY_SHARE))
        size = sum(map(len, base.before))
        if 2 * size >= LARGE_BODY and not exchange.request.lease.grow(2 * size):
            raise over_budget(0, exchange.request.lease.account.largest)
        if below:
            return await self._entries(base, turn, asked, exchange.request.lease.account.client)
        return await _log(store, owner_id, head_name(chain), turns, base)

    async def _entries(self, base: Base, turn: FoundTurn, asked: dict[str, str], client: str) -> bytes:
        """A page of the entries of a log. Raises GatewayError."""
        limit = asked.get("limit", str(MAX_LIMIT))
        if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= MAX_LIMIT:
            raise invalid(f"'limit' must be a number from 1 to {MAX_LIMIT}.", "limit")
        chains = list(chains_of(base.digests))
        first = 0
        if "since" in asked:
            since = chain_named(asked["since"])
            if since is None:
                raise invalid("'since' must be a head.", "since")
            if since not in chains:
                heads = [head_name(each) for each in base.latest()]
                text = "The log does not go on from 'since'."
                raise log_error(409, "prompt_log_diverged", text, "since", length=len(chains), heads=heads)
            first = chains.index(since) + 1
        joined, sizes = b"".join(base.before), [len(piece) for piece in base.before]
        if self._parsing.is_quick(joined, client):
            found = await self._parsing.turns.take(partial(entries, joined, turn.form, sizes, first, int(limit)), client)
        else:
            operation = OPERATION, turn.form, sizes, first, int(limit)
            found = await self._parsing.process.run(operation, joined, client)
        rows = [
            {
                "index": first + at,
                "head": head_name(chains[first + at]),
                "entry": orjson.Fragment(entry),
                "body": [orjson.Fragment(element) for element in elements],
            }
            for at, (entry, elements) in enumerate(found)
        ]
        return orjson.dumps({"entries": rows, "more": first + len(rows) < len(chains)})


async def _log(store: TurnStore, owner_id: str, head: str, turns: Sequence[FoundTurn], base: Base) -> bytes:
    """The log at a head. Its row is that of the newest turn there."""
    turn = turns[0]
    row = await store.get(owner_id, turn.id)
    children = [
        {"head": each.head, "status": each.status, "created_at": int(each.created_at)}
        for each in await store.going_on(owner_id, head, turns)
    ]
    found = {
        "head": head,
        "length": len(base.digests) // DIGEST,
        "form": row.log.form,
        "frame": row.log.frame,
        "bytes": sum(map(len, base.before)),
        "created_at": int(row.created_at),
        "expires_at": int(turn.expires_at),
        "issuer": row.log.issuer or None,
        "children": children,
    }
    return orjson.dumps(found)


def _query(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError:
        raise invalid("The query has too many fields.", "query") from None
