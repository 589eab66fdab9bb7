"""The forms of decoders: they wrap the form of the request's dialect, and add the prefill leg (see the package).

A vLLM decoder computes a prompt itself if anything fails before its first token: no prefiller, an error, no parameters, a
transfer that fails (500, or an error as the first event). It gets the call once more then, without the parameters.

A SGLang decoder waits for the prefiller that its call names. If that one fails first, the decoder's call is ended and both legs
are sent again, to another prefiller; without one, the request goes on to the next replica of the pool. A decoder may hear of
that failure before the gateway does, so its 500 waits for VERDICT_S. A prefiller is not interrupted when the decoder's answer
ends first. It is when that is an error, or the client leaves before it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from gateway.config.addresses import host_and_port
from gateway.dialects.json_edits import Members, read_object
from gateway.errors import GatewayError, ReplicaFailure
from gateway.features.disaggregation.bodies import (
    MAX_ROOM,
    PrefillAnswer,
    batch_size,
    bootstrap_body,
    decode_body,
    prefill_body,
    read_answer,
)
from gateway.features.disaggregation.prefilling import (
    FAILED,
    NO_PARAMS,
    NO_PREFILLER,
    NOT_TRANSFERRED,
    REFUSED,
    REMOTE,
    Leg,
    PrefillLegs,
)
from gateway.fleet.state import ReplicaState
from gateway.request.attempts import require_good_begin
from gateway.request.exchange import Exchange, PrefilledPrompt
from gateway.request.extensions import Extensions
from gateway.request.forms import EVENT_STREAM, NATIVE, Form, Sender
from gateway.upstream.client import ReplicaAnswer, ReplicaCall
from router import Outcome

log = logging.getLogger("warmroute.gateway")

MAX_ANSWER: Final = 1 << 20  # bytes of a prefiller's answer: the blocks of a million tokens are 400 kB
LARGE_ANSWER: Final = 64 << 10  # bytes: a larger one is read in a thread, because it may take 0.2 s
PREFILL_FAILED: Final = "status"  # reason of an attempt whose prefiller failed
VERDICT_S: Final = 1.0  # for the end of a prefill leg whose decoder has failed
_FAILED: Final = Outcome(False)
_OVERLOADED: Final = 429
_BROKEN: Final = 500  # if a transfer fails, at SGLang; where there is no room it is 503


class DecoderForm(Form):
    """A decoder. inner: the form of the dialect."""

    def __init__(self, inner: Form) -> None:
        self._inner = inner

    async def prepare(self, exchange: Exchange) -> None:
        if self._inner is not NATIVE:
            await self._inner.prepare(exchange)

    def call(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall) -> ReplicaCall:
        return self._inner.call(exchange, replica, call)

    async def instead(
        self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall, answer: ReplicaAnswer
    ) -> ReplicaCall | None:
        return None if self._inner is NATIVE else await self._inner.instead(exchange, replica, call, answer)


class TransferForm(DecoderForm):
    """A decoder that takes prompts over by `kv_transfer_params` (vLLM): one leg after the other."""

    def __init__(self, inner: Form, prefilling: PrefillLegs) -> None:
        super().__init__(inner)
        self._prefilling = prefilling

    async def send(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall, sender: Sender) -> ReplicaAnswer:
        prefilling = self._prefilling
        way = prefilling.local_way(exchange)
        leg = None if way else prefilling.begin(exchange)
        if leg is None:
            prefilling.count(exchange, way or NO_PREFILLER)
            return await sender(replica, call)
        answered = False
        try:
            members = _members(call)
            way, params = await self._prefill(exchange, leg, call, members, sender)
            if params:
                prefilling.renew(exchange, replica)
                answer = await self._taken_over(exchange, replica, call.with_body(decode_body(members, params)), sender)
                if answer is not None:
                    answered = True
                    prefilling.count(exchange, REMOTE)
                    return answer
                way, exchange.prefilled = NOT_TRANSFERRED, None
                _log(exchange, leg, way, f"{replica.name} could not take the prompt over")
            prefilling.count(exchange, way)
            answer = await sender(replica, call)
            answered = answer.status < 500
            return answer
        finally:
            leg.close(_FAILED)  # it has not begun if there was no room for its body
            leg.judge(answered=answered)

    async def _prefill(
        self, exchange: Exchange, leg: Leg, call: ReplicaCall, members: Members, sender: Sender
    ) -> tuple[str, bytes]:
        """(the reason why there are no parameters, the parameters for the decoder)."""
        exchange.charge_copy(call.body)
        leg_call = call.with_body(prefill_body(members, call.path))
        outcome = _FAILED
        try:
            while True:
                try:
                    status, read = await self._ask(exchange, leg, leg_call, sender)
                except ReplicaFailure as failure:
                    _log(exchange, leg, failure.reason, failure.message)
                    if leg.move(failure):
                        continue
                    return FAILED, b""
                if read is None:
                    _log(exchange, leg, "status", f"answered {status}")
                    return REFUSED, b""
                outcome = Outcome(True, read.prompt, read.cached)
                if not read.params:
                    _log(exchange, leg, NO_PARAMS, "no whole kv_transfer_params in its answer: has it --kv-transfer-config?")
                    return NO_PARAMS, b""
                chosen = leg.booking.chosen
                exchange.prefilled = PrefilledPrompt(chosen.replica, chosen.matched_tokens, read.cached or 0)
                return "", read.params
        finally:
            leg.close(outcome)

    async def _ask(self, exchange: Exchange, leg: Leg, call: ReplicaCall, sender: Sender) -> tuple[int, PrefillAnswer | None]:
        """(status, answer) of a prefiller; None: it refuses the prompt."""
        prefilling = self._prefilling
        answer = await sender(leg.state, call)
        try:
            leg.answers(answer.status)
            if answer.status != 200:
                return answer.status, None
            body = await answer.read(MAX_ANSWER)
            leg.booking.first_token(prefilling.clock())
            if len(body) > LARGE_ANSWER:
                return 200, await asyncio.to_thread(read_answer, body, exchange.answers)
            return 200, read_answer(body, exchange.answers)
        finally:
            answer.close()

    async def _taken_over(
        self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall, sender: Sender
    ) -> ReplicaAnswer | None:
        """The decoder's answer. None: it could not take the prompt over. Raises ReplicaFailure."""
        answer = await sender(replica, call)
        try:
            if answer.status >= 500:
                answer.close()
                return None
            begin = answer.peek()
            if answer.status == 200 and answer.content_type == EVENT_STREAM and begin:
                first = exchange.answers.first_event(begin)
                if first is not None:
                    await require_good_begin(answer, first, begin)
        except ReplicaFailure as failure:
            answer.close()
            if failure.reason == "reset":  # it has died
                raise
            return None
        except BaseException:
            answer.close()
            raise
        return answer


