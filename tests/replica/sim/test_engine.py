"""The simulated engine on a clock that stands still: exact times, exact hits, nothing left behind."""

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.cache.prefix import Prefix, Scope
from replica.engine import EngineError, EngineLoad, EngineRequest, Sequence
from replica.sim.cost import SimConfig
from replica.sim.engine import ADMITTED, MIN_TICK_S, TURN, SimEngine
from replica.sim.faults import Fault, FaultConfig, fault_sequence
from tests.replica.fakes import FakeClock, FakeTimer


def engine_of(faults: Iterator[Fault] | None = None, **options: float) -> tuple[SimEngine, FakeClock]:
    clock = FakeClock()
    config = {"kv_tokens": 1600, "prefill_rate": 1000.0, "decode_rate": 100.0, "max_batch": 4} | options
    return SimEngine(SimConfig(**config), clock, faults=faults), clock  # type: ignore[arg-type]


async def timeline(sequence: Sequence, clock: FakeClock, seconds: float, step: float) -> list[float]:
    """When each token came, seen at every step."""
    times: list[float] = []
    for at in range(1, round(seconds / step) + 1):
        clock.advance(step)
        if sequence.pending:
            times += [round(at * step, 6)] * len((await sequence.next()).tokens)
    return times


def request(length: int, answer: int = 4, start: int = 0) -> EngineRequest:
    return EngineRequest(prompt=list(range(start, start + length)), max_tokens=answer, ignore_eos=True)


async def test_prefill_takes_its_time_then_tokens_come_at_the_decode_rate() -> None:
    engine, clock = engine_of()
    sequence = engine.submit(request(320))
    clock.advance(0.319)
    assert sequence.pending == 0
    clock.advance(0.001)
    assert len((await sequence.next()).tokens) == 1
    for finish in (None, None, "length"):
        clock.advance(0.01)
        step = await sequence.next()
        assert (len(step.tokens), step.finish) == (1, finish)
    engine.check()
    assert engine.load() == EngineLoad(0, 0, 0.0)


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
    follow_up = engine.submit(EngineRequest([*range(64), *answer, 1, 2, 3], 1))
    clock.advance(1)
    assert follow_up.cached_tokens == cached


