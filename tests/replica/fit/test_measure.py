"""What is measured, of a replica whose times are computed."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Self

from replica.fit.client import ReplicaClient, TimedAnswer
from replica.fit.measure import LONGER, Measurer
from replica.fit.solve import solve
from replica.sim.cost import SimConfig, StepWork

CONFIG = SimConfig(prefill_rate=700, decode_rate=30, step_s=0.03, context_s=1e-5, attention_s=6e-7)


class Computed(ReplicaClient):
    """A word is a token; what has been asked once is cached."""

    def __init__(self, url: str, model: str | None) -> None:
        super().__init__(url, model)
        self.known: list[list[str]] = []

    async def __aenter__(self) -> Self:
        self.model, self.context, self.block_size, self.kv_tokens = "m", 32_768, 16, 32_768
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, text: str, tokens: int, on_piece: Callable[[], None] = lambda: None) -> TimedAnswer:
        words = text.split()
        cached = max((_common(words, known) for known in self.known), default=0)
        cached = min(cached, len(words) - 1) // self.block_size * self.block_size
        self.known.append(words)
        first = CONFIG.costs.seconds(StepWork.of([(len(words) - cached, len(words))], ()))
        step = CONFIG.costs.seconds(StepWork.of((), [len(words) + tokens // 2]))
        return TimedAnswer(0.0, [first + at * step for at in range(tokens)], len(words), cached, tokens)

    async def streams(self, texts: Items[str], tokens: int, begun: asyncio.Event | None = None) -> list[TimedAnswer]:
        return [await self.generate(text, tokens) for text in texts]


def _common(one: list[str], other: list[str]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))


async def test_a_context_that_is_much_longer_is_measured_too() -> None:
    """Cached, which is cheap; else what a long document costs that many ask about would be an extrapolation."""
    lines = list[str]()
    async with Measurer("http://replica", None, lines.append, Computed) as measurer:
        measurer.measured.max_batch = 1
        await measurer.measure()
    found = measurer.measured
    longest = max(int(line.split()[4]) for line in lines if line.startswith("a new prompt"))
    others = {sample.prompt for sample in found.prefills if sample.prompt < longest}
    assert longest == LONGER * max(length for length in others if length % 64 == 0)
    assert {sample.cached for sample in found.prefills if sample.prompt == longest} == {0, longest - 16}
    (decoded,) = (sample for sample in found.decodes if sample.context > longest)
    assert decoded.batch == 1
    assert sum(line.endswith("behind this prompt") for line in lines) == 1
    first_s = next(sample.seconds for sample in found.prefills if sample.prompt * LONGER == longest and not sample.cached)
    assert f"one much longer prompt, which may take {LONGER**2 * first_s:.0f} s" in lines
    config = solve(found).config
    assert abs(config.context_s / CONFIG.context_s - 1) < 0.02
    assert config.attention_dense == 0


async def test_there_is_no_longer_one_in_a_small_cache() -> None:
    class Small(Computed):
        async def __aenter__(self) -> Self:
            await super().__aenter__()
            self.kv_tokens = 2048
            return self

    lines = list[str]()
    async with Measurer("http://replica", None, lines.append, Small) as measurer:
        measurer.measured.max_batch = 1
        await measurer.measure()
    assert not any(line.endswith("behind this prompt") for line in lines)
