"""Traces of real requests through a real gateway, as a collector receives them."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.dialects.table import ENDPOINTS
from gateway.features.tracing.exporter import Exporter
from gateway.features.tracing.spans import MAX_CHARS, OPERATIONS
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.support.collector import Collector, Received
from tests.support.compiled import documented
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, dies, event, hangs, models, status, streams
from tests.support.paths import ROOT

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
STREAM: dict[str, Any] = {**BODY, "stream": True}
SECRET = "sk-never-in-a-span"
WORDS = "hello hello"  # of the prompt


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Each request, at whichever replica has this, takes the next one."""
    left = list(behaviours)

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await left.pop(0)(request, writer)

    return behave


def named(spans: Sequence[Received], *names: str) -> list[Received]:
    return [span for span in spans if span.name in names]


def tree_of(spans: Sequence[Received]) -> Received:
    """The root of one request's spans, after checks of what holds for all of them."""
    (root,) = [span for span in spans if span.kind == "server"]
    assert len({span.span_id for span in spans}) == len(spans)
    for span in spans:
        assert span.trace_id == root.trace_id
        if span is not root:
            assert span.parent_id == root.span_id
            assert not span.remote
            assert root.begun <= span.begun <= span.ended <= root.ended, span.name
    phases = [span for span in spans if span.kind == "internal"]
    for one, other in itertools.pairwise(phases):
        assert one.ended <= other.begun
    return root


def texts(spans: Sequence[Received]) -> str:
    return repr([(span.name, span.attributes, span.error, span.resource) for span in spans])


async def traced(
    collector: Collector, *replicas: FakeReplica, body: Any = BODY, path: str = "/v1/chat/completions", **config: Any
) -> tuple[list[Received], Received, int]:
    """(spans, root, status) of one request."""
    async with (
        running(*replicas, tracing=collector.tracing(), **config) as run,
        run.session.post(run.url + path, json=body, headers={"Authorization": f"Bearer {SECRET}"}) as answer,
    ):
        await answer.read()
    assert WORDS not in texts(collector.spans)
    assert SECRET not in texts(collector.spans)
    return collector.spans, tree_of(collector.spans), answer.status


@pytest.fixture
async def collector() -> Any:
    async with Collector() as one:
        yield one


async def test_a_plain_request_has_a_span_for_each_phase(collector: Collector) -> None:
    async with FakeReplica([answers(prompt=400, completion=7, cached=128)]) as one:
        spans, root, _ = await traced(collector, one)
        (seen,) = one.requests
    assert [span.name for span in spans] == ["chat m", "parse", "admit", "choose", "deliver", "attempt"]
    assert root.parent_id == ""
    assert root.error is None
    about = root.attributes
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.request.model"] == "m"
    assert about["gen_ai.request.stream"] is False
    assert about["gen_ai.usage.input_tokens"] == 400
    assert about["gen_ai.usage.output_tokens"] == 7
    assert about["gen_ai.usage.cache_read.input_tokens"] == 128
    assert about["http.response.status_code"] == 200
    assert about["http.route"] == "/v1/chat/completions"
    assert about["warmroute.replica"] == one.name
    assert about["warmroute.request_id"].startswith("wr-")
    (choose,) = named(spans, "choose")
    decision = choose.attributes
    assert decision["warmroute.policy"] == "cost"
    assert decision["warmroute.reason"] == "cold"
    assert decision["warmroute.candidates"] == 1
    assert decision["warmroute.candidates.replica"] == [one.name]
    assert decision["warmroute.candidates.cost_s"] == [decision["warmroute.cost_s"]]
    (attempt,) = named(spans, "attempt")
    assert attempt.kind == "client"
    assert attempt.attributes["server.address"] == "127.0.0.1"
    assert attempt.attributes["server.port"] == one.port
    assert attempt.attributes["http.response.status_code"] == 200
    assert choose.ended <= attempt.begun
    assert seen.headers["traceparent"] == f"00-{root.trace_id}-{attempt.span_id}-01"
    assert root.resource["service.name"] == "warmroute"
    assert root.resource["service.instance.id"]
    assert collector.headers[0]["Content-Encoding"] == "gzip"


async def test_a_stream_has_its_first_chunk_and_ends_with_its_last(collector: Collector) -> None:
    async with FakeReplica([streams("a", "b", "c", cached=64)]) as one:
        spans, root, _ = await traced(collector, one, body=STREAM)
    assert root.attributes["gen_ai.request.stream"] is True
    assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] < (root.ended - root.begun) / 1e9
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    (attempt,), (deliver,) = named(spans, "attempt"), named(spans, "deliver")
    assert attempt.begun <= deliver.begun <= deliver.ended == attempt.ended == root.ended


