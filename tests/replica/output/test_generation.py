"""Many answers of one request begin without holding up others."""

import asyncio
from contextlib import aclosing

from replica.engine import Request
from replica.output.generation import Choices, Ended, FirstToken, Generation, TextOptions
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine


class Quiet:
    def first_token(self, first: FirstToken, now: float) -> None: ...

    def generated(self, tokens: int, now: float) -> None: ...

    def ended(self, end: Ended, now: float) -> None: ...


async def test_others_have_their_turn_between_the_beginnings_of_two_answers() -> None:
    engine = SimEngine(SimConfig(decode_rate=10_000.0))
    await engine.start()
    turns, running, begun = 0, True, list[int]()

    async def other() -> None:
        nonlocal turns
        while running:
            turns += 1
            await asyncio.sleep(0)

    def make(index: int) -> Generation:
        begun.append(turns)
        return Generation(engine, Quiet(), Request([index // 4, 7], 1, ignore_eos=True), TextOptions(), 0.0)

    task = asyncio.create_task(other())
    choices = Choices(make, prompts=8, n=4)
    async with aclosing(choices.deltas()) as deltas:
        ended = [index async for index, delta in deltas if delta.finish]
    running = False
    await task
    choices.close()
    assert sorted(ended) == list(range(32))
    assert len(set(begun)) == 32, "two of them began in the same turn of the loop"
    await engine.close()
