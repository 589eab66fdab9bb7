"""The traceparent on every way from a client to a replica: traced, it is the attempt's; else it passes byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import running
from tests.gateway.request.background.test_runs import Slow, begin, ended
from tests.gateway.request.kept.test_recall import kept_in
from tests.gateway.request.tracing.test_traces import NOT_SAMPLED, PARENT, SAMPLED, TRACE, named
from tests.gateway.server.websocket import test_tunnel as tunnel
from tests.gateway.server.websocket.test_responses_socket import WHOLE, answer, dial, send
from tests.support.collector import Collector
from tests.support.fakes import FakeReplica, status
from tests.support.fakes import answers as chat

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
STATE = "vendor=1"
OFF = {"endpoint": "off"}


def checked(seen: list[str], collector: Collector, parent: str, *, on: bool) -> None:
    """seen: by replicas, of the requests in their order."""
    attempts = named(collector.spans, "attempt")
    if on and parent == SAMPLED:
        assert set(seen) == {f"00-{TRACE}-{attempt.span_id}-01" for attempt in attempts}
        assert {span.parent_id for span in collector.spans if span.kind == "server"} == {PARENT}
    else:
        assert set(seen) == {parent}
        assert not collector.spans


WAYS = pytest.mark.parametrize(
    ("on", "parent"), [(False, SAMPLED), (False, "no traceparent"), (True, SAMPLED), (True, NOT_SAMPLED)]
)


@WAYS
async def test_requests_over_http(on: bool, parent: str) -> None:
    """Plain, in chunks, on another path, and translated."""

    async def chunks() -> Any:
        yield CHAT

    headers = {"traceparent": parent, "tracestate": STATE, "Content-Type": "application/json"}
    message = json.dumps({**json.loads(CHAT), "max_tokens": 5}).encode()
    async with Collector() as collector, FakeReplica([chat(), chat(), chat(), status(404, "Not Found"), chat()]) as one:
        async with running(one, tracing=collector.tracing(sample=0) if on else OFF) as run:
            for path, data in (
                ("/v1/chat/completions", CHAT),
                ("/v1/chat/completions", chunks()),
                ("/v1/embeddings?a=b", b'{"model": "m", "input": "x"}'),
                ("/v1/messages", message),
            ):
                async with run.session.post(run.url + path, data=data, headers=headers) as got:
                    assert got.status == 200, await got.text()
                    await got.read()
        assert len(one.requests) == 5
        checked([request.headers["traceparent"] for request in one.requests], collector, parent, on=on)
        assert {request.headers["tracestate"] for request in one.requests} == {STATE}


@WAYS
async def test_messages_of_a_websocket(on: bool, parent: str) -> None:
    async with Collector() as collector, FakeReplica([WHOLE]) as one:
        tracing = collector.tracing(sample=0) if on else OFF
        async with running(one, tracing=tracing) as run, dial(run, additional_headers={"traceparent": parent}) as client:
            for _ in range(2):
                await send(client)
                assert (await answer(client))[-1]["type"] == "response.completed"
        assert len(one.requests) == 2
        checked([request.headers["traceparent"] for request in one.requests], collector, parent, on=on)


@WAYS
async def test_a_session_of_a_websocket(on: bool, parent: str) -> None:
    async with Collector() as collector, tunnel.RealtimeReplica(tunnel.echo).up() as replica:
        tracing, headers = collector.tracing(sample=0) if on else OFF, {"traceparent": parent}
        async with running(replica.url, tracing=tracing) as run, tunnel.dial(run, additional_headers=headers) as client:
            await client.send("a")
            assert await client.recv() == "a"
        checked([request.headers["traceparent"] for request in replica.seen], collector, parent, on=on)


@WAYS
async def test_a_run_in_the_background(tmp_path: Path, on: bool, parent: str) -> None:
    slow = Slow()
    slow.go.set()
    async with Collector() as collector, slow.replica() as one:
        tracing = collector.tracing(sample=0) if on else OFF
        async with running(one, state=kept_in(tmp_path), tracing=tracing) as run:
            first = await begin(run, extra_headers={"traceparent": parent})
            await ended(run, first.id)
        checked([request.headers["traceparent"] for request in one.requests], collector, parent, on=on)
