"""Keys and money: the steps of a run are requests of its caller."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import compose
from gateway.core import Surroundings
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.workflows.metrics import WorkflowsMetrics
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, Running, config_over, eventually, serving_runner
from tests.gateway.features.keys.conftest import PRICES, bearer, keyed, made
from tests.gateway.features.workflows.test_runs import CHAT, RUNS, USER, document
from tests.support.fakes import FakeReplica, http, writes
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

TWO = document(
    {"a": {**CHAT, "yield": "a"}, "b": {"chat": {"from": "a", "append": [USER]}, "yield": "b"}}, name="two", primary="b"
)
BODY = {"inputs": {"messages": [USER]}}


@asynccontextmanager
async def served(
    folder: Path, *, holds: bool = False, connectors: Any = None, **config: Any
) -> AsyncIterator[tuple[ScriptedEngine, Running]]:
    (folder / "workflows").mkdir()
    (folder / "workflows" / "two.yaml").write_text(json.dumps(TWO))
    scripted = ScriptedEngine(lambda _body: ScriptedAnswer("some text", 1.0), holds=holds)
    workflows = {"directory": str(folder / "workflows"), "connectors": connectors or {}}
    async with scripted.replica, keyed(folder, scripted.replica, prices=PRICES, workflows=workflows, **config) as run:
        yield scripted, run


async def test_a_key_that_has_the_workflow_needs_none_of_its_models(tmp_path: Path) -> None:
    async with served(tmp_path) as (scripted, run):
        _, key = await made(run, models=["workflow:two"])
        headers = bearer(key)
        got, _, found = await run.post({**BODY, "workflow": "two"}, RUNS, headers=headers)
        assert (got, found["status"]) == (200, "completed")
        got, _, found = await run.post({"model": "workflow:two", "messages": [USER]}, headers=headers)
        assert (got, found["choices"][0]["message"]["content"]) == (200, "some text")
        assert (await run.post({"model": "m", "messages": [USER]}, headers=headers))[2]["error"]["code"] == "model_not_allowed"
        calls = scripted.cache.calls
        got, _, found = await run.post({**BODY, "workflow": TWO}, RUNS, headers=headers)
        assert (got, found["error"]["code"], found["error"]["param"]) == (403, "model_not_allowed", "steps.a.chat.model")
        assert scripted.cache.calls == calls == 4


async def test_a_key_without_the_workflow_does_not_see_it(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run):
        _, key = await made(run, models=["m"])
        for body in ({**BODY, "workflow": "two"}, {**BODY, "workflow": "unknown"}):
            got, _, found = await run.post(body, RUNS, headers=bearer(key))
            assert (got, found["error"]["code"]) == (403, "workflow_not_allowed")
        assert json.loads((await run.get("/v1/workflows", headers=bearer(key)))[2])["data"] == []
        assert (await run.post({**BODY, "workflow": TWO}, RUNS, headers=bearer(key)))[2]["status"] == "completed"
        assert (await run.post({**BODY, "workflow": TWO}, RUNS))[0] == 401


@pytest.mark.parametrize("kind", ["chat", "call"])
async def test_a_revoked_key_ends_its_run_before_the_next_step(kind: str, tmp_path: Path) -> None:
    steps = dict(TWO["steps"])
    if kind == "call":
        steps["b"] = {"call": {"use": "unreachable", "with": {"a": "${a.text}"}}}
    connectors = {"unreachable": {"url": "http://127.0.0.1:1/"}}
    async with served(tmp_path, holds=True, connectors=connectors) as (scripted, run):
        id_, key = await made(run)
        asked = asyncio.create_task(run.post({**BODY, "workflow": document(steps)}, RUNS, headers=bearer(key)))
        await eventually(lambda: scripted.held)
        async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}") as answer:
            assert answer.status == 200
        scripted.release()
        found = (await asked)[2]
    assert (found["status"], found["error"]["code"], found["error"]["step"]) == ("failed", "grant_revoked", "b")
    assert found["outputs"] == {"a": "some text"}
    assert scripted.cache.calls == 1


async def test_a_spent_budget_ends_a_run_within_one_step(tmp_path: Path) -> None:
    steps: dict[str, Any] = {"s0": {"chat": {**CHAT["chat"], "max_tokens": 5}}}
    for at in range(1, 9):
        steps[f"s{at}"] = {"chat": {"from": f"s{at - 1}", "append": [USER], "max_tokens": 5}}
    async with served(tmp_path) as (scripted, run):
        _, key = await made(run, budget_usd_day=0.000060)
        found = (await run.post({**BODY, "workflow": document(steps)}, RUNS, headers=bearer(key)))[2]
    assert (found["status"], found["error"]["code"]) == ("failed", "step_failed")
    assert found["error"]["cause"] == {"status": 429, "code": "insufficient_quota"}
    assert 1 <= scripted.cache.calls < 9
    assert found["usage"]["cost_usd"] < 0.000080, "within one step"


async def test_a_step_that_waits_for_the_budget_of_its_key_is_no_call(tmp_path: Path) -> None:
    step = {"chat": {**CHAT["chat"], "max_tokens": 5}}
    async with served(tmp_path, holds=True) as (scripted, run):
        _, key = await made(run, budget_usd_day=0.000012)
        body = {**BODY, "workflow": document({"a": {**step, "kill": ["b"]}, "b": step})}
        asked = asyncio.create_task(run.post(body, RUNS, headers=bearer(key)))
        limited = run.gateway.metrics.of(KeyMetrics).limited
        await eventually(lambda: scripted.held and limited.values["rate_limit_exceeded",])
        scripted.release()
        found = (await asked)[2]
    assert (found["status"], found["usage"]["calls"], scripted.cache.calls) == ("completed", 1, 1)


async def test_a_run_over_the_rate_of_its_key_waits_and_ends_late(tmp_path: Path) -> None:
    items = [*range(62)]
    step = {"each": {"in": items, "as": "n", "steps": {"one": {"chat": {"append": [USER]}}}, "value": "${one.text}"}}
    now = [time.monotonic()]
    scripted = ScriptedEngine(lambda _body: ScriptedAnswer("some text"))
    async with scripted.replica:
        config = config_over(scripted.replica, keys={"url": f"sqlite:///{tmp_path}/keys.sqlite"})
        gateway = compose(config, LOGGED, Surroundings(clock=lambda: now[0]))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            _, key = await made(run, requests_per_minute=60)
            body = {**BODY, "workflow": document({"all": {**step, "yield": "all"}})}
            asked = asyncio.create_task(run.post(body, RUNS, headers=bearer(key)))
            limited = gateway.metrics.of(KeyMetrics).limited
            await eventually(lambda: limited.values["rate_limit_exceeded",])
            await eventually(lambda: scripted.cache.calls == 60)
            assert not asked.done()
            now[0] += 60
            found = (await asked)[2]
    assert (found["status"], found["outputs"]) == ("completed", {"all": ["some text"] * 62})
    assert {each["attempts"] for each in found["steps"]} == {1}, "a wait for the limit is no attempt"
    assert found["usage"]["calls"] == 62, "nor a call"  # the engine has more: a silent one is asked whether it hangs
    assert gateway.metrics.of(WorkflowsMetrics).retries.values == {}


async def test_calls_of_connectors_count_for_the_rate_of_a_key(tmp_path: Path) -> None:
    steps = {"a": {"call": {"use": "rag"}}, "b": {"call": {"use": "rag"}, "needs": ["a"], "yield": "b"}}
    now = [time.monotonic()]
    answer = writes(http(200, b'"found"'))
    async with FakeReplica() as engine, FakeReplica([answer, answer]) as rag:
        workflows = {"connectors": {"rag": {"url": f"{rag.url}/search"}}}
        config = config_over(engine, keys={"url": f"sqlite:///{tmp_path}/keys.sqlite"}, workflows=workflows)
        gateway = compose(config, LOGGED, Surroundings(clock=lambda: now[0]))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            _, key = await made(run, requests_per_minute=60)  # a step waits for a second
            for _ in range(59):
                assert (await run.get("/v1/models", headers=bearer(key)))[0] == 200
            asked = asyncio.create_task(run.post({**BODY, "workflow": document(steps)}, RUNS, headers=bearer(key)))
            limited = gateway.metrics.of(KeyMetrics).limited
            await eventually(lambda: limited.values["rate_limit_exceeded",])
            assert (len(rag.requests), asked.done()) == (1, False)
            now[0] += 60
            found = (await asked)[2]
    assert (found["status"], found["outputs"]) == ("completed", {"b": "found"})
    assert len(rag.requests) == 2


async def test_the_document_of_the_operator_is_for_operators_only(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run):
        _, key = await made(run)
        for headers, shown in ((bearer(key), True), ({**bearer(key), "X-Forwarded-For": "192.0.2.1"}, False)):
            found = json.loads((await run.get("/v1/workflows/two", headers=headers))[2])
            assert (found["name"], found.get("workflow")) == ("two", TWO if shown else None)
            (prefix,) = (await run.post({**BODY, "workflow": "two"}, "/v1/workflows/plan", headers=headers))[2]["prefixes"]
            assert (prefix["pieces"] is not None) is shown


async def test_a_step_that_may_be_killed_waits_one_priority_below_its_key(tmp_path: Path) -> None:
    def said(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    arms = [{"when": "${certain.text == 'kill'}", "kill": ["uncertain"]}, {"else": True}]
    steps = {name: {"chat": {"append": said(name)}, "yield": name} for name in ("uncertain", "certain")}
    workflow = document({**steps, "decision": {"switch": arms}})
    order = list[str]()

    def script(body: dict[str, Any]) -> ScriptedAnswer:
        order.append(body["messages"][-1]["content"])
        return ScriptedAnswer("some text", 1.0)

    scripted = ScriptedEngine(script, holds=True)
    async with scripted.replica:
        pools = [{"replicas": [scripted.replica.url], "max_inflight": 1}]
        async with keyed(tmp_path, pools=pools) as run:
            admission = run.gateway.fleet.pools[0].admission
            _, high = await made(run, priority=50)
            _, low = await made(run)

            async def ask(text: str, key: str) -> None:
                body = {"model": "m", "messages": said(text), "stream": True}
                async with run.session.post(f"{run.url}/v1/chat/completions", json=body, headers=bearer(key)) as answer:
                    await answer.read()

            asked = [asyncio.create_task(ask("first", high))]
            await eventually(lambda: scripted.held)
            asked.append(asyncio.create_task(ask("other", low)))
            await eventually(lambda: admission.waiting == 1)
            running = asyncio.create_task(run.post({"workflow": workflow}, RUNS, headers=bearer(high)))
            await eventually(lambda: admission.waiting == 3)
            await eventually(lambda: not scripted.release() and all(each.done() for each in (*asked, running)))
    assert order == ["first", "certain", "uncertain", "other"]


async def test_the_rate_of_a_key_counts_what_the_gateway_answers_itself_and_no_run(tmp_path: Path) -> None:
    gets = (f"/v1/workflows{path}" for path in ("", "/two", "/schema", "/runs/run_1"))
    async with served(tmp_path) as (scripted, run):
        for path in gets:
            _, key = await made(run, requests_per_minute=1)
            assert (await run.get(path, headers=bearer(key)))[0] in (200, 404)
            status, _, body = await run.get(path, headers=bearer(key))
            assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded"), path
        _, key = await made(run, requests_per_minute=3)
        for request in (RUNS, "/v1/workflows/plan"):  # a run: its two steps
            assert (await run.post({**BODY, "workflow": "two"}, request, headers=bearer(key)))[0] == 200
        got, _, found = await run.post({**BODY, "workflow": "two"}, "/v1/workflows/plan", headers=bearer(key))
        assert (got, found["error"]["code"]) == (429, "rate_limit_exceeded")
        assert scripted.cache.calls == 2


async def test_each_step_has_its_own_line_in_the_log_and_the_run_is_not_metered(tmp_path: Path, request_lines: Any) -> None:
    async with served(tmp_path) as (_, run):
        _, key = await made(run)
        found = (await run.post({**BODY, "workflow": TWO}, RUNS, headers=bearer(key)))[2]
        metrics = await run.metrics()
    lines = {line.get("id"): line for line in request_lines()}
    for name in "ab":
        assert lines[f"{found['id']}.{name}"]["tenant"] == "acme"
    assert metrics['warmroute_requests_total{code="200",endpoint="/v1/workflows/",model="unknown"}'] == 1
    assert metrics['warmroute_workflow_runs_total{status="completed",workflow="inline"}'] == 1
    assert metrics["warmroute_workflow_computed_tokens_total"] == found["usage"]["computed_tokens"]