class BootstrapForm(DecoderForm):
    """A decoder that waits for the prefiller that its call names (SGLang): both legs at once."""

    def __init__(self, inner: Form, prefilling: PrefillLegs, ends: LegEnds, chance: random.Random) -> None:
        super().__init__(inner)
        self._prefilling = prefilling
        self._ends = ends
        self._chance = chance

    async def send(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall, sender: Sender) -> ReplicaAnswer:
        prefilling = self._prefilling
        leg = prefilling.begin(exchange)
        if leg is None:
            prefilling.count(exchange, NO_PREFILLER)
            raise ReplicaFailure(PREFILL_FAILED, "no prefiller is up for this decoder", reached=0, blameless=True)
        answered = False
        try:
            members = _members(call)
            exchange.charge_copy(call.body)
            while True:
                answer = await self._both(exchange, replica, leg, call.with_body(self._body(leg, members)), sender)
                if isinstance(answer, ReplicaAnswer):
                    answered = answer.status < 500
                    prefilling.count(exchange, REMOTE)
                    return answer
                _log(exchange, leg, answer.reason, answer.message)
                if not leg.move(answer):
                    prefilling.count(exchange, FAILED)
                    text = f"its prefiller {leg.state.name} has failed ({answer.message})"
                    raise ReplicaFailure(PREFILL_FAILED, text, reached=answer.reached, blameless=True)
        except BaseException:
            leg.close(_FAILED)
            raise
        finally:
            leg.judge(answered=answered)

    def _body(self, leg: Leg, members: Members) -> bytes:
        host = host_and_port(leg.state.url)[0]
        host = f"[{host}]" if ":" in host else host
        prompts = batch_size(members)
        rooms = [self._chance.randrange(MAX_ROOM) for _ in range(prompts or 1)]
        return bootstrap_body(members, host, leg.state.bootstrap_port, rooms if prompts else rooms[0])

    async def _both(
        self, exchange: Exchange, replica: ReplicaState, leg: Leg, call: ReplicaCall, sender: Sender
    ) -> ReplicaAnswer | ReplicaFailure:
        """The decoder's answer, the prefiller's refusal of the prompt, or the failure of the prefiller. Raises ReplicaFailure
        of the decoder.
        """
        prefill = asyncio.ensure_future(sender(leg.state, call))
        decode = asyncio.ensure_future(sender(replica, call))
        answer: ReplicaAnswer | None = None
        kept = False
        try:
            await asyncio.wait([prefill, decode], return_when=asyncio.FIRST_COMPLETED)
            if not prefill.done() and decode.exception() is None and decode.result().status == _BROKEN:
                await asyncio.wait([prefill], timeout=VERDICT_S)
            if prefill.done():
                try:
                    refusal = prefill.result()
                except ReplicaFailure as failure:
                    return ReplicaFailure(failure.reason, failure.message, reached=failure.reached, blameless=failure.blameless)
                if 400 <= refusal.status < 500:
                    leg.answers(refusal.status)
                    if refusal.status != _OVERLOADED:
                        leg.close(_FAILED)
                        kept = True
                        return refusal
                if refusal.status >= 400:
                    overloaded = refusal.status == _OVERLOADED
                    return ReplicaFailure("status", f"answered {refusal.status}", reached=1, blameless=overloaded)
            answer = await decode
            if answer.status >= 400:  # the prefiller would wait for it until its own timeout
                leg.close(_FAILED)
                return answer
            chosen = leg.booking.chosen
            exchange.prefilled = PrefilledPrompt(chosen.replica, chosen.matched_tokens, None)
            kept = True
            self._ends.follow(prefill, exchange, replica, leg)
            return answer
        finally:
            if answer is None:
                _abandon(decode)
            if not kept:
                _abandon(prefill)


