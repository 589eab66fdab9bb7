"""A request from start to end: the results of each phase, for the later phases.

`Exchange` begins with the request and its record. identify sets `caller`, parse `api`, admit `target` and `permit`, choose
`booking`. Further attempts renew the target and move the booking; another pool begins with a booking of its own. The body in
`api` is dropped when no further attempt can follow. `AttemptLog` is written by `attempts.py` and, for broken streams, by
`resumption.py`, which makes further attempts; `delivery.py` takes the answer's body from it. `DeliveryLog` is written by
`delivery.py` and `resumption.py`. The end of the request reads both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from gateway.accounting.consumed import Consumption, Prediction, consumed
from gateway.accounting.meter import Bill
from gateway.admission.memory import LARGE_BODY
from gateway.admission.pool_queue import Permit, Place
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import AnswerEditor, Answers, AnswerTail, Dialect, StreamReader
from gateway.dialects.usage import Usage, bounded, counted_once
from gateway.errors import HUNG, NO_ACCESS, REFUSED, UNREACHABLE, GatewayError
from gateway.fleet.breaker import Trial
from gateway.fleet.directory import Target
from gateway.fleet.state import ReplicaState
from gateway.request.answer_assembly import AnswerAssembly
from gateway.request.client import Caller, ClientReply, ClientRequest
from gateway.request.notes import Notes
from gateway.request.record import SettledRequest
from gateway.upstream.client import ReplicaAnswer, ReplicaCall
from gateway.upstream.loop_guard import VIA_HEADER
from router import Booking
from router.native import mypyc_attr

_OUR_WORDS: Final = frozenset(
    [REFUSED, UNREACHABLE, "reset", "timeout", NO_ACCESS, HUNG]
)  # failures that the gateway words itself
MISCOUNTED: Final = 2  # times the estimate: too many prompt tokens, of a replica that miscounts prompts
_HIDDEN: Final = 32_768  # tokens that a template, or a prompt of the server itself, may add to the text of a request
_SURE: Final = 4096  # tokens of a prompt; fewer are not compared with the model's context
_IDEMPOTENT: Final = frozenset(["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])  # RFC 9110, section 9.2.2


class AttemptLog:
    """The results of the attempts so far.

    failed: replica, reason and error of each failed attempt. sent: number of times that the request may have reached a replica
    before the answer's first byte. since: reading of the clock at the first attempt. resumptions: attempts to continue a broken
    stream that may have reached a replica. error: message of a replica's error that the client gets, or "". trial: of the
    replica that answers now. broken: trials whose answer broke off, until the cause is known. body: of a plain answer, or the
    beginning of a large one. object: the id of the object that the answer is. usage: in the body. tail: of a large answer.
    next_target: of another pool, which gets the request after this one failed. refusal: the last replica's answer, open until
    that pool has the request. Attempts in earlier pools are included in failed, sent and since. unfit: a requested capability
    that an engine lacks. notes: notes of attempts, or None. lines: of the head of an answer
    that the gateway has put into another form; b"": the replica's.
    """

    __slots__ = (
        "asked",
        "body",
        "broken",
        "error",
        "failed",
        "lines",
        "next_target",
        "notes",
        "object",
        "refusal",
        "resumptions",
        "sent",
        "since",
        "tail",
        "trial",
        "unfit",
        "usage",
    )

    def __init__(self) -> None:
        self.failed: tuple[dict[str, str], ...] = ()  # a tuple, because it mostly stays empty
        self.sent = 0
        self.since = 0.0
        self.lines = b""
        self.notes: Notes | None = None
        self.asked = False
        self.next_target: Target | None = None
        self.refusal: ReplicaAnswer | None = None
        self.resumptions = 0
        self.error = ""
        self.trial: tuple[Trial, ReplicaState] | None = None
        self.broken: tuple[tuple[Trial, ReplicaState], ...] = ()
        self.body = b""
        self.object = ""
        self.usage: Usage | None = None
        self.tail: AnswerTail | None = None
        self.unfit: GatewayError | None = None

    def add(self, replica: str, reason: str, error: str, now: float) -> None:
        """Record a failed attempt."""
        self.failed += ({"replica": replica, "reason": reason, "error": error},)
        self.note_end(reason, error, now)

    def note_end(self, reason: str, error: str, now: float) -> None:
        """Note the failure of the current attempt. The engine's own message is left out, because it may quote a prompt."""
        if self.notes is not None:
            self.notes.failed(reason, error if reason in _OUR_WORDS else "", now)

    def drop_refusal(self) -> None:
        """Close the refusal, which no client gets. Idempotent."""
        if self.refusal is not None:
            self.refusal.close()
            self.refusal = None


