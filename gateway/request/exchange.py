"""A request from its first moment to its end: what each phase has found, for those after it.

`Exchange` begins with the request and its record. identify sets `caller`, parse `api`, admit `target` and `permit`, choose
`booking`; further attempts renew the target and move the booking, another pool begins with a booking of its own, and the body
in `api` is dropped when there will be no further attempt. `AttemptLog` is written by `attempts.py` and, for broken streams, by
`resumption.py`, which makes further attempts; `delivery.py` takes the answer's body out of it. `DeliveryLog` is written by
`delivery.py` and `resumption.py`. The end of the request reads both.
"""

from __future__ import annotations

from typing import Final

from gateway.accounting.consumed import Consumption, Prediction, consumed
from gateway.accounting.meter import Bill
from gateway.admission.memory import LARGE_BODY
from gateway.admission.pool_queue import Permit
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import AnswerEditor, Answers, AnswerTail, Dialect, StreamReader
from gateway.dialects.usage import Usage
from gateway.errors import NO_ACCESS, REFUSED, UNREACHABLE, GatewayError, over_budget
from gateway.fleet.breaker import Trial
from gateway.fleet.directory import Target
from gateway.fleet.state import ReplicaState
from gateway.request.client import Caller, ClientReply, ClientRequest
from gateway.request.notes import Notes
from gateway.request.record import SettledRequest
from gateway.upstream.client import ReplicaAnswer, ReplicaCall
from gateway.upstream.loop_guard import VIA_HEADER
from router import Booking
from router.native import mypyc_attr

