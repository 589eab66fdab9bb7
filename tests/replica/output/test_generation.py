"""Many answers of one request begin without holding up others, and are delivered together."""

import asyncio
from contextlib import aclosing

import pytest

from replica.engine import EngineError, EngineRequest
from replica.output.generation import Choices, Delta, FirstToken, Generation, GenerationEnd, TextOptions
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from replica.sim.faults import Fault


class Quiet:
    def first_token(self, first: FirstToken, now: float) -> None: ...

    def generated(self, tokens: int, now: float) -> None: ...

    def ended(self, end: GenerationEnd, now: float) -> None: ...


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
        return Generation(engine, Quiet(), EngineRequest([index // 4, 7], 1, ignore_eos=True), TextOptions(), 0.0)

    task = asyncio.create_task(other())
    choices = Choices(make, prompts=8, n=4)
    async with aclosing(choices.deltas()) as deltas:
        ended = [index async for together in deltas for index, delta in together if delta.finish]
    running = False
    await task
    choices.close()
    assert sorted(ended) == list(range(32))
    assert len(set(begun)) == 32, "two of them began in the same turn of the loop"
    await engine.close()


async def test_what_one_step_gives_is_delivered_together() -> None:
    engine = SimEngine(SimConfig(decode_rate=100.0))
    await engine.start()
    answers = Answers(engine, 3)
    await answers.run(8)
    assert max(map(len, answers.rounds)) > 2, "each answer's tokens came alone"
    assert answers.delivered() == [3] * 8
    assert answers.begun[0] == 1, "the first token was kept until the other answers had begun"
    await engine.close()


async def test_what_came_before_a_failure_is_delivered() -> None:
    faults = iter([Fault(), Fault(), Fault(breaks=0.5), *[Fault()] * 5])
    engine = SimEngine(SimConfig(decode_rate=100.0), faults=faults)
    await engine.start()
    answers = Answers(engine, 20)
    with pytest.raises(EngineError, match="injected"):
        await answers.run(8)
    assert answers.delivered() == [generation.completion_tokens for generation in answers.all]
    assert min(answers.delivered()) > 1
    await engine.close()


@pytest.mark.parametrize("decode_rate", [100.0, 1e7])
async def test_tokens_behind_a_stop_string_do_not_count(decode_rate: float) -> None:
    """However many came together with the last one of it."""
    engine = SimEngine(SimConfig(decode_rate=decode_rate))
    await engine.start()
    answers = Answers(engine, 300, stops=("a",))
    await answers.run(1)
    tokens = [token for together in answers.rounds for _, delta in together for token in delta.tokens]
    assert ["a" in engine.decode([token]) for token in tokens] == [*[False] * (len(tokens) - 1), True]
    assert answers.all[0].completion_tokens == len(tokens)
    await engine.close()


class Answers:
    """Those to one prompt: `rounds` is what was delivered together, `begun` how many answers there were by then."""

    def __init__(self, engine: SimEngine, tokens: int, stops: tuple[str, ...] = ()) -> None:
        self._engine, self._tokens, self._options = engine, tokens, TextOptions(stops)
        self.all: list[Generation] = []
        self.rounds: list[list[tuple[int, Delta]]] = []
        self.begun: list[int] = []

    def _make(self, _: int) -> Generation:
        request = EngineRequest([7, 8], self._tokens, ignore_eos=True)
        self.all.append(Generation(self._engine, Quiet(), request, self._options, 0.0))
        return self.all[-1]

    async def run(self, n: int) -> None:
        choices = Choices(self._make, prompts=1, n=n)
        try:
            async with aclosing(choices.deltas()) as deltas:
                async for together in deltas:
                    self.rounds.append(together)
                    self.begun.append(len(self.all))
        finally:
            choices.close()

    def delivered(self) -> list[int]:
        """Tokens of each answer."""
        counts = [0] * len(self.all)
        for index, delta in (each for together in self.rounds for each in together):
            counts[index] += len(delta.tokens)
        return counts
