"""Probes the replicas: health, models, the engine's facts, and signs of a lost cache.

Each replica has one task, which requests `/v1/models`: every engine answers it, at no cost, and it brings the models too. A
replica is down after `failures` failed probes in a row, or at once if it refuses the connection of a probe or a request. One
successful probe brings it up again.

Bytes of answers to requests are signs of life: while they arrive, a probe that times out takes no replica down, and a replica
that is down is set up again. A busy engine's model list becomes slow first.

Beside the regular probes there are extra ones: after a failed request, or when the replica closed an idle connection, it is
probed at once, within a small budget (`state.ProbeBudget`). A process that ends closes its idle connections, and refuses new
ones until its successor listens: so a quick restart between two regular probes is noticed. Engines also have idle timeouts; if
a probe for a closed connection finds the replica up, the idle time is stored as such a timeout, and causes no further probes.

After a successful probe the engine's own facts are read (`engines.py`). An engine without a page of metrics has not failed; it
is asked rarely from then on, as every engine is for facts that are not on its page. Their KV size bounds the router's belief of
the cache, unless the replica's source sets another size. While others use an engine, it is asked for its load between two
probes, too, every LOAD_S.

A cache counts as lost if the replica refuses connections ("refused"), if it loads its model ("loading"), if the engine's
process has a later start time than any before ("start_time"), if it repeatedly reported zero hits on known prefixes
("zero_hits"), if it sleeps ("sleep"), or if a model has other weights under the same name ("weights"): the version of the
weights, or the path in the model list, is another one, or an adapter was loaded through the gateway. One restart counts once:
after another sign, the next start time is only stored.

The data-parallel ranks of one server (`ranks.py`) are probed once for all: the first of them is asked, and each gets the
result, with its own part of the engine's facts.

Replicas come and go while the gateway runs: `add` and `remove` take effect at once. `run` starts their tasks, and `remove` ends
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gateway.config.schema import HealthConfig
from gateway.errors import LOADING, REFUSED, UNREACHABLE, GatewayError, ReplicaFailure
from gateway.fleet.cache_reports import CacheFinding
from gateway.fleet.engine_client import MAX_MODELS, Models, facts_of, models_of
from gateway.fleet.engines import Facts, named
from gateway.fleet.membership import PREFILL
from gateway.fleet.ranks import Server, of_rank, server_of
from gateway.fleet.state import BETWEEN_PROCESSES, NOT_PROBED, ReplicaState
from gateway.telemetry.logs import first_of
from gateway.telemetry.metrics import Metrics
from gateway.upstream.client import UpstreamClient
from router import Replica, Router

log = logging.getLogger("warmroute.replicas")

START_TIME, ZERO_HITS, SLEEP, WEIGHTS = "start_time", "zero_hits", "sleep", "weights"
RESTART_SIGNS = (REFUSED, LOADING, START_TIME, ZERO_HITS, SLEEP, WEIGHTS)

# Failures of a probe that may only mean that the engine is busy.
_MAYBE_BUSY = frozenset(["timeout", UNREACHABLE])
# Share of a replica's idle timeout: its timer and the gateway's are not exact.
_IDLE_LIMIT_SHARE = 0.9

AT_ONCE = 16  # probes that begin between two turns of the event loop: some milliseconds
LOAD_S = 0.25  # between two questions for the load of an engine that others use
PAGE_S = 0.01  # for each replica, between two such questions: a page takes a quarter of a millisecond of the event loop
LOGGED_MODELS = 20  # names in a log line
RARELY = 30  # probes, of which one asks for facts on no page of metrics, and for a page that was not there before

# Start times are computed from the time of the boot, which drifts a little. A process with a shorter life had nothing cached.
START_TOLERANCE_S = 2.0


ProbeResult = Models | ReplicaFailure | GatewayError | None
"""Result of a request for a replica's models; None: they need a key."""


