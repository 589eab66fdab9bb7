"""Whose fault it is that an attempt failed: the replica's, which its breaker counts, or the request's.

A failed attempt is judged when the request's outcome is known:

    another replica answered well                 the replica's fault      it counts
    another one failed on the same request        the request's fault      it counts against none of them
    no other one could be tried                   `lone_failures.py`       it counts, unless the client's others fail elsewhere
    another one was not tried for lack of budget  not known                it does not count
    a limit of the gateway's ended it             not known                it does not count, nor is it compared with others

A connection that could not be had is no request's fault, and counts at once. 429 says nothing about the replica unless several
clients hear it (`health.Refusals`); 503 with Retry-After means that the replica wants to rest, and is no failure; 501 means
that its engine does not have such an endpoint: an answer like 404, the same everywhere. 508 to a request that has passed
another gateway is about its way, or a client has forged that header, and is no failure either. What breaks off after it has
begun is judged by `Failover.settle`.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import ReplicaFailure
from gateway.exchange import Request
from gateway.health import REST_MOST_S
from gateway.health import Attempt as Watched
from gateway.lone_failures import LoneFailures
from gateway.loops import LOOP_DETECTED, VIA_HEADER
from gateway.outgoing import address_of
from gateway.relay import Attempt
from gateway.replica_state import ReplicaState
from gateway.replicas import Fleet

_OVERLOADED: Final = 429
_NOT_IMPLEMENTED: Final = 501
_UNAVAILABLE: Final = 503


class Alone:
    """What the failures show that no other replica could be compared with: `lone_failures.py`, for requests."""

    __slots__ = ("_lone",)

    def __init__(self) -> None:
        self._lone = LoneFailures()

    def failed(self, request: Request, state: ReplicaState, now: float) -> bool:
        """Whether it counts for the replica's breaker."""
        return self._lone.failed(_client(request), state.name, now)

    def answered(self, request: Request, state: ReplicaState, watched: Watched) -> None:
        """The replica's answer was good and went out whole."""
        if watched.begun < self._lone.until:  # mostly there is nothing to be forgotten
            self._lone.answered(_client(request), state.name, watched.begun)

    def __repr__(self) -> str:
        return f"<Alone {self._lone!r}>"


class Doubts:
    """One request's failed attempts, until its outcome is known; then `settle`.

    answered: a replica answered the request well. refused: the last one answered, with a refusal. unsure: another one was
    there and not tried, or gave no verdict.
    """

    __slots__ = ("_alone", "_fleet", "_request", "answered", "failed", "refused", "unsure")

    def __init__(self, fleet: Fleet, alone: Alone, request: Request) -> None:
        self._fleet = fleet
        self._alone = alone
        self._request = request
        self.failed: list[tuple[Watched, ReplicaState]] = []
        self.answered = self.refused = self.unsure = False

    def failure(self, failure: ReplicaFailure, state: ReplicaState, watched: Watched, now: float) -> None:
        """An attempt gave no answer."""
        if failure.blameless:
            watched.abandoned()
            self.unsure = True
        elif failure.reached:
            self.failed.append((watched, state))
        else:
            watched.failure(now)
            self._fleet.troubles(state)

    def answer(self, attempt: Attempt, state: ReplicaState, watched: Watched, now: float) -> None:
        """An attempt gave an answer: what its status says about the replica."""
        status = attempt.status
        if status == _OVERLOADED:
            watched.success()
            if seconds := _retry_after(attempt):
                self._fleet.refused(state, _client(self._request), seconds, now)
        elif status < 500 or status == _NOT_IMPLEMENTED:
            watched.success()
            if state.refusals:
                state.refusals.answered()
        elif status == _UNAVAILABLE and (seconds := _retry_after(attempt)):
            watched.abandoned()
            self._fleet.rests(state, seconds, now)
        elif status == LOOP_DETECTED and self._request.headers.get(VIA_HEADER) is not None:
            watched.abandoned()
        else:
            self.failed.append((watched, state))

    def settle(self, now: float) -> None:
        """The request's outcome is known. Further calls do nothing."""
        failed, self.failed = self.failed, []
        replicas_fault = self.answered
        if len(failed) == 1 and not (replicas_fault or self.unsure):
            replicas_fault = self._alone.failed(self._request, failed[0][1], now)
        for watched, state in failed:
            if replicas_fault:
                watched.failure(now)
                self._fleet.troubles(state)
            else:
                watched.abandoned()

    def __repr__(self) -> str:
        return f"<Doubts about {[state.name for _, state in self.failed]}>"


def _client(request: Request) -> int:
    return hash(address_of(request))


def is_answer(attempt: Attempt) -> bool:
    """Whether the client should get it even if another replica is left: it is no refusal."""
    status = attempt.status
    return (status < 500 and status != _OVERLOADED) or status == _NOT_IMPLEMENTED


def _retry_after(attempt: Attempt) -> float:
    """Seconds for which the replica asks to be left alone, REST_MOST_S at most; 0: it does not, or by a date, which nobody's
    clock agrees on.
    """
    value = attempt.head.get(b"retry-after")
    if not value.isdigit():
        return 0.0
    return float(value) if len(value) < 10 else REST_MOST_S
