"""The fleet: which replicas there are, which models they serve, which pool takes a model, where a request may go.

Who is up is the prober's to say (`probe.py`); here the question is who may answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pygtrie

from gateway.config import MATCH_ALL, Config
from gateway.errors import GatewayError, ReplicaFailure, bad_request, no_replica, unknown_model
from gateway.metrics import Metrics
from gateway.probe import Prober, ReplicaState
from gateway.relay import Relay
from router import Router


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas that serve the same models, and the model prefixes that the configuration gives it ("*" for any)."""

    models: tuple[str, ...]
    replicas: tuple[ReplicaState, ...]

    @property
    def ready(self) -> bool:
        return any(replica.up for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model's requests may go. label: the model's bounded name for metrics; down: who would serve it but is down."""

    label: str
    replicas: Mapping[str, ReplicaState]
    down: str

    def require(self) -> None:
        """Raises GatewayError 503 if no replica is live."""
        if not self.replicas:
            raise no_replica(f"No replica that serves this model is up: {self.down}. They are probed all the time; retry.")


class Fleet:
    """See the top of this file. `run()` probes until it is cancelled; everything else is synchronous."""

    def __init__(self, config: Config, router: Router, metrics: Metrics) -> None:
        self._prober = Prober(config.health, config.routing.block_tokens, router, metrics)
        self.pools = tuple(Pool(pool.models, tuple(map(ReplicaState, pool.replicas))) for pool in config.pools)
        self._prefixes: Any = pygtrie.CharTrie()
        for pool in self.pools:
            for prefix in pool.models:
                self._prefixes["" if prefix == MATCH_ALL else prefix] = (prefix, pool)
        self._by_name = {state.name: state for state in self.replicas}
        for state in self.replicas:
            self._prober.add(state)

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
        label, pool = self._pool_of(model)
        live = [state for state in pool.replicas if state.up]
        # Engines answer 404 for what they do not serve; those that list the model know best.
        listing = [state for state in pool.replicas if model in state.models]
        serving = [state for state in live if state in listing] if listing else live
        down = ", ".join(f"{state.name} ({state.error})" for state in pool.replicas if not state.up)
        return Target(label, {state.name: state for state in serving}, down)

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

    def failed(self, name: str, failure: ReplicaFailure) -> None:
        """A request's attempt failed on this replica."""
        self._prober.failed(self._by_name[name], failure)

    def zero_hits(self, name: str) -> None:
        """The router has forgotten what this replica held, for the engine reported zero hits again and again."""
        self._prober.zero_hits(self._by_name[name])

    def metered(self, name: str, predicted: int, reported: int | None) -> None:
        """An answer's cached tokens, as the router predicted them and as the engine reported them (None: it did not)."""
        self._prober.metered(self._by_name[name], predicted, reported)

    # -- probing

    async def run(self, relay: Relay) -> None:
        """Probe every replica until cancelled."""
        await self._prober.run(self.replicas, relay)

    async def probe_all(self, relay: Relay) -> None:
        """One round, so that the first requests find their replicas."""
        await asyncio.gather(*(self._prober.probe(state, relay) for state in self.replicas))
