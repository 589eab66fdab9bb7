"""Every metric name, once.

Labels are bounded: `model` is a name that a replica lists or a configured prefix, `replica` a configured name, `tenant` one
of the first TENANTS distinct values of the tenant header, `code` an HTTP status. Units are in the names.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from router import Router

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
ROUTING_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)

TENANTS = 100

_TOKEN_LABELS = ("model", "replica")


class _Family:
    """Makes metrics in one registry, all with the same prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"warmroute_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"warmroute_{name}", text, labels, registry=self._registry)

    def seconds(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"warmroute_{name}_seconds", text, labels, buckets=buckets, registry=self._registry)


class Metrics:
    """The gateway's metrics in a registry of their own (no global state: two gateways can live in one process)."""

    def __init__(self) -> None:
        # By default there is a second series beside every counter, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._evicted_before: dict[str, int] = {}
        family = _Family(self.registry)
        self._add_requests(family)
        self._add_tokens(family)
        self._add_state(family)

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
        self.broken = make.counter(
            "broken_answers_total", "Answers that the replica broke off after their first byte.", "model", "replica"
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
        self.replica_up = make.gauge("replica_up", "1 if the replica answers its probes.", "replica")
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
        self.replica_overlap_zero = make.gauge(
            "replica_overlap_zero", "1 while the engine reports no cached tokens though many were predicted.", "replica"
        )
        self.replica_restarts = make.counter(
            "replica_restarts_total", "Times that its cache was taken for lost, by the first sign of it.", "replica", "reason"
        )
        self.trie_blocks = make.gauge("trie_blocks", "Block credits in the prefix index, summed over replicas.")
        self.trie_bytes = make.gauge("trie_bytes", "Memory of the prefix index, estimated.")
        self.trie_evicted = make.counter("trie_evicted_blocks_total", "Block credits that were forgotten, by why.", "reason")

    def read(self, router: Router) -> None:
        """Set the gauges that mirror the router's state; called at each scrape."""
        for name in router.replicas:
            load = router.ledger.of(name)
            self.replica_inflight.labels(name).set(load.inflight)
            self.replica_booked.labels(name).set(load.booked_tokens)
            self.prefill_rate.labels(name).set(load.rate.value)
        self.trie_blocks.set(router.trie.blocks)
        self.trie_bytes.set(router.trie.size_bytes)
        for reason, blocks in router.trie.evicted.items():
            counter = self.trie_evicted.labels(reason)
            counter.inc(blocks - self._evicted_before.get(reason, 0))
            self._evicted_before[reason] = blocks
