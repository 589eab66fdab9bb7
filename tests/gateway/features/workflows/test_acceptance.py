"""The ten acceptance programs over real sockets, on four engines: their events, and the tokens that the engines computed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.features.workflows.language.compiling import YAML, compile_text
from tests.gateway.conftest import running
from tests.gateway.features.workflows.language.test_programs import SCENARIOS, given
from tests.gateway.features.workflows.test_runs import RUNS, events_of
from tests.support.fakes import FakeReplica, FakeRequest, http
from tests.support.paths import WORKFLOWS
from tests.support.scripted_engine import BLOCK, ScriptedAnswer, ScriptedEngine, quiet
from tests.support.scripted_runs import written
from tests.support.workflows import prose

NAMED: Mapping[str, Mapping[str, str]] = {
    "answer_critic_copilot": {"violate the policy": "critic", "ask next": "copilot", "": "answer"},
    "linear": {"Copilot:": "questions", "Critic:": "critic", "": "answer"},
    "linear_chat": {"next": "questions", "policy": "critic", "": "answer"},
    "speculative": {"Extract feature 1": "feature1", "Use this": "result2", "": "default"},
    "outline": {"section titles": "plan", "Write the section": "section", "Join and smooth": "polish"},
    "panel": {"Write the best answer": "judge", "": "candidate"},
    "paper_qa": {"": "answer"},
    "streamed_field": {"": "result"},
    "two_features": {"Extract feature 1": "feature1", "Answer the user": "result"},
}
"""The step of a request, by a piece of its last message: the first that is there."""


def _step(name: str, body: dict[str, Any]) -> str:
    if name == "hedge":
        return "large" if body["model"] == "qwen3-32b" else "small"
    last = body["prompt"][-200:] if "prompt" in body else body["messages"][-1]["content"]
    return next(step for piece, step in NAMED[name].items() if piece in last)


@pytest.mark.parametrize(("name", "scenario"), SCENARIOS, ids=lambda value: value if isinstance(value, str) else value["name"])
async def test_a_program_over_sockets(name: str, scenario: dict[str, Any]) -> None:
    workflow = compile_text((WORKFLOWS / f"{name}.yaml").read_text(), YAML)
    seconds = scenario.get("seconds", {})
    count = 0

    def script(body: dict[str, Any]) -> ScriptedAnswer:
        nonlocal count
        count += 1
        step = _step(name, body)
        return ScriptedAnswer(
            written(scenario["answers"][step], f"{step}{count}", "text" if "prompt" in body else "chat"), seconds.get(step, 1)
        )

    engines = [ScriptedEngine(script, "qwen3-8b", "qwen3-32b", "base-7b", holds=True) for _ in range(4)]
    connectors = {use: _Connector(engines[0], use, answer, scenario) for use, answer in scenario.get("connectors", {}).items()}
    async with contextlib.AsyncExitStack() as stack:
        for each in engines:
            await stack.enter_async_context(each.replica)
        for connector in connectors.values():
            await stack.enter_async_context(connector.replica)
        config = {use: {"url": f"{each.replica.url}/call"} for use, each in connectors.items()}
        run = await stack.enter_async_context(running(*(each.replica for each in engines), workflows={"connectors": config}))
        usages = []
        for number in range(scenario.get("runs", 1)):
            inputs = {key: given(workflow.inputs[key].type, key, value, number) for key, value in scenario["inputs"].items()}
            asked = asyncio.create_task(
                _stream(run.session, run.url, {"workflow": workflow.source, "inputs": inputs, "stream": True})
            )
            while not asked.done():
                await quiet(*engines)
                _release(engines)
            events = await asked
            usages.append(events[-1][1]["usage"])
            _check(events, scenario)
    stated = scenario["tokens"]
    computed = sum(each.cache.computed for each in engines)
    assert sum(each.cache.calls for each in engines) == stated["calls"]
    assert abs(computed - stated["computed"]) <= BLOCK * stated["calls"]
    if len(usages) == 1:
        (usage,) = usages
        estimated = 60 if any(each.startswith("step.killed") for each in scenario["events"]) else 0  # of a call without usage
        assert abs(usage["prompt_tokens"] - sum(each.cache.prompts for each in engines)) <= estimated
        assert abs(usage["computed_tokens"] - computed) <= estimated
        assert abs(usage["least_tokens"] - stated["least"]) <= 4 * stated["calls"]
        assert usage["computed_tokens"] / usage["least_tokens"] <= 1.05


def _release(engines: list[ScriptedEngine]) -> None:
    """Answer the request that is due first, of all engines."""
    now = max(each.now for each in engines)
    due = [(min(held.due for held in each.held), at) for at, each in enumerate(engines) if each.held]
    if due:
        moment, at = min(due)
        engines[at].release()
        for each in engines:
            each.now = max(now, moment)


async def _stream(session: Any, url: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    async with session.post(url + RUNS, json=body) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        return events_of(raw)


def _check(events: list[tuple[str, dict[str, Any]]], scenario: dict[str, Any]) -> None:
    said = [" ".join([kind, *filter(None, [data.get("step") or data.get("name")])]) for kind, data in events]
    said = [each for each in said if not each.startswith(("output.delta", "output.snapshot"))]
    assert sorted(said) == sorted(scenario["events"])
    for chain in scenario["order"]:
        places = [said.index(each.strip()) for each in chain.split(" < ")]
        assert places == sorted(places), (chain, said)
    assert not set(scenario.get("never", ())) & set(said)
    for output, provisional in scenario.get("provisional", {}).items():
        assert [data["provisional"] for kind, data in events if (kind, data.get("name")) == ("output.done", output)] == [
            provisional
        ]


class _Connector:
    """A connector on loopback, whose calls an engine holds as it holds requests."""

    def __init__(self, engine: ScriptedEngine, use: str, answer: Mapping[str, Any], scenario: Mapping[str, Any]) -> None:
        self.replica = FakeReplica([self._behave])
        self._engine = engine
        step = {"kb_rag": "feature2", "papers": "library"}[use]
        self._seconds = scenario.get("seconds", {}).get(step, 1)
        self._answer = {key: prose(value, key) if isinstance(value, int) else value for key, value in answer.items()}

    async def _behave(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        assert request.headers["idempotency-key"].startswith("run_")
        await self._engine.hold(request.json, ScriptedAnswer("", self._seconds))
        writer.write(http(200, json.dumps(self._answer).encode()))
