"""Turns of all runs of a process share the work of one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import cast

from gateway.features.workflows.language.plan import RunAllowance, plan_of
from gateway.features.workflows.running.calls import ModelCalls
from gateway.features.workflows.running.messages import RunEvent
from gateway.features.workflows.running.run import WorkflowRun
from gateway.features.workflows.running.run_order import RunOrder, RunServices
from gateway.features.workflows.running.run_turns import RunTurns
from gateway.features.workflows.running.scheduler import TURN_WORK
from tests.support.compiled import uncompiled
from tests.support.in_memory import BytesRequest
from tests.support.journaled_runs import JournaledRuns
from tests.support.workflows import workflow_of


async def rounds(turns: RunTurns, jobs: dict[str, int], work: int, count: int) -> list[str]:
    """The turns of each round of the event loop. jobs: turns that each one needs."""
    done = [""]

    def job(name: str) -> Callable[[], None]:
        def turn() -> None:
            done[-1] += name
            turns.spend(work)
            jobs[name] -= 1
            if jobs[name]:
                turns.wait(turn)

        return turn

    for name in jobs:
        turns.wait(job(name))
    for _ in range(count):
        await asyncio.sleep(0)
        done.append("")
    return done[:count]


async def test_runs_with_much_work_have_a_round_of_the_loop_each_in_order() -> None:
    assert await rounds(RunTurns(), {"a": 3, "b": 2, "c": 1}, TURN_WORK, 7) == ["a", "b", "c", "a", "b", "a", ""]


async def test_runs_with_little_work_share_a_round_and_none_has_two_turns_in_it() -> None:
    assert await rounds(RunTurns(), {"a": 2, "b": 2}, TURN_WORK // 4, 3) == ["ab", "ab", ""]


async def test_the_work_of_happenings_counts_until_the_next_round() -> None:
    turns = RunTurns()
    turns.spend(TURN_WORK + 5)
    assert turns.left == -5
    await asyncio.sleep(0)
    assert turns.left == TURN_WORK


async def test_a_run_that_waits_keeps_its_place() -> None:
    turns, done = RunTurns(), list[str]()

    def turn(name: str) -> Callable[[], None]:
        def turn() -> None:
            done.append(name)
            turns.spend(TURN_WORK)

        return turn

    first, second = turn("first"), turn("second")
    for each in (first, second, first):
        turns.wait(each)
    await asyncio.sleep(0)
    assert done == ["first"]


async def test_a_forgotten_turn_does_not_come() -> None:
    turns, done = RunTurns(), list[int]()

    def turn() -> None:
        done.append(1)

    turns.wait(turn)
    turns.forget(turn)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not done


@uncompiled
async def test_two_runs_with_much_work_take_turns() -> None:
    heavy = "${len(" + "lower(" * 45 + "inputs.text" + ")" * 45 + ")}"  # more than the work of a turn
    steps = {f"s{at}": {"let": heavy, "yield": f"s{at}"} for at in range(6)}
    workflow = workflow_of(steps, inputs={"text": {"type": "string"}})
    others = JournaledRuns(workflow, {}, {})  # of its services only the connectors are used
    services = RunServices(cast(ModelCalls, others), others, lambda: 1.0, lambda: 1.0)
    order = RunOrder(workflow, plan_of(workflow, RunAllowance()), {"text": "x" * 300_000}, 10, 600.0)
    told = list[tuple[str, int]]()
    round_ = 0

    def run(name: str) -> WorkflowRun:
        def emit(_number: int, event: RunEvent) -> None:
            if event.kind == "output.done":
                told.append((name, round_))

        return WorkflowRun(name, order, BytesRequest(b"", "/"), services, emit)

    running = [asyncio.create_task(run(name).run()) for name in "ab"]
    while not all(each.done() for each in running):
        await asyncio.sleep(0)
        round_ += 1
    assert Counter(name for name, _ in told) == {"a": 6, "b": 6}
    assert len({at for _, at in told}) == 12, "a round of the event loop has the work of one of these steps"
    ahead = 0
    for name, _ in told:
        ahead += 1 if name == "a" else -1
        assert abs(ahead) <= 2
