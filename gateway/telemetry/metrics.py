"""Every metric name, once.

Labels are bounded: `model` is a name that a replica lists or a configured prefix, `replica` a configured name, `tenant` one
of the first TENANTS distinct values of the tenant header, `code` a known HTTP status, else its class ("5xx"). The number of
their combinations is bounded by `counters.MAX_LABEL_SETS`. Units are in the names. `across` says what several workers' numbers
come to (`counters.py`).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.telemetry.counters import Across, Counter, Gauge, Histogram, Page, least, most, total
from router import Router

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
ROUTING_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

TENANTS = 100

_TOKEN_LABELS = ("model", "replica")


class _Family:
    """Makes metrics on one page, all with the same prefix."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def counter(self, name: str, text: str, *labels: str, across: Across = total) -> Counter:
        return self._page.counter(f"warmroute_{name}", text, *labels, across=across)

    def gauge(self, name: str, text: str, *labels: str, across: Across = most) -> Gauge:
        return self._page.gauge(f"warmroute_{name}", text, *labels, across=across)

    def seconds(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return self._page.histogram(f"warmroute_{name}_seconds", text, *labels, bounds=buckets)


class Metrics:
    """The gateway's metrics in a registry of their own (no global state: two gateways can live in one process)."""

    def __init__(self) -> None:
        self.page = Page()
        self.registry = CollectorRegistry()
        family = _Family(self.page)
        self._add_requests(family)
        self._add_tokens(family)
        self._add_state(family)
        self._add_reloads(family)
        self._add_workers(family)
        self.registry.register(self.page)

    def _add_requests(self, make: _Family) -> None:
        self.requests = make.counter(
            "requests_total", "Requests answered, by HTTP status (499: the client left).", "model", "code"
        )
        self.request_seconds = make.seconds("request", "Request read to last byte of the answer.", "model")
        self.ttft_seconds = make.seconds(
            "ttft", "Request read to first byte of a streamed answer; hit: cached tokens were predicted.", "model", "cache"
        )
        self.inter_token_seconds = make.seconds("inter_token", "Mean gap between the tokens of a streamed answer.", "model")
        self.routing_seconds = make.seconds("routing", "Time to hash a prompt and choose a replica.", buckets=ROUTING_SECONDS)
        self.routing = make.counter("routing_total", "Decisions, by policy and reason.", "policy", "reason")
        self.retries = make.counter("retries_total", "Attempts on a further replica, by why the one before failed.", "reason")
        self.retries_refused = make.counter(
            "retries_refused_total", "Retries that were not made, for they are at most a fifth of the requests."
        )
        self.refused = make.counter("refused_total", "Requests refused before a replica was chosen, by why.", "pool", "reason")
        self.inflight_bytes = make.gauge(
            "inflight_bytes", "Bytes of the clients' requests that are held in memory.", across=total
        )
        self.inflight_limit = make.gauge(
            "inflight_limit_bytes", "What inflight_bytes may come to: limits.inflight_mb, or its default.", across=total
        )
        self.inflight_refused = make.counter(
            "inflight_refused_total",
            "Requests and unfinished heads that were refused, for they would have held too many bytes.",
        )
        self.connections = make.gauge("client_connections", "Connections that clients have open.", across=total)
        self.connections_limit = make.gauge(
            "client_connections_limit",
            "How many they may be: limits.connections, or what the open files allow.",
            across=total,
        )
        self.connections_refused = make.counter(
            "client_connections_refused_total", "Connections answered 503: all were in use, or one address's share of them."
        )
        self.pool_inflight = make.gauge("pool_inflight", "Requests of a pool at its replicas.", "pool", across=total)
        self.pool_waiting = make.gauge("pool_waiting", "Requests of a pool that wait for a place.", "pool", across=total)
        self.broken = make.counter(
            "broken_answers_total", "Answers that the replica broke off after their first byte.", "model", "replica"
        )
        self.resumed = make.counter(
            "resumed_streams_total",
            "Broken streams, where pools resume them: finished (good), not finished (failed), not to be resumed (impossible).",
            "model",
            "result",
        )

    def _add_tokens(self, make: _Family) -> None:
        self.prompt_tokens = make.counter(
            "prompt_tokens_total",
            "Prompt tokens as the engine reported them; hit: it had them cached.",
            *_TOKEN_LABELS,
            "cache",
        )
        self.predicted_cached = make.counter(
            "predicted_cached_tokens_total", "Prompt tokens that the chosen replica was believed to hold.", *_TOKEN_LABELS
        )
        self.available_cached = make.counter(
            "available_cached_tokens_total", "Prompt tokens that the best holder was believed to hold, chosen or not.", "model"
        )
        self.completion_tokens = make.counter(
            "completion_tokens_total", "Generated tokens as the engine reported them.", *_TOKEN_LABELS
        )
        self.unmetered = make.counter(
            "unmetered_requests_total", "Successful answers of generation requests without usage.", "model"
        )
        self.cost_usd = make.counter("cost_usd_total", "Cost by the configured prices, in USD.", "model", "tenant", "kind")
        self.savings_usd = make.counter(
            "savings_usd_total", "What the cached tokens would have cost more, in USD.", "model", "tenant"
        )

    def _add_state(self, make: _Family) -> None:
        self.replica_up = make.gauge("replica_up", "1 if the replica answers its probes.", "replica", across=least)
        self.replica_inflight = make.gauge("replica_inflight", "Requests of this gateway on the replica.", "replica")
        self.replica_booked = make.gauge(
            "replica_booked_tokens", "Uncached prompt tokens awaiting their first token.", "replica"
        )
        self.prefill_rate = make.gauge("replica_prefill_tokens_per_second", "Learned prefill rate.", "replica")
        self.replica_capacity = make.gauge(
            "replica_capacity_tokens", "KV cache by the configuration, else by the engine's own word.", "replica"
        )
        self.replica_engine_running = make.gauge(
            "replica_engine_running", "Sequences that the engine says it runs, whoever sent them.", "replica"
        )
        self.replica_engine_waiting = make.gauge(
            "replica_engine_waiting", "Sequences that the engine says wait in it, whoever sent them.", "replica"
        )
        self.replica_cut_off = make.gauge(
            "replica_cut_off", "1 while its breaker is not closed, or it asked for rest (Retry-After).", "replica"
        )
        self.replica_overlap_zero = make.gauge(
            "replica_overlap_zero", "1 while the engine reports no cached tokens though many were predicted.", "replica"
        )
        self.replica_restarts = make.counter(
            "replica_restarts_total",
            "Times that its cache was taken for lost, by the first sign of it.",
            "replica",
            "reason",
            across=most,
        )
        self.trie_blocks = make.gauge("trie_blocks", "Block credits in the prefix index, summed over replicas.")
        self.trie_bytes = make.gauge("trie_bytes", "Memory of the prefix index, estimated.", across=total)
        self.trie_evicted = make.counter(
            "trie_evicted_blocks_total", "Block credits that were forgotten, by why.", "reason", across=most
        )

    def _add_reloads(self, make: _Family) -> None:
        self.reloads = make.counter(
            "reloads_total",
            "Times that the configuration was read again: good, invalid (it changed nothing), unchanged.",
            "result",
            across=most,
        )
        self.config_loaded = make.gauge(
            "config_loaded_timestamp_seconds", "When the running configuration was taken, in Unix time.", across=least
        )

    def _add_workers(self, make: _Family) -> None:
        self.workers = make.gauge("workers", "Processes that are this gateway.", across=total)
        self.worker_restarts = make.counter("worker_restarts_total", "Workers that ended and were replaced.")
        self.log_lines_dropped = make.counter(
            "log_lines_dropped_total",
            "Log lines that were dropped: their reader did not keep up, or they could not be written.",
        )
        self.worker_lag_seconds = make.seconds(
            "worker_lag", "What one worker booked was known to another after so long.", buckets=LAG_SECONDS
        )

    def read(self, router: Router) -> None:
        """Set the gauges that mirror this process and its router; called at each scrape."""
        self.workers.set((), 1)
        for gauge in (self.replica_inflight, self.replica_booked, self.prefill_rate):
            gauge.values.clear()  # of replicas that are no more
        for name in router.replicas:
            load = router.ledger.of(name)
            self.replica_inflight.set((name,), load.inflight)
            self.replica_booked.set((name,), load.booked_tokens)
            self.prefill_rate.set((name,), load.rate.value)
        self.trie_blocks.set((), router.trie.blocks)
        self.trie_bytes.set((), router.trie.size_bytes)
        for reason, blocks in router.trie.evicted.items():
            self.trie_evicted.set((reason,), blocks)

    def read_connections(self, *, open_now: int, limit: int, refused: int) -> None:
        """The same for the clients' connections."""
        self.connections.set((), open_now)
        self.connections_limit.set((), limit)
        self.connections_refused.set((), refused)

    def read_memory(self, *, held: int, limit: int, refused: int) -> None:
        """The same for the bytes that requests hold."""
        self.inflight_bytes.set((), held)
        self.inflight_limit.set((), limit)
        self.inflight_refused.set((), refused)
