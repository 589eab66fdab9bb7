"""Recent runs for operators: their rows, their bounds, and nothing without a watch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from gateway.features.workflows.recent_runs import MAX_RUNS, MAX_STEPS, WATCH_S, RecentRuns
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.workflows.test_runs import CHAT, RUNS, TEXT, USER, document
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

STEPS: dict[str, Any] = {
    "slow": {**CHAT, "yield": "slow"},
    "fast": {"chat": {"append": [USER]}, "kill": ["slow"], "yield": "fast"},
    "never": {"chat": {"append": [USER]}, "if": "${fast.text == 'x'}"},
}


async def rows(run: Running) -> list[dict[str, Any]]:
    async with run.session.get(f"{run.admin_url}/warmroute/runs") as answer:
        assert answer.status == 200
        found: list[dict[str, Any]] = (await answer.json())["runs"]
    return found


async def test_a_run_is_seen_while_it_runs_and_after_its_end_without_texts() -> None:
    scripted = ScriptedEngine(lambda body: ScriptedAnswer("x", None) if len(body["messages"]) == 2 else TEXT, holds=True)
    async with scripted.replica, running(scripted.replica) as run:
        assert await rows(run) == []
        body = {"workflow": document(STEPS), "inputs": {"messages": [USER, {"role": "user", "content": "a secret"}]}}
        asked = asyncio.create_task(run.post(body, RUNS))
        await eventually(lambda: len(scripted.held) == 2)
        (row,) = await rows(run)
        assert (row["workflow"], row["status"]) == ("w", "running")
        assert {step["name"]: step["status"] for step in row["steps"]} == {
            "slow": "running",
            "fast": "running",
            "never": "pending",
        }
        scripted.release()
        _, _, ended = await asked
        (row,) = await rows(run)
    assert (row["id"], row["status"], row["usage"]) == (ended["id"], "completed", ended["usage"])
    slow, fast, never = row["steps"]
    assert (slow["status"], slow["killed_by"], slow["replica"]) == ("killed", "fast", scripted.replica.name)
    assert sum(step.get("prompt_tokens", 0) for step in row["steps"]) == row["usage"]["prompt_tokens"]
    assert row["outputs"] == {"fast": "settled"}
    assert (fast["status"], fast["request"], fast["replica"]) == ("done", f"{row['id']}.fast", scripted.replica.name)
    assert 0 <= fast["started_ms"] <= fast["first_ms"] <= fast["done_ms"] <= row["elapsed_ms"]
    assert (never["status"], never["reason"]) == ("skipped", "condition")
    assert not {"hello", "secret", "some text", "inputs"} & set(json.dumps(row).split('"'))


async def test_the_states_of_outputs_are_shown() -> None:
    steps: dict[str, Any] = {
        "draft": {**CHAT, "yield": "draft"},
        "check": {"chat": {"from": "draft", "append": [USER]}},
        "judge": {"needs": ["check"], "let": 1, "kill": ["draft"], "yield": "judged"},
    }
    scripted = ScriptedEngine(lambda _body: TEXT, holds=True)
    async with scripted.replica, running(scripted.replica) as run:
        await rows(run)
        asked = asyncio.create_task(run.post({"workflow": document(steps), "inputs": {"messages": [USER]}}, RUNS))
        await eventually(lambda: [len(each.body["messages"]) for each in scripted.held] == [1])
        scripted.release()
        await eventually(lambda: [len(each.body["messages"]) for each in scripted.held] == [3])
        assert (await rows(run))[0]["outputs"] == {"draft": "provisional"}
        scripted.release()
        await asked
        (row,) = await rows(run)
    assert row["outputs"] == {"draft": "retracted", "judged": "settled"}


async def test_a_failed_run_names_the_step_and_the_code() -> None:
    scripted = ScriptedEngine(lambda _body: ScriptedAnswer("quoted words", status=400))
    async with scripted.replica, running(scripted.replica) as run:
        await rows(run)
        await run.post({"workflow": document({"a": {**CHAT, "yield": "a"}}), "inputs": {"messages": [USER]}}, RUNS)
        (row,) = await rows(run)
    assert (row["status"], row["failed_step"], row["reason"]) == ("failed", "a", "step_failed")
    assert row["steps"][0]["error"] == "step_failed"
    assert "quoted" not in json.dumps(row)


async def test_runs_are_for_operators() -> None:
    scripted = ScriptedEngine(lambda _body: TEXT)
    async with (
        scripted.replica,
        running(scripted.replica, admin_key="operators") as run,
        run.session.get(f"{run.admin_url}/warmroute/runs") as answer,
    ):
        assert answer.status == 401


class _Run:
    def __init__(self, at: int) -> None:
        self.id = f"run_{at}"

    def row(self, max_steps: int) -> dict[str, Any]:
        return {"id": self.id, "steps": [1] * max_steps}


def _shown(recent: RecentRuns) -> list[str]:
    return [row["id"] for row in msgspec.msgpack.decode(recent.answer())]


@pytest.mark.parametrize("asked_before", [False, True])
def test_runs_that_ended_are_held_only_while_somebody_asks(asked_before: bool) -> None:
    now = 0.0
    recent = RecentRuns(lambda: now)
    if asked_before:
        recent.answer()
    for at in range(3 * MAX_RUNS):
        run: Any = _Run(at)
        recent.begin(run)
        assert len(recent) == 1
        recent.end(run)
    assert _shown(recent) == ([f"run_{at}" for at in range(2 * MAX_RUNS, 3 * MAX_RUNS)] if asked_before else [])
    assert len(recent) == 0
    now = WATCH_S
    recent.sweep(now)
    assert _shown(recent) == []


def test_a_row_has_a_bounded_number_of_steps() -> None:
    recent = RecentRuns(lambda: 0.0)
    run: Any = _Run(1)
    recent.begin(run)
    (row,) = msgspec.msgpack.decode(recent.answer())
    assert len(row["steps"]) == MAX_STEPS
