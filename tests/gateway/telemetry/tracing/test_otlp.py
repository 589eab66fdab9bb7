"""Collectors that are well, slow, gone or refusing, behind a real gateway."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import pytest

from gateway.commands.surroundings import require_libraries
from gateway.config.parse import ConfigError
from tests.gateway.conftest import config_over, eventually, running
from tests.support.collector import Collector
from tests.support.fakes import FakeReplica, answers, models
from tests.support.paths import ROOT

DROPPED = 'warmroute_spans_dropped_total{reason="%s"}'
TOKENIZE = {"model": "m", "prompt": "x"}


async def test_headers_and_attributes_come_from_the_standards_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=other")
    async with Collector() as collector, FakeReplica() as one:
        async with running(one, tracing=collector.tracing(service="edge")) as run:
            await run.post()
            await collector.asked(1)
            await eventually(lambda: run.gateway.exporter and run.gateway.exporter.exported)
            metrics = await run.metrics()
        assert metrics["warmroute_spans_exported_total"] == len(collector.spans)
        assert collector.headers[0]["authorization"] == "Bearer key"
        assert collector.spans[0].resource["deployment.environment"] == "test"
        assert collector.spans[0].resource["service.name"] == "edge"


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
async def test_the_endpoint_may_have_the_path_that_is_added(path: str) -> None:
    async with Collector() as collector, FakeReplica() as one:
        async with running(one, tracing=collector.tracing(endpoint=collector.url + path)) as run:
            await run.post()
        assert collector.spans


@pytest.mark.parametrize("status", [400, 302, 307, 308])
async def test_a_collector_that_refuses_costs_its_spans_only(status: int) -> None:
    """Or sends them elsewhere: nobody follows."""
    async with Collector(status=status) as collector, FakeReplica() as one, running(one, tracing=collector.tracing()) as run:
        assert (await run.post())[0] == 200
        exporter = run.gateway.exporter
        assert exporter
        await eventually(lambda: exporter.failed)
        collector.status = 200
        assert (await run.post())[0] == 200
        await eventually(lambda: exporter.exported)
        metrics = await run.metrics()
        assert metrics[DROPPED % "failed"] == exporter.failed
        assert len(collector.headers) == 2  # it was not asked again for what it has refused


async def test_a_collector_that_hangs_holds_nothing_up() -> None:
    hold = asyncio.Event()
    async with Collector(hold=hold) as collector, FakeReplica() as one:
        async with running(one, tracing=collector.tracing()) as run:
            await run.post()
            await collector.asked(1)
            for _ in range(50):
                assert (await run.post())[0] == 200
            begun = time.monotonic()
        assert time.monotonic() - begun < 30  # its end waits for seconds, not for the collector
        hold.set()


async def test_ten_thousand_requests_with_a_dead_collector() -> None:
    async with FakeReplica(listing=models("m")) as gone:
        dead = gone.url
    async with FakeReplica() as one, running(one, tracing={"endpoint": dead, "sample": 1}) as run:

        async def client() -> None:
            for _ in range(100):
                status, _, _ = await run.post({"model": "m", "messages": [{"role": "user", "content": "x"}]})
                assert status == 200

        for _ in range(5):
            await asyncio.gather(*(client() for _ in range(20)))
        exporter = run.gateway.exporter
        assert exporter
        metrics = await run.metrics()
    # None was taken, and none forgotten; the thread may still be in its last attempt.
    await eventually(lambda: exporter.dropped + exporter.failed == 6 * 10_000)
    assert exporter.exported == 0
    assert metrics["warmroute_spans_exported_total"] == 0


async def test_the_log_says_which_collector_is_away_and_why(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica(listing=models("m")) as gone:
        dead = gone.url
    async with FakeReplica([answers()]) as one, running(one, tracing={"endpoint": dead, "sample": 1}) as run:
        assert (await run.post())[0] == 200
        exporter = run.gateway.exporter
        assert exporter
        await eventually(lambda: exporter.failed)
    [problem] = [record.__dict__["error"] for record in caplog.records if record.name == "warmroute.traces"]
    assert problem.startswith(f"{dead}/v1/traces: ")
    assert "Connection refused" in problem


async def test_the_share_of_the_requests() -> None:
    async with Collector() as collector, FakeReplica() as one:
        async with running(one, tracing=collector.tracing(sample=0.25)) as run:
            for _ in range(400):
                await run.post(TOKENIZE, "/tokenize")
        sampled = [span for span in collector.spans if span.kind == "server"]
        assert 50 < len(sampled) < 150  # 100 +- 5 standard deviations
        assert len({span.trace_id for span in sampled}) == len(sampled)


def test_nothing_is_imported_where_traces_are_off() -> None:
    heavy = ("opentelemetry", "google", "requests")
    code = f"import sys, gateway.app; print([name for name in sys.modules if name.startswith({heavy})])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_without_the_library_the_start_says_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from gateway.commands.surroundings import require_libraries
from gateway.config.source import load
pools = [{"replicas": ["http://127.0.0.1:1"]}]
require_libraries(load(None, {"pools": pools, "tracing": {"endpoint": "http://c:4318"}}, env={}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert "tracing.endpoint needs a library that is not installed here: pip install 'warmroute[otel]'" in done.stderr
    require_libraries(config_over("http://127.0.0.1:1", tracing={"endpoint": "http://c:4318"}))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"endpoint": "collector:4318"}, "tracing.endpoint"),
        ({"endpoint": "http://user:secret@c:4318"}, "credentials do not belong in a URL"),
        ({"endpoint": "http://c:4318", "sample": 1.5}, "tracing.sample"),
        ({"endpoint": "http://c:4318", "service": ""}, "tracing.service"),
        ({"headers": {"authorization": "x"}}, "tracing"),
    ],
)
def test_a_wrong_configuration_is_named(value: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        config_over("http://127.0.0.1:1", tracing=value)
    assert "secret" not in str(error.value)


def test_off_is_short_for_no_endpoint() -> None:
    assert config_over("http://127.0.0.1:1", tracing=False).tracing.endpoint == "off"
    assert config_over("http://127.0.0.1:1", tracing={"endpoint": False}).tracing.endpoint == "off"
