"""Attempts up to the first byte: one on the chosen replica, then, after each failure, one on the best replica left.

    chosen ──► attempt ──► answers ──► a good answer, or a refusal that all others would give
       ▲          │ refused, reset, silent, 5xx, garbage
       └── move ◄─┘ to the best of the others that were not tried ──► none left, or no budget ──► the refusal, else 502

Nothing has been sent to the client yet, so it notices none of this. Bounds: each replica is tried once. A request is sent at
most MAX_REACHED times, because a prompt that kills its engine must not reach the whole fleet (refused connections do not count,
because the prompt cannot cause them; the silent repetition on a fresh connection does). Retries after refusals, silence and
garbage are at most a fifth of all requests plus a reserve of 100, so that they do not add to an overload
(`retries.RetryBudget`). A lost connection needs no budget: the requests of a dead or hung replica
move to the others once, however many they are. A replica without the endpoint costs neither: it is not asked again for a
while. A time limit at a replica that is up ends the request (504): another replica would need as long for the same prompt.

If the pool has a fallback (`fallback_pools/`), that pool gets the request next, and the client no refusal of this one. Earlier
attempts count, but each further pool gets one attempt at least; the budget is the same.

The effect of a failed attempt on its replica's breaker is decided when the request's outcome is known (`verdicts.py`).

`rest_of_answer` does the same for a stream that broke off after its first byte and may be resumed (`resumption.py`). Together
with the earlier attempts, the request is sent at most MAX_SENT times.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final, Protocol

from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.excerpt import excerpt
from gateway.dialects.full_context import MAX_READ, STATUSES, full_context
from gateway.dialects.openai.request import without_usage
from gateway.dialects.salts import is_object
from gateway.errors import HUNG, NO_ACCESS, REFUSED, UNFIT, UNKNOWN_PATH, UNREACHABLE, GatewayError, ReplicaFailure, timed_out
from gateway.fleet.directory import Fleet
from gateway.fleet.membership import DECODE
from gateway.fleet.state import PRIORITY_FIELD, USAGE_WISH, ReplicaState
from gateway.request import usage_refusal
from gateway.request.exchange import Exchange
from gateway.request.extensions import Extensions
from gateway.request.forms import EVENT_STREAM, EVENTS_LINE, NATIVE, Form, collected, is_odd, note_form
from gateway.request.inflated import inflated_begin, read_inflated
from gateway.request.lone_failures import LoneFailures
from gateway.request.phases.replies import JSON_LINE, STREAM_LINES
from gateway.request.priority import is_priority_refusal, may_refuse, priority_for, with_priority
from gateway.request.ranks import BAD_REQUEST, is_rank_refusal, to_rank
from gateway.request.retries import RetryBudget, jitter
from gateway.request.unknown_path import MOST_READ, is_unknown_path, may_be
from gateway.request.verdicts import Verdicts, client_hash, is_answer
from gateway.telemetry.metrics import Metrics
from gateway.upstream.client import ReplicaAnswer, ReplicaCall, UpstreamClient
from gateway.upstream.loop_guard import LOOP_DETECTED
from gateway.upstream.timeouts import FIRST_BYTE, TOTAL
from router import Candidate

log = logging.getLogger("warmroute.gateway")

ADAPTER_PATHS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
MAX_REACHED: Final = 3  # number of times that a request is sent before its answer's first byte
MAX_SENT: Final = 4  # number of times that it is sent in all, if broken streams are resumed
MAX_HELD_ANSWER: Final = 1 << 20  # bytes; a plain answer up to this size is read completely before the client gets any of it

SIGN_OF_LIFE_S: Final = 10.0  # a replica is at work if it sent a byte of any answer within this time
_MAX_ERROR: Final = 64 << 10  # bytes of an error to be translated
_WHOLE: Final = frozenset([201, 203])  # other statuses of a whole answer; 203 if a proxy at the replica has changed it
_CANNOT: Final = frozenset([UNKNOWN_PATH, UNFIT])  # no failures: the engine cannot serve the request
GATEWAY_TIMEOUT: Final = 504
LATE_S: Final = 10.0  # an earlier 504 means that the proxy cannot reach the replica
_FREE: Final = _CANNOT | {REFUSED, UNREACHABLE, "reset", NO_ACCESS, HUNG}  # a retry after these needs no budget and no pause


class Attempts:
    """Attempts on replicas (see the module). clock: monotonic seconds. lone: failures without a comparison with other
    replicas.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        upstream: UpstreamClient,
        extensions: Extensions,
        metrics: Metrics,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._extensions = extensions
        self._metrics = metrics
        self._clock = clock
        self._chance = chance
        self.budget = RetryBudget()
        self.lone = LoneFailures()

    async def first_answer(self, exchange: Exchange) -> ReplicaAnswer:
        """The first answer for the client, else the last refusal. Raises GatewayError if there is neither."""
        self._begin(exchange)
        attempts, call = exchange.attempts, exchange.call(exchange.api.body)
        verdicts = Verdicts(self._fleet, self.lone, exchange.request)
        reached, tries = attempts.sent, 0
        refusal: ReplicaAnswer | None = None
        given = False  # not `refusal = None` instead: mypyc takes its type at the end of `try` for the type in `finally`
        most = MAX_REACHED if call.repeatable else 1
        try:
            while True:
                tries += 1
                candidate = exchange.booking.chosen
                try:
                    answer = await self._try(exchange, candidate, call, verdicts, fresh=reached > 0)
                except ReplicaFailure as failure:
                    if failure.reason not in _CANNOT:  # else an earlier refusal remains the result
                        _close(refusal)
                        refusal = None
                    reached += failure.reached
                    attempts.sent = reached
                    self._failed(exchange, candidate, failure)
                else:
                    _close(refusal)
                    refusal = None
                    if answer.status < 400 or is_answer(answer) or self._is_late(exchange, answer):
                        verdicts.answered = True
                        attempts.error = _summary(answer) if answer.status >= 400 else ""
                        attempts.sent = reached + answer.sends
                        return answer
                    refusal = answer
                    reached += answer.sends
                    self.note(exchange, candidate.replica, "status", _summary(answer))
                verdicts.refused = refusal is not None
                if reached >= most or not await self._next(exchange, tries, verdicts):
                    break
                if not exchange.dialect.lacking:
                    _close(refusal)
                    refusal = None
            attempts.sent = reached
            last = self._last_word(exchange, call, verdicts, refusal)
            given = True
            if last:
                return last
        finally:
            if not given:
                _close(refusal)
            if verdicts.failed:
                verdicts.judge(self._clock())
        raise self._no_answer(exchange)

    def _is_late(self, exchange: Exchange, answer: ReplicaAnswer) -> bool:
        """True for the time limit of a proxy in front of the replica, which computed meanwhile."""
        return answer.status == GATEWAY_TIMEOUT and self._clock() - exchange.attempts.since > LATE_S

    def _begin(self, exchange: Exchange) -> None:
        if not exchange.attempts.failed:  # else the request comes from another pool, where it was counted
            self.budget.request()
            exchange.attempts.since = self._clock()

    def _last_word(
        self, exchange: Exchange, call: ReplicaCall, verdicts: Verdicts, refusal: ReplicaAnswer | None
    ) -> ReplicaAnswer | None:
        """The refusal, if no other replica is left; the client gets the engine's own message. None: there is no refusal, or
        another pool gets the request, and the client gets the refusal only if that pool fails too.
        """
        attempts = exchange.attempts
        fallback = self._extensions.fallback is not None and exchange.target.fallback is not None
        if fallback and self._falls_back(exchange, call, verdicts, refusal):
            attempts.refusal = refusal
            return None
        if refusal:
            attempts.error = _summary(refusal)
        return refusal

    def _no_answer(self, exchange: Exchange) -> GatewayError:
        if _nobody_can(exchange):
            if exchange.attempts.unfit is not None:
                return exchange.attempts.unfit.again()
            lacking = exchange.dialect.lacking or f"No replica that is up has the endpoint {exchange.request.path[:100]!r}."
            return self._fleet.lacking(exchange.target, exchange.dialect.name, lacking, self._clock())
        failures = "; ".join(f"{attempt['replica']}: {attempt['error']}" for attempt in exchange.attempts.failed)
        text = f"No replica could answer ({failures}). Retry; see /warmroute/replicas."
        return GatewayError(502, "replica_failed", text, public="No replica could answer. Retry.")

    def is_final(self, exchange: Exchange, failure: ReplicaFailure) -> bool:
        """True if a time limit ended the request and it is sent nowhere else: no time is left, or its replica is up, so that
        another one would need as long for the same prompt.
        """
        return failure.limit == TOTAL or (failure.limit != "" and exchange.target.replicas[exchange.booking.chosen.replica].up)

    def _timed_out(self, exchange: Exchange, failure: ReplicaFailure) -> GatewayError:
        replica = exchange.booking.chosen.replica
        about = {"id": exchange.record.id, "replica": replica, "limit": failure.limit, "error": failure.message}
        log.warning("a time limit ended a request", extra=about)
        return timed_out(replica, failure.message)

    async def rest_of_answer(self, exchange: Exchange, body: bytes) -> ReplicaAnswer | None:
        """The answer of the first other replica that begins to stream the rest of a broken answer, as requested by `body`; or
        None.
        """
        verdicts = Verdicts(self._fleet, self.lone, exchange.request)
        verdicts.unsure = True  # one replica has failed with this request already
        try:
            answer = await self._rest(exchange, exchange.call(body), verdicts)
            verdicts.answered = answer is not None
            return answer
        finally:
            if verdicts.failed:
                verdicts.judge(self._clock())

    async def _rest(self, exchange: Exchange, call: ReplicaCall, verdicts: Verdicts) -> ReplicaAnswer | None:
        attempts = exchange.attempts
        most = MAX_SENT - attempts.sent
        while attempts.resumptions < most and await self._next(exchange, attempts.resumptions + 1, verdicts):
            candidate = exchange.booking.chosen
            try:
                answer = await self._try(exchange, candidate, call, verdicts, fresh=True)
            except ReplicaFailure as failure:
                attempts.resumptions += failure.reached
                self._failed(exchange, candidate, failure)
                continue
            attempts.resumptions += 1
            if answer.status == 200 and answer.content_type == EVENT_STREAM:
                return answer
            self.note(exchange, candidate.replica, "status", f"asked for the rest of a stream, it {_summary(answer)}")
            answer.close()
            if is_answer(answer):
                return None  # it refuses such a request, and so will the others
        return None

    def final_refusal(self, exchange: Exchange, error: GatewayError) -> ReplicaAnswer:
        """The refusal for the client, if the fallback pool is not used although one was found.

        Raises the error again if there is no refusal.
        """
        if exchange.attempts.next_target is None:
            raise error.again()  # the caller keeps `error` in its frame: a cycle
        attempts = exchange.attempts
        self.drop_next_target(exchange)
        answer, attempts.refusal = attempts.refusal, None
        if answer is None:
            raise error.again()
        attempts.error = _summary(answer)
        return answer

    def drop_next_target(self, exchange: Exchange) -> None:
        """The fallback pool that was found does not get the request. Idempotent."""
        attempts = exchange.attempts
        if attempts.next_target is not None:
            attempts.next_target = None
            self._not_made(attempts.failed[-1]["reason"])

    # -- later findings

    def completed(self, exchange: Exchange) -> None:
        """The answer was good and has been sent completely."""
        if exchange.attempts.trial:
            trial, state = exchange.attempts.trial
            path = exchange.record.path
            if not exchange.dialect.strict and path in ADAPTER_PATHS:
                self._fleet.adapters_changed(state, loaded=path == ADAPTER_PATHS[0])
            if trial.begun < self.lone.until:  # mostly no failure is remembered
                self.lone.answered(client_hash(exchange.request), state.name, trial.begun)

    def broke_off(self, exchange: Exchange, failure: ReplicaFailure) -> GatewayError:
        """The replica failed after its answer's first byte. `judge_broken` must follow. Returns the error for the client."""
        replica, attempts = exchange.booking.chosen.replica, exchange.attempts
        if attempts.trial:
            self._excuse(failure, attempts.trial[1])
            self._fleet.failed(attempts.trial[1], failure)
            if not (exchange.delivered.done_sent or failure.blameless):
                attempts.broken += (attempts.trial,)
        attempts.trial = None
        attempts.note_end(failure.reason, failure.message, self._clock())
        if not failure.blameless:
            self._metrics.broken_responses.add((exchange.record.subject.label, replica))
        if self.is_final(exchange, failure):
            return self._timed_out(exchange, failure)
        text = f"The replica {replica} failed while it answered ({failure.message}). Retry the request."
        return GatewayError(502, "replica_failed", text, public="The replica failed while it answered. Retry the request.")

    def judge_broken(self, exchange: Exchange, *, completed: bool) -> None:
        """Judge an answer that broke off: its replica's fault if another replica completed it, the request's if another one
        failed with it as well; if no other was tried, `lone_failures.py` decides. A replica that came up after the attempt is
        not blamed.
        """
        attempts = exchange.attempts
        broken, attempts.broken = attempts.broken, ()
        now, compared = self._clock(), attempts.resumptions > 0
        for trial, state in broken:
            if state.up_since > trial.begun:
                continue
            if completed if compared else self.lone.failed(client_hash(exchange.request), state.name, now):
                trial.broke_off(now)
                self._fleet.suspect(state)

    # -- one attempt

    def _failed(self, exchange: Exchange, candidate: Candidate, failure: ReplicaFailure) -> None:
        """Record a failed attempt. Raises GatewayError 504 if no other may follow."""
        if failure.reason not in _CANNOT:
            self._fleet.failed(exchange.target.replicas[candidate.replica], failure)
        self.note(exchange, candidate.replica, failure.reason, failure.message)
        if self.is_final(exchange, failure):
            raise self._timed_out(exchange, failure)

    def note(self, exchange: Exchange, replica: str, reason: str, error: str) -> None:
        """Record a failed attempt, and log it now: the request's own line comes with its end, which may be minutes away."""
        exchange.attempts.add(replica, reason, error, self._clock())
        if reason not in _CANNOT:
            number, id_ = len(exchange.attempts.failed), exchange.record.id
            about = {"id": id_, "attempt": number, "replica": replica, "reason": reason, "error": error}
            log.warning("an attempt failed", extra=about)

    async def _next(self, exchange: Exchange, tries: int, verdicts: Verdicts) -> bool:
        """Move the lease to the best replica not tried yet. False if there is none, or no budget."""
        live = self._untried(exchange, verdicts)
        if not live:
            return False
        reason = exchange.attempts.failed[-1]["reason"]
        if not self._may_retry(reason):
            verdicts.unsure = verdicts.unpaid = True
            return False
        if pause_s := jitter(tries, self._chance, at_once=reason in _FREE):
            try:
                await asyncio.sleep(pause_s)
            except asyncio.CancelledError:  # the client has disconnected
                self._not_made(reason)
                raise
            live = self._untried(exchange, verdicts)  # replicas may have come and gone during the pause
        if not live:
            self._not_made(reason)
            return False
        self._metrics.retries.add((reason,))
        now = self._clock()
        exchange.booking.move(live, now)
        exchange.booking.release(now)  # it is sent at once
        return True

    def _may_retry(self, reason: str) -> bool:
        """Spend the budget for an attempt after a failure with this reason. False: there is none left."""
        if reason in _FREE or self.budget.take():
            return True
        self._metrics.retry_budget_exhausted.add()
        return False

    def _not_made(self, reason: str) -> None:
        """Return the budget of an attempt that is not made."""
        if reason not in _FREE:
            self.budget.give_back()

    def _falls_back(self, exchange: Exchange, call: ReplicaCall, verdicts: Verdicts, refusal: ReplicaAnswer | None) -> bool:
        """True if another pool gets the request because all attempts in this one failed: the request may be repeated, there is
        such a pool, and budget for it.
        """
        attempts = exchange.attempts
        if exchange.api.refers or exchange.binding or _nobody_can(exchange) or (attempts.sent and not call.repeatable):
            return False
        if refusal and refusal.status == LOOP_DETECTED:  # the request's way is the cause, not the pool
            return False
        return not verdicts.unpaid and self._finds_pool(exchange)

    def leaves_pool(self, exchange: Exchange) -> bool:
        """True if another pool gets a stream that broke off before its first token, after this pool has given up."""
        attempts = exchange.attempts
        if not exchange.may_begin_again or exchange.api.refers or not attempts.failed:
            return False
        if not self._finds_pool(exchange):
            return False
        attempts.sent += attempts.resumptions
        return True

    def _finds_pool(self, exchange: Exchange) -> bool:
        """Set the pool that gets the request next. False: there is none, or no budget."""
        attempts = exchange.attempts
        fallback, reason = self._extensions.fallback, attempts.failed[-1]["reason"]
        further = fallback.find(exchange) if fallback is not None and exchange.target.fallback is not None else None
        if attempts.sent + attempts.resumptions > MAX_REACHED and reason == "reset":  # the prompt may kill engines
            return False
        if further is None or not self._may_retry(reason):
            return False
        attempts.next_target = further
        return True

    def _untried(self, exchange: Exchange, verdicts: Verdicts) -> Collection[str]:
        """The replicas that may serve the request now and were not tried yet. If there is a refusal for the client, resting
        replicas (Retry-After) are left out.
        """
        exchange.target = self._fleet.renewed(exchange.target)
        tried, now = {attempt["replica"] for attempt in exchange.attempts.failed}, self._clock()
        if exchange.dialect.lacking:
            return self._fleet.able(exchange.target, exchange.dialect.name, now, tried, resting=not verdicts.refused)
        return self._fleet.candidates(exchange.target, now, tried, resting=not verdicts.refused)

    async def _try(
        self, exchange: Exchange, candidate: Candidate, call: ReplicaCall, verdicts: Verdicts, *, fresh: bool
    ) -> ReplicaAnswer:
        """One attempt on one replica, up to its first byte. A plain answer to a generation is read completely, or up to
        MAX_HELD_ANSWER.

        fresh: use a new connection.
        """
        state = exchange.target.replicas[candidate.replica]
        trial = state.breaker.begin(self._clock())
        if exchange.notes is not None:
            call = exchange.notes.calls(call, state, trial.begun)
        try:
            dialect = exchange.dialect
            if dialect.lacking and state.lacked(dialect.name, trial.begun):
                raise _unknown_path()
            exchange.attempts.asked = True
            answer = await self._open(exchange, state, call, trial.begun, fresh=fresh)
            status = answer.status
            if status >= 400 and exchange.answers is dialect and (dialect.translatable or dialect.lacking):
                answer = await self._require_path(exchange, state, call, answer, fresh=fresh)
                status = answer.status
            trial.answers()
            if status == 200 and exchange.api.metered:
                try:
                    if check := self._inspect(exchange, answer):
                        await check
                except BaseException:
                    answer.close()
                    raise
            if (status < 400 or is_answer(answer)) and not state.refusals:
                trial.success()
            else:
                verdicts.answer(answer, state, trial, self._clock())
            exchange.attempts.trial = trial, state
            return answer
        except ReplicaFailure as failure:
            self._excuse(failure, state)
            verdicts.failure(failure, state, trial, self._clock())
            raise
        except BaseException:
            trial.abandoned()
            raise

    async def _open(
        self, exchange: Exchange, state: ReplicaState, call: ReplicaCall, now: float, *, fresh: bool
    ) -> ReplicaAnswer:
        """Send the request in the form of this replica. Raises ReplicaFailure also if the replica refuses the gateway's own
        key, because the client has no key there.
        """
        exchange.attempts.body = exchange.attempts.lines = b""  # of an earlier replica
        exchange.prefilled = None
        form = self._form(exchange, state, now)
        if form is not NATIVE:
            await form.prepare(exchange)
        sent = form.call(exchange, state, call)
        if state.lacks and exchange.wishes_usage and not state.speaks(USAGE_WISH, now):
            sent = _without_usage(exchange, sent)
        if form is NATIVE:
            answer = await self._send(exchange, state, sent, fresh=fresh)
        else:
            answer = await form.send(exchange, state, sent, partial(self._send, exchange, fresh=fresh))
        while form is not NATIVE and (other := await _instead(form, exchange, state, sent, answer)):
            sent = other
            answer = await self._send(exchange, state, sent, fresh=False)
        if answer.status != 200 and exchange.wishes_usage and usage_refusal.may_be(answer.status):
            answer = await self._unasked(exchange, state, sent, answer, now)
        if answer.status != 200:
            if answer.status in _WHOLE and exchange.api.metered:
                answer.head.status = 200
                return answer
            if answer.status in (401, 403) and state.member.key is not None:
                answer.close()
                text = f"it refuses the key that the gateway has for it (it answers {answer.status})"
                raise ReplicaFailure(NO_ACCESS, text, reached=0)
            if exchange.answers.translated:
                error = await _error_of(answer, _MAX_ERROR)
                exchange.attempts.body = exchange.answers.error(answer.status, error)
            if answer.status in STATUSES and exchange.api.metered:
                _reword_full_context(exchange, state, await _error_of(answer, MAX_READ + 1))
            if exchange.attempts.body and answer.head.fields.compression:
                exchange.attempts.lines = JSON_LINE
        return answer

    def _send(
        self, exchange: Exchange, state: ReplicaState, call: ReplicaCall, *, fresh: bool
    ) -> Coroutine[Any, Any, ReplicaAnswer]:
        value = priority_for(exchange, state) if state.facts.priority else None
        if value is not None and state.speaks(PRIORITY_FIELD, self._clock()):
            return self._send_with_priority(exchange, state, value, call, fresh=fresh)
        return self._send_plainly(exchange, state, call, fresh=fresh)

    async def _send_with_priority(
        self, exchange: Exchange, state: ReplicaState, value: int, call: ReplicaCall, *, fresh: bool
    ) -> ReplicaAnswer:
        """`_send` with the request's priority. If the engine refuses it, it is taken back. Only a good answer then shows that
        it was the cause, as for ranks.
        """
        if is_object(call.body):
            exchange.charge_copy(call.body)
        answer = await self._send_plainly(exchange, state, with_priority(call, value), fresh=fresh)
        if not may_refuse(answer.status):
            return answer
        begin = answer.peek() if answer.status < BAD_REQUEST else await _error_of(answer, MAX_READ)
        if not is_priority_refusal(begin):
            return answer
        answer.close()
        answer = await self._send_plainly(exchange, state, call, fresh=False)
        if answer.status < BAD_REQUEST:
            self._fleet.refuses_priority(state, self._clock())
        return answer

    def _send_plainly(
        self, exchange: Exchange, state: ReplicaState, call: ReplicaCall, *, fresh: bool
    ) -> Coroutine[Any, Any, ReplicaAnswer]:
        """`_send` without a priority."""
        again = exchange.attempts.failed or exchange.prefilled is not None or not state.answers
        spent_s = self._clock() - exchange.attempts.since if again else 0.0
        if state.member.rank is not None and (state.answers or not state.engine.bootstraps):  # decoders find it by the room
            return self._send_to_rank(exchange, state, state.member.rank, call, spent_s, fresh=fresh)
        return self._upstream.open(state.url, call, fresh=fresh, spent_s=spent_s)

    async def _send_to_rank(
        self, exchange: Exchange, state: ReplicaState, rank: int, call: ReplicaCall, spent_s: float, *, fresh: bool
    ) -> ReplicaAnswer:
        """`_send` for a data-parallel rank. If the server does not have it (any more), the server chooses one. Only a good
        answer then shows that the rank was the cause: a client may have provoked the words of the refusal.
        """
        field = state.engine.rank_field
        if field and is_object(call.body):
            exchange.charge_copy(call.body)
        answer = await self._upstream.open(state.url, to_rank(call, rank, field), fresh=fresh, spent_s=spent_s)
        if answer.status != BAD_REQUEST or not is_rank_refusal(await _error_of(answer, MAX_READ)):
            return answer
        answer.close()
        answer = await self._upstream.open(state.url, call, spent_s=spent_s)
        if answer.status < BAD_REQUEST:
            self._fleet.refuses_rank(state)
        return answer

    async def _unasked(
        self, exchange: Exchange, state: ReplicaState, call: ReplicaCall, refusal: ReplicaAnswer, now: float
    ) -> ReplicaAnswer:
        """The answer to the request without the wish for usage, if the refusal may be about it; else the refusal."""
        error = await _error_of(refusal, usage_refusal.MOST_READ)
        if not usage_refusal.is_refusal(refusal.status, error, call.body):
            return refusal
        plain = _without_usage(exchange, call)
        if plain is call:
            return refusal
        refusal.close()
        answer = await self._send(exchange, state, plain, fresh=False)
        if answer.status < 400:
            self._fleet.refuses_usage(state, now)
        return answer

    def _excuse(self, failure: ReplicaFailure, state: ReplicaState) -> None:
        """A replica that answers other requests is not sick because it is silent about a long prompt."""
        if failure.limit == FIRST_BYTE and self._upstream.silence_s(state.url) < SIGN_OF_LIFE_S:
            failure.blameless = True

    def _form(self, exchange: Exchange, state: ReplicaState, now: float) -> Form:
        extensions = self._extensions
        if state.role == DECODE:
            for form_of in extensions.decoding:
                form = form_of(exchange, state, now)
                if form is not None:
                    return form
        for form_of in extensions.forms:
            form = form_of(exchange, state, now)
            if form is not None:
                return form
        return NATIVE

    async def _require_path(
        self, exchange: Exchange, state: ReplicaState, call: ReplicaCall, answer: ReplicaAnswer, *, fresh: bool
    ) -> ReplicaAnswer:
        """Note a replica that does not know the path, and repeat the request at once if it has another form for this replica.

        Raises ReplicaFailure, and closes the answer, if another replica is to be asked.
        """
        if exchange.target.delta:  # gateways have all paths
            return answer
        if not (may_be(answer.status) and is_unknown_path(answer.status, await _begin_of(answer, MOST_READ))):
            return answer
        now = self._clock()
        self._fleet.lacks(state, exchange.dialect.name, now)
        if exchange.dialect.lacking:
            answer.close()
            raise _unknown_path()
        if self._form(exchange, state, now) is NATIVE:
            return answer
        answer.close()
        return await self._open(exchange, state, call, now, fresh=fresh)

    def _inspect(self, exchange: Exchange, answer: ReplicaAnswer) -> Coroutine[Any, Any, None] | None:
        """Check that an engine could answer so. None: it could, as in nearly all streams; else the check goes on. Raises
        ReplicaFailure if not.
        """
        begin = answer.peek()
        if exchange.answers.collects or answer.head.fields.compression or is_odd(answer, begin):
            return self._unwrap(exchange, answer)
        if answer.content_type == EVENT_STREAM and (exchange.api.stream or not exchange.answers.translated):
            return _inspect_stream(exchange, answer, begin)
        return self._unwrap(exchange, answer) if answer.content_type == EVENT_STREAM else self._read_plain(exchange, answer)

    async def _unwrap(self, exchange: Exchange, answer: ReplicaAnswer) -> None:
        """`_inspect` for an answer of another form than was asked for."""
        plain, attempts = exchange.answers, exchange.attempts
        if answer.head.fields.compression:
            if not (plain.translated or plain.collects):
                answer.content_type = ""  # it passes unread, and its usage is estimated
                return
            await read_inflated(exchange, answer)
        else:
            await note_form(answer)
        events = answer.content_type == EVENT_STREAM
        if not exchange.api.stream and (plain.collects or (plain.translated and events)):
            reader = exchange.answers.collecting()
            attempts.body = await collected(answer, reader, plain, exchange.charge)
            attempts.lines, attempts.usage = JSON_LINE, reader.usage
        elif not events:
            await self._read_plain(exchange, answer)
        else:
            attempts.lines = EVENTS_LINE if plain.translated else b""
            if check := _inspect_stream(exchange, answer, answer.peek()):
                await check

    async def _read_plain(self, exchange: Exchange, answer: ReplicaAnswer) -> None:
        """Read a plain answer completely, or up to MAX_HELD_ANSWER. Raises ReplicaFailure if no engine could answer so."""
        answers, attempts = exchange.answers, exchange.attempts
        lease = exchange.request.lease
        before = lease.held
        try:
            body = await answer.read_begin(MAX_HELD_ANSWER, exchange.charge)
        except BaseException:
            lease.shrink(lease.held - before)  # this answer is dropped
            raise
        if exchange.api.keeps:
            attempts.object = answers.object_in(body)
        if len(body) <= MAX_HELD_ANSWER:
            attempts.usage = answers.usage_of(body)
            if answers.translated:
                body = _translated(exchange, body)
        elif answers.translated:  # other replicas would only compute the same again
            long = f"has answered with more than {MAX_HELD_ANSWER} bytes, which are not translated. Ask for a stream."
            text = f"The replica {exchange.booking.chosen.replica} {long}"
            raise GatewayError(502, "replica_failed", text, public=f"The model's server {long}")
        else:
            attempts.tail = answers.answer_tail(body)
        attempts.body = body


