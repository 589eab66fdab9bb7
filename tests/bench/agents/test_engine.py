"""The modelled engine: its cache beside a simple one, its queue on a clock of its own."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.agents.engine import BLOCK, Engine, Model, PrefixCache, block_keys
from bench.agents.rendering import TOKEN_BYTES, tokens

BYTES = BLOCK * TOKEN_BYTES


class SettableClock:
    """Passes when it is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    async def until(self, when: float) -> None:
        self.now = max(self.now, when)
        await asyncio.sleep(0)


def prompt(*blocks: str, rest: int = 0) -> bytes:
    return b"".join(block.encode() * BYTES for block in blocks) + b"." * rest


def test_a_key_stands_for_all_before_it() -> None:
    one, other = block_keys(prompt("a", "b", rest=5)), block_keys(prompt("c", "b"))
    assert len(one) == len(other) == 2
    assert set(one).isdisjoint(other)
    assert block_keys(prompt("a", "b", "c"))[:2] == one
    assert tokens(prompt("a", rest=5)) == BLOCK + 2


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=20), st.integers(1, 8))
def test_the_cache_holds_what_was_used_last_and_of_a_prompt_its_beginning(prompts: list[str], most: int) -> None:
    """Beside every block with the time and place of its last use, sorted."""
    cache, used = PrefixCache(most * BLOCK), dict[bytes, tuple[int, int]]()
    for time, text in enumerate(prompts):
        keys = block_keys(prompt(*text))
        known = next((place for place, key in enumerate(keys) if key not in used), len(keys))
        assert cache.match(keys) == known
        cache.use(keys)
        used |= {key: (time, -place) for place, key in enumerate(keys[:most])}
        used = dict(sorted(used.items(), key=lambda item: item[1], reverse=True)[:most])
        assert len(cache) == len(used) <= most
        assert repr(cache) == f"<PrefixCache: {len(used)} of {most} blocks>"


async def test_prompts_are_computed_one_after_the_other_and_what_is_cached_is_not() -> None:
    clock = SettableClock()
    engine = Engine(3, Model(kv_tokens=1000, prefill_rate=16.0), clock)
    firsts: list[float] = []

    async def ask(text: bytes, tag: str) -> None:
        async with engine.sequence(text, tag, "/v1/messages") as prefilled:
            firsts.append(prefilled.first)
            assert prefilled.cached + prefilled.created == prefilled.prompt // BLOCK * BLOCK
        engine.end(text + prompt("z"), 4)

    await asyncio.gather(ask(prompt("a", "b"), "0.1"), ask(prompt("a", "b"), "1.1"), ask(prompt("a", "b", "c"), "2.1"))
    assert firsts == pytest.approx([2.0, 3.0, 4.0]), "the last block of an equal prompt is computed again"
    assert [(row.replica, row.tag, row.prompt, row.cached) for row in engine.rows] == [
        (3, "0.1", 32, 0),
        (3, "1.1", 32, 16),
        (3, "2.1", 48, 32),
    ]
    assert engine.rows[0].wait == pytest.approx(2.0)
    counters = engine.counters
    assert (counters.running, counters.waiting, counters.prompt, counters.cached, counters.answered) == (0, 0, 112, 48, 12)
    assert engine.cache.match(block_keys(prompt("a", "b", "c", "z"))) == 4, "its answer is cached, too"


async def test_it_runs_no_more_than_its_batch_and_forgets_who_left() -> None:
    engine = Engine(0, Model(prefill_rate=16.0, batch=1), SettableClock())
    async with engine.sequence(prompt("a"), "", ""):
        waiting = asyncio.ensure_future(_begin(engine))
        await asyncio.sleep(0)
        assert (engine.counters.running, engine.counters.waiting) == (1, 1)
        assert repr(engine).startswith("<Engine 0: {'running': 1, 'waiting': 1,")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (engine.counters.running, engine.counters.waiting) == (1, 0)
    assert engine.counters.running == 0
    await _begin(engine)


async def _begin(engine: Engine) -> None:
    async with engine.sequence(prompt("b"), "", ""):
        pass
