"""Runs at their limits: clients that do not read, kills without number, values without room."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.errors import GatewayError
from gateway.features.runs.event_log import MAX_LOG
from gateway.features.runs.runs import Runs
from gateway.features.workflows.feature import WorkflowEndpoint
from gateway.features.workflows.metrics import WorkflowsMetrics
from gateway.features.workflows.run_request import read_body
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.responses.test_recall import kept_in
from tests.gateway.features.workflows.background.test_background_runs import begun, events, read_events
from tests.gateway.features.workflows.test_runs import CHAT, RUNS, TEXT, USER, document, stream
from tests.support.fakes import FakeReplica
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.tiers import nightly

LARGE = 1_000_000  # bytes of a value
INPUTS = {"messages": {"type": "messages"}, "text": {"type": "string"}}


def values(count: int, **more: Any) -> dict[str, Any]:
    """The body of a run with so many large values, a call before each, then these steps."""
    steps: dict[str, Any] = {}
    for at in range(count):
        steps[f"c{at}"] = {**CHAT, "needs": [*steps][-1:]}
        steps[f"v{at}"] = {"let": "${inputs.text}", "yield": f"v{at}", "needs": [f"c{at}"]}
    steps |= {name: {**step, "needs": [*steps][-1:]} for name, step in more.items()}
    return {"workflow": document(steps, inputs=INPUTS), "inputs": {"messages": [USER], "text": "x" * LARGE}}


@pytest.mark.parametrize("background", [False, True])
async def test_a_reader_that_is_too_slow_loses_its_stream_and_not_the_run(tmp_path: Path, background: bool) -> None:
    scripted = ScriptedEngine(lambda _body: TEXT)
    async with scripted.replica, running(scripted.replica, state=kept_in(tmp_path)) as run:
        body = {**values(15, last=CHAT), "stream": True, "background": background}
        if not background:  # its log has room for all values, so these are six times as large in an event
            body = json.loads(json.dumps(body).replace("${inputs.text}", "${" + "+".join(["inputs.text"] * 10) + "}"))
            body["inputs"]["text"] = "\1" * (LARGE // 10)
            body["workflow"]["outputs"] = {"last": "${last.text}"}
        async with run.session.post(run.url + RUNS, json=body) as answer:
            runs = run.gateway.metrics.of(WorkflowsMetrics).runs
            await eventually(lambda: runs.values)
            assert runs.values == {("inline", "completed"): 1}
            told = read_events(await answer.read())
        kind, last = told[-1]
        assert (kind, last["error"]["code"]) == ("error", "events_gone")
        assert [data["seq"] for _, data in told] == [*range(len(told))]
        assert 0 < sum(len(data.get("value", "")) for _, data in told) < 15 * LARGE - MAX_LOG // 2
        if background:
            async with run.session.get(f"{run.url}{RUNS}/{last['run']}?stream=true") as answer:
                ((kind, end),) = read_events(await answer.read())
            assert (kind, len(end["outputs"])) == ("run.completed", 15)


async def test_a_client_that_reads_has_all_values_that_come_at_once() -> None:
    steps = {f"v{at}": {"let": "${inputs.text}", "yield": f"v{at}"} for at in range(15)}
    body = {"workflow": document(steps, inputs=INPUTS), "inputs": {"text": "x" * LARGE}}
    async with FakeReplica() as replica, running(replica) as run:
        told = await stream(run, body)
        assert told[-1][0] == "run.completed"
        assert [len(data["value"]) for kind, data in told if kind == "output.done"] == [LARGE] * 15
        await eventually(lambda: run.gateway.memory.held == 0)


async def test_a_killed_call_is_closed_at_the_engine_while_its_run_goes_on() -> None:
    steps = {
        "slow": {**CHAT, "yield": "slow"},
        "fast": {"chat": {"append": [USER]}},
        "decision": {"switch": [{"when": "${fast.text == 'some text'}", "kill": ["slow"]}]},
        "rest": {"chat": {"append": [USER, USER, USER]}, "needs": ["decision"], "yield": "rest"},
    }
    answers = {1: TEXT, 2: ScriptedAnswer("x", None), 3: TEXT}
    scripted = ScriptedEngine(lambda body: answers[len(body["messages"])], holds=True)
    async with scripted.replica, running(scripted.replica) as run:
        asked = asyncio.create_task(stream(run, {"workflow": document(steps), "inputs": {"messages": [USER, USER]}}))
        await eventually(lambda: len(scripted.held) == 2)
        scripted.release()
        await eventually(lambda: scripted.cut)
        await eventually(lambda: [len(each.body["messages"]) for each in scripted.held] == [3])
        assert not asked.done()
        scripted.release()
        told = await asked
    kinds = [f"{kind} {data.get('step', '')}" for kind, data in told]
    assert kinds.index("step.decided decision") < kinds.index("step.killed slow") < kinds.index("step.started rest")
    assert told[-1][1]["outputs"] == {"rest": "some text"}


KILLED = 15


@pytest.mark.parametrize("runs", [4, pytest.param(67, marks=nightly("sixty kills are in the gate, a thousand take a minute"))])
async def test_many_kills_leave_places_leases_and_memory_as_before(tmp_path: Path, runs: int) -> None:
    steps: dict[str, Any] = {f"s{at}": CHAT for at in range(KILLED)}
    steps["killer"] = {"chat": {"append": [USER]}, "kill": [*steps], "yield": "killer"}
    body = {"workflow": document(steps), "inputs": {"messages": [USER, USER]}}
    scripted = ScriptedEngine(lambda body: ScriptedAnswer("x", None) if len(body["messages"]) == 2 else TEXT, holds=True)

    async def one(run: Running, *, background: bool) -> None:
        if background:
            following = asyncio.create_task(events(run, await begun(run, {**body, "background": True})))
        else:
            following = asyncio.create_task(stream(run, body))
        await eventually(lambda: len(scripted.held) == KILLED + 1)
        scripted.release()
        told = await following
        assert sum(kind == "step.killed" for kind, _ in told) == KILLED
        await eventually(lambda: not scripted.held)

    async with scripted.replica, running(scripted.replica, state=kept_in(tmp_path)) as run:
        await one(run, background=True)
        tasks = len(asyncio.all_tasks())
        for at in range(runs - 1):
            await one(run, background=bool(at % 2))
        gateway, endpoint = run.gateway, run.gateway[WorkflowEndpoint]
        assert len(scripted.cut) == runs * KILLED
        assert gateway[Runs].places.taken == len(endpoint.api.background) == len(endpoint.recent) == 0
        await eventually(lambda: gateway.router.ledger.open_leases == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 4)
        for key in list(gateway[Runs].logs.keys()):
            gateway[Runs].logs.forget(key)
        await eventually(lambda: gateway.memory.held == 0)
        gateway.memory.check()


async def test_the_values_of_runs_have_the_memory_of_requests_and_no_more() -> None:
    def script(body: dict[str, Any]) -> ScriptedAnswer:
        return ScriptedAnswer("x", None) if len(body["messages"]) == 2 else TEXT

    scripted = ScriptedEngine(script)
    limits = {"inflight_mb": 48, "body_mb": 2}
    async with scripted.replica, running(scripted.replica, limits=limits) as run:
        body = values(14, last={"chat": {**CHAT["chat"], "append": [USER]}, "yield": "last"})
        body["workflow"]["outputs"] = {"last": "${last.text}"}
        first = asyncio.create_task(run.post(body, RUNS))
        await eventually(lambda: [len(each.body["messages"]) for each in scripted.held] == [2])
        asked = [first, *(asyncio.create_task(run.post(body, RUNS)) for _ in range(7))]
        most = 0

        def all_stand() -> bool:
            nonlocal most
            most = max(most, run.gateway.memory.held)
            return sum(each.done() for each in asked) + len(scripted.held) == 8

        await eventually(all_stand)
        assert not first.done()
        assert any(each.done() for each in asked)
        assert 14 * LARGE < most <= limits["inflight_mb"] << 20
        for each in asked:
            if each.done() and not isinstance(each.exception(), aiohttp.ClientPayloadError):  # cut: no room to hold it unread
                got, _, found = each.result()
                assert (got, found.get("status")) in ((503, None), (200, "failed")), found
                assert "gateway_overloaded" in (found["error"]["code"], found["error"].get("cause", {}).get("code"))
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await eventually(lambda: run.gateway.memory.held == 0)


@pytest.mark.parametrize("value", [b"[]", b"1"])
def test_a_body_with_millions_of_values_is_refused_unread(value: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        read_body(b'{"inputs": [' + (value + b",") * (1 << 21) + b"1]}")
    assert (refused.value.status, refused.value.code) == (413, "request_too_complex")


def test_a_body_is_read_up_to_its_first_unknown_member() -> None:
    """Millions of them took a second."""
    with pytest.raises(GatewayError) as refused:
        read_body(b'{"x": 1, no JSON')
    assert refused.value.param == "x"
