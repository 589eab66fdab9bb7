"""vLLM's names, labels and buckets, and gauges asked at the scrape."""

import re

from replica.api.metrics import ReplicaMetrics
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine

NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:cache_config_info",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
}
# As a running vLLM 0.32 writes them.
TTFT_BOUNDS = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0 +Inf"
)
E2E_BOUNDS = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0 +Inf"


def test_names_labels_and_buckets_are_vllms() -> None:
    metrics = ReplicaMetrics([SimEngine(SimConfig(kv_tokens=1600))], "m")
    metrics.ranks[0].first_token(prompt_tokens=100, cached_tokens=64, seconds=0.03)
    metrics.ranks[0].generated(7)
    metrics.ranks[0].ended("stop", 1.2)
    text = metrics.text().decode()
    assert set(re.findall(r"^([\w:]+)\{", text, re.MULTILINE)) >= NAMES
    assert re.search(r"^process_start_time_seconds 1\.\d+e\+09$", text, re.MULTILINE)
    samples = [line for line in text.splitlines() if not line.startswith(("#", "process_"))]
    assert all('engine="0"' in line for line in samples)
    assert all('model_name="m"' in line for line in samples if "cache_config_info" not in line)
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="100"' in text
    assert 'enable_prefix_caching="True"' in text
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0' in text
    for name, bounds in (("time_to_first_token", TTFT_BOUNDS), ("e2e_request_latency", E2E_BOUNDS)):
        assert re.findall(rf'{name}_seconds_bucket{{engine="0",le="([^"]+)"', text) == bounds.split()


class Starting(SimEngine):
    """Knows only after its start that it caches nothing, as the real engine may."""

    started = False

    @property
    def prefix_caching(self) -> bool:
        return not self.started

    async def start(self) -> None:
        await super().start()
        self.started = True


async def test_an_engine_that_does_not_cache_is_no_prefix_cache_to_a_gateway() -> None:
    engine = Starting(SimConfig())
    metrics = ReplicaMetrics([engine], "m")
    await engine.start()
    assert 'enable_prefix_caching="False"' in metrics.text().decode()
