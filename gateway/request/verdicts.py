"""Verdicts on failed attempts: the replica's fault, which its breaker counts, or the request's.

A failed attempt is judged when the request's outcome is known:

    another replica answered well                 the replica's fault      counts
    another one failed on the same request        the request's fault      counts for none of them
    no other one could be tried, or all others    `lone_failures.py`       counts, unless the client has failures elsewhere
      refused it without a verdict (429, ...)
    another one was not tried for lack of budget  unknown                  does not count
    a limit of the gateway ended it               unknown                  does not count, and is not compared with others

A connection that could not be opened is never the request's fault, and counts at once. 429 shows nothing about the replica
unless several clients get it (`fleet/refusals.py`); 503 with Retry-After is overload, and no failure; 501 means that its engine
has no such endpoint: an answer like 404, the same at all replicas. 508 to a request that has passed another gateway concerns
its way, or the client has forged that header, and is no failure either. An answer that breaks off is judged by
`Attempts.judge_broken`.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import ReplicaFailure
from gateway.fleet.breaker import Trial
from gateway.fleet.directory import Fleet
from gateway.fleet.refusals import REST_MOST_S
from gateway.fleet.state import ReplicaState
from gateway.request.client import ClientRequest
from gateway.request.lone_failures import LoneFailures
from gateway.upstream.client import ReplicaAnswer
from gateway.upstream.loop_guard import LOOP_DETECTED, VIA_HEADER

_OVERLOADED: Final = 429
_NOT_IMPLEMENTED: Final = 501
_UNAVAILABLE: Final = 503


class Verdicts:
    """The failed attempts of one request, until its outcome is known; then call `judge`.

    answered: a replica answered the request well. refused: the last replica with the endpoint answered with a refusal. unsure:
    another replica was available and not tried, or a limit of the gateway ended its attempt. unpaid: there was no budget for
    another attempt.
    """

    __slots__ = ("_fleet", "_lone", "_request", "answered", "failed", "refused", "unpaid", "unsure")

    def __init__(self, fleet: Fleet, lone: LoneFailures, request: ClientRequest) -> None:
        self._fleet = fleet
        self._lone = lone
        self._request = request
        self.failed: tuple[tuple[Trial, ReplicaState], ...] = ()  # a tuple, because it mostly stays empty
        self.answered = self.refused = self.unpaid = self.unsure = False

    def failure(self, failure: ReplicaFailure, state: ReplicaState, trial: Trial, now: float) -> None:
        """An attempt gave no answer."""
        if failure.blameless:
            trial.abandoned()
            self.unsure = True
        elif failure.reached:
            self.failed += ((trial, state),)
        else:
            trial.failure(now)
            self._fleet.suspect(state)

    def answer(self, answer: ReplicaAnswer, state: ReplicaState, trial: Trial, now: float) -> None:
        """An attempt gave an answer; its status shows something about the replica."""
        status = answer.status
        if status == _OVERLOADED:
            trial.success()
            if seconds := _retry_after(answer):
                self._fleet.refused(state, client_hash(self._request), seconds, now)
        elif status < 500 or status == _NOT_IMPLEMENTED:
            trial.success()
            if state.refusals:
                state.refusals.answered()
        elif status == _UNAVAILABLE and (seconds := _retry_after(answer)):
            trial.abandoned()
            self._fleet.rests(state, seconds, now)
        elif status == LOOP_DETECTED and self._request.headers.get(VIA_HEADER) is not None:
            trial.abandoned()
        else:
            self.failed += ((trial, state),)

    def judge(self, now: float) -> None:
        """The request's outcome is known. Further calls do nothing."""
        failed, self.failed = self.failed, ()
        replicas_fault = self.answered
        if len(failed) == 1 and not (replicas_fault or self.unsure):
            replicas_fault = self._lone.failed(client_hash(self._request), failed[0][1].name, now)
        for trial, state in failed:
            if replicas_fault and state.up_since <= trial.begun:
                trial.failure(now)
                self._fleet.suspect(state)
            else:
                trial.abandoned()

    def __repr__(self) -> str:
        return f"<Verdicts about {[state.name for _, state in self.failed]}>"


def client_hash(request: ClientRequest) -> int:
    """A key for a client by its address, which it cannot forge."""
    return hash(request.lease.account.client)


def is_answer(answer: ReplicaAnswer) -> bool:
    """True if the client should get the answer even if another replica is left: it is no refusal."""
    status = answer.status
    return (status < 500 and status != _OVERLOADED) or status == _NOT_IMPLEMENTED


def _retry_after(answer: ReplicaAnswer) -> float:
    """The seconds of its Retry-After, at most REST_MOST_S; 0 without one, or for a date, because clocks differ."""
    value = answer.head.get(b"retry-after")
    if not value.isdigit():
        return 0.0
    return float(value) if len(value) < 10 else REST_MOST_S