async def test_the_next_prompt_shows_what_was_predicted(collector: Collector) -> None:
    async with FakeReplica() as one, running(one, tracing=collector.tracing()) as run:
        await run.post()
        await run.post()
    warm = named(collector.spans, "choose")[1].attributes
    assert warm["warmroute.reason"] == "warm"
    assert 0 < warm["warmroute.cached_tokens.predicted"] == warm["warmroute.cached_tokens.available"]
    assert warm["warmroute.candidates.cached_tokens"] == [warm["warmroute.cached_tokens.predicted"]]


async def test_a_retry_is_an_attempt_of_its_own(collector: Collector) -> None:
    script = [in_turn(dies, dies, answers())]  # twice: the connection of the probes may just have been closed
    async with FakeReplica(script) as one, FakeReplica(script) as other:
        spans, root, code = await traced(collector, one, other)
        seen = {replica.name: replica.requests[0].headers["traceparent"] for replica in (one, other)}
    assert code == 200
    attempts = named(spans, "attempt")
    assert seen == {one.attributes["warmroute.replica"]: f"00-{root.trace_id}-{one.span_id}-01" for one in attempts}
    failed = attempts[0]
    assert failed.attributes["error.type"] == "reset"
    assert failed.error
    assert failed.ended <= attempts[1].begun
    assert attempts[1].error is None
    assert root.error is None
    assert root.attributes["warmroute.attempts"] == 2


async def test_where_no_replica_can_answer_the_request_has_failed(collector: Collector) -> None:
    async with FakeReplica([status(500, "the prompt was hello hello")]) as one, FakeReplica([status(500)]) as other:
        spans, root, code = await traced(collector, one, other)
    assert code == root.attributes["http.response.status_code"] == 500
    assert root.error == ""
    first, last = named(spans, "attempt")
    assert first.attributes["error.type"] == "status"
    assert first.error == ""  # an engine's words stay in the log
    assert last.attributes["error.type"] == "status"
    assert root.attributes["error.type"] == "status"


async def test_a_resumed_stream_has_an_attempt_that_goes_on(collector: Collector) -> None:
    script = [in_turn(streams("a", "b", die=True), streams("c"))]
    async with FakeReplica(script) as one, FakeReplica(script) as other:
        pools = [{"replicas": [one.url, other.url], "resume_streams": True}]
        async with running(tracing=collector.tracing(), pools=pools) as run:
            await _read(run, STREAM)
    root = tree_of(collector.spans)
    attempts = named(collector.spans, "attempt")
    assert [attempt.attributes.get("warmroute.resumes") for attempt in attempts] == [None, True]
    assert root.attributes["warmroute.resumed"] == 1
    assert root.error is attempts[1].error is None
    assert attempts[0].attributes["error.type"] == "reset"
    assert attempts[0].ended <= attempts[1].begun
    (deliver,) = named(collector.spans, "deliver")
    assert deliver.begun <= attempts[0].ended
    assert deliver.ended == root.ended


async def test_a_stream_that_broke_off_has_failed(collector: Collector) -> None:
    async with FakeReplica([streams("a", "b", die=True)]) as one:
        spans, root, code = await traced(collector, one, body=STREAM)
    assert code == 200
    assert root.error == ""
    assert root.attributes["error.type"] == "reset"
    assert named(spans, "attempt")[0].error


@pytest.mark.parametrize(
    ("body", "path", "code", "kind", "names"),
    [
        ({**BODY, "model": "nobody"}, "/v1/chat/completions", 404, "model_not_found", ["chat unknown", "parse", "admit"]),
        ({"model": 3}, "/v1/chat/completions", 400, "invalid_request", ["chat unknown", "parse"]),
        (BODY, "/v1/models", 405, "method_not_allowed", ["POST other"]),
    ],
)
async def test_a_refused_request_ends_with_the_phase_that_refused_it(
    collector: Collector, body: Any, path: str, code: int, kind: str, names: list[str]
) -> None:
    async with FakeReplica() as one:
        spans, root, answered = await traced(collector, one, body=body, path=path)
    if answered == 405 and not spans:
        return
    assert answered == code
    assert [span.name for span in spans] == names
    assert root.error is None  # by the conventions a client's error is none of the server's span
    assert root.attributes["error.type"] == kind
    if len(spans) > 1:
        assert spans[-1].attributes["error.type"] == kind
        assert spans[-1].ended == root.ended


async def test_a_client_that_leaves_is_no_error(collector: Collector) -> None:
    until = asyncio.Event()
    async with FakeReplica([hangs(until)]) as one, running(one, tracing=collector.tracing()) as run:
        asking = asyncio.create_task(run.post())
        await eventually(lambda: one.requests)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: one.gone)
    root = tree_of(collector.spans)
    assert root.attributes["http.response.status_code"] == 499
    assert root.attributes["error.type"] == "client_left"
    assert root.error is None
    (attempt,) = named(collector.spans, "attempt")
    assert attempt.ended == root.ended
    assert attempt.error is None


