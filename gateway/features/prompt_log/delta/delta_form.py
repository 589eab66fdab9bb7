"""The form of requests for a gateway that keeps logs: the new turns, and names for the rest.

    outline ── acknowledged heads ── a part is known ──► the rest of the body, with the header ──► 200, with the same input head
                    │                                          │ refused, or an answer without the header
                    └── nothing ──► the whole body, with it ◄──┘ at once, on the same request

A part is left out only if the other gateway has acknowledged it to the same caller, and `expect` has it compare the whole. The
head of a good answer arrives before the client gets anything, so a gateway that has forgotten the header (an older version) is
noticed in time: its answer is dropped, and it gets whole conversations of this model for OFF_S. Only of this model: a gateway
has no logs of models that it serves itself (workflows).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from gateway.dialects.excerpt import replica_error
from gateway.dialects.json_edits import Edit
from gateway.errors import ReplicaFailure
from gateway.features.prompt_log.delta.delta_answers import DeltaAnswers
from gateway.features.prompt_log.delta.delta_request import DELTA, DeltaRequest, LogWords, scope_of, words_in, words_of
from gateway.features.prompt_log.delta.expiring_keys import ExpiringKeys
from gateway.features.prompt_log.delta.outline import BodyOutline, open_digest
from gateway.features.prompt_log.delta.outlines import Outlines
from gateway.features.prompt_log.delta.passed_heads import PassedHeads
from gateway.features.prompt_log.delta.planning import DeltaPlan, frame_key, log_key, plan_of, whole_plan
from gateway.features.prompt_log.header import HEADER
from gateway.features.prompt_log.log_request import FORMS_BY_PATH
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.fleet.state import ReplicaState
from gateway.request.answer_assembly import AnswerAssembly
from gateway.request.exchange import Exchange
from gateway.request.forms import EVENT_STREAM, Form
from gateway.request.owner import owner
from gateway.upstream.client import ReplicaAnswer, ReplicaCall

log = logging.getLogger("warmroute.gateway")

MOST_HEADS: Final = 65_536
OFF_S: Final = 600.0
MOST_OFF: Final = 1024  # clients choose the names of models
_NAME: Final = HEADER.lower().encode()
_MAX_ERROR: Final = 16 << 10  # bytes of an error that are read
_NOT_ABOUT_LOGS: Final = frozenset([401, 403, 408, 429])
_UNREADABLE: Final = "state_unavailable"
_FORGOTTEN: Final = frozenset(
    ["prompt_log_not_found", "prompt_log_expired", "prompt_log_form", "prompt_log_diverged", "prompt_frame_not_found"]
)


class DeltaForm(Form):
    """The form (see the module). passed: clients' own headers Prompt-Log go to the other gateway, whose answers have it; None:
    the header is served here. wall_clock: Unix seconds. clock: monotonic seconds.
    """

    def __init__(
        self,
        outlines: Outlines,
        metrics: PromptLogMetrics,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        passed: PassedHeads | None,
    ) -> None:
        self.heads = ExpiringKeys(MOST_HEADS)  # acknowledged; a key begins with its scope, so no caller uses another one's
        self.outlines = outlines
        self._metrics = metrics
        self._wall_clock = wall_clock
        self._clock = clock
        self._passed = passed
        self._without_logs = ExpiringKeys(MOST_OFF)  # replicas and models
        self._said = dict[str, float]()  # when it was logged that a replica keeps nothing

    def of(self, exchange: Exchange, replica: ReplicaState, now: float) -> Form | None:
        """This form, if the pool has the option and the request may be a turn of a log."""
        if not exchange.target.delta or exchange.request.path not in FORMS_BY_PATH:
            return None
        return self

    async def prepare(self, exchange: Exchange) -> None:
        api, request = exchange.api, DELTA.get(exchange.record)
        if request is not None and request.body is api.body:
            return
        outline, chosen = None, exchange.target.replicas[exchange.booking.chosen.replica]
        if api.answers <= 1 and not self._is_own(exchange) and not self._is_off(exchange, chosen):
            form, owner_id = FORMS_BY_PATH[exchange.request.path], owner(exchange.request, exchange.caller)
            outline = await self.outlines.of(api.body, form, owner_id, exchange.request.lease)
        DELTA.set(exchange.record, DeltaRequest(api.body, outline))

    def call(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall) -> ReplicaCall:
        request = DELTA.get(exchange.record)
        assert request is not None, "it is prepared"
        request.plan, request.call = None, call
        if call.body is request.body and request.outline is not None and not self._is_off(exchange, replica):
            request.replica = replica.name
            request.scope = scope_of(exchange, replica.url)
            request.plan = plan_of(request.outline, partial(self._knows, request.scope))
        return self._planned(exchange, replica, request)

    def edits(self, exchange: Exchange, replica: ReplicaState) -> list[Edit]:
        request = DELTA.get(exchange.record)
        native = super().edits(exchange, replica)
        if request is None or request.plan is None or not request.plan.edits:
            return native
        cut = request.plan.edits
        return [each for each in native if not any(start <= each[0] and each[1] <= end for start, end, _ in cut)] + cut

    async def instead(
        self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall, answer: ReplicaAnswer
    ) -> ReplicaCall | None:
        request = DELTA.get(exchange.record)
        assert request is not None, "it is prepared"
        value = answer.head.get(_NAME)
        if self._is_own(exchange):
            exchange.head_lines = b"%b: %b\r\n" % (HEADER.encode(), value) if value else b""
            self._note(exchange, value, answer)
        plan, words, outline = request.plan, words_in(value), request.outline
        if plan is None or outline is None:
            self._counts(request, answer, "off", 0)
            return None
        if answer.status == 200:
            if words is not None and words.input == outline.chain:
                self._read(exchange, request, outline, plan, words, answer)
                self._counts(request, answer, "delta" if plan.cuts else "whole", plan.saved)
                return None
            self._leave_alone(exchange, replica)
            if not plan.cuts:
                self._counts(request, answer, "off", 0)
                return None
            return self._again(exchange, replica, request, None)
        refusal = await self._refusal(request, outline, plan, words, answer)
        if refusal is None:
            self._counts(request, answer, "delta" if plan.cuts else "whole", plan.saved)
            return None
        return self._again(exchange, replica, request, whole_plan(outline) if plan.cuts else None)

    def _is_own(self, exchange: Exchange) -> bool:
        """True if the client speaks with the other gateway itself."""
        return self._passed is not None and self._passed.concerns(exchange)

    def _note(self, exchange: Exchange, value: bytes, answer: ReplicaAnswer) -> None:
        """Has the heads of an answer to such a client noted."""
        words, passed = words_in(value), self._passed
        if passed is None or words is None or answer.status != 200:
            return
        passed.note(exchange, words)
        assembler = exchange.dialect.assembler()
        if answer.content_type == EVENT_STREAM and assembler is not None:

            def told(names: Any, _ids: list[str]) -> None:
                if (later := words_of(names)) is not None:
                    passed.note(exchange, later)

            assembly = AnswerAssembly(assembler, exchange.request.lease)
            exchange.answers = DeltaAnswers(exchange.dialect, told, assembly, keeps=True)

    def _planned(self, exchange: Exchange, replica: ReplicaState, request: DeltaRequest) -> ReplicaCall:
        """The call with its plan."""
        assert request.call is not None
        sent = super().call(exchange, replica, request.call)
        if request.plan is not None:
            sent = sent.with_headers(sent.headers + request.plan.header)
        elif self._is_own(exchange):
            own = (exchange.request.headers.get(HEADER) or "").encode("latin-1", "replace")
            sent = sent.with_headers(b"%b%b: %b\r\n" % (sent.headers, HEADER.encode(), own))
        request.sent += len(sent.body)
        return sent

    def _again(self, exchange: Exchange, replica: ReplicaState, request: DeltaRequest, plan: DeltaPlan | None) -> ReplicaCall:
        """The call with another plan, which leaves nothing out; None: without the header."""
        request.replayed, request.plan = True, plan
        return self._planned(exchange, replica, request)

    def _knows(self, scope: bytes, key: bytes) -> bool:
        return self.heads.has(scope + key, self._wall_clock())

    async def _refusal(
        self, request: DeltaRequest, outline: BodyOutline, plan: DeltaPlan, words: LogWords | None, answer: ReplicaAnswer
    ) -> str | None:
        """The code of an error that is, or may be, about the log ("": it has none). None: it is about the client's request."""
        status = answer.status
        if words is not None or not (400 <= status < 500 or status == 503) or status in _NOT_ABOUT_LOGS:
            return None
        try:
            code = replica_error(status, await answer.begin(_MAX_ERROR)).code
        except ReplicaFailure:
            return "" if plan.cuts else None
        if code in _FORGOTTEN:
            self._forget(request, outline)
        if status == 503:
            return code if code == _UNREADABLE else None
        return code if plan.cuts or code.startswith("prompt_log") else None

    def _forget(self, request: DeltaRequest, outline: BodyOutline) -> None:
        self.heads.forget(request.scope + frame_key(outline.frame))
        for place in outline.places:
            self.heads.forget(request.scope + log_key(place.chain, place.open))

    def _read(
        self,
        exchange: Exchange,
        request: DeltaRequest,
        outline: BodyOutline,
        plan: DeltaPlan,
        words: LogWords,
        answer: ReplicaAnswer,
    ) -> None:
        """Has the names in the answer read."""
        assembler = exchange.dialect.assembler()
        assert assembler is not None, "a model answers on these paths"
        stream = answer.content_type == EVENT_STREAM

        def told(names: Any, ids: list[str]) -> None:
            later = words_of(names) if stream else words
            if later is not None:
                self._acknowledge(request, outline, plan, later._replace(frame=words.frame), ids)

        assembly = AnswerAssembly(assembler, exchange.request.lease)
        exchange.answers = DeltaAnswers(exchange.dialect, told, assembly)

    def _acknowledge(
        self, request: DeltaRequest, outline: BodyOutline, plan: DeltaPlan, words: LogWords, ids: list[str]
    ) -> None:
        """Notes the heads of a kept turn. ids: of the answer's calls."""
        scope, expires, heads = request.scope, words.expires, self.heads
        if not expires:
            self._note_loss(request.replica)
            return
        if plan.base is not None:
            heads.add(scope + log_key(plan.base.chain, plan.base.open), expires)  # it lives as long as its last turn
        heads.add(scope + log_key(outline.chain, open_digest(outline.open)), expires)
        if words.head is not None:
            heads.add(scope + log_key(words.head, open_digest([*outline.open, *ids])), expires)
        if words.frame == outline.frame:
            heads.add(scope + frame_key(outline.frame), expires)

    def _note_loss(self, replica: str) -> None:
        """A replica does not keep a turn: logged every OFF_S at most."""
        now = self._clock()
        if now >= self._said.get(replica, now):
            log.warning(
                "a replica of a pool with delta does not keep turns (state off, full, or failing)", extra={"replica": replica}
            )
            self._said[replica] = now + OFF_S

    def _counts(self, request: DeltaRequest, answer: ReplicaAnswer, result: str, saved: int) -> None:
        """The answer counts, unless another replica is asked because of it. result: of a request that was not replayed."""
        if answer.status < 500:
            self._metrics.delta_requests.add(("replayed" if request.replayed else result,))
        self._metrics.delta_bytes.add(("sent",), request.sent)
        if saved:
            self._metrics.delta_bytes.add(("saved",), saved)
        request.sent = 0
        if answer.status == 200:
            request.release()

    def _is_off(self, exchange: Exchange, replica: ReplicaState) -> bool:
        """True if the replica keeps no logs of the model."""
        return self._without_logs.has(_off_key(exchange, replica), self._clock())

    def _leave_alone(self, exchange: Exchange, replica: ReplicaState) -> None:
        """The replica does not know the header, or the model is a workflow."""
        if not self._is_off(exchange, replica):
            about = {"replica": replica.name, "model": exchange.target.label, "for_s": int(OFF_S)}
            log.warning("a replica of a pool with delta answers without Prompt-Log: it gets whole conversations", extra=about)
        self._without_logs.add(_off_key(exchange, replica), self._clock() + OFF_S)


def _off_key(exchange: Exchange, replica: ReplicaState) -> bytes:
    return f"{replica.url}\0{exchange.target.model}".encode("utf-8", "surrogatepass")
