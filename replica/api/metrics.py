"""Prometheus metrics under vLLM's names, so that routers and dashboards made for vLLM can read this replica.

Counters are updated when the engine's numbers reach the server: prompt, cached and queried tokens at the first token,
generated tokens with each step, so `prefix_cache_hits_total` is the sum of the `cached_tokens` of all requests that
had a first token. Gauges, and the cache's block counts (our own names: vLLM has none), are read from the engine at each
scrape, so they are never out of date. The process's own metrics are included: its start time shows a router when the cache
was lost.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
FINISHES = ("stop", "length", "abort", "error")


class ReplicaMetrics:
    """All metrics of one replica, in a registry of its own. `ranks`: the metrics of each of its engines."""

    def __init__(self, engines: Sequence[Engine], model: str) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(engines, model))
        ProcessCollector(registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, LABELS, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, registry=registry, buckets=buckets)

        families = _Families(
            queries=counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            hits=counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            prompt=counter("prompt_tokens", "Prompt tokens, cached ones included."),
            generated=counter("generation_tokens", "Generated tokens."),
            ttft=histogram("time_to_first_token_seconds", "From the request's arrival to its first token.", TTFT_BUCKETS),
            e2e=histogram("e2e_request_latency_seconds", "From the request's arrival to its end.", E2E_BUCKETS),
            success=Counter("vllm:request_success", "Requests that ended.", (*LABELS, "finished_reason"), registry=registry),
        )
        self.ranks = [RankMetrics(families, model, str(rank)) for rank in range(len(engines))]

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Families(NamedTuple):
    queries: Counter
    hits: Counter
    prompt: Counter
    generated: Counter
    ttft: Histogram
    e2e: Histogram
    success: Counter


class RankMetrics:
    """The counters and histograms of one engine of a replica."""

    def __init__(self, families: _Families, model: str, rank: str) -> None:
        self._queries, self._hits = families.queries.labels(model, rank), families.hits.labels(model, rank)
        self._prompt, self._generated = families.prompt.labels(model, rank), families.generated.labels(model, rank)
        self._ttft, self._e2e = families.ttft.labels(model, rank), families.e2e.labels(model, rank)
        self._ended = {reason: families.success.labels(model, rank, reason) for reason in FINISHES}

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


class MetricsRecorder:
    """Observes generations for `/metrics` and `/stats`: the implementation of `output.generation.Observer`."""

    def __init__(self, metrics: RankMetrics, stats: Stats) -> None:
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
    """Read from the engines at each scrape: an engine knows only after its start if it caches."""

    def __init__(self, engines: Sequence[Engine], model: str) -> None:
        self._engines, self._model = engines, model

    def collect(self) -> Iterable[Metric]:
        loads = [engine.load() for engine in self._engines]
        caches = [engine.cache_counts() for engine in self._engines]
        running, waiting, usage = zip(*((load.running, load.waiting, load.kv_usage) for load in loads), strict=True)
        yield self._config()
        yield self._gauge("num_requests_running", "Requests in the batch.", running)
        yield self._gauge("num_requests_waiting", "Requests waiting to enter the batch.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of blocks held by running requests, 0 to 1.", usage)
        counts = (
            ("hit_blocks", "Blocks of prompts that were found in the prefix cache.", [cache.hits for cache in caches]),
            ("missed_blocks", "Full blocks of prompts that were not found.", [cache.misses for cache in caches]),
            ("evicted_blocks", "Cached blocks that were evicted.", [cache.evicted for cache in caches]),
            ("evicted_kept_blocks", "Those of them whose retention time was not over.", [c.evicted_kept for c in caches]),
        )
        for name, text, values in counts:
            yield self._add(CounterMetricFamily(f"warmroute_cache_{name}", text, labels=LABELS), values)
        blocks = GaugeMetricFamily(
            "warmroute_cache_blocks", "Blocks by state: held by requests, cached and idle, free.", labels=(*LABELS, "state")
        )
        for rank, cache in enumerate(caches):
            for state, count in (("held", cache.held), ("idle", cache.idle), ("free", cache.free)):
                blocks.add_metric((self._model, str(rank), state), count)
        yield blocks

    def _config(self) -> GaugeMetricFamily:
        names = ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching", "engine")
        family = GaugeMetricFamily("vllm:cache_config_info", "The cache's configuration, as labels.", labels=names)
        for rank, engine in enumerate(self._engines):
            info = engine.info
            tokens = info.block_size * info.num_blocks
            values = (info.block_size, info.num_blocks, tokens, engine.prefix_caching, rank)
            family.add_metric([str(value) for value in values], 1)
        return family

    def _gauge(self, name: str, text: str, values: Iterable[float]) -> Metric:
        return self._add(GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS), values)

    def _add(self, family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[float]) -> Metric:
        """The family with a value for each rank."""
        for rank, value in enumerate(values):
            family.add_metric((self._model, str(rank)), value)
        return family