class Prober:
    """Probes the replicas (see the module). `run`, `probe` and `request_models` send requests; everything else is
    synchronous.
    """

    def __init__(
        self,
        health: HealthConfig,
        router: Router,
        metrics: Metrics,
        changed: Callable[[ReplicaState], None],
        ranks_found: Callable[[ReplicaState, Facts], None],
        reported: Callable[[ReplicaState], None],
        clock: Callable[[], float],
    ) -> None:
        """changed: called when a replica comes, goes, or changes its models. ranks_found: called with the facts of each page of
        metrics; may add and remove replicas. reported: called when an engine has shown its load.
        """
        self._health = health
        self._router = router
        self._metrics = metrics
        self._changed = changed
        self._reported = reported
        self._ranks_found = ranks_found
        self._ranks: dict[Server, list[ReplicaState]] = {}  # the ranks of each server that has some; the first one is asked
        self._clock = clock
        self._tasks: dict[ReplicaState, asyncio.Task[None] | None] = {}  # by replica; None: to be started
        self._news = asyncio.Event()

    def add(self, state: ReplicaState) -> None:
        """A replica joins the fleet."""
        self.set_bounds(state)
        if state.member.rank is not None:
            ranks = self._ranks.setdefault(server_of(state.member), [])
            if ranks:
                state.probe_now, state.probe_budget = ranks[0].probe_now, ranks[0].probe_budget
            ranks.append(state)
        self._tasks[state] = None
        self._news.set()
        self._metrics.replica_up.set((state.name,), 0)
        self._metrics.replica_cache_hits_missing.set((state.name,), 0)
        for sign in RESTART_SIGNS:
            self._metrics.replica_restarts.add((state.name, sign), 0)

    def remove(self, state: ReplicaState) -> None:
        """A replica has left: end its probes and its gauges."""
        if task := self._tasks.pop(state):
            task.cancel()
        if state.member.rank is not None:
            ranks = self._ranks[server_of(state.member)]
            ranks.remove(state)
            self._news.set()  # the next rank may have to be asked
            if not ranks:
                del self._ranks[server_of(state.member)]
        state.probed.set()
        name, metrics = (state.name,), self._metrics
        for gauge in (metrics.replica_up, metrics.replica_cache_hits_missing, metrics.replica_capacity):
            gauge.set(name, None)
        self._show_load(state.name, None, None)

    def _together(self, state: ReplicaState) -> Sequence[ReplicaState]:
        """The ranks of this replica's server, the asked one first; or the replica alone."""
        if state.member.rank is None:
            return (state,)
        return tuple(self._ranks.get(server_of(state.member), ()))

    def is_asked(self, state: ReplicaState) -> bool:
        """True if probes of this replica are sent; else it gets the results of another rank of its server."""
        return state.member.rank is None or self._together(state)[:1] == (state,)

    def retune(self, health: HealthConfig) -> None:
        """Set the rules of probing."""
        if health != self._health:
            self._health = health
            for state in self._tasks:
                state.probe_now.set()  # else the next probe would wait for the end of the old interval

    def set_bounds(self, state: ReplicaState) -> None:
        """Give the router the replica's KV size, longest prompt and kind of engine; called when they may have changed."""
        capacity, engine = state.capacity_tokens, state.engine
        kind = state.member.pool if state.answers else f"{state.member.pool} {PREFILL}"  # transfers are not as fast as prefills
        known = state.name, capacity, state.context_tokens, engine.one_conversation, kind
        self._router.add(Replica(*known, engine.shares_inflight, engine.slots, state.member.caches, state.facts.adapters))
        self._metrics.replica_capacity.set((state.name,), capacity)

    # -- observations of requests

    def failed(self, state: ReplicaState, failure: ReplicaFailure) -> None:
        """A request's attempt failed on this replica."""
        if failure.reason == REFUSED:
            for each in self._together(state):
                self._set_down(each, failure)
        if self._probe_soon(state) and failure.reason != REFUSED:
            self._router.failing(state.name)

    def doubt(self, state: ReplicaState) -> None:
        """See `Fleet.doubt`. A replica that is down is probed at its time."""
        if state.up:
            self._probe_soon(state)

    def adapters_changed(self, state: ReplicaState, *, loaded: bool) -> None:
        """A request to load (or unload) an adapter has succeeded there; it may replace one of the same name."""
        for each in self._together(state) if loaded else ():
            self._lose_cache(each, WEIGHTS)
        self._probe_soon(state)

    def moved(self, state: ReplicaState) -> None:
        """It has another address."""
        self._probe_soon(state)

    def connection_closed(self, state: ReplicaState, idle_s: float) -> None:
        """The replica has closed a connection that had been idle for idle_s; its process may have ended."""
        if state.up and idle_s < state.idle_limit_s * _IDLE_LIMIT_SHARE and self._probe_soon(state):
            state.closed_after_s = min(idle_s, state.closed_after_s or math.inf)

    def _probe_soon(self, state: ReplicaState) -> bool:
        """Probe it at once, if the budget allows. False: it waits for the next regular probe."""
        allowed = state.probe_now.is_set() or state.probe_budget.take(self._clock(), self._health.interval_s)
        if allowed:
            state.probe_now.set()
        return allowed

    def zero_hits(self, state: ReplicaState) -> None:
        """The router has treated repeated zero hits as a restart, and forgotten the replica's cached prefixes."""
        log.warning("replica restarted?", extra={"replica": state.name, "reason": ZERO_HITS})
        self._cache_lost(state, ZERO_HITS)

    def cache_reported(self, state: ReplicaState, finding: CacheFinding) -> None:
        """The engine's reports of cached tokens have shown something new."""
        about = {"replica": state.name, "engine": state.engine.name}
        match finding:
            case CacheFinding.ZERO:
                self._metrics.replica_cache_hits_missing.set((state.name,), 1)
                log.warning("cached tokens stay at zero", extra={**about, "hint": _zero_hint(state)})
            case CacheFinding.SILENT:
                log.info("cached tokens are not reported", extra={**about, "hint": state.engine.silent})
            case CacheFinding.HIT:
                self._metrics.replica_cache_hits_missing.set((state.name,), 0)
                log.info("cached tokens are no longer zero", extra=about)

    # -- probing

    async def run(self, upstream: UpstreamClient) -> None:
        """Probe every replica, including later members, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                new = [state for state, task in self._tasks.items() if task is None and self.is_asked(state)]
                for number, state in enumerate(new):
                    if number % AT_ONCE == 0:
                        await asyncio.sleep(0)
                    if self._tasks.get(state, self) is None:  # it is still a member
                        self._tasks[state] = group.create_task(self._keep_probing(state, upstream))
                await self._news.wait()

    async def _keep_probing(self, state: ReplicaState, upstream: UpstreamClient) -> None:
        while True:
            await self._await_turn(state, upstream)
            state.probe_now.clear()
            try:
                await self.probe(state, upstream)
            except Exception:  # a bug in one probe must not stop the probing
                log.exception("probe failed", extra={"replica": state.name})

    async def _await_turn(self, state: ReplicaState, upstream: UpstreamClient) -> None:
        """Wait for the time of the next probe. While others use the engine, ask it for its load meanwhile."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._health.interval_s
        while (left_s := until - clock()) > 0:
            pause_s = max(LOAD_S, PAGE_S * len(self._tasks))
            watched = pause_s < left_s and self._is_shared(state)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s if watched else left_s):
                    await state.probe_now.wait()
                    return
            if watched:
                await self.ask_load(state, upstream)

    def _is_shared(self, state: ReplicaState) -> bool:
        """True if others use its server."""
        if not (state.up and state.has_metrics):
            return False
        now, ledger = self._clock(), self._router.ledger
        return any(ledger.shared(each.name, now) for each in self._together(state))

    async def probe(self, state: ReplicaState, upstream: UpstreamClient) -> None:
        if state.engine.fragile is not None and (upstream.busy(state.url) or self._router.ledger.of(state.name).inflight):
            return  # it serves one request at a time: a probe would wait behind the running one
        closed_after_s, state.closed_after_s = state.closed_after_s, None
        result = await self.request_models(state.url, upstream)
        if state not in self._tasks:  # it has left during the probe
            return
        if isinstance(result, ReplicaFailure) and result.reason == "timeout" and upstream.busy(state.url):
            return  # a request was faster
        silence_s = upstream.silence_s(state.url)
        for other in self._together(state)[1:]:
            self.apply_probe(other, result, silence_s)
        if not self.apply_probe(state, result, silence_s):
            return
        if closed_after_s is not None:
            state.idle_limit_s = min(state.idle_limit_s, closed_after_s)
        await self._ask_engine(state, upstream)

    async def ask_load(self, state: ReplicaState, upstream: UpstreamClient) -> None:
        """Ask the replica's engine for its load, between two probes."""
        try:
            await self.ask_facts(state, upstream)
        except Exception:  # as in `_keep_probing`
            log.exception("probe failed", extra={"replica": state.name})

    async def request_models(self, url: str, upstream: UpstreamClient) -> ProbeResult:
        """Request the models at this URL. Changes nothing; `apply_probe` applies the result."""
        try:
            return await models_of(upstream, url, self._health.timeout_s)
        except (ReplicaFailure, GatewayError) as error:
            return error

    async def request_models_of_all(
        self, urls: Iterable[str], upstream: UpstreamClient, within_s: float
    ) -> dict[str, ProbeResult]:
        """`request_models` of all URLs concurrently. URLs without an answer within within_s are omitted."""
        asking: dict[str, asyncio.Future[ProbeResult]] = {}
        try:
            for number, url in enumerate(dict.fromkeys(urls)):
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
                asking[url] = asyncio.ensure_future(self.request_models(url, upstream))
            if asking:
                await asyncio.wait(asking.values(), timeout=within_s)
            return {url: answer.result() for url, answer in asking.items() if answer.done()}
        finally:
            for answer in asking.values():
                answer.cancel()

    def apply_probe(self, state: ReplicaState, result: ProbeResult, silence_s: float = math.inf) -> bool:
        """Apply the result of a probe to the replica's state. Returns True if the probe succeeded.

        silence_s: seconds since the last byte of its answers to requests.
        """
        state.probed.set()
        if isinstance(result, ReplicaFailure):
            self._probe_failed(state, result, silence_s)
            return False
        if isinstance(result, GatewayError):  # the gateway's lack of resources shows nothing about the replica
            log.warning("cannot probe", extra={"replica": state.name, "error": result.message})
            return False
        keyed = result is None
        other = result is not None and result != state.models
        changed = other or keyed != state.needs_key
        if changed and result is not None:
            _warn_of_bounds(state.name, result)
        state.needs_key = keyed
        if result is not None and other:
            replaced = _replaced(state.models, result)
            state.models = result
            self.set_bounds(state)
            if replaced:
                self._lose_cache(state, WEIGHTS, model=replaced)
        if changed:
            self._changed(state)
        self._set_up(state)
        return True

    def _probe_failed(self, state: ReplicaState, failure: ReplicaFailure, silence_s: float) -> None:
        if failure.reason in _MAYBE_BUSY and silence_s <= self._health.interval_s + self._health.timeout_s:
            if not (state.up and state.error):
                log.warning("probe fails, but requests are answered", extra={"replica": state.name, "error": failure.message})
            self._set_up(state)
            state.error = f"its probe fails ({failure.message}), but it answers requests"
            return
        state.failed_probes += 1
        if failure.reason in BETWEEN_PROCESSES or state.failed_probes >= self._health.failures or not state.up:
            self._set_down(state, failure)
        elif failure.reason == "reset":
            self._probe_soon(state)  # an ending process may reset a connection before it refuses the next one

    def _set_up(self, state: ReplicaState) -> None:
        state.failed_probes = 0
        if state.up:
            state.error = ""
            return
        if state.needs_key:
            log.warning("replica needs a key for its model list; models unknown", extra={"replica": state.name})
        if state.error != NOT_PROBED:  # else it has just joined, and `_begin_slowly` has set its share
            state.up_since = self._clock()
            self._router.came_up(state.name, state.up_since)
        state.error = ""
        state.idle_limit_s = math.inf
        state.up = state.warm = True
        self._changed(state)
        state.probes = 0
        state.facts = Facts(role=state.facts.role)  # until it is asked: a prefiller answers no client meanwhile
        state.places.forget()
        state.lacks.clear()
        self._metrics.replica_up.set((state.name,), 1)
        log.info("replica up", extra={"replica": state.name, **first_of("models", state.models, LOGGED_MODELS)})

    def _set_down(self, state: ReplicaState, failure: ReplicaFailure) -> None:
        changed = state.up or state.error == NOT_PROBED
        if state.up:
            self._router.failing(state.name)
        state.up, state.error, state.down_by = False, failure.message, failure.reason
        self._changed(state)
        self._metrics.replica_up.set((state.name,), 0)
        self._show_load(state.name, None, None)
        if failure.reason in BETWEEN_PROCESSES:
            self._router.restarted(state.name)
            if state.warm:
                self._cache_lost(state, failure.reason)
                state.warm = False
        if changed:
            log.warning("replica down", extra={"replica": state.name, "reason": failure.reason, "error": failure.message})

    # -- the engine's facts

    async def _ask_engine(self, state: ReplicaState, upstream: UpstreamClient) -> None:
        again = state.probes % RARELY == 0
        state.probes += 1
        if state.has_metrics or state.facts.tells_sleep or again:
            await self.ask_facts(state, upstream, inquire=again)

    async def ask_facts(self, state: ReplicaState, upstream: UpstreamClient, *, inquire: bool = False) -> None:
        """Ask the replica's engine for its facts. inquire: also for facts beyond its page of metrics."""
        timeout_s = self._health.timeout_s
        engine = named(state.member.engine)
        ranks = self._ranks.get(server_of(state.member), ())
        before = {each: self._sequences(each) for each in (state, *ranks)}
        known = state.facts if state.member.rank is None else replace(state.facts, kv_tokens=None)  # of all ranks together
        found = await facts_of(upstream, state.url, timeout_s, state.models, known, engine, inquire=inquire)
        facts, state.has_metrics = found
        if not state.has_metrics:
            last = state.facts
            asleep = facts.asleep if facts.tells_sleep else last.asleep
            facts = replace(facts, asleep=asleep, restorable=last.restorable, version=last.version)
        elif not facts.version:
            facts = replace(facts, version=state.facts.version)
        if not (state.up and state in self._tasks):  # it may have gone down or left during the question
            return
        server = server_of(state.member)
        if state.member.rank is None:
            self._apply_facts(state, facts)
            self._apply_load(state, before[state])
        if state.has_metrics:
            self._ranks_found(state, facts)
        for each in tuple(self._ranks.get(server, ())):
            each.has_metrics = state.has_metrics
            own = of_rank(facts, each.member)
            self._apply_facts(each, own if own.kv_tokens else replace(own, kv_tokens=each.facts.kv_tokens))
            if each in before:
                self._apply_load(each, before[each])

    def _sequences(self, state: ReplicaState) -> tuple[int, int]:
        """(sequences of our requests there, the sent ones of these)."""
        load = self._router.ledger.of(state.name)
        return load.sequences, load.sent_sequences

    def _apply_load(self, state: ReplicaState, before: tuple[int, int]) -> None:
        """Apply the load that the replica's engine reports. before: `_sequences` at the time of the question."""
        if not state.has_metrics:
            return
        running, waiting, now = state.facts.running, state.facts.waiting, self._clock()
        after = self._sequences(state)
        least, most = min(before[0], after[0]), max(before[0], after[0])
        if running is not None and waiting is not None:
            self._router.reported(state.name, running, waiting, max(before[1], after[1]), now)
        # Requests in line (`router/late.py`) take places: else one tenant would fill the line, where tenants take no turns.
        in_line = sum([lease.sequences for lease in self._router.ledger.of(state.name).line])
        state.places.learn(running, waiting, (least - in_line, most), now)
        self._reported(state)

    def _apply_facts(self, state: ReplicaState, facts: Facts) -> None:
        """Apply the facts that the replica's engine reports."""
        engine, before, state.facts = state.engine, state.facts, facts
        if facts.asleep != before.asleep or facts.role != before.role:
            self._changed(state)
        if facts.asleep != before.asleep:
            log.info("replica sleeps" if facts.asleep else "replica is awake", extra={"replica": state.name})
            if facts.asleep:
                self._lose_cache(state, SLEEP)
        if before.version and facts.version not in ("", before.version):
            self._lose_cache(state, WEIGHTS, version=facts.version)
        self._show_load(state.name, facts.running, facts.waiting)
        other = state.engine is not engine or facts.adapters not in (None, before.adapters) or facts.role != before.role
        if facts.capacity_tokens is not None and facts.capacity_tokens != state.engine_capacity_tokens:
            state.engine_capacity_tokens = facts.capacity_tokens
            if state.member.capacity_tokens is None:
                other = True
                about = {"replica": state.name, "engine": facts.engine.name, "capacity_tokens": facts.capacity_tokens}
                log.info("replica reports the size of its KV cache", extra=about)
        if other:
            self.set_bounds(state)
        if facts.started is not None:
            if state.started is not None and facts.started > state.started + START_TOLERANCE_S:
                log.warning("replica restarted", extra={"replica": state.name, "reason": START_TIME})
                self._router.restarted(state.name)
                self._cache_lost(state, START_TIME)
            # Several processes may answer at one address, by turns; only a start later than all of theirs is a restart.
            state.started = max(facts.started, state.started or 0.0)

    def _lose_cache(self, state: ReplicaState, sign: str, **about: str) -> None:
        """The process goes on, but nothing that it has cached is of use."""
        started = state.started
        log.info("replica's cache is void", extra={"replica": state.name, "reason": sign, **about})
        self._router.restarted(state.name)
        self._cache_lost(state, sign)
        state.started = started

    def _cache_lost(self, state: ReplicaState, sign: str) -> None:
        state.started = None
        if sign != ZERO_HITS:  # a cache that never works looks the same
            state.overlap.restart()
        self._metrics.replica_restarts.add((state.name, sign))

    def _show_load(self, name: str, running: int | None, waiting: int | None) -> None:
        self._metrics.replica_engine_running.set((name,), running)
        self._metrics.replica_engine_waiting.set((name,), waiting)


def _replaced(before: Models, now: Models) -> str:
    """The first model that is loaded from elsewhere under the same name; "": none is."""
    for name, entry in now.items():
        known = before.get(name)
        if known is not None and known.root and entry.root and known.root != entry.root:
            return name
    return ""


def _zero_hint(state: ReplicaState) -> str:
    if state.facts.caching is False:
        return f"Its metrics say that prefix caching is off. {state.engine.zero}"
    return f"{state.engine.zero} Or does the chat template put a changing text, such as the time, before the messages?"


def _warn_of_bounds(replica: str, models: Models) -> None:
    """Logs a new model list that exceeds the bounds."""
    if len(models) >= MAX_MODELS:
        log.warning("model list is too long; the rest is ignored", extra={"replica": replica, "models": len(models)})
    cut = [name for name, entry in models.items() if not entry.whole]
    if cut:
        about = {"replica": replica, "models": len(cut), "first": cut[0]}
        log.warning("entries of the model list are too large or too deep; only OpenAI's fields are shown", extra=about)