async def test_the_wait_in_the_queue_is_in_the_admission(collector: Collector, request_lines: Any) -> None:
    first = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=first), answers()]) as one:
        pools = [{"replicas": [one.url], "max_inflight": 1}]
        async with running(tracing=collector.tracing(), pools=pools) as run:
            running_one = asyncio.create_task(_read(run, STREAM))
            await eventually(lambda: one.requests)
            waiting = asyncio.create_task(run.post())
            await eventually(lambda: run.gateway.fleet.pools[0].admission.waiting)
            first.set()
            await asyncio.gather(running_one, waiting)
            metrics = await run.metrics()
    (queued,) = [span for span in named(collector.spans, "admit") if "warmroute.queued_s" in span.attributes]
    assert 0 < queued.attributes["warmroute.queued_s"] <= (queued.ended - queued.begun) / 1e9
    assert metrics['warmroute_queue_seconds_count{pool="default"}'] == 1
    (line,) = [line for line in request_lines() if "queued_s" in line]
    assert line["queued_s"] > 0
    assert line["trace_id"] == queued.trace_id


async def _read(run: Running, body: Any) -> None:
    async with run.session.post(run.url + "/v1/chat/completions", json=body) as answer:
        await answer.read()


async def test_a_translated_request_has_one_attempt(collector: Collector) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": WORDS}]}
    async with FakeReplica([status(404, "Not Found"), answers()]) as one:
        spans, root, code = await traced(collector, one, body=body, path="/v1/messages")
        assert [request.path for request in one.requests] == ["/v1/messages", "/v1/chat/completions"]
        parents = {request.headers["traceparent"] for request in one.requests}
    assert code == 200
    assert root.name == "chat m"
    assert root.attributes["warmroute.translated"] is True
    (attempt,) = named(spans, "attempt")
    assert parents == {f"00-{root.trace_id}-{attempt.span_id}-01"}


async def test_a_fallback_is_a_second_admission(collector: Collector) -> None:
    async with FakeReplica([dies]) as one, FakeReplica(listing=models("x")) as other:
        pools = [
            {"name": "near", "models": ["m"], "replicas": [one.url], "fallback": {"pool": "far", "model": "x"}},
            {"name": "far", "models": ["x"], "replicas": [other.url]},
        ]
        async with running(tracing=collector.tracing(), pools=pools) as run:
            code, _, _ = await run.post()
    root = tree_of(collector.spans)
    assert code == 200
    assert [span.name for span in collector.spans if span.kind == "internal"] == [
        *("parse", "admit", "choose", "admit", "choose", "deliver")
    ]
    assert [span.attributes["warmroute.pool"] for span in named(collector.spans, "choose")] == ["near", "far"]
    assert root.attributes["warmroute.pool"] == "far"
    assert root.attributes["warmroute.fallback.passed_pools"] == ["near"]


async def test_names_that_clients_choose_are_bounded(collector: Collector) -> None:
    body = {**BODY, "model": "m" * 200}
    async with FakeReplica() as one:
        _, root, _ = await traced(collector, one, body=body)
    assert root.name == "chat unknown"
    assert len(root.attributes["gen_ai.request.model"]) == MAX_CHARS
    assert all(len(str(value)) < 1000 for span in collector.spans for value in span.attributes.values())


# -- which requests


async def ask(run: Running, **headers: str) -> None:
    async with run.session.post(run.url + "/v1/chat/completions", json=BODY, headers=headers) as answer:
        assert answer.status == 200
        await answer.read()