class DeliveryLog:
    """The progress of the answer to the client.

    status: 0 before an answer. reply: None before an answer. early: its head was sent before there was an answer. awaits_token:
    a stream has no token so far. first_token, last_byte: readings of the clock. sent_at: likewise, when a stream's client got
    bytes last; 0: not yet. done_sent: the stream's own end was sent: a client that disconnects then has everything.
    reader: of the stream. resumed: number of times that another replica continued it. passed: tokens of its finished streams.
    shown: a plain answer has a token. late: more tokens passed after the usage. error: why the answer could not be completed,
    or "". bill: of a plain answer, made before it was sent.
    """

    __slots__ = (
        "awaits_token",
        "bill",
        "done_sent",
        "early",
        "error",
        "first_token",
        "last_byte",
        "late",
        "passed",
        "reader",
        "reply",
        "resumed",
        "sent_at",
        "shown",
        "status",
        "usage",
    )

    def __init__(self) -> None:
        self.status = 0
        self.reply: ClientReply | None = None
        self.early = False
        self.sent_at = 0.0
        self.awaits_token = False
        self.first_token: float | None = None
        self.last_byte: float | None = None
        self.done_sent = False
        self.reader: StreamReader | None = None
        self.resumed = 0
        self.passed = 0
        self.shown = False
        self.late = False
        self.error = ""
        self.usage: Usage | None = None
        self.bill: Bill | None = None

    def passed_on(self, out: bytes, now: float) -> None:
        """Bytes of a stream have come, of which the client has got these."""
        self.last_byte = now
        if out:
            self.sent_at = now


@mypyc_attr(allow_interpreted_subclasses=True)
class AnswerTap:
    """A stage of the gateway through which a good answer passes to the client."""

    __slots__ = ()

    def repeatable(self) -> bool:
        """True if it may read the same answer in several streams: another replica begins it again, or continues it."""
        return False

    def reader(self, inner: StreamReader) -> StreamReader:
        """A reader around `inner`. If it holds the stream's end (`StreamReader.holds`), `ended` must follow."""
        raise NotImplementedError

    async def ended(self, reader: StreamReader) -> bytes:
        """The end of a stream that its reader has held."""
        raise NotImplementedError

    async def whole(self, body: bytes) -> bytes:
        """The body of a plain answer for the client."""
        raise NotImplementedError


class PoolBinding:
    """The only pool that may serve a request: no fallback takes it. refusal: makes the error if the request's model leads to
    another pool. Not strict: the request goes to this pool first, if the pool is well and the model leads to it.
    """

    __slots__ = ("pool", "refusal", "strict")

    def __init__(self, pool: str, refusal: Callable[[], GatewayError], *, strict: bool = True) -> None:
        self.pool = pool
        self.refusal = refusal
        self.strict = strict

    def __repr__(self) -> str:
        return f"<PoolBinding to {self.pool}>"


class PrefilledPrompt:
    """A prompt computed by another replica than the answering one. replica: its name. matched_tokens: cached there, by
    the index. cached_tokens: cached there, as it has reported; None: the replica that answers knows and reports them.
    """

    __slots__ = ("cached_tokens", "matched_tokens", "replica")

    def __init__(self, replica: str, matched_tokens: int, cached_tokens: int | None) -> None:
        self.replica = replica
        self.matched_tokens = matched_tokens
        self.cached_tokens = cached_tokens

    def __repr__(self) -> str:
        return f"<PrefilledPrompt by {self.replica}, {self.cached_tokens} tokens cached>"


class RewrittenRequest:
    """The request in another dialect, for all replicas that need it. answers: reads their answers."""

    __slots__ = ("answers", "body")

    def __init__(self, body: bytes, answers: Answers) -> None:
        self.body = body
        self.answers = answers


