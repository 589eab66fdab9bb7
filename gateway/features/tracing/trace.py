"""The record of a traced request: times, decisions, attempts. Spans are made from it at the request's end.

    begun ── receive ── parse ── recall ── admit ── choose ──┬── deliver ── ended      phases: each ends when the next begins
                                             ▲               │
                                             └─ another pool ┤
                                                             └── attempt, attempt, ...  from the call to the answer's end

A request that is not traced has no `Trace`, and its phases do not read the clock. The record is bounded: a few phases for each
pool, and each pool is tried at most once; attempts by MAX_ATTEMPTS, because a request may try thousands of replicas that refuse
connections. Of more attempts, the first ones and the last one are kept.
"""

from __future__ import annotations

from typing import Final

from gateway.features.tracing.context import SAMPLED, traceparent, with_parent
from gateway.fleet.state import ReplicaState
from gateway.request.notes import DELIVER, Notes
from gateway.request.slots import Slot
from gateway.upstream.client import ReplicaCall
from router import Candidate, Decision

MAX_SHOWN: Final = 5  # candidates of a decision
MAX_ATTEMPTS: Final = 64
# Ids of spans: the root's + 1, 3, 5, ... for attempts, + 2, 4, 6, ... for phases.
_FIRST_ATTEMPT: Final = 1
_FIRST_PHASE: Final = 2
ROOT_BITS: Final = 62  # of a root's id, so that the ids of its spans have at most 63


class Phase:
    """A phase of the request. Times are of the gateway's clock, in seconds."""

    __slots__ = ("begun", "name")

    def __init__(self, name: str, begun: float) -> None:
        self.name = name
        self.begun = begun

    def __repr__(self) -> str:
        return f"<Phase {self.name}>"


class Attempt:
    """A call to a replica. ended: time of its failure; None if it runs or has succeeded. failure: its reason, "" without
    one; text: details, written by the gateway. resumes: it continues a broken stream.
    """

    __slots__ = ("begun", "ended", "engine", "failure", "replica", "resumes", "span_id", "text", "url")

    def __init__(self, span_id: str, replica: str, url: str, engine: str, begun: float) -> None:
        self.span_id = span_id
        self.replica = replica
        self.url = url
        self.engine = engine
        self.begun = begun
        self.ended: float | None = None
        self.failure = ""
        self.text = ""
        self.resumes = False

    def __repr__(self) -> str:
        return f"<Attempt on {self.replica}, {self.failure or 'good'}>"


class Choice:
    """A decision of the router. candidates: their number; shown: the best ones, in order."""

    __slots__ = ("candidates", "decision", "policy", "pool", "shown")

    def __init__(self, policy: str, pool: str, decision: Decision, ranking: list[Candidate]) -> None:
        """ranking: all candidates."""
        self.policy = policy
        self.pool = pool
        self.decision = decision
        self.candidates = len(ranking)
        self.shown = ranking[:MAX_SHOWN]

    def __repr__(self) -> str:
        return f"<Choice by {self.policy}, {self.decision!r}>"


class Trace(Notes):
    """parent_id: of the client's span, "" if the request starts a trace. origin_ns: Unix time in nanoseconds when the gateway's
    clock was zero. remote: its parent is the client's span. keeps_state: the tracestate of the client belongs to the trace.
    """

    __slots__ = (
        "attempts",
        "choices",
        "flags",
        "keeps_state",
        "method",
        "origin_ns",
        "parent_id",
        "phases",
        "remote",
        "root",
        "trace_id",
        "tried",
    )

    def __init__(self, trace_id: str, parent_id: str, root: int, method: str, origin_ns: int) -> None:
        """root: the id of the request's span, a number of ROOT_BITS."""
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.root = root
        self.method = method
        self.origin_ns = origin_ns
        self.remote = self.keeps_state = bool(parent_id)
        self.flags = SAMPLED
        self.phases: list[Phase] = []
        self.attempts: list[Attempt] = []
        self.tried = 0  # number of all attempts
        self.choices: list[Choice] = []

    @property
    def span_id(self) -> str:
        """Id of the request's span."""
        return f"{self.root:016x}"

    def phase_id(self, number: int) -> str:
        return f"{self.root + _FIRST_PHASE + 2 * number:016x}"

    def enter(self, phase: str, now: float) -> None:
        self.phases.append(Phase(phase, now))

    def chose(self, choice: Choice) -> None:
        self.choices.append(choice)

    def attempt(self, replica: str, url: str, engine: str, now: float) -> bytes:
        """Start an attempt. Returns its traceparent for the replica."""
        span_id = f"{self.root + _FIRST_ATTEMPT + 2 * self.tried:016x}"
        self.tried += 1
        made = Attempt(span_id, replica, url, engine, now)
        made.resumes = bool(self.phases) and self.phases[-1].name == DELIVER
        if len(self.attempts) >= MAX_ATTEMPTS:
            self.attempts.pop()
        self.attempts.append(made)
        return traceparent(self.trace_id, span_id, self.flags)

    def calls(self, call: ReplicaCall, replica: ReplicaState, now: float) -> ReplicaCall:
        """The call with a traceparent, so that the replica's spans are children of the attempt."""
        parent = self.attempt(replica.name, replica.url, replica.engine.name, now)
        return call.with_headers(with_parent(call.headers, parent, keeps_state=self.keeps_state))

    def failed(self, reason: str, text: str, now: float) -> None:
        """Record that the last attempt has failed. Idempotent."""
        if self.attempts and self.attempts[-1].ended is None:
            last = self.attempts[-1]
            last.ended, last.failure, last.text = now, reason, text

    def __repr__(self) -> str:
        return f"<Trace {self.trace_id}-{self.span_id}, {self.tried} attempts>"


TRACE: Final = Slot[Trace]("tracing")
