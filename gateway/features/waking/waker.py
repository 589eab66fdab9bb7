"""Wakes sleeping engines (`POST /wake_up` of vLLM) when they are needed.

A pool needs one if a request has found no replica that is awake, if requests wait in its queue, or if each awake replica
reports waiting requests. One engine of a pool is woken at a time, and the next one PAUSE_S later at the earliest: it takes a
while until it takes load off the others. An engine that has discarded its weights (sleep level 2) is left alone: awake, it
would answer nonsense until somebody loads them. Nobody is put to sleep here.

Each worker does this for itself: to wake an engine that is awake changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from gateway.errors import GatewayError, ReplicaFailure
from gateway.fleet.directory import Fleet
from gateway.fleet.pools import Pool
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.upstream.client import ReplicaCall, UpstreamClient

log = logging.getLogger("warmroute.replicas")

PAUSE_S: Final = 10.0
LONGEST_S: Final = 120.0  # large weights come back from the host's memory in seconds
_MOST_BYTES: Final = 1 << 16


class Waker:
    """Wakes engines (see the module)."""

    def __init__(self, fleet: Fleet, upstream: UpstreamClient) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._wanted: set[str] = set()  # pools without a replica for a request
        self._waking: dict[str, asyncio.Task[None]] = {}  # by pool
        self._since: dict[str, float] = {}  # by pool: the last attempt

    def entering(self, exchange: Exchange) -> None:
        """A request has found its pool. O(1)."""
        if not exchange.target.replicas:
            self._wanted.add(exchange.target.pool)

    def sweep(self, now: float) -> None:
        """Wake the sleepers that pools need; to be called every second. O(replicas)."""
        wanted, self._wanted = self._wanted, set()
        for pool in self._fleet.pools:
            sleeper = next((state for state in pool.replicas if _can_be_woken(state)), None)
            if sleeper is None or pool.name in self._waking or now - self._since.get(pool.name, -PAUSE_S) < PAUSE_S:
                continue
            if pool.name in wanted or _is_full(pool):
                self._since[pool.name] = now
                self._waking[pool.name] = task = asyncio.get_running_loop().create_task(self._wake(sleeper))
                task.add_done_callback(partial(self._awake, pool.name))

    def _awake(self, pool: str, _: asyncio.Task[None]) -> None:
        del self._waking[pool]

    async def _wake(self, state: ReplicaState) -> None:
        call = ReplicaCall("POST", "/wake_up", b"Accept-Encoding: identity\r\n", b"", probe=True)
        problem = ""
        try:
            answer = await self._upstream.open(state.url, call, LONGEST_S)
            try:
                await answer.read(_MOST_BYTES)
                problem = f"it answers {answer.status}" if answer.status != 200 else ""
            finally:
                answer.close()
        except (ReplicaFailure, GatewayError) as error:
            problem = error.message
        if problem:
            log.warning("replica cannot be woken", extra={"replica": state.name, "error": problem})
        else:
            log.info("replica is woken", extra={"replica": state.name})
            self._fleet.doubt(state.name)  # a probe shows that it is awake

    async def close(self) -> None:
        """End all attempts."""
        tasks = list(self._waking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<Waker, {len(self._waking)} under way>"


def _can_be_woken(state: ReplicaState) -> bool:
    return state.up and state.facts.asleep and state.facts.restorable and not state.draining


def _is_full(pool: Pool) -> bool:
    """True if requests wait in the pool's queue, or at each of its awake replicas."""
    awake = [state for state in pool.replicas if state.live]
    return pool.admission.waiting > 0 or (bool(awake) and all((state.facts.waiting or 0) > 0 for state in awake))
