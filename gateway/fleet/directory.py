"""The fleet: the replicas, their models, the pool of a model, and the replicas that may get a request.

The prober decides which replicas are up (`prober.py`); this module decides which may answer a request (`candidates.py` narrows
the choice for each request). If no replica of a model is live, replicas that are down by failed probes only are tried.

Members and configuration may change while requests run. `probe_joining` asks the joining replicas, which takes a while; `apply`
then changes everything in one step, so that a request sees either the old or the new state. A replica is the same if its name,
its URL and its instance are: it keeps its state. A leaving replica gets no new request; its running requests continue, and
`forget_departed` removes it when they are over. (If another replica takes its name, it is removed at once; its running requests
still count for the name.) A request that fails over after a change gets the present candidates from `renewed`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pygtrie

from gateway.admission.pool_queue import Admission, Permit, Place, granted_priority
from gateway.config.kinds import MATCH_ALL
from gateway.config.schema import Config, FallbackConfig
from gateway.config.sections import processes_of
from gateway.dialects.api_request import ApiRequest
from gateway.errors import (
    RETRY_S,
    GatewayError,
    ReplicaFailure,
    bad_request,
    first_names,
    named_model,
    no_replica,
    unknown_model,
)
from gateway.fleet.breaker import CLOSED, Breaker
from gateway.fleet.candidates import any_well, eligible, spared
from gateway.fleet.catalog import Catalog, warn_of_misfits, warn_of_rivals
from gateway.fleet.engine_client import adapter_of
from gateway.fleet.engines import Facts
from gateway.fleet.membership import CONFIGURATION, SHOWN_S, DepartedNames, Member, Members, configured, merge, reconcile
from gateway.fleet.places import ASK_S, LOOK_S
from gateway.fleet.pool_places import PoolPlaces
from gateway.fleet.pools import Pool, listed_by, succeed
from gateway.fleet.prober import Prober, ProbeResult
from gateway.fleet.ranks import KnownRanks
from gateway.fleet.refusals import REST_MOST_S
from gateway.fleet.state import PRIORITY_FIELD, USAGE_WISH, ReplicaState
from gateway.telemetry.counters import FirstValues, Instruments
from gateway.telemetry.metrics import Metrics
from gateway.upstream.client import UpstreamClient
from router import Prompt, Router

log = logging.getLogger("warmroute.replicas")

MAX_TARGETS = 1024
MAX_LABELS = 1024
FIRST_PROBES_S = 2.0  # longest wait of starts, reloads and additions for the first probes; unfinished ones continue
LOGGED = 100  # lines for replicas that join or leave in one change


@dataclass(frozen=True, slots=True)
class Target:
    """The replicas for a model. label: the model's bounded name for metrics. replicas: the live ones, or else the doubtful
    ones. down: the replicas of its pool that get no requests, with the reasons. draining: some of these are up, but drain.
    pool: its name. fallback: target of requests that the pool cannot serve. named: the pool was named by another pool's
    fallback, and not found by the model. translate, delta: as in `Pool`. adapter: that of the model's name, or "".
    prefillers: live replicas that compute prompts for others, and are not in `replicas`.
    """

    model: str
    label: str
    replicas: Mapping[str, ReplicaState]
    down: str
    admission: Admission
    resume_streams: bool = False  # broken streams are continued at other replicas
    strip_billing_header: bool = True  # the client's billing line is removed from requests
    draining: bool = False
    pool: str = ""
    fallback: FallbackConfig | None = None
    named: bool = False
    translate: tuple[str, ...] | None = None
    delta: bool = False
    adapter: str = ""
    prefillers: Mapping[str, ReplicaState] = field(default_factory=dict)

    def adapter_of(self, api: ApiRequest) -> str:
        """The adapter that a request uses; "": none. O(replicas) if its body names one."""
        if self.adapter or not api.adapter:
            return self.adapter
        able = (state for state in self.replicas.values() if state.engine.names_adapters)
        return next(filter(None, (adapter_of(state.models, f"{self.model}:{api.adapter}") for state in able)), "")

    async def wait(
        self, tenant: str, priority: str | None, most: int | None, place: Place, *, sequences: int, pulsed: bool, work_s: float
    ) -> Permit:
        """Waits for a slot at the replicas. priority, most: as in `granted_priority`. place: shows the place in the queue
        meanwhile. sequences: of the request. pulsed: the client gets signs of life. work_s: see `Fleet.work_s`. Raises
        GatewayError 400 or 429.
        """
        granted = granted_priority(priority, most)
        return await self.admission.wait(tenant, granted, place, sequences=sequences, pulsed=pulsed, work_s=work_s)

    def require(self) -> None:
        """Raises GatewayError 503 without a replica to try."""
        if not self.replicas:
            public = "No replica that serves this model is up"
            if self.draining:
                public = "No replica that serves this model takes new requests: the replicas that are up are draining or asleep"
            what = "Undrain or wake one, or wait for another" if self.draining else "They are probed continually; retry"
            text = f"{public}: {self.down or 'there are none at present'}. {what}."
            raise no_replica(text, public=f"{public}. Retry.")


class Fleet:
    """The fleet (see the module). `run`, `probe_all` and `probe_joining` send requests; everything else is synchronous."""

    def __init__(
        self, config: Config, router: Router, metrics: Metrics, chance: random.Random, clock: Callable[[], float]
    ) -> None:
        self._targets: dict[str, Target] = {}  # by model; cleared when a replica comes, goes or changes its models
        self._named_targets: dict[tuple[str, str], Target] = {}  # by pool and model; cleared likewise
        self._catalog: Catalog | None = None  # cleared likewise
        self._router = router
        self._clock = clock
        self._ranks = KnownRanks()
        self._wakes = False
        told = self._models_changed, self._ranks_found, self._count_places
        self._prober = Prober(config.health, router, metrics, *told, clock)
        self._gates: dict[str, PoolPlaces] = {}  # by pool
        self._crowded = asyncio.Event()
        self._chance = chance
        self._labels = FirstValues(MAX_LABELS)  # replicas may list new models at every probe
        self._suspects: set[ReplicaState] = set()  # replicas that may be restricted: few, mostly none
        self._by_name: dict[str, ReplicaState] = {}  # including leaving replicas
        self._unused_urls: list[str] = []  # URLs of removed replicas
        self._metrics = metrics
        keep_s = SHOWN_S if processes_of(config) == 1 else 2 * SHOWN_S
        self._departed, self._departed_pools = DepartedNames(keep_s), DepartedNames(keep_s)
        self._config = config
        self._listed = merge({CONFIGURATION: configured(config)}, [pool.name for pool in config.pools]).members
        self._members = self._ranks.expand(self._listed)
        self.pools: tuple[Pool, ...] = ()
        self._prefixes: Any = pygtrie.CharTrie()
        for member in self._members.values():
            self._join(member, {})
        self._build(config)

    @property
    def replicas(self) -> Iterable[ReplicaState]:
        return (replica for pool in self.pools for replica in pool.replicas)

    def urls(self) -> list[str]:
        """Their URLs; the ranks of a server have one together."""
        return list(dict.fromkeys(replica.url for replica in self.replicas))

    @property
    def _prefixes_by_pool(self) -> Sequence[tuple[str, ...]]:
        return [pool.models for pool in self.pools]

    @property
    def leaving(self) -> Sequence[ReplicaState]:
        """Replicas without a source that still have running requests."""
        return [state for state in self._by_name.values() if state.leaving]

    @property
    def shows_models_to_keys(self) -> bool:
        """True if the replicas of the only pool list their models only to holders of keys, of which the gateway has none."""
        return len(self.pools) == 1 and any(state.needs_key for state in self.pools[0].replicas)

    @property
    def catalog(self) -> Catalog:
        """The models shown to clients. O(1) until a replica comes, goes or changes its models."""
        if self._catalog is None:
            self._catalog = Catalog(self.pools, self._by_prefix)
        return self._catalog

    def entry(self, model: str, alias: str = "") -> bytes:
        """The model's entry in GET /v1/models, even if the list has no room for it. alias: as for `target`.

        Raises GatewayError 404 or 503.
        """
        if home := self._home(model):
            for state in listed_by(home[1], {pool.name: pool for pool in self.pools}):
                if entry := state.models.get(model):
                    return entry.shown
            self.target(model).require()
        raise self._unknown(model, alias)

    # -- the replicas of a request

    def target(self, model: str, alias: str = "") -> Target:
        """The target of a model ("": the request names none), maybe without replicas. alias: the client's name for the model,
        for errors. Raises GatewayError 400, 404 or 503.
        """
        if known := self._targets.get(model):
            return known
        target = self._target(model, alias)
        if len(self._targets) >= MAX_TARGETS:
            self._targets.clear()  # a prefix may match any number of names
        self._targets[model] = target
        return target

    def target_in(self, pool: str, model: str, label: str) -> Target | None:
        """The target in a pool that a fallback names; None: the pool does not exist. label: a bounded name of the model."""
        if known := self._named_targets.get((pool, model)):
            return known
        found = next((each for each in self.pools if each.name == pool), None)
        if found is None:
            return None
        target = replace(_target_of(found, model, self._labels.label(label)), named=True)
        if len(self._named_targets) >= MAX_TARGETS:
            self._named_targets.clear()
        self._named_targets[pool, model] = target
        return target

    def _target(self, model: str, alias: str) -> Target:
        name, pool = self._pool_of(model, alias)
        return _target_of(pool, model, self._labels.label(name))

    def renewed(self, target: Target) -> Target:
        """The present state of an earlier target. O(1) if nothing has changed."""
        if self._targets.get(target.model) is target:
            return target
        if target.named:
            return self.target_in(target.pool, target.model, target.label) or replace(target, replicas={})
        try:
            return self.target(target.model)
        except GatewayError:  # no pool serves the model now
            return replace(target, replicas={})

    def candidates(self, target: Target, now: float, tried: Collection[str] = (), *, resting: bool = True) -> Collection[str]:
        """The target's replicas to which a request may be sent now: see `eligible`. O(1) while no replica is restricted."""
        if not self._suspects and not tried:
            return target.replicas
        self._suspects = {state for state in self._suspects if state.restricted(now)}
        return eligible(target.replicas, self._suspects, now, self._chance, tried, resting=resting)

    def spared(self, target: Target, now: float, chosen: Collection[str]) -> list[str]:
        """The target's replicas that only chance has left out of `candidates`: see `spared` there. O(1) mostly."""
        return spared(target.replicas, self._suspects, now, chosen) if len(chosen) < len(target.replicas) else []

    def able(
        self, target: Target, dialect: str, now: float, tried: Collection[str] = (), *, resting: bool = True
    ) -> Collection[str]:
        """`candidates` without replicas that are known to lack the dialect; these are left out first, like tried ones."""
        lacking = {name for name, state in target.replicas.items() if not state.speaks(dialect, now)}
        return self.candidates(target, now, lacking.union(tried), resting=resting)

    def lacking(self, target: Target, dialect: str, text: str, now: float) -> GatewayError:
        """The error if no replica that is up has the endpoint: 404, or 503 if a replica that is down may have it. text: for
        clients.
        """
        pool = next((pool for pool in self.pools if pool.name == target.pool), None)
        down = [state for state in pool.replicas if not (state.up or state.draining or state.leaving)] if pool else []
        if any(state.speaks(dialect, now) and (target.model in state.models or not target.model) for state in down):
            return GatewayError(503, "not_supported", f"{text} One that may do is down: retry.", retry_after_s=RETRY_S)
        return GatewayError(404, "not_supported", text)

    def is_well(self, target: Target, now: float) -> bool:
        """True if a replica of the target is live, with a closed breaker, and does not rest. O(1) while no replica is
        restricted.
        """
        return any_well(target.replicas, self._suspects, now)

    def work_s(self, target: Target, prompt: Prompt, now: float) -> float:
        """Seconds of prefill of a prompt at the best replica, as estimated; 0.0 where the shortest does not go first: only
        replicas that compute one prompt at a time do so (`router/late.py`), and only while a slot is free. O(decision).
        """
        router, loads = self._router, self._router.ledger.loads
        if target.admission.full or not router.ledger.has_lines:
            return 0.0
        if not all(name in loads and loads[name].binds_late(now) for name in target.replicas):
            return 0.0
        best = router.rank(prompt, target.replicas, now)[0].best
        return best.uncached_tokens / loads[best.replica].rate.value

    def _pool_of(self, model: str, alias: str) -> tuple[str, Pool]:
        if not model:
            if len(self.pools) == 1:
                return "none", self.pools[0]
            raise bad_request("'model' is needed to choose between the pools of this gateway.", "model")
        if home := self._home(model):
            return home
        raise self._unknown(model, alias)

    def _home(self, model: str) -> tuple[str, Pool] | None:
        """(the model's bounded name, its pool): found by the longest prefix, else by the replicas' lists, else a pool with
        replicas whose models are unknown. A pool with prefixes serves only models with them, even if its replicas list others.
        """
        if match := self._prefixes.longest_prefix(model):
            prefix, pool = match.value
            return (model if _lists(pool, model) else prefix), pool
        for pool in self.pools:
            if not pool.models and _lists(pool, model):
                return model, pool
        needing_key = (pool for pool in self.pools if not pool.models and any(state.needs_key for state in pool.replicas))
        if blind := next(needing_key, None):
            return "unlisted", blind
        return None

    def _by_prefix(self, model: str) -> Pool | None:
        """The pool whose configuration has the longest prefix of the model's name."""
        match = self._prefixes.longest_prefix(model)
        return match.value[1] if match else None

    def _unknown(self, model: str, alias: str) -> GatewayError:
        open_pools = (pool for pool in self.pools if not pool.models)
        blind = [state for pool in open_pools for state in pool.replicas if not state.up and not state.models]
        if blind:
            not_yet = f"{named_model(model, alias)} is not known yet"
            public = f"{not_yet}: not all replicas have answered so far. Retry."
            named = first_names([f"{state.name} ({state.down_reason})" for state in blind])
            text = f"{not_yet}: no list of models came so far from {named}. They are probed continually; retry."
            return no_replica(text, public=public)
        if any(not (pool.models or pool.replicas) for pool in self.pools):  # a source may find some
            text = f"{named_model(model, alias)} is not known: a pool has no replicas at present. Retry."
            return no_replica(text, public=text)
        listed = any(state.models for state in self.replicas if state.up)
        return unknown_model(model, self.catalog.names, listed=listed, alias=alias)

    # -- observations of requests

    def suspect(self, state: ReplicaState) -> None:
        """The replica may be restricted from now on: a request has failed there, for example. A removed replica is ignored: no
        request is sent there, so it would stay a suspect for ever.
        """
        if self._by_name.get(state.name) is state:
            self._suspects.add(state)

    def rests(self, state: ReplicaState, seconds: float, now: float) -> None:
        """The replica answered with Retry-After; at most a minute of it counts."""
        state.rests_until = max(state.rests_until, now + min(seconds, REST_MOST_S))
        self.suspect(state)

    def refused(self, state: ReplicaState, client: int, seconds: float, now: float) -> None:
        """The replica refused a client (by hash) for that time. It rests unless the refusal seems to concern this
        client only.
        """
        if rest_s := state.refusals.refused(client, seconds, now):
            self.rests(state, rest_s, now)

    def failed(self, state: ReplicaState, failure: ReplicaFailure) -> None:
        """A request's attempt failed on this replica. A replica removed meanwhile is ignored."""
        if self._by_name.get(state.name) is state:
            self._prober.failed(state, failure)

    def doubt(self, name: str) -> None:
        """The replica may have changed, or have failed, as another process has seen: probe it soon."""
        if state := self._by_name.get(name):
            self._prober.doubt(state)

    def connection_closed(self, url: str, idle_s: float) -> None:
        """The replica at this URL has closed a connection that had been idle for idle_s. O(replicas)."""
        for state in self._by_name.values():
            if state.url == url and not state.member.rank:
                self._prober.connection_closed(state, idle_s)

    def lacks(self, state: ReplicaState, dialect: str, now: float) -> None:
        """The replica did not know the path of this dialect. For a while such requests are sent to it as chat, or to others."""
        if dialect not in state.lacks:
            log.info("replica does not speak a dialect", extra={"replica": state.name, "dialect": dialect})
        state.lacks[dialect] = now

    def wake_sleepers(self) -> None:
        """From now on sleeping replicas are woken when requests need them."""
        self._wakes = True
        for state in self._by_name.values():
            state.wakes = True

    def adapters_changed(self, state: ReplicaState, *, loaded: bool) -> None:
        """A request to load (or unload) an adapter has succeeded on this replica."""
        if self._by_name.get(state.name) is state:
            self._prober.adapters_changed(state, loaded=loaded)

    def refuses_rank(self, state: ReplicaState) -> None:
        """The replica has refused a request that named its data-parallel rank, and answered it without one."""
        if self._by_name.get(state.name) is state:
            self._prober.doubt(state)
            if self._ranks.refused(state.member):
                self._apply_ranks(state)

    def refuses_usage(self, state: ReplicaState, now: float) -> None:
        """The replica has refused `stream_options`. For a while it is not asked for the usage of streams."""
        if USAGE_WISH not in state.lacks:
            log.info("replica refuses stream_options: the usage of its streams is estimated", extra={"replica": state.name})
        state.lacks[USAGE_WISH] = now

    def refuses_priority(self, state: ReplicaState, now: float) -> None:
        """The replica has refused a request for its priority. For a while it gets no priorities."""
        if PRIORITY_FIELD not in state.lacks:
            log.info("replica does not schedule by priority", extra={"replica": state.name})
        state.lacks[PRIORITY_FIELD] = now

    def zero_hits(self, name: str) -> None:
        """The router has forgotten the cached prefixes of this replica, because the engine reported zero hits repeatedly."""
        if state := self._by_name.get(name):
            self._prober.zero_hits(state)

    def metered(self, name: str, predicted: int, reported: int | None) -> None:
        """An answer's cached tokens, as the router predicted and as the engine reported them (None: no report)."""
        if (state := self._by_name.get(name)) and (finding := state.overlap.metered(predicted, reported)):
            self._prober.cache_reported(state, finding)

    def siblings(self, name: str) -> Sequence[str]:
        """The replicas that may get this one's requests, itself included. O(replicas)."""
        state = self._by_name.get(name)
        pool = next((pool for pool in self.pools if state and pool.name == state.member.pool), None)
        return [each.name for each in pool.serving] if pool else []

    # -- for operators

    def named(self, name: str) -> ReplicaState | None:
        return self._by_name.get(name)

    def all_named(self, name: str) -> Sequence[ReplicaState]:
        """The replica of this name, or the ranks of the server that its source lists under this name. O(replicas)."""
        state = self._by_name.get(name)
        if state is not None and not state.leaving:
            return (state,)
        ranks = [each for each in self._by_name.values() if each.member.server == name]
        return ranks or ([] if state is None else [state])

    def drain(self, state: ReplicaState, *, on: bool) -> None:
        """Stop or resume sending new requests; running requests continue."""
        if state.drained != on:
            state.drained = on
            self._changed(state)
            log.info("replica is draining" if on else "replica is no longer draining", extra={"replica": state.name})

    # -- changes of members and configuration

    async def probe_joining(self, wanted: Members, upstream: UpstreamClient, within_s: float) -> Mapping[str, ProbeResult]:
        """Ask the joining replicas concurrently, so that they can be up from the start. Changes nothing.

        within_s: a limit for all together. Returns the answers by URL.
        """
        # A leaving replica may be removed before it is needed again.
        wanted = self._ranks.expand(wanted)
        urls = [each.url for each in wanted.values() if (state := self._same(each)) is None or state.leaving]
        return await self._prober.request_models_of_all(urls, upstream, within_s)

    def apply(self, config: Config, wanted: Members, probed: Mapping[str, ProbeResult]) -> None:
        """Set the members, in the pools of this configuration. probed: the result of `probe_joining`.

        A replica that stays the same keeps its state.
        """
        known = set(self._by_name.values())
        served, prefixes = {state: pool.models for pool in self.pools for state in pool.replicas}, self._prefixes_by_pool
        self._prober.retune(config.health)
        self._config, self._listed = config, wanted
        self._ranks.keep(wanted)
        left = self._change_members(self._ranks.expand(wanted), probed)
        self._build(config)
        _log_each("replica leaves", "more replicas leave", left)
        joined = self._begin_slowly(known)
        _log_each("replica joins", "more replicas join", joined)
        others = self._prefixes_by_pool != prefixes  # then a pool may take another one's models
        changed = {state for pool in self.pools for state in pool.replicas if others or served.get(state) != pool.models}
        warn_of_misfits(changed, self.pools, self._by_prefix)

    def _ranks_found(self, state: ReplicaState, facts: Facts) -> None:
        """The prober has read a page of metrics of this replica's server."""
        if not state.leaving and self._ranks.found(state.member, state.engine, facts):
            self._apply_ranks(state)

    def _apply_ranks(self, known: ReplicaState) -> None:
        """Set the members anew after a change of a server's ranks. known: a replica of that server; the new ones begin with its
        health.
        """
        before = set(self._by_name.values())
        left = self._change_members(self._ranks.expand(self._listed), {known.url: None if known.needs_key else known.models})
        for state in set(self._by_name.values()) - before:
            state.drained = known.drained
        self._build(self._config)
        _log_each("replica leaves", "more replicas leave", left)

    def _change_members(self, wanted: Members, probed: Mapping[str, ProbeResult]) -> Sequence[ReplicaState]:
        """Apply the changes of members. Returns the leaving replicas."""
        changes = reconcile(self._members, wanted)
        left = [self._by_name[member.name] for member in changes.left]
        for state in left:
            state.leaving = True
        turned = [state for each in changes.changed if (state := self._by_name[each.name]).member.draining != each.draining]
        for member in changes.changed:
            state = self._by_name[member.name]
            moved, state.member = member.addresses != state.member.addresses, member
            self._prober.set_bounds(state)
            self.suspect(state)  # its weight may have changed
            if moved:
                self._prober.moved(state)
        for member in changes.joined:
            self._join(member, probed)
        _log_each("source drains replica", "source drains more replicas", [each for each in turned if each.member.draining])
        ended = [each for each in turned if not each.member.draining]
        _log_each("source no longer drains replica", "source no longer drains more replicas", ended)
        self._members = wanted
        return left

    def _begin_slowly(self, known: Collection[ReplicaState]) -> Sequence[ReplicaState]:
        """Replicas not in `known` begin with part of the load, if others can take the rest. Returns them."""
        joining: list[ReplicaState] = []
        for pool in self.pools:
            joined = [state for state in pool.replicas if state not in known]
            for state in joined:
                if len(joined) < len(pool.replicas):  # else no other replica could take the rest of the load
                    state.up_since = self._clock()
                    self._router.came_up(state.name, state.up_since)
            joining += joined
        return joining

    def uses(self, url: str) -> bool:
        """True if a replica has this URL, leaving ones included. O(replicas)."""
        return any(state.url == url for state in self._by_name.values())

    def forget_departed(self) -> Sequence[str]:
        """Remove leaving replicas without running requests, and the counters of replicas that left long ago.

        Returns the URLs that became unused. O(replicas).
        """
        for state in self.leaving:
            if not self._router.ledger.of(state.name).inflight:
                self._forget(state)
        now = self._clock()
        for label, departed in (("replica", self._departed), ("pool", self._departed_pools)):
            if gone := departed.pop_expired(now):
                self._metrics.instruments.drop(label, gone)
                if label == "pool":
                    self._metrics.instruments.drop("to", gone)
        if not self._unused_urls:
            return ()
        used = {state.url for state in self._by_name.values()}
        urls, self._unused_urls = [url for url in self._unused_urls if url not in used], []
        return urls

    def _build(self, config: Config) -> None:
        """Build the pools of this configuration from the present members."""
        members: dict[str, list[ReplicaState]] = {pool.name: [] for pool in config.pools}
        for member in self._members.values():
            members[member.pool].append(self._by_name[member.name])
        for pool in self.pools:
            if pool.name not in members:
                self._departed_pools.leave(pool.name, self._clock())
        for name in members:
            self._departed_pools.back(name)
        self.pools = succeed(config.pools, [tuple(members[pool.name]) for pool in config.pools], self.pools)
        self._prefixes = pygtrie.CharTrie()
        self._gates = {}
        for made in self.pools:
            self._gates[made.name] = PoolPlaces(made.replicas, self._router.ledger.loads, self._clock, self._crowded)
            made.admission.set_gate(self._gates[made.name])
            for prefix in made.models:
                self._prefixes["" if prefix == MATCH_ALL else prefix] = (prefix, made)
        self._forget_lists()

    def _forget_lists(self) -> None:
        self._targets.clear()
        self._named_targets.clear()
        self._catalog = None

    def _same(self, member: Member) -> ReplicaState | None:
        """The state of this member's replica, if it exists."""
        state = self._by_name.get(member.name)
        return state if state and state.member.is_same(member) else None

    def _join(self, member: Member, probed: Mapping[str, ProbeResult]) -> None:
        """Give the replica a state, or its earlier one; draining ends."""
        if state := self._same(member):
            known, state.member, state.leaving, state.drained = state.member, member, False, False
            if known != member:
                self._prober.set_bounds(state)
                self.suspect(state)
            return
        if former := self._by_name.get(member.name):
            self._forget(former)
        self._departed.back(member.name)
        state = self._by_name[member.name] = ReplicaState(member, Breaker(self._chance), wakes=self._wakes)
        self._prober.add(state)
        if self.pools:  # else all replicas begin together, and are probed before anything else
            if member.url in probed:
                self._prober.apply_probe(state, probed[member.url])
            state.probe_now.set()  # its engine was not asked yet

    def _forget(self, state: ReplicaState) -> None:
        state.leaving = True
        del self._by_name[state.name]
        self._suspects.discard(state)
        self._prober.remove(state)
        self._router.remove(state.name)
        self._departed.leave(state.name, self._clock())
        self._unused_urls.append(state.url)

    # -- for metrics

    def hide_departed(self, instruments: Instruments) -> None:
        """Drop the series of replicas and pools that left a while ago, from a page of all processes."""
        now = self._clock()
        instruments.drop("replica", self._departed.hidden(now))
        for label in ("pool", "to"):
            instruments.drop(label, self._departed_pools.hidden(now))

    def set_gauges(self, metrics: Metrics, now: float) -> None:
        """Set the gauges of the fleet's state; called at each scrape."""
        for gauge in metrics.by_pool:
            gauge.values.clear()  # removes pools that do not exist now
        metrics.replica_circuit_open.values.clear()
        for pool in self.pools:
            name = (pool.name,)
            metrics.pool_inflight.set(name, pool.admission.inflight)
            metrics.pool_waiting.set(name, pool.admission.waiting)
            metrics.pool_slots_taken.set(name, pool.admission.taken)
            metrics.pool_inflight_limit.set(name, pool.admission.max_inflight)
            metrics.pool_prefill_backlog.set(name, self._backlog_s(pool, now))
            metrics.pool_replicas.set(name, len(pool.replicas))
            metrics.pool_replicas_live.set(name, sum(state.live for state in pool.replicas))
            for reason, count in pool.admission.refused.items():
                metrics.admission_rejected.set((*name, reason), count)
            for state in pool.replicas:
                metrics.replica_circuit_open.set((state.name,), now < state.rests_until or state.breaker.state(now) != CLOSED)

    def _backlog_s(self, pool: Pool, now: float) -> float:
        """Prefill work booked by this process at all replicas of the pool, in seconds of one replica. O(replicas)."""
        known = self._router.ledger.loads
        loads = [known[state.name] for state in pool.replicas if state.name in known]  # the others have no bookings
        return sum([load.own_remaining_tokens(now) / load.rate.value for load in loads])

    def _changed(self, state: ReplicaState) -> None:
        """A replica came, went, or changed its models."""
        self._forget_lists()
        self.suspect(state)
        self._count_places(state)

    def _count_places(self, state: ReplicaState) -> None:
        """A replica came, went, or its engine has reported its load."""
        gate = self._gates.get(state.member.pool)
        if gate is not None and gate.count():
            next(pool for pool in self.pools if pool.name == state.member.pool).admission.set_gate(gate)

    def _models_changed(self, state: ReplicaState) -> None:
        """The prober has found new models of a replica."""
        self._changed(state)
        if state.up and state.models:  # mostly False for a joining replica; comparing all others takes a while
            warn_of_misfits((state,), self.pools, self._by_prefix)
            warn_of_rivals(state, self.pools, self._by_prefix)

    # -- probing

    async def run(self, upstream: UpstreamClient) -> None:
        """Probe every replica until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prober.run(upstream))
            await self._watch_places(upstream, group)

    async def _watch_places(self, upstream: UpstreamClient, group: asyncio.TaskGroup) -> None:
        """While requests wait for a place, learn more of the places (`places.py`)."""
        asked: dict[ReplicaState, asyncio.Task[None]] = {}
        last_s = 0.0
        while True:
            await self._crowded.wait()
            await asyncio.sleep(LOOK_S)
            self._crowded.clear()
            now = self._clock()
            asks = now - last_s >= ASK_S
            for pool in self.pools:
                if not pool.admission.crowded:
                    continue
                self._crowded.set()
                gate = self._gates[pool.name]
                gate.look()
                pool.admission.set_gate(gate)
                if asks:
                    last_s = now
                    asked = {state: task for state, task in asked.items() if not task.done()}
                    for state in gate.oldest():
                        if state not in asked and self._prober.is_asked(state):
                            asked[state] = group.create_task(self._prober.ask_load(state, upstream))

    async def probe_all(self, upstream: UpstreamClient) -> None:
        """Probe every replica once, so that the first requests find their replicas."""
        asked = [state for state in self.replicas if self._prober.is_asked(state)]
        await asyncio.gather(*(self._prober.probe(state, upstream) for state in asked))


def _target_of(pool: Pool, model: str, label: str) -> Target:
    # Engines answer 404 for models that they do not serve; replicas that list the model are preferred.
    members = [state for state in pool.replicas if model in state.models] or pool.replicas
    answering = [state for state in members if state.answers]
    serving = [state for state in answering if state.live] or [state for state in answering if state.doubtful]
    return Target(
        model,
        label,
        {state.name: state for state in serving},
        first_names([f"{state.name} ({state.down_reason})" for state in pool.replicas if not (state.live and state.answers)]),
        pool.admission,
        pool.resume_streams,
        pool.strip_billing_header,
        draining=any(state.up and not state.live for state in answering),
        pool=pool.name,
        fallback=pool.fallback,
        translate=pool.translate,
        delta=pool.delta,
        adapter=next(filter(None, (adapter_of(state.models, model) for state in pool.replicas)), ""),
        prefillers={state.name: state for state in members if state.live and not state.answers},
    )


def _log_each(one: str, more: str, states: Collection[ReplicaState]) -> None:
    """Logs the first LOGGED replicas one by one, and the number of the rest: 1,000 lines would delay requests."""
    for state in islice(states, LOGGED):
        log.info(one, extra={"replica": state.name, "url": state.url, "up": state.up})
    if len(states) > LOGGED:
        log.info(more, extra={"replicas": len(states) - LOGGED})


def _lists(pool: Pool, model: str) -> bool:
    """True if a replica of the pool lists the model."""
    return any(model in state.models for state in pool.replicas)
