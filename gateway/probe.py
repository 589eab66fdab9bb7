"""Watching the replicas: who answers, with which models, what its engine tells, and whether its cache is still there.

Every replica has one prober, which asks it for `/v1/models`: that any engine answers, it costs the engine nothing, and it
brings the models too. A replica is down after `failures` failed probes in a row, or at once when it refuses a connection, be
it a probe's or a request's. One good probe brings it back. A request that failed in any other way only makes the prober look
sooner.

After a good probe the engine is asked for its own facts (`engines.py`). That it does not tell them is no failure; it is then
asked rarely. The KV size that it tells bounds what the router believes it to hold, unless the configuration says otherwise.

A cache is taken for lost when nobody listens any more ("refused"), when the engine's process started later than any that was
seen before ("start_time"), or when the router was told of zero hits on warm prefixes again and again ("zero_hits"). One
restart counts once: whatever sign came first, the next start time is then only remembered.

Replicas come and go while the gateway runs: `add` and `remove` take effect at once, and `run` starts and ends their probers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.ask import Models, facts_of, models_of
from gateway.config import HealthConfig, ReplicaConfig
from gateway.engines import Facts
from gateway.errors import REFUSED, GatewayError, ReplicaFailure
from gateway.health import CLOSED, Breaker, share
from gateway.metrics import Metrics
from gateway.overlap import Finding, Overlap
from gateway.relay import Relay
from router import DEFAULT_UNITS_PER_TOKEN, Replica, Router

log = logging.getLogger("warmroute.replicas")

START_TIME, ZERO_HITS = "start_time", "zero_hits"
RESTART_SIGNS = (REFUSED, START_TIME, ZERO_HITS)

NOT_PROBED = "not probed yet"
DRAINING = "draining"
SLOW_START_S = 10.0  # for so long one that came back gets less than its due

RARELY = 30  # probes from one question to the next, where the engine had no answer to it

# Start times are computed from the time of the boot, which drifts a little. Who lived for less had nothing cached.
_START_TOLERANCE_S = 2.0


@dataclass(slots=True, eq=False)
class ReplicaState:
    """What is known of one replica, kept while it is down. models: id -> its entry in the replica's model list.

    started: the latest start of its process that was seen. warm: it was up since its cache was last taken for lost.
    told_tokens: the KV size that bounds it by its own word. probes: good ones since it came up. tells: it has a metrics page.
    draining: an operator wants no new requests there. leaving: the configuration has it no more; it is here until what runs
    there is over.
    """

    config: ReplicaConfig
    breaker: Breaker
    up: bool = False
    draining: bool = False
    leaving: bool = False
    up_since: float = float("-inf")
    rests_until: float = float("-inf")
    keyed: bool = False  # it wants a key for its model list, so that its models are unknown
    models: Models = field(default_factory=dict)
    failed_probes: int = 0
    error: str = NOT_PROBED
    facts: Facts = field(default_factory=Facts)
    told_tokens: int | None = None
    started: float | None = None
    warm: bool = False
    probes: int = 0
    tells: bool = False
    overlap: Overlap = field(default_factory=Overlap)
    look_now: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def live(self) -> bool:
        """Whether it may be sent new requests."""
        return self.up and not self.draining and not self.leaving

    @property
    def trouble(self) -> str:
        """Why it is not live."""
        return self.error if not self.up else DRAINING

    def share(self, now: float) -> float:
        """What part of its due it gets, having come up a while ago."""
        return share(self.up_since, now, SLOW_START_S)

    def troubled(self, now: float) -> bool:
        """Whether it may not be sent everything."""
        return self.breaker.state(now) != CLOSED or not self.breaker.allows(now) or self.share(now) < 1

    @property
    def capacity_tokens(self) -> int | None:
        """What bounds the router's belief: the configuration's word, else the engine's."""
        return self.config.capacity_tokens or self.told_tokens

    @property
    def context_tokens(self) -> int | None:
        """The longest prompt that any of its models takes, where its model list has it (vLLM, SGLang)."""
        lengths = [entry.get("max_model_len") for entry in self.models.values()]
        return max((length for length in lengths if isinstance(length, int) and length > 0), default=None)


Heard = Models | ReplicaFailure | GatewayError | None
"""What became of asking a replica for its models; None: it wants a key for them."""


