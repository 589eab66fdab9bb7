"""The endpoints of background runs.

GET    /v1/workflows/runs/ID             the run; ?stream=true&starting_after=N: its events after number N
POST   /v1/workflows/runs/ID/cancel      ends it
DELETE /v1/workflows/runs/ID             ends it, and deletes all that is stored of it

Events are in the memory of the process that runs it. Elsewhere, or when they are gone, a follower gets the last one at its end.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

import orjson
from xxhash import xxh3_128_hexdigest

from gateway.core import Core
from gateway.database.failures import StoreFailed
from gateway.errors import GatewayError, bad_request, shutting_down
from gateway.features.histories.histories import unavailable
from gateway.features.runs.asking import event_number, fields_of, require_method
from gateway.features.runs.event_log import EventLog
from gateway.features.runs.passing import FIRST
from gateway.features.workflows.background.background_run import BackgroundRun
from gateway.features.workflows.background.runs import BackgroundRuns
from gateway.features.workflows.background.stored_run import LIVE, IdempotentRequest, RunKey, StoredRun, unfinished
from gateway.features.workflows.running.event_stream import COMMENT, KEEP_ALIVE_S, EventSender, error_event, event_bytes
from gateway.features.workflows.running.messages import RunEvent
from gateway.features.workflows.running.run import EVENTS
from gateway.features.workflows.running.run_order import RunOrder
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.owner import owner
from gateway.request.phases.replies import JSON_LINE, STREAM_LINES

CANCEL_S: Final = 5.0  # longest wait for the end of a cancelled run
MAX_KEY: Final = 255  # characters of an Idempotency-Key
_PATH: Final = re.compile(r"/v1/workflows/runs/([\w-]{1,100})(?:/(cancel))?")


class BackgroundAnswers:
    """Answers requests for background runs, and requests that begin one."""

    def __init__(self, core: Core, runs: BackgroundRuns) -> None:
        self._core = core
        self._runs = runs

    async def begin(self, exchange: Exchange, order: RunOrder, body: bytes, *, stream: bool) -> ClientReply:
        """Starts a run. stream: the client gets its events. Raises GatewayError."""
        given = exchange.request.headers.get("Idempotency-Key") or ""
        if given and not (len(given) <= MAX_KEY and given.isprintable()):
            raise bad_request(f"An Idempotency-Key has at most {MAX_KEY} printable characters.")
        request = IdempotentRequest(given, xxh3_128_hexdigest(body))
        stored = await self._runs.start(exchange, order, request, len(body))
        if stream:
            return await self._follow(exchange, stored.key, None)
        return self._json(exchange, self._object(stored), 202)

    async def answer(self, exchange: Exchange) -> ClientReply:
        """Raises GatewayError."""
        found = _PATH.fullmatch(exchange.record.path)
        if found is None:
            raise _unknown()
        key, method = (owner(exchange.request, exchange.caller), found[1]), exchange.request.method
        try:
            if found[2]:
                require_method(method, "POST")
                return self._json(exchange, await self._cancelled(exchange, key))
            require_method(method, "GET", "DELETE")
            if method == "DELETE":
                return self._json(exchange, await self._deleted(key))
            asked = fields_of(exchange.request.target.partition("?")[2])
            if asked.get("stream") in ("true", "1"):
                return await self._follow(exchange, key, event_number(asked.get("starting_after")))
            return self._json(exchange, await self._found(key))
        except StoreFailed as failure:
            raise unavailable(failure) from None

    # -- answers

    async def _found(self, key: RunKey) -> bytes:
        """Raises GatewayError 404, StoreFailed."""
        try:
            stored = await self._stored(key)  # also of a run here: another gateway may have deleted it just now
        except StoreFailed:
            if (one := self._runs.find(key)) is None:
                raise
            return orjson.dumps(one.run.as_json())
        one = self._runs.find(key)
        return self._object(stored) if one is None or one.released else orjson.dumps(one.run.as_json())

    def _object(self, stored: StoredRun) -> bytes:
        return stored.result or orjson.dumps(unfinished(stored, stored.status))

    async def _stored(self, key: RunKey) -> StoredRun:
        """Raises GatewayError 404, StoreFailed."""
        if not self._runs.on or (found := await (await self._runs.open()).get(*key)) is None:
            raise _unknown()
        return found

    async def _cancelled(self, exchange: Exchange, key: RunKey) -> bytes:
        stored = await self._stored(key)
        if stored.status in LIVE:
            await (await self._runs.open()).ask_cancel(*key)
            one = self._runs.find(key)
            if one is not None:
                one.run.cancel()
                await asyncio.wait([one.task], timeout=CANCEL_S)
            else:
                await self._ended_elsewhere(exchange, key, CANCEL_S)
        return await self._found(key)

    async def _deleted(self, key: RunKey) -> bytes:
        if not self._runs.on or not await (await self._runs.open()).delete(*key):
            raise _unknown()
        if one := self._runs.find(key):
            one.release()
        else:
            self._runs.logs.forget(key)
        return orjson.dumps({"id": key[1], "object": "workflow.run", "deleted": True})

    # -- streams

    async def _follow(self, exchange: Exchange, key: RunKey, after: int | None) -> ClientReply:
        """Raises GatewayError, StoreFailed."""
        one, log, sent = self._runs.find(key), self._runs.logs.find(key), FIRST if after is None else after
        if log is not None:
            sent = self._position(one, log, sent)
        here = log is not None and log.first <= sent + 1
        stored = None if here else await self._stored(key)
        record = exchange.record
        record.status, record.subject.stream = 200, True
        reply = self._core.replies.begin(exchange, 200, None, STREAM_LINES)
        sender = EventSender(log, reply, sent) if log is not None and here else None
        error: GatewayError | None = None
        try:
            if sender is not None:
                await sender.run(self._core.live.patience_s)
                if one is not None and one.released:
                    raise GatewayError(410, "events_gone", "It was deleted, or goes on at another gateway: follow it again.")
            elif stored is not None:
                await self._last_event(exchange, stored, reply)
        except StoreFailed as failure:
            error = unavailable(failure)
        except GatewayError as failure:
            error = failure
        except asyncio.CancelledError:
            if not self._core.running.over:
                raise  # the client left
            error = shutting_down()
        if error is not None:
            record.error = error.message
            number = (sender.sent if sender is not None else sent) + 1
            reply.end(error_event(key[1], number, self._core.replies.shown(exchange, error)))
        else:
            reply.end()
        record.answer.ok = record.answer.complete = error is None
        return reply

    def _position(self, one: BackgroundRun | None, log: EventLog, sent: int) -> int:
        """The number after which events follow. Raises GatewayError 400 or 410."""
        if sent >= log.next:
            raise bad_request(f"The latest event of this run is number {log.next - 1}.", "starting_after")
        if one is not None and sent < one.first:
            sent = one.first - 1  # the events of the gateway that has stopped are lost: run.resumed comes next
        if sent + 1 < log.first and not log.ended:
            text = f"The events of this run before number {log.first} have been dropped. Fetch the run when it has ended."
            raise GatewayError(410, "events_gone", text)
        return sent

    async def _last_event(self, exchange: Exchange, stored: StoredRun, reply: ClientReply) -> None:
        """Raises GatewayError."""
        while stored.status in LIVE:
            if not await self._ended_elsewhere(exchange, stored.key, KEEP_ALIVE_S):
                reply.write(COMMENT)
            stored = await self._stored(stored.key)
        exchange.charge(len(stored.result))
        run = orjson.loads(stored.result)
        run.pop("steps", None)
        reply.write(event_bytes(stored.id, stored.sequence, RunEvent(EVENTS[stored.status], run)))

    async def _ended_elsewhere(self, exchange: Exchange, key: RunKey, within_s: float) -> bool:
        """Waits for the end of a run of another process. Raises GatewayError 429."""
        try:
            async with asyncio.timeout(within_s):
                await self._runs.watched.wait_for_end(key, exchange.request.lease.account.client)
        except TimeoutError:
            return False
        return True

    def _json(self, exchange: Exchange, body: bytes, status: int = 200) -> ClientReply:
        exchange.record.status = status
        reply = self._core.replies.begin(exchange, status, body, JSON_LINE)
        exchange.record.answer.ok = exchange.record.answer.complete = True
        return reply


def _unknown() -> GatewayError:
    return GatewayError(
        404, "run_not_found", "There is no such run. Runs are kept if they run in the background, for state.ttl_s."
    )
