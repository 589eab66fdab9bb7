"""The fleet: which replicas there are, which models they serve, which pool takes a model, where a request may go.

Who is up is the prober's to say (`probe.py`); here the question is who may answer.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pygtrie

from gateway.admission import Admission, Permit, priority_of
from gateway.config import MATCH_ALL, Config, PoolConfig
from gateway.errors import GatewayError, ReplicaFailure, bad_request, no_replica, unknown_model
from gateway.health import CLOSED, REST_MOST_S, Breaker
from gateway.metrics import Metrics
from gateway.probe import Prober, ReplicaState
from gateway.relay import Relay
from router import Router

MAX_TARGETS = 1024


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas that serve the same models, and the model prefixes that the configuration gives it ("*" for any)."""

    models: tuple[str, ...]
    replicas: tuple[ReplicaState, ...]
    admission: Admission

    @property
    def ready(self) -> bool:
        return any(replica.up for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model's requests may go. label: the model's bounded name for metrics; down: who would serve it but is down."""

    label: str
    replicas: Mapping[str, ReplicaState]
    down: str
    admission: Admission

    async def wait(self, tenant: str, priority: str | None) -> Permit:
        """For a place at the replicas. priority: the client's header. Raises GatewayError 400 or 429."""
        return await self.admission.wait(tenant, priority_of(priority))

    def require(self) -> None:
        """Raises GatewayError 503 if no replica is live."""
        if not self.replicas:
            raise no_replica(f"No replica that serves this model is up: {self.down}. They are probed all the time; retry.")


class Fleet:
    """See the top of this file. `run()` probes until it is cancelled; everything else is synchronous."""

    def __init__(
        self, config: Config, router: Router, metrics: Metrics, chance: random.Random, clock: Callable[[], float]
    ) -> None:
        self._targets: dict[str, Target] = {}  # by model, until a replica comes, goes or changes its models
        self._prober = Prober(config.health, config.routing.block_tokens, router, metrics, self._changed, clock)
        self._chance = chance
        self._troubled: set[ReplicaState] = set()  # who may not be all right: few, mostly nobody
        self.pools = tuple(self._pool(pool) for pool in config.pools)
        self._prefixes: Any = pygtrie.CharTrie()
        for pool in self.pools:
            for prefix in pool.models:
                self._prefixes["" if prefix == MATCH_ALL else prefix] = (prefix, pool)
        self._by_name = {state.name: state for state in self.replicas}
        for state in self.replicas:
            self._prober.add(state)

    def _pool(self, config: PoolConfig) -> Pool:
        replicas = tuple(ReplicaState(replica, Breaker(self._chance)) for replica in config.replicas)
        admission = Admission(max_inflight=config.max_inflight, max_queue=config.max_queue, queue_s=config.queue_s)
        return Pool(config.models, replicas, admission)

    @property
    def replicas(self) -> Iterable[ReplicaState]:
        return (replica for pool in self.pools for replica in pool.replicas)

    @property
    def models(self) -> dict[str, Mapping[str, Any]]:
        """The union of the models of all live replicas; where two list the same id, the first one's entry."""
        union: dict[str, Mapping[str, Any]] = {}
        for pool in self.pools:
            for state in pool.replicas:
                for name, entry in state.models.items() if state.up else ():
                    if (home := self._home(name)) and home[1] is pool:
                        union.setdefault(name, entry)
        return union

    # -- where a request may go

    def target(self, model: str) -> Target:
        """The live candidates for a model ("": the request names none), maybe none. Raises GatewayError 400, 404 or 503."""
        if known := self._targets.get(model):
            return known
        target = self._target(model)
        if len(self._targets) >= MAX_TARGETS:
            self._targets.clear()  # any name may be one that a prefix takes
        self._targets[model] = target
        return target

    def _target(self, model: str) -> Target:
        label, pool = self._pool_of(model)
        live = [state for state in pool.replicas if state.up]
        # Engines answer 404 for what they do not serve; those that list the model know best.
        listing = [state for state in pool.replicas if model in state.models]
        serving = [state for state in live if state in listing] if listing else live
        down = ", ".join(f"{state.name} ({state.error})" for state in pool.replicas if not state.up)
        return Target(label, {state.name: state for state in serving}, down, pool.admission)

    def candidates(self, target: Target, now: float) -> Collection[str]:
        """Who of a target's replicas may be sent a request now: not who is cut off by its breaker or asked for rest, and who
        has just come up only at times, for its first requests are slow. If that leaves nobody, all of those that did not
        ask for rest: who fails often is better than nobody.
        """
        if not self._troubled:
            return target.replicas
        self._troubled = {state for state in self._troubled if state.troubled(now)}
        good = [
            name
            for name, state in target.replicas.items()
            if state not in self._troubled or (state.breaker.allows(now) and self._chance.random() < state.share(now))
        ]
        if good:
            return good
        return [name for name, state in target.replicas.items() if now >= state.rests_until]

    def all_rest(self, target: Target, now: float) -> GatewayError:
        """The answer where `candidates` gives nobody."""
        seconds = max(1, math.ceil(min(state.rests_until for state in target.replicas.values()) - now))
        return no_replica("All replicas of this model ask to be left alone for a while (Retry-After). Retry.", seconds)

    def _pool_of(self, model: str) -> tuple[str, Pool]:
        if not model:
            if len(self.pools) == 1:
                return "none", self.pools[0]
            raise bad_request("'model' is needed to choose between the pools of this gateway.", "model")
        if home := self._home(model):
            return home
        raise self._unknown(model)

    def _home(self, model: str) -> tuple[str, Pool] | None:
        """(the model's bounded name, its pool): by the longest prefix, by who lists it, by whose models are unknown."""
        listing = next((pool for pool in self.pools if any(model in state.models for state in pool.replicas)), None)
        if match := self._prefixes.longest_prefix(model):
            prefix, pool = match.value
            return (model if listing else prefix), pool
        if listing and not listing.models:
            return model, listing
        keyed = (pool for pool in self.pools if not pool.models and any(state.keyed for state in pool.replicas))
        if blind := next(keyed, None):
            return "unlisted", blind
        return None

    def _unknown(self, model: str) -> GatewayError:
        blind = [
            state.name for pool in self.pools if not pool.models for state in pool.replicas if not state.up and not state.models
        ]
        if blind:
            return no_replica(f"The model {model[:100]!r} is not known yet: {', '.join(blind)} did not answer so far. Retry.")
        return unknown_model(model, list(self.models))

    # -- what requests tell

    def troubles(self, state: ReplicaState) -> None:
        """A request has failed there; its breaker may be open."""
        self._troubled.add(state)

    def rests(self, state: ReplicaState, seconds: int, now: float) -> None:
        """It asked to be left alone for a while."""
        state.breaker.rest(now + seconds, now)
        state.rests_until = max(state.rests_until, min(now + seconds, now + REST_MOST_S))
        self._troubled.add(state)

    def failed(self, name: str, failure: ReplicaFailure) -> None:
        """A request's attempt failed on this replica."""
        self._prober.failed(self._by_name[name], failure)

    def zero_hits(self, name: str) -> None:
        """The router has forgotten what this replica held, for the engine reported zero hits again and again."""
        self._prober.zero_hits(self._by_name[name])

    def metered(self, name: str, predicted: int, reported: int | None) -> None:
        """An answer's cached tokens, as the router predicted them and as the engine reported them (None: it did not)."""
        self._prober.metered(self._by_name[name], predicted, reported)

    # -- for metrics

    def show(self, metrics: Metrics, now: float) -> None:
        """Set the gauges that mirror the fleet's state; called at each scrape."""
        for number, pool in enumerate(self.pools):
            name = (str(number),)
            metrics.pool_inflight.set(name, pool.admission.inflight)
            metrics.pool_waiting.set(name, pool.admission.waiting)
            for reason, count in pool.admission.refused.items():
                metrics.refused.values[*name, reason] = count
            for state in pool.replicas:
                metrics.replica_cut_off.set((state.name,), not state.breaker.allows(now) or state.breaker.state(now) != CLOSED)

    def _changed(self, state: ReplicaState) -> None:
        """A replica came, went, or serves other models than before."""
        self._targets.clear()
        self._troubled.add(state)

    # -- probing

    async def run(self, relay: Relay) -> None:
        """Probe every replica until cancelled."""
        await self._prober.run(self.replicas, relay)

    async def probe_all(self, relay: Relay) -> None:
        """One round, so that the first requests find their replicas."""
        await asyncio.gather(*(self._prober.probe(state, relay) for state in self.replicas))