class Prober:
    """See the top of this file. `run`, `probe` and `ask` do the asking; everything else is synchronous."""

    def __init__(
        self,
        health: HealthConfig,
        block_bytes: int,
        router: Router,
        metrics: Metrics,
        changed: Callable[[ReplicaState], None],
        clock: Callable[[], float],
    ) -> None:
        """changed: called when a replica comes, goes, or serves other models than before."""
        self._health = health
        self._block_tokens = block_bytes / DEFAULT_UNITS_PER_TOKEN
        self._router = router
        self._metrics = metrics
        self._changed = changed
        self._clock = clock
        self._tasks: dict[ReplicaState, asyncio.Task[None] | None] = {}  # of whoever is probed; None: to be started
        self._news = asyncio.Event()

    def add(self, state: ReplicaState) -> None:
        """A replica joins the fleet."""
        self.bound(state)
        self._tasks[state] = None
        self._news.set()
        self._metrics.replica_up.set((state.name,), 0)
        self._metrics.replica_overlap_zero.set((state.name,), 0)
        for sign in RESTART_SIGNS:
            self._metrics.replica_restarts.add((state.name, sign), 0)

    def remove(self, state: ReplicaState) -> None:
        """It is gone: nobody looks there any more, and its gauges end."""
        if task := self._tasks.pop(state):
            task.cancel()
        name, metrics = (state.name,), self._metrics
        for gauge in (metrics.replica_up, metrics.replica_overlap_zero, metrics.replica_capacity):
            gauge.set(name, None)
        self._show_load(state.name, None, None)

    def retune(self, health: HealthConfig) -> None:
        """Probe by these rules from now on."""
        if health != self._health:
            self._health = health
            for state in self._tasks:
                state.look_now.set()  # else the next look would come when the old interval is over

    def bound(self, state: ReplicaState) -> None:
        """What bounds our belief in it is known, or has changed."""
        capacity = state.capacity_tokens
        self._router.add(Replica(state.name, capacity, state.context_tokens), self._block_tokens)
        self._metrics.replica_capacity.set((state.name,), capacity)

    # -- what requests tell

    def failed(self, state: ReplicaState, failure: ReplicaFailure) -> None:
        """A request's attempt failed on this replica."""
        if failure.reason == REFUSED:
            self._set_down(state, failure)
        state.look_now.set()

    def zero_hits(self, state: ReplicaState) -> None:
        """The router has taken repeated zero hits for a restart, and forgotten what the replica held."""
        log.warning("replica restarted?", extra={"replica": state.name, "reason": ZERO_HITS})
        self._lost(state, ZERO_HITS)

    def metered(self, state: ReplicaState, predicted: int, reported: int | None) -> None:
        """An answer's cached tokens, as predicted and as reported."""
        finding = state.overlap.metered(predicted, reported)
        if finding is None:
            return
        told = {"replica": state.name, "engine": state.facts.engine.name}
        match finding:
            case Finding.ZERO:
                self._metrics.replica_overlap_zero.set((state.name,), 1)
                log.warning("cached tokens stay at zero", extra={**told, "hint": _zero_hint(state.facts)})
            case Finding.SILENT:
                log.info("cached tokens are not reported", extra={**told, "hint": state.facts.engine.silent})
            case Finding.HIT:
                self._metrics.replica_overlap_zero.set((state.name,), 0)
                log.info("cached tokens are no longer zero", extra=told)

    # -- probing

    async def run(self, relay: Relay) -> None:
        """Probe every replica, those that join later too, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                for state in [state for state, task in self._tasks.items() if task is None]:
                    self._tasks[state] = group.create_task(self._keep_probing(state, relay))
                await self._news.wait()

    async def _keep_probing(self, state: ReplicaState, relay: Relay) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._health.interval_s):
                    await state.look_now.wait()
            state.look_now.clear()
            try:
                await self.probe(state, relay)
            except Exception:  # a bug in one probe must not end the probing
                log.exception("probe failed", extra={"replica": state.name})

    async def probe(self, state: ReplicaState, relay: Relay) -> None:
        if self.hear(state, await self.ask(state.config.url, relay)):
            await self._ask_engine(state, relay)

    async def ask(self, url: str, relay: Relay) -> Heard:
        """For its models. Says nothing to anybody: that is for `hear`."""
        try:
            return await models_of(relay, url, self._health.timeout_s)
        except (ReplicaFailure, GatewayError) as error:
            return error

    def hear(self, state: ReplicaState, heard: Heard) -> bool:
        """Take in what a replica answered when it was asked for its models. Whether that was good."""
        if isinstance(heard, ReplicaFailure):
            state.failed_probes += 1
            if heard.reason == REFUSED or state.failed_probes >= self._health.failures or not state.up:
                self._set_down(state, heard)
            return False
        if isinstance(heard, GatewayError):  # our own lack of resources says nothing about the replica
            log.warning("cannot probe", extra={"replica": state.name, "error": heard.message})
            return False
        keyed = heard is None
        if keyed != state.keyed or (heard is not None and heard != state.models):
            self._changed(state)
            state.keyed = keyed
        if heard is not None and heard != state.models:
            state.models = heard
            self.bound(state)
        self._set_up(state)
        return True

    def _set_up(self, state: ReplicaState) -> None:
        state.failed_probes = 0
        if state.up:
            state.error = ""
            return
        if state.keyed:
            log.warning("replica wants a key for its model list; models unknown", extra={"replica": state.name})
        if state.error != NOT_PROBED:  # else the gateway itself has just started, and all of them would be new
            state.up_since = self._clock()
        state.error = ""
        state.up = state.warm = True
        self._changed(state)
        state.probes = 0
        state.facts = Facts()
        self._metrics.replica_up.set((state.name,), 1)
        log.info("replica up", extra={"replica": state.name, "models": list(state.models)})

    def _set_down(self, state: ReplicaState, failure: ReplicaFailure) -> None:
        changed = state.up or state.error == NOT_PROBED
        state.up, state.error = False, failure.message
        self._changed(state)
        self._metrics.replica_up.set((state.name,), 0)
        self._show_load(state.name, None, None)
        if failure.reason == REFUSED:
            self._router.restarted(state.name)
            if state.warm:
                self._lost(state, REFUSED)
                state.warm = False
        if changed:
            log.warning("replica down", extra={"replica": state.name, "reason": failure.reason, "error": failure.message})

    # -- the engine's facts

    async def _ask_engine(self, state: ReplicaState, relay: Relay) -> None:
        again = state.probes % RARELY == 0
        state.probes += 1
        if not state.tells and not again:
            return
        timeout_s = self._health.timeout_s
        facts, state.tells = await facts_of(relay, state.config.url, timeout_s, state.models, state.facts, inquire=again)
        if state.up:  # a request may have found it down meanwhile
            self._learn(state, facts)

    def _learn(self, state: ReplicaState, facts: Facts) -> None:
        """The replica's engine told these facts."""
        state.facts = facts
        self._show_load(state.name, facts.running, facts.waiting)
        if facts.capacity_tokens is not None and facts.capacity_tokens != state.told_tokens:
            state.told_tokens = facts.capacity_tokens
            if state.config.capacity_tokens is None:
                self.bound(state)
                told = {"replica": state.name, "engine": facts.engine.name, "capacity_tokens": state.told_tokens}
                log.info("replica tells the size of its KV cache", extra=told)
        if facts.started is not None:
            if state.started is not None and facts.started > state.started + _START_TOLERANCE_S:
                log.warning("replica restarted", extra={"replica": state.name, "reason": START_TIME})
                self._router.restarted(state.name)
                self._lost(state, START_TIME)
            # Several processes may answer under one address, by turns; only a start later than all of theirs is a restart.
            state.started = max(facts.started, state.started or 0.0)

    def _lost(self, state: ReplicaState, sign: str) -> None:
        state.started = None
        if sign != ZERO_HITS:  # which a cache that never works looks like too
            state.overlap.begin()
        self._metrics.replica_restarts.add((state.name, sign))

    def _show_load(self, name: str, running: int | None, waiting: int | None) -> None:
        self._metrics.replica_engine_running.set((name,), running)
        self._metrics.replica_engine_waiting.set((name,), waiting)


def _zero_hint(facts: Facts) -> str:
    if facts.caching is False:
        return f"Its metrics say that prefix caching is off. {facts.engine.zero}"
    return f"{facts.engine.zero} Or does the chat template put something that changes, such as the time, before the messages?"