class Exchange:
    """The state of one request (see the module).

    caller, api, target, booking: set once their phase is over; parsed, booked: True then. permit: the slot in the pool. place:
    in its queue, or None. notes: of a feature that follows the request, or None. tap: stage through which a good answer passes,
    or None. salt: the tenant's, for engines, if tenants are isolated; else empty. rewritten: the request in another dialect,
    once a replica needed it.
    answers: reads the answer of the current replica: `dialect`, or set by its form (`forms.py`). edited: the editor of that
    answer, or None. assembly: assembles the answer as a value, or None. head_lines: of features, for the head of the answer.
    binding: of a feature, to one pool, or None. ended_by: the error with which a feature has cancelled the request's task, or
    None. instead: of a feature that has cancelled the task to answer the request itself, or None. body_size: bytes of the body
    when a replica was chosen, which is dropped before the answer ends. prefiller: the other replica that was last asked to
    compute the prompt, "" without one. prefilled: set by a form if it has computed it, or None.
    """

    __slots__ = (
        "_copied",
        "_judged",
        "answers",
        "api",
        "assembly",
        "attempts",
        "binding",
        "body_size",
        "booked",
        "booking",
        "caller",
        "delivered",
        "dialect",
        "edited",
        "ended_by",
        "head_lines",
        "instead",
        "notes",
        "parsed",
        "permit",
        "place",
        "prefilled",
        "prefiller",
        "record",
        "request",
        "rewritten",
        "salt",
        "tap",
        "target",
    )

    api: ApiRequest
    booking: Booking
    caller: Caller
    target: Target

    def __init__(self, request: ClientRequest, dialect: Dialect, record: SettledRequest) -> None:
        self.request = request
        self.dialect = dialect
        self.record = record
        self.permit: Permit | None = None
        self.place: Place | None = None
        self.notes: Notes | None = None
        self.tap: AnswerTap | None = None
        self.parsed = self.booked = False
        self.salt = self.head_lines = b""
        self.body_size = 0
        self.attempts = AttemptLog()
        self.delivered = DeliveryLog()
        self.answers: Answers = dialect
        self.rewritten: RewrittenRequest | None = None
        self.edited: AnswerEditor | None = None
        self.assembly: AnswerAssembly | None = None
        self.binding: PoolBinding | None = None
        self.ended_by: GatewayError | None = None
        self.instead: Callable[[Exchange], Awaitable[ClientReply]] | None = None
        self.prefiller = ""
        self.prefilled: PrefilledPrompt | None = None
        self._copied = False  # a changed copy of the body is charged
        self._judged: tuple[Usage, Usage | None] | None = None  # the usage as reported, and as far as it is believed

    def book(self, booking: Booking) -> None:
        """Set the booking on a replica. The number and the failures of attempts in an earlier pool are kept."""
        if self.booked:
            before, self.attempts = self.attempts, AttemptLog()
            before.drop_refusal()
            self.attempts.failed, self.attempts.sent, self.attempts.asked = before.failed, before.sent, before.asked
            self.attempts.since = before.since
        self.attempts.notes = self.notes
        self.booking = self.record.booking = booking
        self.body_size = len(self.api.body)
        self.booked = True

    def leave_queue(self) -> None:
        """Release the slot in the pool. Idempotent."""
        if self.permit is not None:
            self.permit.release()

    def call(self, body: bytes) -> ReplicaCall:
        """The request for any replica, with this body."""
        request, record = self.request, self.record
        headers = b"%bX-Request-Id: %b\r\n" % (request.upstream_headers(), (record.sent_id or record.id).encode("ascii"))
        via = request.headers.get(VIA_HEADER)
        call = ReplicaCall(request.method, request.target, headers, body, repeatable=self.repeatable, via=via)
        call.upgrades, call.request = request.upgrades, self
        return call

    @property
    def repeatable(self) -> bool:
        """True if the request may be repeated after it may have reached a replica."""
        api = self.api
        if self.request.method == "POST":
            return api.repeatable and not self.dialect.may_store(api, self.request.path)
        return self.request.method in _IDEMPOTENT

    def editor(self) -> AnswerEditor | None:
        """The editor of a good answer of the current replica, for features that the client asked for; or None."""
        prompt = self.booking.prompt
        if not (prompt.breakpoints or self.api.demands):
            return None  # nearly all answers
        trial = self.attempts.trial
        caches = trial is None or trial[1].facts.caching is not False
        self.edited = self.dialect.editor(self.api, prompt, caches=caches, diagnoses=self.diagnoses)
        return self.edited

    def assemble(self) -> AnswerAssembly | None:
        """An assembly of the answer as a value, for any number of callers, before the answer begins. None: no model answers."""
        if self.assembly is None and (assembler := self.dialect.assembler()):
            self.assembly = AnswerAssembly(assembler, self.request.lease)
        return self.assembly

    @property
    def diagnoses(self) -> bool:
        """True if the gateway answers `diagnostics`: not for a pool that is Anthropic's own API."""
        return self.target.strip_billing_header

    def rewrite(self, rewritten: RewrittenRequest) -> None:
        """Set the request in another dialect, which replicas of this pool get instead. Raises GatewayError without room for a
        large one.
        """
        if len(rewritten.body) >= LARGE_BODY:
            self.charge(len(rewritten.body))
        self.rewritten = rewritten

    def charge_copy(self, body: bytes) -> None:
        """Charge memory for a changed copy of the body, once. Raises GatewayError without room for it."""
        if len(body) >= LARGE_BODY and not self._copied:
            self.charge(len(body))
            self._copied = True

    @property
    def usage(self) -> Usage | None:
        """The engine's usage, without counts that are impossible or unreliable (`answer_counted`); None if the prompt cannot be
        so long.
        """
        reported, judged = self.delivered.usage, self._judged
        if reported is None:
            return None
        if judged is None or judged[0] is not reported:
            self._judged = judged = reported, self._believable(reported)
        return judged[1]

    @property
    def answer_counted(self) -> bool:
        """True if the engine has reported a possible count of the answer's tokens."""
        believed, reported = self.usage, self.delivered.usage
        return believed is not None and reported is not None and believed.completion == reported.completion

    def _believable(self, usage: Usage) -> Usage | None:
        """The part of a reported usage that is believed."""
        trial = self.attempts.trial
        if usage.prompt > _SURE or usage.completion > min(self.api.output or _SURE, _SURE):
            api, entry = self.api, trial[1].models.get(self.api.model) if trial is not None else None
            context = entry.context_tokens if entry is not None else None
            text = self.body_size + _HIDDEN if api.textual and api.countable and not self.delivered.resumed else None
            possible = bounded(usage, context, api.answers, api.output, turns=not api.countable, prompt=text)
            if possible is None:
                return None
            usage = possible
        if self.prefilled is not None:  # some engines count a prompt that they have taken over as cached
            cached = self.prefilled.cached_tokens
            return usage if cached is None else Usage(usage.prompt, usage.completion, min(cached, usage.prompt))
        if trial is not None and (not trial[1].engine.counts_cached or trial[1].findings):
            return self._audited(usage, trial[1])
        return usage

    def _audited(self, usage: Usage, state: ReplicaState) -> Usage | None:
        """The usage as far as the replica counts reliably."""
        estimate = self.booking.decision.prompt_tokens
        if state.miscounts_prompts and usage.prompt > min(MISCOUNTED * estimate, self.body_size) + _SURE:
            return None
        if state.miscounts_cached or not state.engine.counts_cached:
            return Usage(usage.prompt, usage.completion)
        if usage.cached and self.dialect.adds_cached and not self.answers.translated:
            return counted_once(usage, self.booking.decision.prompt_tokens)
        return usage

    def consumed(self, reported: Usage | None, *, whole: bool) -> Consumption:
        """The consumption of this request over all attempts. whole: the answer reached its end."""
        decision, trial = self.booking.decision, self.attempts.trial
        caches = trial is None or trial[1].facts.caching is not False
        cached = self.booking.paid_tokens if reported is None or reported.cached is None else 0
        predicted = Prediction(decision.prompt_tokens, cached, caches=caches)
        delivered = self.delivered
        whole = whole and not delivered.late and self.answer_counted
        return consumed(reported, predicted, delivered.passed, whole=whole, images=self.api.images)

    def give_up(self) -> None:
        """Another pool gets the request: drop the copies of its body, and release their memory. Idempotent."""
        lease, rewritten = self.request.lease, self.rewritten
        if self._copied:
            lease.shrink(len(self.api.body))
        if rewritten and len(rewritten.body) >= LARGE_BODY:
            lease.shrink(len(rewritten.body))
        self._copied, self.rewritten = False, None

    @property
    def wishes_usage(self) -> bool:
        """True if the gateway has asked for the usage of a stream that the client has not asked for in these words."""
        return self.api.strip_usage or (self.api.stream and self.answers.translated)

    @property
    def may_begin_again(self) -> bool:
        """True if a stream without a token so far may be begun again at another replica. Features that store the answer need
        one beginning.
        """
        begins = self.tap is None or self.tap.repeatable()
        return self.delivered.awaits_token and begins and self.repeatable

    def note_token(self, answer: ReplicaAnswer) -> None:
        """The first token of a stream has passed: the replica has computed the prompt. A batch has several prompts, and this
        shows only that the first one is computed.
        """
        delivered = self.delivered
        assert delivered.last_byte is not None
        delivered.awaits_token = False
        delivered.first_token = delivered.first_token or delivered.last_byte
        if self.api.countable or not self.api.size:
            self.booking.first_token(delivered.last_byte)
        answer.note_prefill(on=False)
        self.answered(answer)

    def answered(self, answer: ReplicaAnswer) -> None:
        """The answer has begun, a stream with its first token. Unless it is a stream that may have to be resumed, the request
        will not be repeated: its body is dropped once this answer's request has been sent.
        """
        if self.target.resume_streams and self.api.stream:
            return
        self.api.body = b""
        if self.rewritten:
            self.rewritten.body = b""
        answer.when_sent(self.request.lease.drop_body)

    def charge(self, size: int) -> None:
        """Charge memory: a piece of a plain answer, a copy of the body. Raises GatewayError without room for it."""
        self.request.lease.charge(size)

    def require_room(self) -> None:
        """Raises GatewayError without room for a large plain answer until the client has read it.

        The connection charges the bytes that the client has not read yet.
        """
        lease, size = self.request.lease, len(self.attempts.body)
        if size >= LARGE_BODY and not lease.fits(size):
            self.attempts.body = b""
            raise lease.refusal(size)

    def __repr__(self) -> str:
        return f"<Exchange {self.record.id}, {self.booking if self.booked else None!r}>"
