"""Requests with the member `once`: they follow the generation of their token, which they begin if there is none.

    find ── it runs here ───────────────► follow: the answer from its beginning, then as it comes
      │ ├── it runs elsewhere ──────────► wait, WAIT_S at most, and find again; then 409
      │ ├── it has ended ───────────────► the stored turn, as a stream or plain (`repeating.py`)
      │ ├── it was another request ─────► 422
      └─┴── none, or its runner is silent ► start (`runs.py`), and follow

An answer in the other form waits for the end of the generation. A stream has signs of life while it waits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import orjson

from gateway.admission.memory import LARGE_BODY, parsing
from gateway.core import Core
from gateway.database.failures import StoreFailed
from gateway.dialects.table import UNLOGGED
from gateway.errors import ClientStalled, GatewayError, over_budget
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.records import ExpiredObjectError, FoundTurn, RefMove, UnknownObjectError
from gateway.features.histories.whole import max_history
from gateway.features.prompt_log.base_phase import BasePhase
from gateway.features.prompt_log.bases import log_error, not_answering, outline_of
from gateway.features.prompt_log.divergence import diverged
from gateway.features.prompt_log.header import ONCE_TOKEN, Wishes, answer_line, logs_off
from gateway.features.prompt_log.log_jobs import LogJobs
from gateway.features.prompt_log.log_request import FORMS_BY_PATH, count_refusal
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming.chain import DIGEST, EMPTY, chain_named, head_name
from gateway.features.prompt_log.once.digest import named_digest
from gateway.features.prompt_log.once.repeating import RepeatedAnswer
from gateway.features.prompt_log.once.run import OnceRun
from gateway.features.prompt_log.once.runs import OnceRuns, stopped
from gateway.features.prompt_log.own_turns import is_named_at_once
from gateway.features.runs.answer_followers import AnswerFollowers, begin_stream, id_lines
from gateway.features.runs.passing import Gate
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.named_log import NAMED_LOG, REPEATED, NamedLog
from gateway.request.owner import owner
from gateway.request.phases.replies import JSON_LINE, STREAM_LINES

if TYPE_CHECKING:
    from gateway.features.prompt_log.once.store import OnceStore, StoredToken, TokenKey

OPERATION: Final = "prompt_log.once"
WAIT_S: Final = 30.0  # for a generation of another process
RETRY_S: Final = 5
_PATH: Final = re.compile(r"/v1/logs/once/([^/]{1,200})")


class _TokenRequest(NamedTuple):
    """ref, expect: as in `Wishes`. until: end of the wait for another process, a reading of the clock."""

    runs: OnceRuns
    key: TokenKey
    digest: str
    ref: str
    expect: bytes | None
    until: float


class OnceAnswers:
    """Answers these requests. state: None: nothing is kept here, so that they are refused. wait_s: the longest wait for a
    generation of another process.
    """

    def __init__(self, core: Core, base: BasePhase, state: LazyStore[Any] | None, runs: OnceRuns | None) -> None:
        self._core = core
        self._base = base
        self._jobs = LogJobs(core.parsing)
        self._state = state
        self._runs = runs
        self._followers = AnswerFollowers(core)
        self.wait_s = WAIT_S
        self._metrics = core.metrics.of(PromptLogMetrics)

    async def answer(self, exchange: Exchange) -> ClientReply | None:
        """None: it has no token. Raises GatewayError."""
        try:
            wishes = self._base.wishes(exchange)
            if wishes is None or not wishes.once:
                return None
            return await self._answer(exchange, wishes)
        except StoreFailed as failure:
            raise not_answering(failure) from None
        except GatewayError as error:
            count_refusal(exchange, error, self._metrics)
            raise

    async def _answer(self, exchange: Exchange, wishes: Wishes) -> ClientReply:
        if self._runs is None:
            raise logs_off("This gateway keeps no logs (state).", "once")
        record, api = exchange.record, exchange.api
        record.subject.model, record.answer.own = api.model, True
        record.subject.generates = record.subject.metered = False  # the generation has a record of its own
        self._core.pulses.watch(exchange)
        key = owner(exchange.request, exchange.caller), wishes.once
        digest, until = await self._digest(exchange, wishes), self._core.clock() + self.wait_s
        asked = _TokenRequest(self._runs, key, digest, wishes.ref, wishes.expect, until)
        while True:
            run = self._runs.find(key)
            reply = await (self._begin(exchange, asked) if run is None else self._join(exchange, asked, run))
            if reply is not None:
                return reply

    async def _begin(self, exchange: Exchange, asked: _TokenRequest) -> ClientReply | None:
        """Begins a generation, or answers without one. None: look again. Raises GatewayError and StoreFailed."""
        runs, key, digest, ref, expect, until = asked
        store = await runs.open()
        seen = await store.find(key)
        is_free = seen is None or seen.stopped
        if seen is not None and not is_free and seen.digest != digest:
            raise self._mismatch(exchange)
        if seen is not None and seen.turn:
            return await self._repeat(exchange, store, asked, seen)
        if runs.find(key) is not None:
            return None
        if seen is not None and store.is_alive(seen) and not runs.is_mine(seen.runner):
            await self._wait_elsewhere(exchange, key, until)
            ended = await store.find(key)
            if ended is not None and ended.stopped:
                raise stopped()
            return None
        run = runs.start(exchange, key, digest, seen)
        run.ref, run.expect = ref, expect
        if not await self._is_claimed(exchange, run):
            exchange.api = run.api or exchange.api
            return None
        self._metrics.once.add(("run" if is_free else "taken_over",))
        return await self._followers.follow(exchange, run, strip_usage=exchange.api.strip_usage)

    async def _join(self, exchange: Exchange, asked: _TokenRequest, run: OnceRun) -> ClientReply | None:
        """Follows a generation that was begun here. None: look again. Raises GatewayError."""
        if run.failed:
            await run.ended.wait()
            return None
        if not await self._is_claimed(exchange, run):  # else the token is another request's
            return None
        if run.digest != asked.digest:
            raise self._mismatch(exchange)
        same = (run.stream, run.ref) == (exchange.api.stream, asked.ref) and asked.expect in (None, run.expect)
        if not same and not await self._is_over(exchange, asked.runs, run):
            return None
        self._joins(exchange, "joined")
        return await self._followers.follow(exchange, run, strip_usage=exchange.api.strip_usage)

    async def _is_claimed(self, exchange: Exchange, run: OnceRun) -> bool:
        """False: another process was faster. Raises GatewayError, also for the limits of the key."""
        outcome: bool | GatewayError = await asyncio.shield(run.claimed)  # for others, if this client leaves
        if isinstance(outcome, GatewayError):
            if outcome.status < 500:
                self._enter(exchange)
            raise outcome.again()
        return outcome

    async def _digest(self, exchange: Exchange, wishes: Wishes) -> str:
        """Raises GatewayError."""
        form, body, lease = FORMS_BY_PATH[exchange.request.path], exchange.api.body, exchange.request.lease
        base, _ = await self._base.base(exchange, form, wishes)
        client = lease.account.client
        if is_named_at_once(body):
            return await self._core.parsing.turns.take(partial(named_digest, body, form, base, wishes.frame), client)
        with parsing(lease, len(body)):
            found = await self._core.parsing.process.run((OPERATION, form, base, wishes.frame), body, client)
        return str(found[0])

    async def _wait_elsewhere(self, exchange: Exchange, key: TokenKey, until: float) -> None:
        """Waits for the end of a generation of another process. Raises GatewayError 409 or 429."""
        assert self._runs is not None
        self._enter(exchange)
        left_s = until - self._core.clock()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await self._runs.wait_for_end(key, exchange.request.lease.account.client)
        except TimeoutError:
            text = "The generation of this token runs in another process of the gateway. Send the request again later."
            error = log_error(409, "once_running", text, "once")
            error.retry_after_s = RETRY_S
            raise error from None

    async def _is_over(self, exchange: Exchange, runs: OnceRuns, run: OnceRun) -> bool:
        """Waits for the end of a generation in the other form, or for other wishes. True: its answer is for all: an error,
        which has one form, or an answer of this form that is not kept, so that it moves no ref.

        Raises GatewayError if it was stopped.
        """
        self._enter(exchange)
        await run.ended.wait()
        if run.stopped is not None:
            raise run.stopped.again()
        if run.stream != exchange.api.stream:
            runs.forget(run)  # an answer that is not kept cannot be told in another form
            return not run.kept and run.status != 200
        return not run.kept

    def _mismatch(self, exchange: Exchange) -> GatewayError:
        """Raises GatewayError 429."""
        self._enter(exchange)
        self._metrics.once.add(("mismatch",))
        text = "This token belongs to another request: its body or its base differs. Send another token."
        return log_error(422, "once_mismatch", text, "once")

    def _joins(self, exchange: Exchange, result: str) -> None:
        """Counts a request that generates nothing."""
        self._enter(exchange)
        self._metrics.requests.add(("once",))
        self._metrics.once.add((result,))

    def _enter(self, exchange: Exchange) -> None:
        """Applies the limits of the key; a generation does that itself. Idempotent. Raises GatewayError 429."""
        for enter in self._core.extensions.entering:
            enter(exchange)

    # -- answers

    async def _repeat(self, exchange: Exchange, store: OnceStore, asked: _TokenRequest, seen: StoredToken) -> ClientReply:
        """The answer of a generation that has ended. Raises GatewayError and StoreFailed."""
        assert self._state is not None
        self._joins(exchange, "repeated")
        turns, gone = await self._state.get(), log_error(410, "prompt_log_expired", "The answer of this token is gone.", "once")
        owner_id = asked.key[0]
        try:
            row, expires_at = await turns.get(owner_id, seen.turn), await store.expiry(owner_id, seen.turn)
        except (UnknownObjectError, ExpiredObjectError):
            raise gone from None
        if expires_at is None:
            raise gone
        max_bytes = max_history(self._core.live)
        if asked.expect is not None and head_name(asked.expect) != row.log.input_head:
            given = FoundTurn(row.id, row.log.form, at_input=True, open=b"[]")
            base = await outline_of(turns, owner_id, given, max_bytes)
            raise diverged(base.length, await self._jobs.latest(base, exchange.request.lease.account.client), None)
        size, lease = len(row.output) + len(row.response), exchange.request.lease
        if size >= LARGE_BODY and not lease.grow(2 * size):
            raise over_budget(0, lease.account.largest, 2 * size)
        told: dict[str, str | int | bool] = {"head": row.log.head} | ({"ref": False} if asked.ref else {})
        try:
            last = FoundTurn(row.id, row.log.form, at_input=False, open=b"[]")
            base = await outline_of(turns, owner_id, last, max_bytes)
            told["length"] = base.length
            NAMED_LOG.set(exchange.record, NamedLog(base.length, REPEATED))
            if asked.ref:
                latest = await self._jobs.latest(base, lease.account.client)
                from_ = latest[-1 - len(row.log.digests) // DIGEST :]  # the base, and all after it
                move = RefMove(asked.ref, list(map(head_name, from_)))
                await turns.move_ref(owner_id, move, row.log.head)
                told["ref"] = move.moved
        except (GatewayError, StoreFailed):
            pass  # a turn before it is gone, or the ref cannot be moved, and the answer is there
        told |= {"expires": int(expires_at), "kept": True, "repeated": True}
        answer = RepeatedAnswer(row, exchange.api.alias or exchange.api.model, told)
        lines = id_lines(exchange) + answer_line(chain_named(row.log.input_head) or EMPTY, row.log.frame, told)
        record = exchange.record
        record.status, record.subject.stream = 200, exchange.api.stream
        if not exchange.api.stream:
            reply = self._core.replies.begin(exchange, 200, answer.plain(), JSON_LINE + lines)
            record.answer.ok = record.answer.complete = True
            return reply
        reply = begin_stream(self._core, exchange, 200, STREAM_LINES + lines)
        await self._write(exchange, reply, answer.streamed(usage=not exchange.api.strip_usage))
        return reply

    async def _write(self, exchange: Exchange, reply: ClientReply, events: Iterable[bytes]) -> None:
        gate = Gate()
        reply.feed_from(gate)
        try:
            for event in events:
                await gate.wait_open(self._core.live.patience_s)
                reply.write(event)
            reply.end()
            exchange.record.answer.ok = exchange.record.answer.complete = True
        except ClientStalled:
            reply.cut()
            raise
        finally:
            reply.feed_from(None)

    # -- the end of a generation by its client

    def stops(self, exchange: Exchange) -> bool:
        """True for a request that stops a generation."""
        below = exchange.record.path == UNLOGGED and self._runs is not None
        return below and _PATH.fullmatch(exchange.request.target.partition("?")[0]) is not None

    async def stop(self, exchange: Exchange) -> ClientReply:
        """Raises GatewayError."""
        runs, record = self._runs, exchange.record
        assert runs is not None
        record.answer.own = True
        record.subject.generates = record.subject.metered = False
        if exchange.request.method != "DELETE":
            raise GatewayError(405, "method_not_allowed", "A token takes DELETE.")
        self._enter(exchange)
        found = _PATH.fullmatch(exchange.request.target.partition("?")[0])
        token = unquote(found[1]) if found is not None else ""
        key = owner(exchange.request, exchange.caller), token
        try:
            if not ONCE_TOKEN.fullmatch(token) or not await (await runs.open()).stop(key):
                raise log_error(404, "prompt_log_not_found", "No generation of this token runs.", "once")
        except StoreFailed as failure:
            raise not_answering(failure) from None
        if (run := runs.find(key)) is not None:
            run.stop(stopped())
        record.status = 200
        reply = self._core.replies.begin(exchange, 200, orjson.dumps({"stopped": True}), JSON_LINE)
        record.answer.ok = record.answer.complete = True
        return reply