_OUR_WORDS: Final = frozenset([REFUSED, UNREACHABLE, "reset", "timeout", NO_ACCESS])  # failures that no engine has put in words
_IDEMPOTENT: Final = frozenset(["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])  # RFC 9110, section 9.2.2


class AttemptLog:
    """What became of the attempts so far.

    failed: replica, reason and error of each failed one. sent: times that the request may have reached a replica until its
    answer's first byte was here. resumptions: attempts to go on with a broken stream that may have reached one. error: why the
    client gets an error of a replica, "" if it gets none. trial: the one that the replica in charge answers; broken: those
    whose answer broke off, until it is known whose fault that was. body: of a plain answer, read whole, or the beginning of a
    large one; object: the id of the object that the answer is; usage: that in it; tail: of a large one only. elsewhere: another
    pool, which gets the request if this one has failed; refusal: the last replica's answer, open until that pool has it.
    Attempts in pools before are among those that failed, and were sent. unfit: what an engine cannot do that the request wants.
    notes: where attempts are noted, None: nowhere.
    """

    __slots__ = (
        "asked",
        "body",
        "broken",
        "elsewhere",
        "error",
        "failed",
        "notes",
        "object",
        "refusal",
        "resumptions",
        "sent",
        "tail",
        "trial",
        "unfit",
        "usage",
    )

    def __init__(self) -> None:
        self.failed: tuple[dict[str, str], ...] = ()  # a tuple, for nearly always it stays empty
        self.sent = 0
        self.notes: Notes | None = None
        self.asked = False
        self.elsewhere: Target | None = None
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
        """An attempt failed."""
        self.failed += ({"replica": replica, "reason": reason, "error": error},)
        self.note_end(reason, error, now)

    def note_end(self, reason: str, error: str, now: float) -> None:
        """The current attempt has failed, if it is noted: the engine's own words, which may quote a prompt, are left out."""
        if self.notes is not None:
            self.notes.failed(reason, error if reason in _OUR_WORDS else "", now)

    def drop_refusal(self) -> None:
        """Nobody gets it. Idempotent."""
        if self.refusal is not None:
            self.refusal.close()
            self.refusal = None


class DeliveryLog:
    """What went to the client.

    status: 0 while there is none. reply: once there is one. first_byte, last_byte: readings of the clock. done_sent: the
    stream's own end went out: a client that leaves then has everything. reader: of the stream. resumed: how often another
    replica went on with it. passed: tokens of its streams that are over. late: more of them passed after the usage. error: why
    the answer could not be completed, "" if it was. bill: of a plain answer, made before it went out.
    """

    __slots__ = (
        "bill",
        "done_sent",
        "error",
        "first_byte",
        "last_byte",
        "late",
        "passed",
        "reader",
        "reply",
        "resumed",
        "status",
        "usage",
    )

    def __init__(self) -> None:
        self.status = 0
        self.reply: ClientReply | None = None
        self.first_byte: float | None = None
        self.last_byte: float | None = None
        self.done_sent = False
        self.reader: StreamReader | None = None
        self.resumed = 0
        self.passed = 0
        self.late = False
        self.error = ""
        self.usage: Usage | None = None
        self.bill: Bill | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class AnswerTap:
    """A part of the gateway that a good answer passes on its way to the client."""

    __slots__ = ()

    def reader(self, inner: StreamReader) -> StreamReader:
        """Reads a stream. If it holds the stream's end back (`StreamReader.holds`), `ended` is to follow."""
        raise NotImplementedError

    async def ended(self, reader: StreamReader) -> bytes:
        """The end of a stream that its reader has held back."""
        raise NotImplementedError

    async def whole(self, body: bytes) -> bytes:
        """What the client gets for a plain answer."""
        raise NotImplementedError


class RewrittenRequest:
    """The request in another dialect, for all replicas that need it so. answers: reads what they answer."""

    __slots__ = ("answers", "body")

    def __init__(self, body: bytes, answers: Answers) -> None:
        self.body = body
        self.answers = answers


class Exchange:
    """See the top of this file.

    caller, api, target, booking: to be read once their phase is over; parsed, booked: whether it is. permit: the slot in the
    pool. notes: of a feature that follows the request, None: nobody does. tap: what a good answer passes, None: nothing. salt:
    the tenant's, for engines, where tenants are isolated; else empty. rewritten: the request in another dialect, once a
    replica needed that. answers: what reads the answer of the replica in charge: `dialect`, or what its form has set
    (`forms.py`). edited: what edits that answer, if anything does.
    """

    __slots__ = (
        "_copied",
        "answers",
        "api",
        "attempts",
        "booked",
        "booking",
        "caller",
        "delivered",
        "dialect",
        "edited",
        "notes",
        "parsed",
        "permit",
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
        self.notes: Notes | None = None
        self.tap: AnswerTap | None = None
        self.parsed = self.booked = False
        self.salt = b""
        self.attempts = AttemptLog()
        self.delivered = DeliveryLog()
        self.answers: Answers = dialect
        self.rewritten: RewrittenRequest | None = None
        self.edited: AnswerEditor | None = None
        self._copied = False  # a changed copy of the body is charged

    def book(self, booking: Booking) -> None:
        """A replica is chosen. Of attempts in a pool before this one their number and their failures stay."""
        if self.booked:
            before, self.attempts = self.attempts, AttemptLog()
            before.drop_refusal()
            self.attempts.failed, self.attempts.sent, self.attempts.asked = before.failed, before.sent, before.asked
        self.attempts.notes = self.notes
        self.booking = self.record.booking = booking
        self.booked = True

    def leave_queue(self) -> None:
        """Release the slot in the pool. Idempotent."""
        if self.permit is not None:
            self.permit.release()

    def call(self, body: bytes) -> ReplicaCall:
        """The request as it goes to any replica, with this body."""
        request = self.request
        headers = b"%bX-Request-Id: %b\r\n" % (request.upstream_headers(), self.record.id.encode("ascii"))
        via = request.headers.get(VIA_HEADER)
        call = ReplicaCall(request.method, request.target, headers, body, repeatable=self._is_repeatable(), via=via)
        call.upgrades = request.upgrades
        return call

    def _is_repeatable(self) -> bool:
        """Whether the request may be sent again after it may have reached a replica."""
        api = self.api
        if self.request.method == "POST":
            return api.repeatable and not self.dialect.may_store(api, self.request.path)
        return self.request.method in _IDEMPOTENT

    def editor(self) -> AnswerEditor | None:
        """For a good answer of the replica in charge, where the client has asked something of it."""
        prompt = self.booking.prompt
        if not (prompt.breakpoints or self.api.demands):
            return None  # nearly all answers
        trial = self.attempts.trial
        caches = trial is None or trial[1].facts.caching is not False
        self.edited = self.dialect.editor(self.api, prompt, caches=caches, diagnoses=self.diagnoses)
        return self.edited

    @property
    def diagnoses(self) -> bool:
        """Whether `diagnostics` is the gateway's to answer: not for a pool that is Anthropic's own API."""
        return self.target.strip_billing_header

    def rewrite(self, rewritten: RewrittenRequest) -> None:
        """Replicas of this pool get it in the place of the body. Raises GatewayError if there is no room for a large one."""
        if len(rewritten.body) >= LARGE_BODY:
            self.charge(len(rewritten.body))
        self.rewritten = rewritten

    def charge_copy(self, body: bytes) -> None:
        """Charge memory for a changed copy of the body, once. Raises GatewayError if there is no room for it."""
        if len(body) >= LARGE_BODY and not self._copied:
            self.charge(len(body))
            self._copied = True

    @property
    def usage(self) -> Usage | None:
        """As the engine has reported it, as far as it is known to count such tokens."""
        usage, trial = self.delivered.usage, self.attempts.trial
        if usage is not None and trial is not None and not trial[1].engine.counts_cached:
            return Usage(usage.prompt, usage.completion)
        return usage

    def consumed(self, reported: Usage | None, *, whole: bool) -> Consumption:
        """By this request, once, whatever attempts there were. whole: the answer came to its end."""
        decision, trial = self.booking.decision, self.attempts.trial
        caches = trial is None or trial[1].facts.caching is not False
        predicted = Prediction(decision.prompt_tokens, decision.best.matched_tokens, caches=caches)
        delivered = self.delivered
        return consumed(reported, predicted, delivered.passed, whole=whole and not delivered.late, images=self.api.images)

    def give_up(self) -> None:
        """Another pool gets the request: drop the copies of its body, and release what they were charged. Idempotent."""
        lease, rewritten = self.request.lease, self.rewritten
        if self._copied:
            lease.shrink(len(self.api.body))
        if rewritten and len(rewritten.body) >= LARGE_BODY:
            lease.shrink(len(rewritten.body))
        self._copied, self.rewritten = False, None

    def answered(self, answer: ReplicaAnswer) -> None:
        """The answer has begun. Unless it is a stream that may have to be resumed, the request will not be sent again: its body
        is dropped as soon as this answer's request has been sent.
        """
        if self.target.resume_streams and self.api.stream:
            return
        self.api.body = b""
        if self.rewritten:
            self.rewritten.body = b""
        answer.when_sent(self.request.lease.drop_body)

    def charge(self, size: int) -> None:
        """Charge memory: a piece of a plain answer, a copy of the body. Raises GatewayError if there is no room for it."""
        lease = self.request.lease
        if not lease.grow(size):
            raise over_budget(0, lease.account.largest)

    def require_room(self) -> None:
        """Raises GatewayError if there is no room for a large plain answer until the client has read it.

        The connection charges it as far as the client does not keep up.
        """
        lease, size = self.request.lease, len(self.attempts.body)
        if size >= LARGE_BODY and not lease.fits(size):
            self.attempts.body = b""
            raise over_budget(0, lease.account.largest)

    def __repr__(self) -> str:
        return f"<Exchange {self.record.id}, {self.booking if self.booked else None!r}>"