async def test_answers_to_one_prompt_are_cached_each_with_its_own_tokens() -> None:
    engine, clock = engine_of()
    prompt = list(range(64))
    sequences = [engine.submit(EngineRequest(prompt, 40, ignore_eos=True, temperature=1.0, seed=seed)) for seed in (1, 2)]
    clock.advance(1)
    engine.check()
    answers = [(await sequence.next()).tokens for sequence in sequences]
    assert answers[0] != answers[1]
    for answer in answers:
        follow_up = engine.submit(EngineRequest([*prompt, *answer, 1], 1))
        clock.advance(1)
        assert follow_up.cached_tokens == 96, "but for the last token of the answer, which was never computed"
    salted = engine.submit(EngineRequest(prompt, 1, Scope(salt="a")))
    clock.advance(1)
    assert salted.cached_tokens == 0


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 90_000}, {"min_tokens": 2_000}])
async def test_answers_that_wait_take_no_memory_for_their_tokens(options: dict[str, Any]) -> None:
    """Nor each for the blocks of their prompt: together these would be 80 MB."""
    engine, _ = engine_of(kv_tokens=100_000)
    prompt = list(range(8_000))
    tracemalloc.start()
    try:
        sequences = [engine.submit(EngineRequest(prompt, 90_000, temperature=1.0, seed=seed, **options)) for seed in range(100)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert engine.load().waiting == len(sequences) - 1
    assert peak < 1 << 20


async def test_an_answer_whose_length_is_not_known_has_room_for_the_longest() -> None:
    engine, clock = engine_of(itertools.repeat(Fault(breaks=0.999)), kv_tokens=16_000)
    sequence = engine.submit(EngineRequest(list(range(16)), 5_000, min_tokens=2_000))
    clock.advance(0.02)
    assert engine.load().kv_usage == pytest.approx((16 + 5_000) / 16_000, abs=0.001)
    clock.advance(100)
    assert len((await sequence.next()).tokens) == 1_998, "it breaks before it could have ended"
    with pytest.raises(EngineError):
        await sequence.next()
    engine.check()


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
    assert engine.load() == EngineLoad(2, 1, pytest.approx(0.04))
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
    assert engine.load() == EngineLoad(0, 0, 0.0)


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
    assert engine.load() == EngineLoad(0, 0, 0.0)
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


async def test_nothing_arrives_after_the_end() -> None:
    engine, clock = engine_of(itertools.repeat(Fault(delay_s=0.5)))
    engine.submit(request(160))
    await engine.close()
    clock.advance(10)
    assert engine.load().running == 0


async def test_a_larger_batch_makes_each_answer_slower() -> None:
    engine, clock = engine_of(decode_slowdown=0.5, prefill_rate=1e6)
    alone = engine.submit(request(10, answer=100))
    clock.advance(0.00001)
    assert await timeline(alone, clock, 0.05, 0.01) == pytest.approx([0.01, 0.01, 0.02, 0.03, 0.04, 0.05])
    for start in (100, 200):
        engine.submit(request(10, answer=40, start=start))
    clock.advance(0.6)
    assert 29 <= len((await alone.next()).tokens) <= 30, "three in a batch: half the rate"
    clock.advance(0.3)
    assert engine.load().running == 1
    await alone.next()
    clock.advance(0.1)
    assert 9 <= len((await alone.next()).tokens) <= 10, "alone again"


async def test_chunks_of_a_prompt_and_tokens_of_answers_share_the_steps() -> None:
    engine, clock = engine_of(prefill_chunk=40)
    decoding = engine.submit(request(16, answer=100))
    clock.advance(0.016)
    await decoding.next()
    prefilling = engine.submit(request(200, answer=4, start=1000))
    clock.advance(0.259)  # the step that it meets, and five of 40 ms for the chunk and 10 ms for the token
    assert prefilling.pending == 0
    assert len((await decoding.next()).tokens) == 5
    clock.advance(0.001)
    assert len((await prefilling.next()).tokens) == 1
    clock.advance(0.03)
    assert len((await decoding.next()).tokens) == 4
    engine.check()


async def test_a_prompt_that_is_alone_takes_the_same_time_in_chunks() -> None:
    engine, clock = engine_of(prefill_chunk=50)
    sequence = engine.submit(request(320))
    clock.advance(0.319)
    assert sequence.pending == 0
    clock.advance(0.001)
    assert len((await sequence.next()).tokens) == 1


async def test_the_chunks_of_a_prompt_that_was_given_up_are_cached() -> None:
    engine, clock = engine_of(prefill_chunk=50)
    sequence = engine.submit(request(320))
    clock.advance(0.12)
    sequence.close()
    engine.check()
    again = engine.submit(request(320))
    clock.advance(1)
    assert again.cached_tokens == 96


async def test_a_chunk_that_is_given_up_no_longer_slows_the_others() -> None:
    engine, clock = engine_of(prefill_chunk=40)
    decoding, given_up = engine.submit(request(16, answer=100)), engine.submit(request(200, start=1000))
    clock.advance(0.016 + 0.045)
    given_up.close()
    clock.advance(0.1)
    assert 11 <= len((await decoding.next()).tokens) <= 12
    engine.check()


async def test_what_is_new_of_several_prompts_shares_a_step() -> None:
    """The first one's tokens would fit twice more: a step of its own costs as much as ten tokens."""
    engine, clock = engine_of(prefill_chunk=100, step_s=0.01)
    first = engine.submit(request(20))
    clock.advance(0.001)
    others = [engine.submit(request(40, start=1000 * at)) for at in (1, 2, 3)]
    clock.advance(0.029)
    assert len((await first.next()).tokens) == 1
    clock.advance(0.109)  # 40 + 40 + 20 tokens, and a token of the first one
    assert [other.pending for other in others] == [0, 0, 0]
    clock.advance(0.001)
    assert [other.pending for other in others] == [1, 1, 0]
    clock.advance(0.030)
    assert others[2].pending == 1
    engine.check()


async def test_a_prompt_waits_for_the_end_of_the_step_that_it_meets() -> None:
    engine, clock = engine_of(prefill_chunk=100)
    decoding = engine.submit(request(10))
    clock.advance(0.013)  # 3 ms into a step of 10
    prompt = engine.submit(request(20, start=1000))
    clock.advance(0.007 + 0.029)
    assert prompt.pending == 0
    clock.advance(0.001)
    assert prompt.queued_s == pytest.approx(0.007)
    assert [len((await sequence.next()).tokens) for sequence in (decoding, prompt)] == [3, 1]


async def test_context_costs_time_cached_or_not() -> None:
    engine, clock = engine_of(context_s=1e-4, prefill_chunk=1000)
    for cached, seconds in ((0, 0.320), (304, 0.016)):
        sequence = engine.submit(request(320, answer=1))
        clock.advance(seconds + 0.0315)
        assert (sequence.cached_tokens, sequence.pending) == (cached, 0)
        clock.advance(0.001)
        assert sequence.pending == 1


async def test_steps_that_a_late_timer_has_missed_are_done_each_at_its_time() -> None:
    """Nothing ran for a second: a prompt and its answer are over, and the next prompt began when there was a place for it."""
    engine, clock = engine_of(prefill_chunk=100, max_batch=1)
    first, second = engine.submit(request(100, answer=11)), engine.submit(request(100, answer=1, start=1000))
    clock.stall(1.0)
    assert len((await first.next()).tokens) == 11
    assert second.queued_s == pytest.approx(0.2)
    assert len((await second.next()).tokens) == 1


class Watched(FakeClock):
    """Notes how many tokens there are whenever a timer is set."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []
        self._tokens = [0]

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> FakeTimer:
        self._tokens.append(self.tokens)
        return super().call_at(when, callback, *args)

    @property
    def timers(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> int:
        return sum(each.pending for each in self.sequences)

    @property
    def most(self) -> int:
        """Of those that have come together."""
        return max(later - earlier for earlier, later in itertools.pairwise([*self._tokens, self.tokens]))


@pytest.mark.parametrize("decode_rate", [1e5, 1e7])
async def test_an_engine_that_is_far_behind_lets_others_have_a_turn(decode_rate: float) -> None:
    """Rates beyond what it can do: what it is late with, it does in parts, each with a timer of its own."""
    clock = Watched()
    engine = SimEngine(SimConfig(kv_tokens=400_000, prefill_rate=1e6, decode_rate=decode_rate, max_batch=4), clock)
    clock.sequences += [engine.submit(request(16, 50_000, start)) for start in range(4)]
    clock.stall(4e4 / decode_rate)
    assert clock.tokens > 4 * 3.5e4
    assert clock.most <= 2 * TURN
    engine.check()


@pytest.mark.parametrize(("chunk", "answer", "most"), [(0, 1, 1), (0, 2, 1), (1000, 1, -(-ADMITTED // 5626))])
async def test_prompts_that_are_cached_are_done_in_turns_too(chunk: int, answer: int, most: int) -> None:
    """They take no time to compute, and have thousands of blocks each."""
    clock = Watched()
    config = SimConfig(kv_tokens=200_000, prefill_rate=1e9, decode_rate=0.1, prefill_chunk=chunk)
    engine = SimEngine(config, clock)
    clock.sequences += [engine.submit(request(90_000, answer)) for _ in range(10)]
    clock.stall(1)
    assert (clock.tokens, clock.most) == (10, most)


class CountedKeys(list[bytes]):
    """asked: how often somebody looked at some of them."""

    asked = 0

    def __getitem__(self, at: Any) -> Any:
        self.asked += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("chunk", [0, 1000])
async def test_what_does_not_fit_is_looked_at_once_until_there_is_more_room(chunk: int) -> None:
    engine, clock = engine_of(kv_tokens=3200, prefill_chunk=chunk)
    first = engine.submit(request(100, answer=1600))
    clock.advance(1)
    prompt = Prefix(range(1600), 16)
    keys = prompt.keys = CountedKeys(prompt.keys)
    waiting = [engine.submit(EngineRequest(prompt.tokens, 16, ignore_eos=True, hashed=prompt)) for _ in range(20)]
    clock.advance(1)
    asked = keys.asked
    clock.advance(1)
    for sequence in waiting[:0:-1]:
        sequence.close()
    clock.advance(1)
    assert (keys.asked, engine.load().waiting) == (asked, 1)
    first.close()
    clock.advance(10)
    assert engine.load().waiting == 0
    assert waiting[0].pending
    engine.check()


async def test_blocks_are_retained_from_the_end_of_their_step() -> None:
    """Also if the timer comes late: their retention has passed by then."""
    for late_s in (0.0, 12.0):
        engine, clock = engine_of(kv_tokens=64, prefill_chunk=100)
        engine.submit(EngineRequest(prompt=list(range(32)), max_tokens=1, ignore_eos=True, keep_s=10.0))
        clock.stall(0.5 + late_s)
        clock.advance(12.0 - late_s)
        engine.submit(request(32, 1, 100))
        clock.advance(1)
        engine.submit(request(32, 1, 200))
        clock.advance(1)
        again = engine.submit(request(32, 1, 0))
        clock.advance(1)
        assert again.cached_tokens == 0, f"the timer was {late_s} s late"


async def test_blocks_of_those_that_leave_together_are_given_back_in_turns() -> None:
    clock = Watched()
    engine = SimEngine(SimConfig(kv_tokens=200_000, prefill_rate=1e9), clock)
    sequences = [engine.submit(request(90_000, 1000)) for _ in range(10)]
    clock.advance(0.01)
    assert engine.load().running == 10
    for sequence in sequences:
        sequence.close()
    engine.check()
    assert engine.load().running == 0
    assert engine.cache_counts().held >= 90_000 // 16
    timers = clock.timers
    clock.advance(0)
    assert clock.timers >= timers + 8
    engine.check()
    assert engine.load().kv_usage == 0


async def test_those_that_come_do_not_keep_an_engine_from_its_work() -> None:
    """Its timer is due; were it set anew with each of them, it would always be the last to have a turn."""
    clock = Watched()
    engine = SimEngine(SimConfig(kv_tokens=400_000, prefill_rate=1e6, decode_rate=1e6, prefill_chunk=1000), clock)
    engine.submit(request(16, 90_000))
    clock.lag(0.05)
    engine.submit(request(16, 1, 100))
    timers = clock.timers
    for start in range(200, 300):
        engine.submit(request(16, 1, start))
    assert clock.timers == timers


async def test_a_request_that_comes_while_steps_are_late_takes_part_in_none_of_them() -> None:
    """It came when they had ended. The first one to come then has one turn's steps done."""
    engine, clock = engine_of(kv_tokens=400_000, decode_rate=1e5, prefill_chunk=1000, max_batch=4)
    first = engine.submit(request(10, answer=100_000))
    clock.lag(0.5)
    others = [engine.submit(request(10, answer=1, start=start)) for start in (100, 200)]
    assert first.pending < 0.4e5
    clock.advance(0)
    clock.advance(0.1)
    assert first.pending > 0.4e5
    for other in others:
        assert other.queued_s == pytest.approx(MIN_TICK_S / 2, abs=MIN_TICK_S / 2)
        assert len((await other.next()).tokens) == 1
    engine.check()


async def test_speed_divides_all_times() -> None:
    engine, clock = engine_of(itertools.repeat(Fault(delay_s=1.0)), speed=10)
    sequence = engine.submit(request(320))
    clock.advance(0.131)
    assert sequence.pending == 0
    assert await timeline(sequence, clock, 0.004, 0.001) == [0.001, 0.003, 0.003]
    engine.check()


async def test_speed_shortens_what_is_to_be_kept() -> None:
    def keeping(start: int, keep_s: float) -> EngineRequest:
        return EngineRequest(prompt=list(range(start, start + 64)), max_tokens=1, ignore_eos=True, keep_s=keep_s)

    for speed, kept in ((1, 48), (100, 0)):
        engine, clock = engine_of(speed=speed, kv_tokens=160)
        engine.submit(keeping(0, 60.0))
        clock.advance(1)
        for start in (1000, 2000, 3000):
            engine.submit(keeping(start, 0.0))
            clock.advance(1)
        again = engine.submit(keeping(0, 0.0))
        clock.advance(1)
        assert again.cached_tokens == kept


async def test_a_late_request_waits_without_being_in_the_way() -> None:
    engine, clock = engine_of(iter([Fault(delay_s=0.5), Fault()]))
    late, soon = engine.submit(request(160)), engine.submit(request(160, start=1000))
    engine.check()
    assert engine.load().waiting == 1
    clock.advance(0.16)
    assert len((await soon.next()).tokens) == 1
    clock.advance(0.499)
    assert late.pending == 0
    clock.advance(0.001)
    assert len((await late.next()).tokens) == 1
    assert late.queued_s == pytest.approx(0.5)


async def test_a_late_request_can_leave() -> None:
    engine, clock = engine_of(itertools.repeat(Fault(delay_s=0.5)))
    engine.submit(request(160)).close()
    engine.check()
    clock.advance(1)
    assert engine.load() == EngineLoad(0, 0, 0.0)


@pytest.mark.parametrize(
    ("fault", "answer", "tokens", "flag"), [(Fault(fails=True), 40, 0, "errors"), (Fault(breaks=0.5), 4, 2, "breaks")]
)
async def test_a_request_fails_in_the_place_of_a_token(fault: Fault, answer: int, tokens: int, flag: str) -> None:
    engine, clock = engine_of(itertools.chain([fault], itertools.repeat(Fault())))
    sequence = engine.submit(request(100, answer=answer))
    clock.advance(0.1)
    for at in range(tokens):
        assert len((await sequence.next()).tokens) == 1, at
        clock.advance(0.01)
    with pytest.raises(EngineError, match=f"injected.*--fault-{flag}"):
        await sequence.next()
    engine.check()
    assert engine.load() == EngineLoad(0, 0, 0.0)
    assert engine.cache_counts().idle == 6
    again = engine.submit(request(100))
    clock.advance(1)
    assert again.cached_tokens == 96
    assert "length" in repr(again)


async def test_a_late_tick_brings_what_comes_before_a_break() -> None:
    engine, clock = engine_of(iter([Fault(breaks=0.5)]), decode_rate=10_000.0)
    sequence = engine.submit(request(10, answer=31))
    clock.advance(0.1)
    assert len((await sequence.next()).tokens) == 16
    with pytest.raises(EngineError):
        await sequence.next()


class EngineMachine(RuleBasedStateMachine):
    """Any order of submissions, cancellations and time keeps the invariants, and everything ends."""

    OPTIONS: Mapping[str, float] = {}
    FAULTS = FaultConfig()

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.clock = engine_of(fault_sequence(self.FAULTS, Random(7)), max_batch=2, kv_tokens=640, **self.OPTIONS)
        self.sequences: list[Sequence] = []

    @rule(length=st.integers(1, 200), answer=st.integers(1, 40), branch=st.integers(0, 1))
    def submit(self, length: int, answer: int, branch: int) -> None:
        prompt = [*range(min(length, 40)), *range(1000 * branch, 1000 * branch + max(0, length - 40))]
        self.sequences.append(self.engine.submit(EngineRequest(prompt, answer)))

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
        assert load.running > 0 or load.waiting == 0 or self.FAULTS.latency_s

    def teardown(self) -> None:
        self.clock.advance(1000)
        assert self.engine.load() == EngineLoad(0, 0, 0.0)
        assert all(sequence.ended for sequence in self.sequences)


class HardTimes(EngineMachine):
    """The same with chunks, a slower batch and faults."""

    OPTIONS: Mapping[str, float] = {"prefill_chunk": 24, "decode_slowdown": 0.3, "speed": 2}
    FAULTS = FaultConfig(latency_s=0.05, errors=0.2, breaks=0.3)


TestEngineMachine = EngineMachine.TestCase
TestHardTimes = HardTimes.TestCase
TestHardTimes.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