async def test_a_sampled_trace_goes_on(collector: Collector) -> None:
    async with FakeReplica() as one, running(one, tracing=collector.tracing(sample=0)) as run:
        await ask(run, traceparent=SAMPLED, tracestate="congo=t61rcWkgMzE")
        (seen,) = one.requests
    root = tree_of(collector.spans)
    assert root.trace_id == TRACE
    assert root.parent_id == PARENT
    assert root.remote
    (attempt,) = named(collector.spans, "attempt")
    assert seen.headers["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
    assert seen.headers["tracestate"] == "congo=t61rcWkgMzE"


async def test_that_an_id_is_random_goes_on_and_unknown_flags_do_not(collector: Collector) -> None:
    async with FakeReplica() as one, running(one, tracing=collector.tracing()) as run:
        for flags in ("03", "01", "ff"):
            await ask(run, traceparent=f"00-{TRACE}-{PARENT}-{flags}")
        seen = [request.headers["traceparent"][-2:] for request in one.requests]
    assert seen == ["03", "01", "03"]


async def test_a_trace_that_is_not_sampled_passes_unchanged(collector: Collector) -> None:
    async with FakeReplica() as one, running(one, tracing=collector.tracing(sample=1)) as run:
        await ask(run, traceparent=NOT_SAMPLED, tracestate="congo=t61rcWkgMzE")
        (seen,) = one.requests
    assert not collector.spans
    assert seen.headers["traceparent"] == NOT_SAMPLED
    assert seen.headers["tracestate"] == "congo=t61rcWkgMzE"


async def test_an_invalid_traceparent_begins_a_new_trace(collector: Collector) -> None:
    async with FakeReplica() as one, running(one, tracing=collector.tracing()) as run:
        await ask(run, traceparent="00-" + "0" * 32 + "-" + PARENT + "-01", tracestate="congo=t61rcWkgMzE")
        (seen,) = one.requests
    root = tree_of(collector.spans)
    assert root.parent_id == ""
    assert seen.headers["traceparent"].startswith(f"00-{root.trace_id}-")
    assert "tracestate" not in seen.headers


async def test_where_nothing_is_sampled_nothing_is_added(collector: Collector) -> None:
    async with FakeReplica() as one, running(one, tracing=collector.tracing(sample=0)) as run:
        await ask(run)
        (seen,) = one.requests
    assert not collector.spans
    assert "traceparent" not in seen.headers


async def test_senders_that_are_not_followed_are_drawn_by_their_trace(collector: Collector) -> None:
    few, many = "0" * 31 + "1", "f" * 32  # the lowest and the highest ids
    async with FakeReplica() as one, running(one, tracing=collector.tracing(sample=0.5, follow_parents=False)) as run:
        await ask(run, traceparent=f"00-{many}-{PARENT}-01")
        await ask(run, traceparent=f"00-{few}-{PARENT}-01")
        await ask(run, traceparent=f"00-{few}-{PARENT}-00")
        seen = [request.headers["traceparent"] for request in one.requests]
    assert tree_of(collector.spans).trace_id == few
    assert seen[0] == f"00-{many}-{PARENT}-01"
    assert seen[2] == f"00-{few}-{PARENT}-00"


async def test_off_the_headers_pass_as_they_came() -> None:
    odd = "not a traceparent at all"
    async with FakeReplica() as one, running(one) as run:
        await ask(run, traceparent=SAMPLED, tracestate="a=1,,b=2")
        await ask(run, traceparent=odd)
        assert run.gateway.part(Exporter) is None
        first, second = one.requests
    assert first.headers["traceparent"] == SAMPLED
    assert first.headers["tracestate"] == "a=1,,b=2"
    assert second.headers["traceparent"] == odd


async def test_all_ways_in_are_traced(collector: Collector) -> None:
    """A plain request, a chunked body, another path, and WebSockets."""

    async def chunks() -> Any:
        yield b'{"model": "m", "messages": [{"role"'
        await eventually(lambda: run.gateway.served.memory.held)
        yield b': "user", "content": "hi"}]}'

    async with FakeReplica() as one, running(one, tracing=collector.tracing(sample=0)) as run:
        headers = {"traceparent": SAMPLED}
        await run.post(headers=headers)
        async with run.session.post(run.url + "/v1/chat/completions", data=chunks(), headers=headers) as answer:
            assert answer.status == 200
        await run.post({"model": "m", "input": "x"}, "/v1/embeddings", headers=headers)
        seen = [request.headers["traceparent"] for request in one.requests]
    roots = [span for span in collector.spans if span.kind == "server"]
    assert [root.name for root in roots] == ["chat m", "chat m", "embeddings m"]
    assert {root.parent_id for root in roots} == {PARENT}
    assert [parent[36:52] for parent in seen] == [span.span_id for span in named(collector.spans, "attempt")]
    assert named(collector.spans, "receive")  # what came in pieces


def test_every_operation_is_an_endpoint() -> None:
    assert OPERATIONS.keys() <= ENDPOINTS.keys()


async def test_an_engines_error_in_a_stream_is_not_quoted(collector: Collector) -> None:
    async def fails(_request: Any, writer: asyncio.StreamWriter) -> None:
        body = event("a") + b'data: {"error": {"message": "hello hello", "type": "t", "code": 500}}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with FakeReplica([fails]) as one:
        _, root, _ = await traced(collector, one, body=STREAM)
    assert root.error == ""


@documented
def test_the_page_names_every_attribute() -> None:
    spans = (ROOT / "gateway" / "features" / "tracing" / "spans.py").read_text("utf-8")
    written = re.findall(r'"((?:gen_ai|warmroute|http|server|error)\.[\w.]+)"', spans)
    page = (ROOT / "docs" / "observability.md").read_text("utf-8")
    named_there = set(re.findall(r"`((?:gen_ai|warmroute|http|server|error)\.[\w.]+)`", page))
    assert set(written) == named_there
