"""Runs that go on in another process: from the records of their steps, and never by a recorded step."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.messages import StepFailure
from gateway.features.workflows.running.recorded import RecordedStep, RunProgress
from gateway.features.workflows.running.run import WorkflowRun
from tests.gateway.features.workflows.running.test_scheduler import CHAT, INPUTS, REFUSED, USER, random_workflow
from tests.support.compiled import uncompiled
from tests.support.journaled_runs import USAGE, JournaledRuns, MemoryJournal
from tests.support.workflows import workflow_of

pytestmark = uncompiled
JUMP = 1 << 20
CHAIN = {
    "a": {**CHAT, "yield": {"as": "a", "stream": "delta"}},
    "b": {"chat": {"from": "a", "append": [USER]}, "yield": {"as": "b", "stream": "delta"}},
    "c": {"chat": {"from": "b", "append": [USER]}, "yield": "c"},
}


async def processes(runs: JournaledRuns, stops: list[tuple[int, bool]]) -> tuple[WorkflowRun, MemoryJournal]:
    """One after the other: each stops at so many records, before or after the last one is durable; the last ends the run."""
    journal = MemoryJournal(*stops[0][:1], after=stops[0][1]) if stops else MemoryJournal()
    run = await runs.process(journal)
    for at, (count, after) in enumerate([*stops[1:], (None, False)], 1):
        if journal.ended is not None:
            break
        journal = MemoryJournal(count, after=after, resumed=journal.adopted(at * JUMP))
        run = await runs.process(journal)
    return run, journal


def kinds(runs: JournaledRuns, first: int = 0) -> list[str]:
    events = [event for at, event in runs.events if at >= first]
    return [f"{each.kind} {each.data.get('step') or each.data.get('name') or ''}".strip() for each in events]


async def test_a_dependent_starts_only_when_the_outcome_is_durable() -> None:
    class HeldJournal(MemoryJournal):
        go = asyncio.Event()
        asked = asyncio.Event()

        async def record(self, step: RecordedStep, progress: RunProgress) -> None:
            self.asked.set()
            await self.go.wait()
            await super().record(step, progress)

    runs, journal = JournaledRuns(workflow_of(CHAIN), INPUTS, {}), HeldJournal()
    running = asyncio.create_task(runs.run(journal).run())
    await journal.asked.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert runs.called == ["a"]
    assert "step.done a" not in kinds(runs)
    journal.go.set()
    await running
    assert runs.called == ["a", "b", "c"]


@pytest.mark.parametrize(("after", "called"), [(True, ["a", "b", "c"]), (False, ["a", "b", "b", "c"])])
async def test_recorded_steps_are_not_run_again_and_their_values_are_there(after: bool, called: list[str]) -> None:
    answers = {"a": "one", "b": "two", "c": "three"}
    runs = JournaledRuns(workflow_of(CHAIN), INPUTS, answers)
    run, journal = await processes(runs, [(1, after)])
    assert runs.called == called
    assert run.scheduler.outputs == answers
    assert journal.ended is not None
    recorded = ["a", "b"] if after else ["a"]
    resumed = next(event.data for at, event in runs.events if at == JUMP)
    assert (resumed["recorded"], resumed["outputs"]) == (recorded, {name: answers[name] for name in recorded})
    again = [] if after else ["output.reset b", "step.started b", "output.delta b", "step.done b", "output.done b"]
    assert kinds(runs, JUMP) == [
        "run.resumed",
        *(again or ["step.started c"]),
        *([] if after else ["step.started c"]),
        *("step.done c", "output.done c", "run.completed"),
    ]
    numbers = [number for number, _ in runs.events]
    assert numbers == sorted(set(numbers))
    usage = run.as_json()["usage"]
    assert (usage["calls"], usage["cost_usd"]) == (3, 3 * USAGE.cost_usd), "the lost call is known to the ledger only"
    assert [step["started_ms"] for step in run.as_json()["steps"]][:1] == [None]


async def test_a_run_whose_steps_are_all_recorded_only_ends() -> None:
    runs = JournaledRuns(workflow_of(CHAIN), INPUTS, {})
    await processes(runs, [(2, True)])
    assert runs.called == ["a", "b", "c"]
    assert kinds(runs, JUMP) == ["run.resumed", "run.completed"]


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_connector_that_was_called_is_called_again_only_with_retries(repeatable: bool) -> None:
    steps = {"a": {"call": {"use": "x"}, "yield": "a"}, "b": {"let": "${a.value.use}", "yield": "b"}}
    runs = JournaledRuns(workflow_of(steps), INPUTS, {}, repeatable=frozenset(["x"] if repeatable else []))
    run, _ = await processes(runs, [(0, False)])
    assert runs.called == ["run_1.a"] * (1 + repeatable)
    if repeatable:
        assert run.scheduler.outputs == {"a": {"use": "x"}, "b": "x"}
    else:
        assert run.scheduler.error is not None
        assert (run.scheduler.error.code, run.scheduler.failed_step) == ("connector_interrupted", "a")


async def test_null_of_a_connector_and_final_failures_are_outcomes() -> None:
    steps = {
        "n": {"call": {"use": "null"}, "yield": "n"},
        "bad": {**CHAT, "on_error": "skip", "needs": ["n"]},
        "after": {**CHAT, "needs_any": ["bad", "n"], "yield": "after"},
        "last": {"chat": {"append": [USER]}, "needs": ["after"], "yield": "last"},
    }
    runs = JournaledRuns(workflow_of(steps), INPUTS, {}, failures={"bad": REFUSED})
    run, journal = await processes(runs, [(2, True)])
    assert len(journal.steps) == 4
    assert runs.called.count("run_1.n") == runs.called.count("bad") == 1
    assert run.scheduler.outputs == {"n": None, "after": "text", "last": "text"}


async def test_an_answer_that_does_not_fit_in_the_end_is_a_recorded_failure() -> None:
    steps = {
        "a": {"chat": {**CHAT["chat"], "output": "integer"}, "retry": {"max": 0}, "on_error": {"value": 7}, "yield": "a"},
        "b": {"chat": {"append": [USER]}, "needs": ["a"], "yield": "b"},
    }
    runs = JournaledRuns(workflow_of(steps), INPUTS, {"a": "no number"})
    run, journal = await processes(runs, [(1, False)])
    assert runs.called == ["a", "b", "b"]
    assert run.scheduler.outputs == {"a": 7, "b": "text"}
    outcome = journal.steps[0].outcome
    assert isinstance(outcome, StepFailure)
    assert outcome.code == "constraint_unsatisfied"


@pytest.mark.parametrize("before", [False, True])
async def test_a_run_that_is_cancelled_before_or_while_it_resumes_calls_nothing(before: bool) -> None:
    runs = JournaledRuns(workflow_of(CHAIN), INPUTS, {})
    journal = MemoryJournal(1, after=False)
    await runs.process(journal)
    called = list(runs.called)
    again = MemoryJournal(resumed=replace(journal.adopted(JUMP), cancelled=before))
    run = runs.run(again)
    running = asyncio.create_task(run.run())
    await asyncio.sleep(0)
    if not before:
        run.cancel()
    await running
    assert runs.called == called
    assert kinds(runs, JUMP) == ["run.resumed", "step.killed b", "run.cancelled"]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_random_runs_that_are_stopped_anywhere_end_and_repeat_no_recorded_step(seed: int) -> None:
    chance = random.Random(seed)
    workflow = next(found for _ in range(100) if (found := random_workflow(chance)))
    asyncio.run(_stopped_anywhere(workflow, chance))


async def _stopped_anywhere(workflow: Workflow, chance: random.Random) -> None:
    answers = dict.fromkeys(workflow.graph.steps, chance.choice(["x", "some text"]))
    names = [f"{name}{suffix}" for name in workflow.graph.steps for suffix in ("", "[0]", "[1]")]
    failures = {name: REFUSED for name in names if chance.random() < 0.1}
    repeatable: Any = frozenset(["x"] if chance.random() < 0.5 else [])
    runs = JournaledRuns(workflow, INPUTS, answers, failures=failures, repeatable=repeatable, chance=chance)
    stops = sorted(chance.randint(0, 12) for _ in range(chance.randint(0, 4)))
    run, journal = await processes(runs, [(count, chance.random() < 0.5) for count in stops])
    assert journal.ended is not None, "each run ends"
    run.scheduler.check()
    numbers = [number for number, _ in runs.events]
    assert numbers == sorted(set(numbers)), "event numbers grow"
    connected = [name for name in runs.called if name.startswith("run_1.")]
    assert repeatable or len(connected) == len(set(connected))
    called = len(runs.called)
    if run.scheduler.status == "completed":  # its records are the whole run: they give the same one, without a call
        twin = await runs.process(MemoryJournal(resumed=journal.adopted(99 * JUMP)))
        assert twin.scheduler.outputs == run.scheduler.outputs
        assert {one.name: one.result.status for one in twin.scheduler.tree.all()} == {
            one.name: one.result.status for one in run.scheduler.tree.all()
        }
        assert called == len(runs.called)