async def _instead(
    form: Form, exchange: Exchange, state: ReplicaState, call: ReplicaCall, answer: ReplicaAnswer
) -> ReplicaCall | None:
    """`Form.instead`. Closes the answer if another call takes its place."""
    other = None
    try:
        other = await form.instead(exchange, state, call, answer)
    except BaseException:
        answer.close()
        raise
    if other is not None:
        answer.close()
    return other


def _reword_full_context(exchange: Exchange, state: ReplicaState, error: bytes) -> None:
    """Set an engine's error about a full context in the words of the client's API. error: as the engine writes it."""
    full = full_context(error)
    if full is None:
        return
    full.complete(exchange.booking.decision.prompt_tokens, state.context_tokens)
    attempts = exchange.attempts
    attempts.body = exchange.dialect.full_context_error(full, attempts.body or error, exchange.record.id)


def _without_usage(exchange: Exchange, call: ReplicaCall) -> ReplicaCall:
    """The call without the gateway's wish for usage; the same call if that is not in it."""
    exchange.charge_copy(call.body)
    body = without_usage(call.body)
    return call if len(body) == len(call.body) or call.adapted else call.with_body(body)


def _inspect_stream(exchange: Exchange, answer: ReplicaAnswer, begin: bytes) -> Coroutine[Any, Any, None] | None:
    """`Attempts._inspect` for a stream."""
    if not begin:
        raise ReplicaFailure("garbage", "the stream is empty")
    if exchange.api.keeps:
        exchange.attempts.object = exchange.answers.object_in(begin)
    first = exchange.answers.first_event(begin)
    if first is None:
        return None
    answer.note_prefill(on=True)
    return require_good_begin(answer, first, begin)


