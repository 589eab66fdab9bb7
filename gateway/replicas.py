"""The fleet: which replicas there are, which of them answer, which models they serve, which pool takes a model.

Every replica has one prober, which asks it for `/v1/models`: that any engine answers, it costs the engine nothing, and it
brings the models too. A replica is down after `failures` failed probes in a row, or at once when it refuses a connection,
be it a probe's or a request's; only then its cache is taken for lost. One good probe brings it back. A request that failed in
any other way only makes the prober look sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pygtrie
from multidict import CIMultiDict

from gateway.config import MATCH_ALL, Config, HealthConfig, ReplicaConfig
from gateway.errors import REFUSED, GatewayError, ReplicaFailure, bad_request, no_replica, unknown_model
from gateway.metrics import Metrics
from gateway.relay import Call, Relay
from router import Replica, Router

log = logging.getLogger("warmroute.replicas")

_PROBE = Call("GET", "/v1/models", CIMultiDict({"Accept-Encoding": "identity"}), b"")
_MAX_MODELS_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class ReplicaState:
    """What is known of one replica. models: id -> its entry in the replica's model list, kept while it is down."""

    config: ReplicaConfig
    up: bool = False
    keyed: bool = False  # it wants a key for its model list, so that its models are unknown
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed_probes: int = 0
    error: str = "not probed yet"
    look_now: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def name(self) -> str:
        return self.config.name


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
        self._health = config.health
        self._router = router
        self._metrics = metrics
        self.pools = tuple(Pool(pool.models, tuple(map(ReplicaState, pool.replicas))) for pool in config.pools)
        self._prefixes: Any = pygtrie.CharTrie()
        for pool in self.pools:
            for prefix in pool.models:
                self._prefixes["" if prefix == MATCH_ALL else prefix] = (prefix, pool)
        for state in self.replicas:
            router.add(Replica(state.name, state.config.capacity_tokens), config.routing.block_tokens)
            metrics.replica_up.labels(state.name).set(0)

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
        state = next((state for state in self.replicas if state.name == name), None)
        if state is None:
            return
        if failure.reason == REFUSED:
            self._set_down(state, failure)
        state.look_now.set()

    # -- probing

    async def run(self, relay: Relay) -> None:
        """Probe every replica until cancelled."""
        async with asyncio.TaskGroup() as group:
            for state in self.replicas:
                group.create_task(self._keep_probing(state, relay))

    async def probe_all(self, relay: Relay) -> None:
        """One round, so that the first requests find their replicas."""
        await asyncio.gather(*(self._probe(state, relay) for state in self.replicas))

    async def _keep_probing(self, state: ReplicaState, relay: Relay) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(state.look_now.wait(), self._health.interval_s)
            state.look_now.clear()
            try:
                await self._probe(state, relay)
            except Exception:  # a bug in one probe must not end the probing
                log.exception("probe failed", extra={"replica": state.name})

    async def _probe(self, state: ReplicaState, relay: Relay) -> None:
        try:
            models = await _list_models(state, relay, self._health)
        except ReplicaFailure as failure:
            state.failed_probes += 1
            if failure.reason == REFUSED or state.failed_probes >= self._health.failures or not state.up:
                self._set_down(state, failure)
            return
        except GatewayError as error:  # our own lack of resources says nothing about the replica
            log.warning("cannot probe", extra={"replica": state.name, "error": error.message})
            return
        state.failed_probes, state.error = 0, ""
        state.keyed = models is None
        if models is not None:
            state.models = models
        if state.keyed and not state.up:
            log.warning("replica wants a key for its model list; models unknown", extra={"replica": state.name})
        if not state.up:
            state.up = True
            self._metrics.replica_up.labels(state.name).set(1)
            log.info("replica up", extra={"replica": state.name, "models": list(state.models)})

    def _set_down(self, state: ReplicaState, failure: ReplicaFailure) -> None:
        changed = state.up or state.error == "not probed yet"
        state.up, state.error = False, failure.message
        self._metrics.replica_up.labels(state.name).set(0)
        if failure.reason == REFUSED:
            self._router.restarted(state.name)
        if changed:
            log.warning("replica down", extra={"replica": state.name, "reason": failure.reason, "error": failure.message})


async def _list_models(state: ReplicaState, relay: Relay, health: HealthConfig) -> dict[str, Mapping[str, Any]] | None:
    """id -> entry of a replica's model list; None where it wants a key that we do not have. Raises ReplicaFailure."""
    attempt = await relay.open(state.config.url, _PROBE, health.timeout_s)
    try:
        if attempt.status in (401, 403):
            return None
        body = await attempt.read(_MAX_MODELS_BYTES)
    finally:
        attempt.close()
    if attempt.status != 200:
        raise ReplicaFailure("status", f"GET /v1/models answers {attempt.status}")
    try:
        return {entry["id"]: entry for entry in orjson.loads(body)["data"] if isinstance(entry["id"], str)}
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ReplicaFailure("garbage", "GET /v1/models answers something that is no OpenAI model list") from error
