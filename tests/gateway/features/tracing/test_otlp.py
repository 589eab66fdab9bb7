"""Collectors that are well, slow, gone or refusing, behind a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTracePartialSuccess, ExportTraceServiceResponse

from gateway.commands.surroundings import require_libraries
from gateway.config.parse import ConfigError
from gateway.features.tracing.exporter import Exporter, Rejection
from gateway.features.tracing.otlp import OtlpSender
from gateway.features.tracing.span import Span
from tests.gateway.conftest import config_over, eventually, running
from tests.support.collector import Collector
from tests.support.fakes import FakeReplica, answers
from tests.support.paths import ROOT
from tests.support.sockets import refusing
from tests.support.tiers import gate

DROPPED = 'warmroute_spans_dropped_total{reason="%s"}'
TOKENIZE = {"model": "m", "prompt": "x"}


async def test_headers_and_attributes_come_from_the_standards_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=other")
    async with Collector() as collector, FakeReplica() as one:
        async with running(one, tracing=collector.tracing()) as run:
            await run.post()
            await collector.asked(1)
            await eventually(lambda: run.gateway.part(Exporter) and run.gateway.part(Exporter).exported)
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
@gate("400", "307", reason="a refusal, and a redirect that keeps the method")
async def test_a_collector_that_refuses_costs_its_spans_only(status: int) -> None:
    """Or sends them elsewhere: nobody follows."""
    async with Collector(status=status) as collector, FakeReplica() as one, running(one, tracing=collector.tracing()) as run:
        assert (await run.post())[0] == 200
        exporter = run.gateway.part(Exporter)
        assert exporter
        await eventually(lambda: exporter.failed)
        collector.status = 200
        assert (await run.post())[0] == 200
        await eventually(lambda: exporter.exported)
        metrics = await run.metrics()
        assert metrics[DROPPED % "failed"] == exporter.failed
        assert len(collector.headers) == 2  # it was not asked again for what it has refused


PARTIAL = ExportTraceServiceResponse(
    partial_success=ExportTracePartialSuccess(rejected_spans=1, error_message="too old")
).SerializeToString()
ALL = ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess(rejected_spans=1 << 40)).SerializeToString()
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\n"


class Raw:
    """A collector that answers with given bytes, then for ever with further ones each tenth of a second, if there are any."""

    def __init__(self, answer: bytes, trickles: bytes = b"") -> None:
        self._answer = answer
        self._trickles = trickles
        self.asked = 0
        self._serving = dict[asyncio.Task[None], asyncio.StreamWriter]()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._serving.values():
            writer.close()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._serving[task] = writer
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                self.asked += 1
                writer.write(self._answer)
                await writer.drain()
                while self._trickles and not writer.is_closing():
                    await asyncio.sleep(0.1)
                    writer.write(self._trickles)
                    await writer.drain()


async def sent(url: str, spans: int = 3) -> Rejection | None:
    made = iter([Span("1" * 32, f"{number + 1:016x}", "", "span", 1, 2) for number in range(spans)])
    return await asyncio.to_thread(OtlpSender(url, "edge", "1"), made, spans)


@pytest.mark.parametrize(("body", "rejected"), [(PARTIAL, 1), (ALL, 3), (b"", 0), (b"ok", 0)])
async def test_what_a_collector_rejects_of_a_batch(body: bytes, rejected: int) -> None:
    async with Raw(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as url:
        found = await sent(url)
        assert (found.spans if found else 0) == rejected
        if body == PARTIAL:
            assert found
            assert found.reason == f"{url}/v1/traces: the collector has rejected spans: too old"


async def test_a_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with Raw(OK + b"Content-Length: 0\r\n\r\n") as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        assert await sent("http://collector.invalid:4318") is None


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"HTTP/1.1 429 Slow Down\r\nRetry-After: 60\r\nContent-Length: 0", "Failed to export spans batch due to timeout"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2", "Failed to export spans batch code: 404, reason: Not Found"),
        (b"HTTP/1.1 304 Not Modified", "Failed to export spans batch code: None, reason: the collector redirects to ''"),
    ],
)
async def test_the_reason_is_in_the_rejection(head: bytes, reason: str) -> None:
    async with Raw(head + b"\r\n\r\nno") as url:
        found = await sent(url)
        assert found
        assert found.spans == 3
        assert found.reason.startswith(f"{url}/v1/traces: {reason}")


async def test_nobody_is_there() -> None:
    async with Raw(b"") as url:
        pass
    found = await sent(url)
    assert found
    assert "Connection refused" in found.reason


async def served_and_closed(one: FakeReplica, tracing: dict[str, Any], asked: Callable[[], object]) -> None:
    """Requests are served while the collector holds the exporter up; the gateway's end waits for seconds only."""
    async with running(one, tracing=tracing) as run:
        await run.post()
        await eventually(asked)
        for _ in range(50):
            assert (await run.post())[0] == 200
        begun = time.monotonic()
    assert time.monotonic() - begun < 30


async def test_a_collector_that_hangs_holds_nothing_up() -> None:
    async with Collector(hold=asyncio.Event()) as collector, FakeReplica() as one:
        await served_and_closed(one, collector.tracing(), lambda: collector.headers)


@pytest.mark.parametrize(
    ("head", "trickles"),
    [(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"), (OK + b"X: ", b"x")],
    ids=["body", "head"],
)
async def test_a_collector_whose_answer_trickles_holds_nothing_up(head: bytes, trickles: bytes) -> None:
    collector = Raw(head, trickles)
    async with collector as url, FakeReplica() as one:
        await served_and_closed(one, {"endpoint": url, "sample": 1}, lambda: collector.asked)


@pytest.mark.parametrize("rounds", [1, 5])
@gate("1", reason="the same requests, a fifth of them")
async def test_thousands_of_requests_with_a_dead_collector(rounds: int) -> None:
    with refusing() as dead:
        await _requests_with_a_dead_collector(dead, rounds)


async def _requests_with_a_dead_collector(dead: str, rounds: int) -> None:
    async with FakeReplica() as one, running(one, tracing={"endpoint": dead, "sample": 1}) as run:

        async def client() -> None:
            for _ in range(100):
                status, _, _ = await run.post({"model": "m", "messages": [{"role": "user", "content": "x"}]})
                assert status == 200

        for _ in range(rounds):
            await asyncio.gather(*(client() for _ in range(20)))
        exporter = run.gateway.part(Exporter)
        assert exporter
        metrics = await run.metrics()
    # None was taken, and none forgotten; the thread may still be in its last attempt.
    await eventually(lambda: exporter.dropped + exporter.failed == 6 * 2_000 * rounds)
    assert exporter.exported == 0
    assert metrics["warmroute_spans_exported_total"] == 0


async def test_the_log_says_which_collector_is_away_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with refusing() as dead:
        async with FakeReplica([answers()]) as one, running(one, tracing={"endpoint": dead, "sample": 1}) as run:
            assert (await run.post())[0] == 200
            exporter = run.gateway.part(Exporter)
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
from tests.support.configs import load
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
