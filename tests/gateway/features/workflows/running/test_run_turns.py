"""Turns of all runs of a process share the work of one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.features.workflows.running.run_turns import RunTurns
from gateway.features.workflows.running.scheduler import TURN_WORK


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


async def test_a_forgotten_turn_does_not_come() -> None:
    turns, done = RunTurns(), list[int]()

    def turn() -> None:
        done.append(1)

    turns.wait(turn)
    turns.forget(turn)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not done
