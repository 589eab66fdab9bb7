"""Prometheus metrics under vLLM's names, so that routers and dashboards made for vLLM can read this replica.

Counters are updated when the engine's numbers reach the server: prompt, cached and queried tokens at the first token,
generated tokens with each step, so `prefix_cache_hits_total` is the sum of the `cached_tokens` of all requests that
had a first token. Gauges, and the cache's block counts (our own names: vLLM has none), are read from the engine at each
scrape, so they are never out of date. The process's own metrics are included: its start time shows a router when the cache
was lost.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.api.stats import Stats
from replica.engine import Engine
from replica.output.generation import FirstToken, GenerationEnd

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
LABELS = ("model_name", "engine")
ENGINE = "0"
FINISHES = ("stop", "length", "abort", "error")


class ReplicaMetrics:
    """All metrics of one replica, in a registry of its own."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(engine, model))
        ProcessCollector(registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, LABELS, registry=registry).labels(model, ENGINE)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, registry=registry, buckets=buckets).labels(model, ENGINE)

        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt = counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._generated = counter("generation_tokens", "Generated tokens.")
        self._ttft = histogram("time_to_first_token_seconds", "From the request's arrival to its first token.", TTFT_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "From the request's arrival to its end.", E2E_BUCKETS)
        success = Counter("vllm:request_success", "Requests that ended.", (*LABELS, "finished_reason"), registry=registry)
        self._ended = {reason: success.labels(model, ENGINE, reason) for reason in FINISHES}

    def first_token(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        self._queries.inc(prompt_tokens)
        self._hits.inc(cached_tokens)
        self._prompt.inc(prompt_tokens)
        self._ttft.observe(seconds)

    def generated(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def ended(self, reason: str, seconds: float) -> None:
        """`reason`: a finish reason, "abort" (the client left) or "error"."""
        self._ended[reason].inc()
        self._e2e.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class MetricsRecorder:
    """Observes generations for `/metrics` and `/stats`: the implementation of `output.generation.Observer`."""

    def __init__(self, metrics: ReplicaMetrics, stats: Stats) -> None:
        self._metrics, self._stats = metrics, stats

    def first_token(self, first: FirstToken, now: float) -> None:
        self._metrics.first_token(first.prompt_tokens, first.cached_tokens, first.ttft_s)
        self._stats.add("prefill_tokens", first.prompt_tokens - first.cached_tokens, now)
        self._stats.add("cached_tokens", first.cached_tokens, now)
        self._stats.phase("queue", first.queued_s, now)
        self._stats.phase("prefill", first.prefill_s, now)

    def generated(self, tokens: int, now: float) -> None:
        self._metrics.generated(tokens)
        self._stats.add("decode_tokens", tokens, now)

    def ended(self, end: GenerationEnd, now: float) -> None:
        self._metrics.ended(end.reason, end.total_s)
        self._stats.add("answers", 1, now)
        for phase, seconds in (("decode", end.decode_s), ("detokenise", end.detokenise_s)):
            if seconds is not None:
                self._stats.phase(phase, seconds, now)


class _Gauges(Collector):
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._labels = engine, (model, ENGINE)

    def collect(self) -> Iterable[Metric]:
        yield self._config()
        load, cache = self._engine.load(), self._engine.cache_counts()
        yield self._gauge("num_requests_running", "Requests in the batch.", load.running)
        yield self._gauge("num_requests_waiting", "Requests waiting to enter the batch.", load.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of blocks held by running requests, 0 to 1.", load.kv_usage)
        yield self._cache_counter("hit_blocks", "Blocks of prompts that were found in the prefix cache.", cache.hits)
        yield self._cache_counter("missed_blocks", "Full blocks of prompts that were not found.", cache.misses)
        yield self._cache_counter("evicted_blocks", "Cached blocks that were evicted.", cache.evicted)
        yield self._cache_counter("evicted_kept_blocks", "Those of them whose retention time was not over.", cache.evicted_kept)
        blocks = GaugeMetricFamily(
            "warmroute_cache_blocks", "Blocks by state: held by requests, cached and idle, free.", labels=(*LABELS, "state")
        )
        for state, count in (("held", cache.held), ("idle", cache.idle), ("free", cache.free)):
            blocks.add_metric((*self._labels, state), count)
        yield blocks

    def _config(self) -> GaugeMetricFamily:
        """Computed at each scrape, because an engine knows only after its start if it caches."""
        info = self._engine.info
        labels = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "kv_cache_size_tokens": str(info.block_size * info.num_blocks),
            "enable_prefix_caching": str(self._engine.prefix_caching),
            "engine": ENGINE,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The cache's configuration, as labels.", labels=tuple(labels))
        family.add_metric(tuple(labels.values()), 1)
        return family

    def _cache_counter(self, name: str, text: str, value: int) -> CounterMetricFamily:
        family = CounterMetricFamily(f"warmroute_cache_{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