class LegEnds:
    """The prefill legs that still run when the decoder has begun to answer: each is read to its end."""

    def __init__(self, prefilling: PrefillLegs) -> None:
        self._prefilling = prefilling
        self._running = set[asyncio.Task[None]]()

    def follow(self, prefill: asyncio.Future[ReplicaAnswer], exchange: Exchange, replica: ReplicaState, leg: Leg) -> None:
        """Read the leg's answer. If it fails before the decoder's first token, that call is ended."""
        task = asyncio.ensure_future(self._read(prefill, exchange, replica, leg))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """The gateway ends."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _read(self, prefill: asyncio.Future[ReplicaAnswer], exchange: Exchange, replica: ReplicaState, leg: Leg) -> None:
        outcome = _FAILED
        try:
            answer = await prefill
            try:
                leg.answers(answer.status)
                if answer.status >= 400:
                    raise ReplicaFailure("status", f"answered {answer.status}")
                leg.booking.first_token(self._prefilling.clock())
                while not answer.exhausted:
                    answer.take()
                    if not answer.complete:
                        await answer.more()
                outcome = Outcome(True)
            finally:
                answer.close()
        except ReplicaFailure as failure:
            _log(exchange, leg, failure.reason, failure.message)
            text = f"its prefiller {leg.state.name} has failed ({failure.message})"
            for connection, owner in list(self._prefilling.upstream.running(replica.url).items()):
                if owner is exchange:
                    connection.give_up(ReplicaFailure("reset", text, blameless=True))
        except GatewayError:  # the gateway has no connection left
            pass
        finally:
            leg.close(outcome)
            leg.judge(answered=False)


class DecoderForms:
    """Chooses the form for a decoder."""

    def __init__(self, prefilling: PrefillLegs, extensions: Extensions, ends: LegEnds, chance: random.Random) -> None:
        self._prefilling = prefilling
        self._extensions = extensions
        self._ends = ends
        self._chance = chance

    def of(self, exchange: Exchange, replica: ReplicaState, now: float) -> Form | None:
        """The form for this decoder. None: the request has no prompt, or is a session."""
        api = exchange.api
        if exchange.request.upgrades or not (api.metered and api.has_prompt):
            return None
        inner = self._inner(exchange, replica, now)
        if replica.engine.bootstraps:
            return BootstrapForm(inner, self._prefilling, self._ends, self._chance)
        return TransferForm(inner, self._prefilling)

    def _inner(self, exchange: Exchange, replica: ReplicaState, now: float) -> Form:
        for form_of in self._extensions.forms:
            form = form_of(exchange, replica, now)
            if form is not None:
                return form
        return NATIVE


def _members(call: ReplicaCall) -> Members:
    """The fields of the call's body. Raises ReplicaFailure if it is no JSON object, as a metered one is."""
    try:
        return read_object(call.body)
    except ValueError as error:
        raise ReplicaFailure("unfit", "its body is no JSON object", reached=0, blameless=True) from error


def _abandon(opening: asyncio.Future[ReplicaAnswer]) -> None:
    """Cancel a call, or close its answer."""
    if not opening.done():
        opening.cancel()
    elif not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _log(exchange: Exchange, leg: Leg, reason: str, error: str) -> None:
    about = {"id": exchange.record.id, "replica": leg.state.name, "reason": reason, "error": error}
    log.warning("a prefill failed", extra=about)
