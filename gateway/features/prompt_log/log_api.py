"""The endpoints below /v1/logs, for turns that are kept here. A log is named by its head.

POST   /v1/logs                                    turns without an answer (`appending.py`)
GET    /v1/logs/HEAD[?model=M]                     the log, and what goes on from it; model: an estimate (`log_models.py`)
GET    /v1/logs/HEAD/entries?since=HEAD&limit=N    its entries, with their bytes
GET    /v1/logs/HEAD/render?model=M                its text and tokens, as an engine sees them
DELETE /v1/logs/HEAD[?tree=true]                   its turns; tree: and all turns that are connected with them
GET, PUT, DELETE /v1/logs/refs/NAME                names that can be moved (`ref_api.py`)

In place of HEAD the id of a turn names the log up to its answer. The request's log line has no head: its path is shown without
it (`dialects/table.py: UNLOGGED`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

import orjson

from gateway.core import Core
from gateway.database.failures import StoreFailed
from gateway.dialects.table import UNLOGGED
from gateway.errors import GatewayError
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.records import FoundTurn, StoredResponse
from gateway.features.histories.whole import max_history
from gateway.features.prompt_log.appending import LogAppender, not_before
from gateway.features.prompt_log.bases import (
    Base,
    base_of,
    found_turns,
    frame_of,
    log_error,
    not_answering,
    outline_of,
)
from gateway.features.prompt_log.header import invalid
from gateway.features.prompt_log.identified import IdentifiedTurns, is_turn_id
from gateway.features.prompt_log.job import entries, sealed_parts
from gateway.features.prompt_log.log_jobs import LogJobs, charge
from gateway.features.prompt_log.log_models import LogModels, model_of
from gateway.features.prompt_log.naming.chain import EMPTY, chain_named, frame_name, head_name
from gateway.features.prompt_log.ref_api import LogAnswer, ref_answer
from gateway.features.prompt_log.turns.joining import body_of_log
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.owner import owner
from gateway.request.phases.replies import JSON_LINE

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

PATH: Final = "/v1/logs"
REFS: Final = f"{PATH}/refs/"
MAX_LIMIT: Final = 100
MAX_FIELDS: Final = 16  # of a query
_PATH: Final = re.compile(rf"{PATH}/([^/]{{1,256}})(?:/(entries|render))?")
_NUMBER: Final = re.compile(r"[0-9]{1,3}")


class LogApi:
    """Answers these requests. store: None: turns are not kept here."""

    def __init__(
        self,
        core: Core,
        store: LazyStore[TurnStore] | None,
        append: LogAppender,
        models: LogModels,
    ) -> None:
        self._append = append
        self._live = core.live
        self._jobs = LogJobs(core.parsing)
        self._identified = IdentifiedTurns(core.parsing)
        self._models = models
        self._store = store
        self._replies = core.replies
        self._entering = core.extensions.entering

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
        if found is None or not (is_turn_id(found[1]) or chain_named(found[1])):
            raise log_error(404, "not_found", f"A log is at {PATH}/HEAD, with the head or the id of a kept turn.", "")
        return LogAnswer(await self._answered(exchange, store, found[1], found[2] or "", _query(query)))

    async def _answered(self, exchange: Exchange, store: TurnStore, name: str, below: str, asked: dict[str, str]) -> bytes:
        """name: a head, or the id of a turn. Raises GatewayError and StoreFailed."""
        owner_id, method, lease = owner(exchange.request, exchange.caller), exchange.request.method, exchange.request.lease
        if method not in (("GET",) if below else ("GET", "DELETE")):
            raise GatewayError(405, "method_not_allowed", "A log takes GET and DELETE, what is below it GET.")
        if method == "DELETE":
            tree = asked.get("tree") in ("true", "1")
            count = await store.delete_turns(owner_id, name, tree=tree, by_id=is_turn_id(name))
            if not count:
                raise log_error(404, "prompt_log_not_found", "The log is not known.", "")
            return orjson.dumps({"deleted": count})
        max_bytes, client = max_history(self._live), lease.account.client
        if chain := chain_named(name):
            turns = await found_turns(store, owner_id, chain, param="")
        else:
            chain, turn = await self._identified.find(store, owner_id, name, max_bytes, lease)
            turns = [turn]
        turn = turns[0]
        whole = bool(below) or "model" in asked
        base = await (base_of if whole else outline_of)(store, owner_id, turn, max_bytes)
        charge(lease, 2 * sum(map(len, base.before)))
        if below == "entries":
            return await self._entries(base, turn, asked, client)
        row = await store.get(owner_id, turn.id)
        if below:
            return await self._rendered(exchange, store, row, base, model_of(asked))
        shown = await _log(store, owner_id, head_name(chain), turns, row, base)
        if "model" in asked:
            body = await self._body(exchange, store, row, base, model_of(asked))
            shown["estimate"] = await self._models.estimate(exchange, body, row.log.form)
        return orjson.dumps(shown)

    async def _rendered(self, exchange: Exchange, store: TurnStore, row: StoredResponse, base: Base, model: str) -> bytes:
        body = await self._body(exchange, store, row, base, model)
        rendered = await self._models.render(exchange, body, row.log.form)
        client, sizes = exchange.request.lease.account.client, list(map(len, base.before))
        sealed = await self._jobs.do(sealed_parts, base.before, client, row.log.form, sizes, base.length)
        return orjson.dumps({**rendered, "sealed": sealed})

    async def _body(self, exchange: Exchange, store: TurnStore, row: StoredResponse, base: Base, model: str) -> bytes:
        """The body of a request with the whole log, and with the frame of its last turn. Raises GatewayError."""
        framed, log = b"", row.log
        if log.frame and log.frame != frame_name({}):
            framed = await frame_of(store, owner(exchange.request, exchange.caller), log.frame, log.form)
        charge(exchange.request.lease, sum(map(len, base.before)) + len(framed))
        return body_of_log(model, log.form, framed, base.before)

    async def _entries(self, base: Base, turn: FoundTurn, asked: dict[str, str], client: str) -> bytes:
        """A page of the entries of a log. Raises GatewayError."""
        limit = asked.get("limit", str(MAX_LIMIT))
        if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= MAX_LIMIT:
            raise invalid(f"'limit' must be a number from 1 to {MAX_LIMIT}.", "limit")
        since = chain_named(asked["since"]) if "since" in asked else EMPTY
        if since is None:
            raise invalid("'since' must be a head.", "since")
        first, chains, latest = await self._jobs.chains(base, since, int(limit), client)
        if first < 0:
            raise not_before(base, latest)
        sizes = list(map(len, base.before))
        page = await self._jobs.do(entries, base.before, client, turn.form, sizes, base.length, first, int(limit))
        rows = [
            {
                "index": index,
                "head": head_name(chain),
                "entry": orjson.Fragment(entry),
                "body": [orjson.Fragment(element) for element in elements],
            }
            for index, (chain, (entry, elements)) in enumerate(zip(chains, page, strict=True), first)
        ]
        return orjson.dumps({"entries": rows, "more": first + len(rows) < base.length})


async def _log(
    store: TurnStore, owner_id: str, head: str, turns: Sequence[FoundTurn], row: StoredResponse, base: Base
) -> dict[str, Any]:
    """The log at a head. row: of the newest turn there."""
    children = [
        {
            "head": each.head,
            "status": each.status,
            "request_id": each.request_id or None,
            "created_at": int(each.created_at),
        }
        for each in await store.going_on(owner_id, head, turns)
    ]
    return {
        "head": head,
        "length": base.length,
        "form": row.log.form,
        "frame": row.log.frame or None,
        "bytes": base.size,
        "created_at": int(row.created_at),
        "expires_at": int(turns[0].expires_at),
        "issuer": row.log.issuer or None,
        "parent": row.parent or None,
        "children": children,
    }


def _query(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError:
        raise invalid("The query has too many fields.", "query") from None
