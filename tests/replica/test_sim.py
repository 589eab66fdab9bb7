"""The simulated engine on a clock that stands still: exact times, exact hits, nothing left behind."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.engine import EngineError, Load, Request, Sequence
from replica.sim import SimConfig, SimEngine

from .fakes import FakeClock


def engine_of(**options: float) -> tuple[SimEngine, FakeClock]:
    clock = FakeClock()
    config = {"kv_tokens": 1600, "prefill_rate": 1000.0, "decode_rate": 100.0, "max_batch": 4} | options
    return SimEngine(SimConfig(**config), clock), clock  # type: ignore[arg-type]


def request(length: int, answer: int = 4, start: int = 0) -> Request:
    return Request(prompt=list(range(start, start + length)), max_tokens=answer, ignore_eos=True)


async def test_prefill_takes_its_time_then_tokens_come_at_the_decode_rate() -> None:
    engine, clock = engine_of()
    sequence = engine.submit(request(320))
    clock.advance(0.319)
    assert "0 not taken" in repr(sequence)
    clock.advance(0.001)
    assert len((await sequence.next()).tokens) == 1
    for finish in (None, None, "length"):
        clock.advance(0.01)
        step = await sequence.next()
        assert (len(step.tokens), step.finish) == (1, finish)
    engine.check()
    assert engine.load() == Load(0, 0, 0.0)


async def test_a_second_prompt_computes_only_what_is_not_cached() -> None:
    engine, clock = engine_of()
    engine.submit(request(320))
    clock.advance(1)
    again = engine.submit(request(320))
    clock.advance(0.016)  # the last block: its output is the first token
    assert again.cached_tokens == 304
    assert len((await again.next()).tokens) == 1


@pytest.mark.parametrize(("length", "cached"), [(32, 80), (33, 96)])
async def test_the_answer_is_cached_too(length: int, cached: int) -> None:
    """64 tokens of the prompt, and the answer's but for the last, which was never computed."""
    engine, clock = engine_of()
    first = engine.submit(request(64, answer=length))
    clock.advance(1)
    answer = (await first.next()).tokens
    follow_up = engine.submit(Request([*range(64), *answer, 1, 2, 3], 1))
    clock.advance(1)
    assert follow_up.cached_tokens == cached


async def test_prefill_is_first_come_first_served_and_the_second_of_two_equal_prompts_hits() -> None:
    engine, clock = engine_of()
    first, second = engine.submit(request(160)), engine.submit(request(160))
    assert engine.load().waiting == 1
    clock.advance(0.16)
    assert len((await first.next()).tokens) == 1
    clock.advance(0.016)
    assert second.cached_tokens == 144
    assert len((await second.next()).tokens) == 1


async def test_the_batch_is_limited() -> None:
    engine, clock = engine_of(max_batch=2, prefill_rate=1e6)
    for start in (0, 100, 200):
        engine.submit(request(16, answer=10, start=start))
    clock.advance(0.001)
    assert engine.load() == Load(2, 1, pytest.approx(0.04))
    clock.advance(0.1)
    assert engine.load().waiting == 0


async def test_a_request_waits_for_memory() -> None:
    engine, clock = engine_of(kv_tokens=320)
    engine.submit(request(160, answer=16))
    engine.submit(request(160, answer=16, start=1000))
    clock.advance(0.16)
    assert engine.load().waiting == 1
    clock.advance(1)
    engine.check()
    assert engine.load() == Load(0, 0, 0.0)


async def test_late_ticks_give_all_that_is_due() -> None:
    engine, clock = engine_of(decode_rate=10_000.0)
    sequence = engine.submit(request(10, answer=50))
    clock.advance(0.010)
    assert len((await sequence.next()).tokens) == 1
    clock.advance(0.004)
    assert len((await sequence.next()).tokens) == 40


async def test_cancelling_frees_the_place_at_once_and_leaves_computed_blocks_cached() -> None:
    engine, clock = engine_of()
    decoding, prefilling, waiting = (engine.submit(request(160, answer=50, start=1000 * at)) for at in range(3))
    clock.advance(0.17)
    for sequence in (prefilling, waiting, decoding):
        sequence.close()
        engine.check()
    assert engine.load() == Load(0, 0, 0.0)
    for start, cached in ((0, 144), (1000, 0)):
        again = engine.submit(request(160, start=start))
        clock.advance(1)
        assert again.cached_tokens == cached


async def test_reset_only_when_idle() -> None:
    engine, clock = engine_of()
    engine.submit(request(160))
    assert not await engine.reset_prefix_cache()
    clock.advance(1)
    assert await engine.reset_prefix_cache()
    again = engine.submit(request(160))
    clock.advance(1)
    assert again.cached_tokens == 0


async def test_closing_the_engine_fails_what_is_open() -> None:
    engine, _ = engine_of()
    sequence = engine.submit(request(160))
    await engine.close()
    with pytest.raises(EngineError, match="shutting down"):
        await sequence.next()


class EngineMachine(RuleBasedStateMachine):
    """Any order of submissions, cancellations and time keeps the invariants, and everything ends."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.clock = engine_of(max_batch=2, kv_tokens=640)
        self.sequences: list[Sequence] = []

    @rule(length=st.integers(1, 200), answer=st.integers(1, 40), branch=st.integers(0, 1))
    def submit(self, length: int, answer: int, branch: int) -> None:
        prompt = [*range(min(length, 40)), *range(1000 * branch, 1000 * branch + max(0, length - 40))]
        self.sequences.append(self.engine.submit(Request(prompt, answer)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1))).close()

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.1, 1.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def holds(self) -> None:
        self.engine.check()
        load = self.engine.load()
        assert load.running <= 2
        assert load.running > 0 or load.waiting == 0

    def teardown(self) -> None:
        self.clock.advance(1000)
        assert self.engine.load() == Load(0, 0, 0.0)
        assert all(sequence.ended for sequence in self.sequences)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
