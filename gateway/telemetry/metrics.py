"""The names of the core's metrics; features have their own (`metrics.py` in their packages).

Labels are bounded: `model` is a name that a replica lists or a configured prefix, `replica` its name, from the configuration,
an operator or another source, `endpoint` a path of a table (`dialects/table.py`), `tenant` one of the first TENANTS distinct
ones, of keys or of the tenant header, `code` a known HTTP status, else its class ("5xx"). The number of their combinations is
bounded by `counters.MAX_LABEL_SETS`. Units are in the names. `merge_rule`: how the values of several workers are merged
(`counters.py`).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector

from gateway.telemetry.counters import Counter, Gauge, Histogram, Instruments, MergeRule, merge_max, merge_min, merge_sum
from router import Router

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
ROUTING_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
LATE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

TENANTS = 100

T = TypeVar("T")

_TOKEN_LABELS = ("model", "replica")
_REQUEST_LABELS = ("model", "endpoint")


class MetricFamily:
    """Makes instruments with the prefix warmroute_."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments

    def counter(self, name: str, text: str, *labels: str, merge_rule: MergeRule = merge_sum) -> Counter:
        return self._instruments.counter(f"warmroute_{name}", text, *labels, merge_rule=merge_rule)

    def gauge(self, name: str, text: str, *labels: str, merge_rule: MergeRule = merge_max) -> Gauge:
        return self._instruments.gauge(f"warmroute_{name}", text, *labels, merge_rule=merge_rule)

    def seconds(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return self._instruments.histogram(f"warmroute_{name}_seconds", text, *labels, bounds=buckets)


class Metrics:
    """The gateway's metrics, in their own registry: two gateways can run in one process.

    kinds: classes with the metrics of features, each made with a `MetricFamily`; `of` finds them again.
    """

    def __init__(self, kinds: Sequence[type[Any]] = ()) -> None:
        self.instruments = Instruments()
        self.registry = CollectorRegistry()
        family = MetricFamily(self.instruments)
        self._add_requests(family)
        self._add_admission(family)
        self._add_tokens(family)
        self._add_state(family)
        self._add_reloads(family)
        self._add_replication(family)
        self._add_workers(family)
        self._add_process(family)
        self._kinds = kinds
        self._of: dict[type[Any], Any] = {kind: kind(family) for kind in kinds}
        self.registry.register(self.instruments)

    def of(self, kind: type[T]) -> T:
        """The metrics of a feature, by the class that it declared."""
        found: T = self._of[kind]
        return found

    def fresh(self) -> Metrics:
        """Metrics of the same kinds, without values."""
        return Metrics(self._kinds)

    def _add_requests(self, make: MetricFamily) -> None:
        self.requests = make.counter(
            "requests_total", "Requests answered, by HTTP status (499: the client disconnected).", *_REQUEST_LABELS, "code"
        )
        self.request_seconds = make.seconds("request", "Request read to last byte of its response.", *_REQUEST_LABELS)
        self.held_seconds = make.seconds(
            "held",
            "Wait for another request that computed the same prefix, or in the line of a replica, by its end: computed, late"
            " (the time was up), lost (the prefix is not there any more: it was routed again), left (by its client).",
            "result",
        )
        self.ttft_seconds = make.seconds(
            "ttft",
            "Request read to first token of a stream; hit: cached tokens were predicted.",
            *_REQUEST_LABELS,
            "cache",
        )
        self.inter_token_seconds = make.seconds("inter_token", "Mean seconds between the tokens of a stream.", "model")
        self.routing_seconds = make.seconds(
            "routing", "Seconds to hash a prompt and choose a replica.", buckets=ROUTING_SECONDS
        )
        self.routing = make.counter("routing_decisions_total", "Routing decisions, by policy and reason.", "policy", "reason")
        self.retries = make.counter(
            "retries_total", "Attempts on another replica, by the failure of the previous one.", "reason"
        )
        self.retry_budget_exhausted = make.counter(
            "retry_budget_exhausted_total", "Retries not made, because the retry budget (a fifth of the requests) was spent."
        )
        self.broken_responses = make.counter(
            "broken_responses_total", "Responses that the replica broke off after their first byte.", "model", "replica"
        )
        self.resumed = make.counter(
            "resumed_streams_total",
            "Broken streams of pools with resume_streams, by result: good, failed (not completed), impossible (not resumable).",
            "model",
            "result",
        )

    def _add_admission(self, make: MetricFamily) -> None:
        self.admission_rejected = make.counter(
            "admission_rejected_total", "Requests rejected by a pool's queue.", "pool", "reason"
        )
        self.queue_seconds = make.seconds(
            "queue",
            "Wait in a pool's queue, of the requests that had to wait, whether they got a slot or not.",
            "pool",
        )
        self.inflight_bytes = make.gauge("inflight_bytes", "Bytes of clients' requests held in memory.", merge_rule=merge_sum)
        self.inflight_limit = make.gauge(
            "inflight_limit_bytes", "Limit of inflight_bytes: limits.inflight_mb, or its default.", merge_rule=merge_sum
        )
        self.memory_rejected = make.counter(
            "memory_rejected_total",
            "Requests and partial request heads rejected because of the limit of inflight_bytes.",
        )
        self.connections = make.gauge("client_connections", "Open connections of clients.", merge_rule=merge_sum)
        self.connections_limit = make.gauge(
            "client_connections_limit",
            "Limit of client_connections: limits.connections, or what the open files limit allows.",
            merge_rule=merge_sum,
        )
        self.connections_rejected = make.counter(
            "client_connections_rejected_total",
            "Connections answered 503: the limit, or one address's share of it, was reached.",
        )
        self.pool_inflight = make.gauge(
            "pool_inflight", "Requests of a pool running at its replicas.", "pool", merge_rule=merge_sum
        )
        self.pool_waiting = make.gauge("pool_waiting", "Requests of a pool waiting in its queue.", "pool", merge_rule=merge_sum)
        self.pool_slots_taken = make.gauge(
            "pool_slots_taken", "Slots of a pool that are taken, also by other gateways that share with this one.", "pool"
        )
        self.pool_inflight_limit = make.gauge(
            "pool_inflight_limit", "Limit of pool_slots_taken: pools[].max_inflight.", "pool", merge_rule=merge_max
        )
        self.pool_prefill_backlog = make.gauge(
            "pool_prefill_backlog_seconds",
            "Prefill work of this gateway's requests at a pool's replicas, in seconds by their learned rates, all added up.",
            "pool",
            merge_rule=merge_sum,
        )
        self.pool_replicas = make.gauge("pool_replicas", "Replicas of a pool.", "pool")
        self.pool_replicas_live = make.gauge(
            "pool_replicas_live", "Replicas of a pool that are up and may be sent new requests.", "pool", merge_rule=merge_min
        )

    @property
    def by_pool(self) -> tuple[Gauge, ...]:
        """The gauges that mirror pools."""
        return (
            self.pool_inflight,
            self.pool_waiting,
            self.pool_slots_taken,
            self.pool_inflight_limit,
            self.pool_prefill_backlog,
            self.pool_replicas,
            self.pool_replicas_live,
        )

    def _add_tokens(self, make: MetricFamily) -> None:
        self.prompt_tokens = make.counter(
            "prompt_tokens_total",
            "Prompt tokens; hit: cached, as the engine reported; estimated: cached, as the router predicted.",
            *_TOKEN_LABELS,
            "cache",
        )
        self.predicted_cached = make.counter(
            "predicted_cached_tokens_total", "Prompt tokens predicted to be cached at the chosen replica.", *_TOKEN_LABELS
        )
        self.available_cached = make.counter(
            "available_cached_tokens_total",
            "Prompt tokens predicted to be cached at the best holder, chosen or not.",
            "model",
        )
        self.completion_tokens = make.counter(
            "completion_tokens_total", "Generated tokens, as the engine reported them, else estimated.", *_TOKEN_LABELS
        )
        self.estimated = make.counter(
            "estimated_answers_total",
            "Answers that were metered by an estimate of what the engine did not report: cached, output, tokens (all of them).",
            "model",
            "what",
        )
        self.unmetered = make.counter(
            "unmetered_requests_total",
            "Successful generations whose response had no valid usage (estimated), or one that is not read (not counted).",
            *_REQUEST_LABELS,
        )
        self.breakpoints = make.counter(
            "breakpoints_total",
            "Requests with cache_control, by what became of the prefix to be kept.",
            "model",
            "result",
        )
        self.cache_writes = make.counter(
            "cache_write_tokens_total", "Prompt tokens that the engine reported as newly written to its cache.", *_TOKEN_LABELS
        )
        self.cost_usd = make.counter("cost_usd_total", "Cost by the configured prices, in USD.", "model", "tenant", "kind")
        self.estimated_cost_usd = make.counter(
            "estimated_cost_usd_total", "Of cost_usd_total, what estimates are part of, in USD.", "model", "tenant"
        )
        self.unpriced = make.counter(
            "unpriced_answers_total", "Answers of models for which no price is configured, while others have one.", "model"
        )
        self.savings_usd = make.counter(
            "savings_usd_total", "Additional cost of the cached tokens, had they not been cached, in USD.", "model", "tenant"
        )

    def _add_state(self, make: MetricFamily) -> None:
        self.replica_up = make.gauge("replica_up", "1 if the replica answers its probes.", "replica", merge_rule=merge_min)
        self.replica_inflight = make.gauge(
            "replica_inflight", "Requests of this gateway on the replica.", "replica", merge_rule=merge_sum
        )
        self.replica_booked = make.gauge(
            "replica_booked_tokens",
            "Uncached prompt tokens of this gateway's requests that are still in prefill.",
            "replica",
            merge_rule=merge_sum,
        )
        self.prefill_rate = make.gauge(
            "replica_prefill_tokens_per_second", "Learned prefill rate, in tokens per second.", "replica"
        )
        self.replica_capacity = make.gauge(
            "replica_capacity_tokens", "KV cache size: configured, else as advertised by the engine.", "replica"
        )
        self.replica_engine_running = make.gauge(
            "replica_engine_running", "Running sequences as the engine reports them, from all senders.", "replica"
        )
        self.replica_engine_waiting = make.gauge(
            "replica_engine_waiting", "Waiting sequences as the engine reports them, from all senders.", "replica"
        )
        self.replica_circuit_open = make.gauge(
            "replica_circuit_open",
            "1 while its circuit breaker is not closed, or it asked for a pause (Retry-After).",
            "replica",
        )
        self.replica_cache_hits_missing = make.gauge(
            "replica_cache_hits_missing", "1 while the engine reports no cached tokens though many were predicted.", "replica"
        )
        self.replica_restarts = make.counter(
            "replica_restarts_total",
            "Times the replica's cache was presumed lost, by evidence.",
            "replica",
            "reason",
            merge_rule=merge_max,
        )
        self.trie_blocks = make.gauge(
            "trie_blocks", "Blocks in the prefix index, counted once per replica believed to hold them."
        )
        self.trie_bytes = make.gauge("trie_bytes", "Estimated memory of the prefix index.", merge_rule=merge_sum)
        self.trie_evicted = make.counter(
            "trie_evicted_blocks_total", "Entries removed from the prefix index, by reason.", "reason", merge_rule=merge_max
        )

    def _add_reloads(self, make: MetricFamily) -> None:
        self.reloads = make.counter(
            "config_reloads_total",
            "Configuration reloads, by result: good, invalid (no change), unchanged.",
            "result",
            merge_rule=merge_max,
        )
        self.config_loaded = make.gauge(
            "config_loaded_timestamp_seconds", "Unix time at which the configuration in force was loaded.", merge_rule=merge_min
        )

    def _add_replication(self, make: MetricFamily) -> None:
        self.sharing_unknown_replicas = make.counter(
            "sharing_unknown_replicas_total",
            "Requests of other gateways to replicas of which there is no such name here: nothing is learned from them.",
            merge_rule=merge_max,
        )

    def _add_workers(self, make: MetricFamily) -> None:
        self.workers = make.gauge("workers", "Processes of this gateway that serve requests.", merge_rule=merge_sum)
        self.log_lines_dropped = make.counter(
            "log_lines_dropped_total",
            "Log lines dropped: their reader did not keep up, or they could not be written.",
        )
        self.event_loop_lag_seconds = make.seconds(
            "event_loop_lag",
            "Seconds by which a worker's event loop is late, measured four times a second.",
            buckets=LATE_SECONDS,
        )
        self.worker_replication_lag_seconds = make.seconds(
            "worker_replication_lag",
            "Seconds until a lease of one worker, or of another gateway, was known to a worker.",
            buckets=LAG_SECONDS,
        )

    def _add_process(self, make: MetricFamily) -> None:
        """The standard names, of all workers added up, without the supervisor and the processes that parse large bodies."""
        self.build_info = make.gauge("build_info", "1; what this gateway is, in its labels.", "version", "python", "compiled")
        self._process = ProcessCollector(registry=None)
        self._cpu = self.instruments.counter("process_cpu_seconds_total", "CPU time of the gateway's workers, in seconds.")
        make_gauge = self.instruments.gauge
        self._process_gauges = (
            make_gauge("process_resident_memory_bytes", "Resident memory of the gateway's workers.", merge_rule=merge_sum),
            make_gauge("process_virtual_memory_bytes", "Virtual memory of the gateway's workers.", merge_rule=merge_sum),
            make_gauge("process_open_fds", "Open file descriptors of the gateway's workers.", merge_rule=merge_sum),
            make_gauge("process_max_fds", "Limits of process_open_fds, added up.", merge_rule=merge_sum),
            make_gauge("process_start_time_seconds", "Unix time at which the oldest worker started.", merge_rule=merge_min),
        )

    def set_build(self, version: str, *, compiled: bool) -> None:
        """compiled: the hot modules are compiled."""
        self.build_info.set((version, platform.python_version(), str(compiled).lower()), 1)

    def set_process_gauges(self) -> None:
        """Copy the system's counts for this process; called at each scrape. Nothing without /proc. O(open files)."""
        values = {sample.name: sample.value for family in self._process.collect() for sample in family.samples}
        if (cpu_s := values.get(self._cpu.name)) is not None:
            self._cpu.set((), cpu_s)
        for gauge in self._process_gauges:
            gauge.set((), values.get(gauge.name))

    def set_router_gauges(self, router: Router) -> None:
        """Copy the router's state into the gauges; called at each scrape.

        Counts only requests booked by this process: each worker and each gateway follows the bookings of the others, and their
        gauges are added up.
        """
        self.workers.set((), 1)
        for gauge in (self.replica_inflight, self.replica_booked, self.prefill_rate):
            gauge.values.clear()  # drops the series of removed replicas
        for name in router.replicas:
            load = router.ledger.of(name)
            self.replica_inflight.set((name,), load.own_inflight)
            self.replica_booked.set((name,), load.own_booked_tokens)
            self.prefill_rate.set((name,), load.rate.value)
        self.trie_blocks.set((), router.trie.blocks)
        self.trie_bytes.set((), router.trie.size_bytes)
        for reason, blocks in router.trie.evicted.items():
            self.trie_evicted.set((reason,), blocks)

    def set_connection_gauges(self, *, open_now: int, limit: int, rejected: int) -> None:
        """Set the gauges of clients' connections."""
        self.connections.set((), open_now)
        self.connections_limit.set((), limit)
        self.connections_rejected.set((), rejected)

    def set_memory_gauges(self, *, held: int, limit: int, rejected: int) -> None:
        """Set the gauges of the memory held by requests."""
        self.inflight_bytes.set((), held)
        self.inflight_limit.set((), limit)
        self.memory_rejected.set((), rejected)
