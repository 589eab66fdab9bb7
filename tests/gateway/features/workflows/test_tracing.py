"""Spans of runs: the steps are below the request for their run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.gateway.conftest import running
from tests.gateway.features.workflows.test_runs import RUNS, TEXT, document
from tests.support.collector import Collector, Received
from tests.support.scripted_engine import ScriptedEngine

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
WORDS = "hello hello"  # of the prompt


def _named(spans: Sequence[Received], *names: str) -> list[Received]:
    return [span for span in spans if span.name in names]


@pytest.mark.parametrize("remote", [False, True])
async def test_steps_of_a_workflow_are_below_the_request_for_their_run(remote: bool) -> None:
    message = {"role": "user", "content": WORDS}
    steps = {"a": {"chat": {"append": [message]}}, "b": {"chat": {"from": "a", "append": [message]}, "yield": "b"}}
    headers = {"Traceparent": SAMPLED, "Tracestate": "v=1"} if remote else {"Tracestate": "v=1"}
    engine = ScriptedEngine(lambda _body: TEXT)
    async with Collector() as collector:
        tracing = {**collector.tracing(), "sample": 0.0 if remote else 1.0}
        async with engine.replica, running(engine.replica, tracing=tracing) as run:
            status, _, found = await run.post({"workflow": document(steps)}, RUNS, headers=headers)
            assert (status, found["status"]) == (200, "completed")
        spans = collector.spans
    states = [request.headers.get("tracestate") for request in engine.replica.requests]
    assert states == ["v=1" if remote else None] * 2
    assert len({span.trace_id for span in spans}) == 1
    assert spans[0].trace_id == TRACE or not remote
    outer, *others = sorted(_named(spans, "POST /v1/workflows/", "chat m"), key=lambda span: span.begun)
    assert (outer.name, outer.parent_id, outer.remote) == ("POST /v1/workflows/", PARENT if remote else "", remote)
    assert [each.parent_id for each in others] == [outer.span_id] * 2
    assert not any(each.remote for each in others)
    names = [each.attributes["warmroute.request_id"] for each in others]
    assert names == [f"{found['id']}.a", f"{found['id']}.b"]
    for each in others:
        assert (each.attributes["warmroute.run"], each.attributes["warmroute.workflow"]) == (found["id"], "inline:w")
    (phase,) = _named(spans, "run")
    assert phase.parent_id == outer.span_id
    assert phase.begun <= others[0].begun
    assert others[-1].ended <= phase.ended
    attempts = _named(spans, "attempt")
    assert sorted(each.parent_id for each in attempts) == sorted(each.span_id for each in others)
    assert WORDS not in repr([span.attributes for span in spans])
