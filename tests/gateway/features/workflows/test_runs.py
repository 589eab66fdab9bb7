"""Whole runs over real sockets: a client, the gateway, and scripted engines."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.features.workflows.feature import WorkflowEndpoint
from gateway.features.workflows.language.constraints import choice_constraint
from gateway.features.workflows.metrics import WorkflowsMetrics
from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import FakeReplica, http, status, writes
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine, Sharing
from tests.support.workflows import prose

RUNS = "/v1/workflows/runs"
USER = {"role": "user", "content": "hello"}


def document(steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    inputs = {"messages": {"type": "messages"}}
    return {"workflow": 1, "name": "w", "inputs": inputs, "defaults": {"model": "m"}, "steps": steps} | more


CHAT = {"chat": {"from": "${inputs.messages}"}}
TEXT = ScriptedAnswer("some text")
ONE = document({"a": {**CHAT, "yield": {"as": "a", "stream": "delta"}}})


def events_of(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for event in body.decode().split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in event.split("\n") if not line.startswith(":"))
        if lines.get("event"):
            data = json.loads(lines["data"])
            assert data["seq"] == int(lines["id"]) == len(found)
            found.append((lines["event"], data))
    return found


async def stream(run: Running, body: dict[str, Any], **options: Any) -> list[tuple[str, dict[str, Any]]]:
    async with run.session.post(run.url + RUNS, json={**body, "stream": True}, **options) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        assert answer.content_type == "text/event-stream"
        return events_of(raw)


@asynccontextmanager
async def engine(answer: ScriptedAnswer = TEXT, **config: Any) -> AsyncIterator[tuple[ScriptedEngine, Running]]:
    scripted = ScriptedEngine(lambda _body: answer)
    async with scripted.replica, running(scripted.replica, **config) as run:
        yield scripted, run


async def test_one_step_with_all_its_events_and_its_receipt() -> None:
    async with engine() as (scripted, run):
        events = await stream(run, {"workflow": ONE, "inputs": {"messages": [USER]}, "metadata": {"mine": 1}})
    kinds = [kind for kind, _ in events]
    assert kinds == ["run.created", "step.started", "output.delta", "step.done", "output.done", "run.completed"]
    last = events[-1][1]
    id_ = last["run"]
    assert (last["status"], last["outputs"], last["metadata"]) == ("completed", {"a": "some text"}, {"mine": 1})
    prompt = scripted.cache.prompts
    assert last["usage"] == {
        "calls": 1,
        "prompt_tokens": prompt,
        "cached_tokens": 0,
        "computed_tokens": prompt,
        "least_tokens": prompt,
        "completion_tokens": 2,
        "wasted_tokens": 0,
        "cost_usd": 0.0,
    }
    assert events[1][1]["request"] == f"{id_}.a"
    assert events[3][1]["usage"] == {"prompt_tokens": prompt, "cached_tokens": 0, "completion_tokens": 2}


async def test_the_answer_of_a_retracted_output_is_wasted() -> None:
    switch = {"switch": [{"else": True, "kill": ["a"], "value": "${b.text}"}], "needs": ["b"], "yield": "c"}
    steps = {"a": {**CHAT, "yield": "a"}, "b": {"chat": {"from": "a", "append": [USER]}}, "c": switch}
    async with engine() as (_, run):
        *_, (_, last) = await stream(run, {"workflow": document(steps), "inputs": {"messages": [USER]}})
        wasted = run.gateway.metrics.of(WorkflowsMetrics).wasted.values
    assert last["outputs"] == {"c": "some text"}
    assert wasted == {(): last["usage"]["wasted_tokens"]} == {(): last["usage"]["completion_tokens"] // 2}


async def test_extra_members_do_not_steer_engines() -> None:
    extra = {"top_k": 3, "priority": -9, "kv_transfer_params": {"remote_host": "10.0.0.9"}, "vllm_xargs": {"routed_dp_rank": 1}}
    workflow = document({"a": {"chat": {"from": "${inputs.messages}", "extra": extra}, "yield": "a"}})
    async with engine() as (scripted, run):
        got, _, found = await run.post({"workflow": workflow, "inputs": {"messages": [USER]}}, RUNS)
    assert (got, found["status"]) == (200, "completed")
    (sent,) = [request.json for request in scripted.replica.requests]
    assert (sent["top_k"], sent["vllm_xargs"]) == (3, {})
    assert sent.keys().isdisjoint(["priority", "kv_transfer_params"])


async def test_a_plain_run_is_its_object_with_steps() -> None:
    async with engine() as (_, run):
        got, _, found = await run.post({"workflow": ONE, "inputs": {"messages": [USER]}}, RUNS)
    assert (got, found["status"], found["outputs"]) == (200, "completed", {"a": "some text"})
    (step,) = found["steps"]
    assert (step["name"], step["status"], step["attempts"], step["request"]) == ("a", "done", 1, f"{found['id']}.a")
    assert 0 <= step["started_ms"] <= step["first_ms"] <= step["done_ms"]


# -- refused before anything is spent


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"[]", 400, "invalid_json", None),
        (b'{"workflow": {"a": 1', 400, "invalid_json", None),
        (b'{"workflow": ' + b'{"a": ' * 50_000 + b"1" + b"}" * 50_001, 400, "invalid_json", None),
        (b'{"what": 1}', 400, "invalid_request", "what"),
        (b"{}", 400, "invalid_request", "workflow"),
        (b'{"workflow": {}, "program": ""}', 400, "invalid_request", "workflow"),
        (b'{"workflow": {"workflow": 1, "workflow": 1}}', 400, "workflow_invalid", "workflow"),
        ({"workflow": document({"a": {"chat": {"from": "b"}}})}, 400, "workflow_invalid", "steps.a.chat.from"),
        ({"workflow": "unknown"}, 404, "workflow_not_found", "workflow"),
        ({"workflow": ONE, "inputs": {"messages": "text"}}, 400, "inputs_invalid", "inputs.messages"),
        ({"workflow": ONE, "limits": {"output_tokens": 5}}, 400, "workflow_over_limits", "limits.output_tokens"),
        ({"workflow": ONE, "limits": {"calls": True}}, 400, "invalid_request", "limits.calls"),
        ({"workflow": document({"a": {"chat": {**CHAT["chat"], "model": "x"}}})}, 404, "model_not_found", "steps.a.chat.model"),
        ({"workflow": document({"a": {"call": {"use": "rag"}}})}, 400, "workflow_invalid", "steps.a.call.use"),
        (
            {"workflow": document({"a": {**CHAT, "chat": {**CHAT["chat"], "max_tokens": 70_000}}})},
            400,
            "workflow_over_limits",
            None,
        ),
        ({"program": "import os"}, 400, "program_invalid", None),
        (b'{"workflow": {"x": "' + b"x" * (300 << 10) + b'"}}', 413, "workflow_too_large", "workflow"),
    ],
)
async def test_a_run_is_refused_with_the_path(body: Any, status: int, code: str, param: str | None) -> None:
    async with engine() as (scripted, run):
        for path in (RUNS, "/v1/workflows/plan") if code != "inputs_invalid" else (RUNS,):
            found = await run.post(body, path)
            assert (found[0], found[2]["error"]["code"]) == (status, code), found[2]
            if param:
                assert found[2]["error"]["param"] == param
            if code == "model_not_found":
                assert found[2]["error"]["message"].startswith(f"{param}: The model 'x' does not exist here")
    assert scripted.cache.calls == 0


async def test_the_plan_has_bounds_prefixes_and_warnings() -> None:
    steps = {"a": CHAT, "b": {"chat": {"from": "a", "append": [USER]}, "yield": "b"}, "c": {"chat": {"from": "a"}}}
    async with engine(prices={"m": {"input": 1, "output": 2}}) as (scripted, run):
        got, _, plan = await run.post({"workflow": document(steps)}, "/v1/workflows/plan")
    assert (got, plan["calls"], plan["output_tokens"], plan["widest"]) == (200, 3, 3 * 1024, 2)
    assert plan["prefixes"][0]["steps"] == ["a", "b", "c"]
    assert 0 < plan["least_tokens"] < plan["prompt_tokens"]
    assert plan["cost_usd"] == pytest.approx((plan["prompt_tokens"] + 2 * plan["output_tokens"]) / 1e6)
    assert [each["path"] for each in plan["warnings"]] == ["steps.c"]
    assert scripted.cache.calls == 0


async def test_a_program_runs_as_its_document() -> None:
    program = '@workflow(model="m")\ndef w(messages: Messages):\n    a = chat(messages)\n    yield {"a": a}\n'
    async with engine() as (_, run):
        got, _, found = await run.post({"program": program, "inputs": {"messages": [USER]}}, RUNS)
    assert (got, found["outputs"]) == (200, {"a": "some text"})


@pytest.mark.parametrize(("enabled", "path", "status"), [(True, "/v1/workflows/runs/run_1", 404), (True, "/v1/workflows", 200)])
async def test_paths_below_workflows(enabled: bool, path: str, status: int) -> None:
    async with engine() as (_, run):
        found = await run.get(path)
        assert found[0] == status
        assert (await run.get("/v1/workflows/runs"))[0] == 405


async def test_off_there_are_no_workflows() -> None:
    async with FakeReplica([status(404, "no such path")]) as replica, running(replica, workflows={"enabled": False}) as run:
        found = await run.post({"workflow": ONE, "model": "m"}, RUNS)
        assert (found[0], found[2]["error"]["message"]) == (404, "no such path")
        assert run.gateway.part(WorkflowEndpoint) is None


async def test_workflows_of_the_directory_run_by_name(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(json.dumps(ONE))
    (tmp_path / "bad.yaml").write_text("workflow: 2\n")
    async with engine(workflows={"directory": str(tmp_path), "inline": False}) as (_, run):
        listed = json.loads((await run.get("/v1/workflows"))[2])
        assert [each["name"] for each in listed["data"]] == ["w"]
        assert json.loads((await run.get("/v1/workflows/w"))[2])["workflow"] == ONE
        got, _, found = await run.post({"workflow": "w", "inputs": {"messages": [USER]}}, RUNS)
        assert (got, found["outputs"]) == (200, {"a": "some text"})
        got, _, found = await run.post({"workflow": ONE, "inputs": {"messages": [USER]}}, RUNS)
        assert (got, found["error"]["code"]) == (403, "workflow_not_allowed")


# -- runs that do not go well


@pytest.mark.parametrize(
    ("first", "repeats", "code", "cause"),
    [
        (ScriptedAnswer("no", status=400), {}, "step_failed", {"status": 400, "code": "scripted"}),
        (ScriptedAnswer("no", status=500), {("server_error",): 1}, None, None),
        (ScriptedAnswer("no", status=429), {("rate_limit",): 1}, None, None),
        (ScriptedAnswer("no", status=408), {("timeout",): 1}, None, None),
        (ScriptedAnswer("some", broken=True), {("broken_answer",): 1}, None, None),
    ],
)
async def test_a_failing_engine(first: ScriptedAnswer, repeats: dict[Any, int], code: str | None, cause: Any) -> None:
    answers = [first, TEXT]
    scripted = ScriptedEngine(lambda _body: answers.pop(0))
    async with (
        scripted.replica,
        running(scripted.replica, pools=[{"replicas": [scripted.replica.url], "resume_streams": False}]) as run,
    ):
        got, _, found = await run.post({"workflow": ONE, "inputs": {"messages": [USER]}}, RUNS)
        assert run.gateway.metrics.of(WorkflowsMetrics).retries.values == repeats
    assert got == 200
    assert len(scripted.replica.requests) == 1 + sum(repeats.values())
    assert (found["status"], found["error"] and found["error"]["code"]) == ("failed" if code else "completed", code)
    if code:
        assert (found["error"]["step"], found["error"]["cause"]) == ("a", cause)
    else:
        assert found["steps"][0]["attempts"] == 2


async def test_a_rate_limit_of_an_engine_is_a_failed_attempt() -> None:
    async with engine(ScriptedAnswer("slow down", status=429, code="rate_limit_exceeded")) as (scripted, run):
        body = {"workflow": ONE, "inputs": {"messages": [USER]}, "limits": {"seconds": 5}}
        found = (await run.post(body, RUNS))[2]
    assert (found["status"], found["error"] and found["error"]["cause"]["status"]) == ("failed", 429)
    assert len(scripted.replica.requests) == 2


async def test_a_run_out_of_time_is_incomplete_and_its_call_is_cancelled() -> None:
    """The time is doubled until the engine has the call within it, however slow this machine is. (Also below.)"""
    async with engine(ScriptedAnswer("x", seconds=None)) as (scripted, run):
        seconds = 0.05
        while not scripted.cut:
            body = {"workflow": ONE, "inputs": {"messages": [USER]}, "limits": {"seconds": seconds}}
            got, _, found = await run.post(body, RUNS)
            assert (got, found["status"], found["incomplete_details"]) == (200, "incomplete", {"reason": "run_timeout"})
            await eventually(lambda: not scripted.held)
            seconds *= 2
        assert len(scripted.cut) == 1


async def test_a_step_out_of_time_is_asked_again_then_fails() -> None:
    async with engine(ScriptedAnswer("x", seconds=None)) as (scripted, run):
        seconds = 0.02
        while len(scripted.cut) != 2:
            scripted.cut.clear()
            one = document({"a": {**CHAT, "timeout_s": seconds, "yield": "a"}})
            found = (await run.post({"workflow": one, "inputs": {"messages": [USER]}}, RUNS))[2]
            assert found["error"]["cause"] == {"status": 504, "code": "timeout"}
            await eventually(lambda: not scripted.held)
            seconds *= 2


async def test_a_client_that_leaves_ends_its_run() -> None:
    async with engine(ScriptedAnswer("x", seconds=None)) as (scripted, run):
        for more in ({}, {"stream": True}):
            asked = asyncio.create_task(run.post({"workflow": ONE, "inputs": {"messages": [USER]}, **more}, RUNS))
            await eventually(lambda: scripted.held)
            asked.cancel()
            await eventually(lambda: not scripted.held)
        await eventually(lambda: run.gateway.memory.held == 0)
        assert run.gateway.metrics.of(WorkflowsMetrics).runs.values["inline", "cancelled"] == 2


async def test_a_gateway_that_goes_down_ends_its_runs_with_an_error() -> None:
    body = {"workflow": ONE, "inputs": {"messages": [USER]}}
    async with engine(ScriptedAnswer("x", seconds=None)) as (scripted, run):
        plain, streamed = asyncio.create_task(run.post(body, RUNS)), asyncio.create_task(stream(run, body))
        await eventually(lambda: len(scripted.held) == 2)
        await run.gateway.running.wait(0.0, asyncio.Event())
        got, _, found = await plain
        events = await streamed
        await eventually(lambda: not scripted.held)
    assert (got, found["error"]["code"]) == (503, "shutting_down")
    assert (events[-1][0], events[-1][1]["error"]["code"]) == ("error", "shutting_down")


async def test_a_killed_call_is_closed_at_the_engine_at_once() -> None:
    steps = {"slow": {**CHAT, "yield": "slow"}, "fast": {"chat": {"append": [USER]}, "kill": ["slow"], "yield": "fast"}}
    scripted = ScriptedEngine(lambda body: ScriptedAnswer("x", None) if len(body["messages"]) == 2 else TEXT, holds=True)
    async with scripted.replica, running(scripted.replica) as run:
        asked = asyncio.create_task(stream(run, {"workflow": document(steps), "inputs": {"messages": [USER, USER]}}))
        await eventually(lambda: len(scripted.held) == 2)
        scripted.release()
        events = await asked
        await eventually(lambda: len(scripted.cut) == 1)
    last = events[-1][1]
    assert (last["status"], last["outputs"]) == ("completed", {"fast": "some text"})
    assert [data["by"] for kind, data in events if kind == "step.killed"] == ["fast"]


@pytest.mark.parametrize(
    ("owner", "shares", "gate", "waits", "times"),
    [
        ("llamacpp", "end", "auto", True, 1),
        ("llamacpp", "end", True, True, 1),
        ("somebody", "first token", "auto", True, 1),
        ("somebody", "first token", False, False, 3),
        ("warmroute", "first token", "auto", True, 1),
        ("vllm", "in flight", "auto", False, 1),
        ("vllm", "in flight", True, True, 1),
    ],
)
async def test_three_cold_siblings_compute_their_history_once(
    owner: str, shares: Sharing, gate: str | bool, waits: bool, times: int
) -> None:
    """Engines that share nothing in flight do with the gate; vLLM does by itself, and has none unless it is configured."""
    history = [{"role": "user", "content": prose(2000, "h")}]
    steps: dict[str, Any] = {
        f"s{at}": {"chat": {"from": "${inputs.messages}", "append": [{"role": "user", "content": f"{at}"}]}} for at in range(3)
    }
    steps["s0"] |= {"yield": "a"}
    held = times == 3  # else one may end before another one arrives
    scripted = ScriptedEngine(lambda _body: TEXT, shares=shares, owner=owner, holds=held, together=times)
    async with scripted.replica, running(scripted.replica, workflows={"gate": gate}) as run:
        asked = asyncio.create_task(run.post({"workflow": document(steps), "inputs": {"messages": history}}, RUNS))
        for left in (3, 2, 1) if held else ():
            await eventually(lambda left=left: len(scripted.held) == left)
            scripted.release()
        found = (await asked)[2]
    assert found["usage"]["computed_tokens"] == scripted.cache.computed
    assert [("gate_ms" in each) for each in found["steps"]] == [False, waits, waits]
    assert 2000 * times * 0.97 < scripted.cache.computed < 2000 * times * 1.05


@pytest.mark.parametrize(
    ("owner", "constraint"),
    [
        ("vllm", ("structured_outputs", {"choice": ["Yes", "No"]})),
        ("llamacpp", ("response_format", choice_constraint(("Yes", "No")).members(as_choice=False)["response_format"])),
    ],
)
async def test_choices_have_the_form_of_the_engines_if_all_of_the_pool_take_it(owner: str, constraint: tuple[str, Any]) -> None:
    bodies: list[dict[str, Any]] = []

    def script(body: dict[str, Any]) -> ScriptedAnswer:
        bodies.append(body)
        return ScriptedAnswer("Yes")

    engines = [ScriptedEngine(script, owner=each) for each in ("vllm", owner)]
    steps = {"a": {"chat": {**CHAT["chat"], "choices": ["Yes", "No"]}, "yield": {"as": "a", "value": "${a.value}"}}}
    async with engines[0].replica, engines[1].replica, running(*(each.replica for each in engines)) as run:
        found = (await run.post({"workflow": document(steps), "inputs": {"messages": [USER]}}, RUNS))[2]
    assert found["outputs"] == {"a": "Yes"}
    assert [each for each in bodies[0].items() if each[0] in ("structured_outputs", "response_format")] == [constraint]


async def test_a_limit_of_money_ends_a_run_before_a_step_that_could_exceed_it() -> None:
    prices = {"m": {"input": 1, "output": 1000}}
    steps = {"a": {"chat": {**CHAT["chat"], "max_tokens": 100}, "yield": "a"}, "b": {"chat": {"from": "a", "max_tokens": 100}}}
    async with engine(prices=prices) as (scripted, run):
        body = {"workflow": document(steps), "inputs": {"messages": [USER]}, "limits": {"cost_usd": 0.101}}
        found = (await run.post(body, RUNS))[2]
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "cost_usd"})
    assert found["outputs"] == {"a": "some text"}
    assert scripted.cache.calls == 1
    assert 0.002 <= found["usage"]["cost_usd"] < 0.0021


@pytest.mark.parametrize(("most_usd", "status"), [(0.15, "incomplete"), (0.25, "completed")])
async def test_calls_beside_each_other_share_the_limit_of_money(most_usd: float, status: str) -> None:
    """Each may cost 0.1 USD; what they have cost is known only at their ends."""
    steps = {name: {"chat": {**CHAT["chat"], "max_tokens": 100}, "yield": name} for name in ("a", "b")}
    async with engine(prices={"m": {"input": 1, "output": 1000}}) as (_, run):
        body = {"workflow": document(steps), "inputs": {"messages": [USER]}, "limits": {"cost_usd": most_usd}}
        assert (await run.post(body, RUNS))[2]["status"] == status


async def test_the_price_of_an_alias_is_that_of_its_model() -> None:
    steps = {"a": {"chat": {**CHAT["chat"], "model": "other", "max_tokens": 100}, "yield": "a"}}
    async with engine(prices={"m": {"input": 1, "output": 1000}}, model_aliases={"other": "m"}) as (scripted, run):
        body = {"workflow": document(steps), "inputs": {"messages": [USER]}, "limits": {"cost_usd": 0.01}}
        assert (await run.post(body, "/v1/workflows/plan"))[2]["cost_usd"] > 0.1
        assert (await run.post(body, RUNS))[2]["incomplete_details"] == {"reason": "cost_usd"}
    assert scripted.cache.calls == 0


async def test_the_worst_price_is_that_of_the_dearest_fallback() -> None:
    scripted = ScriptedEngine(lambda _body: ScriptedAnswer("some text"))
    steps = {"a": {"chat": {**CHAT["chat"], "max_tokens": 100}, "yield": "a"}}
    other, last = FakeReplica(), FakeReplica()
    async with scripted.replica, other, last:
        pools: Any = [
            {"name": "own", "models": ["m"], "replicas": [scripted.replica.url], "fallback": {"pool": "next"}},
            {"name": "next", "models": ["n"], "replicas": [other.url], "fallback": {"pool": "last", "model": "dear"}},
            {"name": "last", "models": ["dear"], "replicas": [last.url]},
        ]
        prices: Any = {"m": {"input": 1, "output": 1}, "dear": {"input": 1, "output": 1000}}
        async with running(pools=pools, prices=prices) as run:
            body = {"workflow": document(steps), "inputs": {"messages": [USER]}, "limits": {"cost_usd": 0.01}}
            assert (await run.post(body, "/v1/workflows/plan"))[2]["cost_usd"] > 0.1
            assert (await run.post(body, RUNS))[2]["incomplete_details"] == {"reason": "cost_usd"}
    assert scripted.cache.calls == 0


async def test_the_tokens_of_the_plan_and_the_worst_price_follow_the_learned_size_of_a_token() -> None:
    steps = {"a": {"chat": {**CHAT["chat"], "max_tokens": 1}, "yield": "a"}}
    body = {"workflow": document(steps), "inputs": {"messages": [{"role": "user", "content": "x" * 40_000}]}}
    async with engine(prices={"m": {"input": 1, "output": 1}}) as (scripted, run):
        assert (await run.post(body, "/v1/workflows/plan"))[2]["prompt_tokens"] == pytest.approx(10_000, rel=0.01)
        for _ in range(50):
            run.gateway.router.scales.learn("m", 20_000, 20_000)
        plan = (await run.post(body, "/v1/workflows/plan"))[2]
        assert plan["prompt_tokens"] > 30_000
        assert plan["cost_usd"] == pytest.approx((plan["prompt_tokens"] + 1) / 1e6)
        found = (await run.post(body | {"limits": {"cost_usd": 0.02}}, RUNS))[2]
        assert found["incomplete_details"] == {"reason": "cost_usd"}, "3 bytes for a token would be 0.0134 USD"
    assert scripted.cache.calls == 0


async def test_an_answer_with_half_of_a_character_is_asked_for_again_and_named() -> None:
    half = b'{"choices": [{"message": {"role": "assistant", "content": "\\ud83d"}, "finish_reason": "stop"}]}'
    replica = FakeReplica([writes(http(200, half))] * 2)
    async with replica, running(replica) as run:
        found = (await run.post({"workflow": ONE, "inputs": {"messages": [USER]}}, RUNS))[2]
    assert (found["error"]["code"], found["error"]["cause"]) == ("step_failed", {"status": 502, "code": "unreadable_answer"})
    assert "half of a character" in found["error"]["message"]
    assert found["steps"][0]["attempts"] == 2


async def test_a_value_that_is_too_large_ends_the_run() -> None:
    async with engine(ScriptedAnswer("x" * (2 << 20))) as (_, run):
        found = (await run.post({"workflow": ONE, "inputs": {"messages": [USER]}}, RUNS))[2]
    assert found["error"]["code"] == "value_too_large"


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_nested_values_and_metadata_are_told_or_refused(more: dict[str, Any]) -> None:
    """All depths around the one that the run around a value makes too deep."""
    step = {"let": "${inputs.x}", "yield": {"as": "a", "value": {"deeper": "${a.value}"}}}
    valued, plain = document({"a": step}, inputs={"x": {"type": "list"}}), document({"a": {"let": 1}})
    ends = set[tuple[int, bool]]()
    async with engine() as (_, run):
        for levels in (200, *range(232, 260)):
            nested: Any = json.loads("[" * levels + "]" * levels)
            for body in ({"workflow": valued, "inputs": {"x": nested}}, {"workflow": plain, "metadata": {"m": nested}}):
                async with run.session.post(run.url + RUNS, json={**body, **more}) as answer:
                    raw = await answer.read()
                ended = b'"status":"completed"' in raw or b'"code":"expression_failed"' in raw
                assert answer.status == 400 or ended, raw[-200:]
                ends.add((levels, answer.status == 400))
    assert (200, True) not in ends
    assert (259, False) not in ends


@pytest.mark.parametrize(
    "error",
    [
        {"message": "The answer cannot be constrained to this format: no schema", "param": None},
        {"message": "no", "param": "response_format"},
        {"message": "unknown field structured_outputs"},
    ],
)
async def test_an_engine_that_refuses_a_constraint_is_not_asked_again(error: dict[str, Any]) -> None:
    replica = FakeReplica([writes(http(400, json.dumps({"error": {"type": "t", "code": "c", **error}}).encode()))] * 2)
    one = document({"a": {"chat": {**CHAT["chat"], "output": "list"}, "yield": "a"}})
    async with replica, running(replica) as run:
        found = (await run.post({"workflow": one, "inputs": {"messages": [USER]}}, RUNS))[2]
    assert (found["error"]["code"], found["steps"][0]["attempts"]) == ("constraint_unsupported", 1)
    assert found["error"]["cause"] == {"status": 400, "code": "c"}


# -- many runs


RACE = {
    "a": {**CHAT, "on_error": "skip"},
    "b": {**CHAT, "yield": "b"},
    "taken": {"switch": [{"when": "${contains(b.text, 'x')}", "kill": ["slow"]}, {"else": True, "value": "${slow.text}"}]},
    "slow": {**CHAT, "yield": "slow", "on_error": "skip"},
}


async def test_many_runs_with_kills_failures_and_clients_that_leave_leave_nothing() -> None:
    chance = random.Random(7)
    answers = [ScriptedAnswer("no", status=400), ScriptedAnswer("te", broken=True)]
    scripted = ScriptedEngine(
        lambda _body: chance.choice([*answers, *[ScriptedAnswer(f"{letter} text") for letter in "xyxyxy"]])
    )
    body = {"workflow": document(RACE), "inputs": {"messages": [USER]}}

    async def one(run: Running, leaves: bool) -> None:
        id_ = f"client-{chance.random()}"
        named: dict[str, Any] = {"headers": {"X-Request-Id": id_}}
        asked = asyncio.create_task(run.post(body, RUNS, **named) if chance.random() < 0.5 else stream(run, body, **named))
        if leaves:
            await eventually(lambda: asked.done() or id_ in [each.record.id for each in run.gateway.running.exchanges])
            await asyncio.sleep(chance.random() * 0.01)
            asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async with scripted.replica, running(pools=[{"replicas": [scripted.replica.url], "resume_streams": False}]) as run:
        await one(run, False)
        tasks = len(asyncio.all_tasks())
        for _ in range(4):
            await asyncio.gather(*(one(run, at == 0) for at in range(8)))
        await eventually(lambda: run.gateway.memory.held == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 16)  # of connections
        metrics = run.gateway.metrics.of(WorkflowsMetrics)
        assert sum(metrics.runs.values.values()) == 33
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
