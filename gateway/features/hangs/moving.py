"""Moves requests without a first token from a hung replica to another one, by the failover before the first token."""

from __future__ import annotations

from gateway.core import Core
from gateway.errors import HUNG, ReplicaFailure
from gateway.features.hangs.metrics import HangMetrics
from gateway.fleet.membership import DECODE, PREFILL
from gateway.fleet.state import ReplicaState
from gateway.request.attempts import MAX_REACHED
from gateway.request.exchange import Exchange
from gateway.upstream.client import UpstreamClient
from gateway.upstream.connection import Connection


def running_at(upstream: UpstreamClient, state: ReplicaState) -> list[tuple[Connection, object]]:
    """The requests that run at a replica, by their connections. The data-parallel ranks of a server share its connections."""
    running = list(upstream.running(state.url).items())
    if state.member.rank is None:
        return running
    return [each for each in running if isinstance(each[1], Exchange) and _is_at(each[1], state)]


def _is_at(exchange: Exchange, state: ReplicaState) -> bool:
    """True if the replica, one of the ranks of a server at which the request runs, is the rank that was chosen."""
    return state.name == (exchange.prefiller if state.role == PREFILL else exchange.booking.lease.replica)


class MovingRequests:
    """Moves requests (see the module). A request moves at most MAX_REACHED - 1 times, because its prompt may be
    the cause of the hang.
    """

    def __init__(self, core: Core) -> None:
        self._fleet = core.fleet
        self._upstream = core.upstream
        self._extensions = core.extensions
        self._metrics = core.metrics.of(HangMetrics)

    def move(self, state: ReplicaState, now: float) -> None:
        """Move the requests without a first token for which another replica is left. O(its requests)."""
        for connection, exchange in running_at(self._upstream, state):
            if not (connection.awaits_token and isinstance(exchange, Exchange)):
                continue
            if self._leg_moves(exchange, state) if state.role == PREFILL else self._moves(exchange, now):
                self._metrics.moved.add((state.name,))
                connection.give_up(ReplicaFailure(HUNG, "it answers probes, and generates nothing", blameless=True))

    def _moves(self, exchange: Exchange, now: float) -> bool:
        """True if the request may be sent to another replica, and not all others hang."""
        attempts, target = exchange.attempts, exchange.target
        if (
            attempts.sent + attempts.resumptions + 1 >= MAX_REACHED
            or not exchange.repeatable
            or exchange.api.refers
            or exchange.request.upgrades
        ):
            return False
        if exchange.delivered.reader is not None and not exchange.may_begin_again:
            return False
        target, tried = self._fleet.renewed(target), {attempt["replica"] for attempt in attempts.failed}
        tried.add(exchange.booking.lease.replica)
        if exchange.dialect.lacking:
            others = self._fleet.able(target, exchange.dialect.name, now, tried, resting=False)
        else:
            others = self._fleet.candidates(target, now, tried, resting=False)
        if any(not target.replicas[name].hung for name in others):
            return True
        fallback = self._extensions.fallback
        if fallback is None or target.fallback is None or exchange.binding:
            return False
        return fallback.taker(target).pool != target.pool

    def _leg_moves(self, exchange: Exchange, state: ReplicaState) -> bool:
        """True if another prefiller may compute the prompt, the decoder itself, or a replica that does both."""
        target = self._fleet.renewed(exchange.target)
        able = (*target.prefillers.values(), *(each for each in target.replicas.values() if each.role != DECODE))
        return not state.engine.bootstraps or any(not each.hung for each in able)

    def __repr__(self) -> str:
        return f"<MovingRequests of {self._fleet!r}>"