def _translated(exchange: Exchange, body: bytes) -> bytes:
    """A whole answer in the client's dialect: as events if it has asked for a stream, and takes no plain answer."""
    if not exchange.api.stream or exchange.request.any_form:
        return exchange.answers.whole(body)
    exchange.attempts.lines = STREAM_LINES
    return exchange.answers.as_stream(exchange.api, body)


def _nobody_can(exchange: Exchange) -> bool:
    """True if no tried replica has the endpoint. This is no failure, and no reason to use another pool."""
    return all(attempt["reason"] in _CANNOT for attempt in exchange.attempts.failed)


def _unknown_path() -> ReplicaFailure:
    return ReplicaFailure(UNKNOWN_PATH, "it does not have this endpoint", reached=0, blameless=True)


def _close(refusal: ReplicaAnswer | None) -> None:
    """Drop an earlier refusal, if there is one."""
    if refusal:
        refusal.close()


async def _begin_of(answer: ReplicaAnswer, most: int) -> bytes:
    """The first bytes of an error, up to `most`, which stay in the answer. Closes it on failure."""
    try:
        return await answer.begin(most)
    except BaseException:
        answer.close()
        raise


async def _error_of(answer: ReplicaAnswer, most: int) -> bytes:
    """The first bytes of an error, up to `most`, inflated if they are compressed. Closes the answer on failure."""
    data = await _begin_of(answer, most)
    return inflated_begin(data, answer.head.fields.compression, most)


class BegunAnswer(Protocol):
    """The part of a ReplicaAnswer that `require_good_begin` uses."""

    @property
    def complete(self) -> bool: ...
    def peek(self, start: int = 0) -> bytes: ...
    async def more(self) -> None: ...


async def require_good_begin(answer: BegunAnswer, first: FirstEvent, data: bytes) -> None:
    """Waits for the whole first event of a stream, if it may be the engine's failure, which comes with status 200 too.

    data: received beginning of the stream. Raises ReplicaFailure if it is one. O(bytes), also for small pieces.
    """
    seen = 0
    while not first.feed(data) and not answer.complete:
        seen += len(data)
        await answer.more()
        data = answer.peek(seen)


def _summary(answer: ReplicaAnswer) -> str:
    """An answer's status, and for an error the engine's message, as far as its body has arrived."""
    reason = excerpt(answer.peek()) if answer.status >= 400 else ""
    return f"answered {answer.status}: {reason}" if reason else f"answered {answer.status}"
