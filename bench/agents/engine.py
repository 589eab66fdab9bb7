"""A modelled engine: a bounded prefix cache, one prefill after the other, parallel decoding.

A prompt waits for its turn (first come, first served; at most `batch` sequences run), is looked up when its prefill begins, and
takes `uncached tokens / prefill_rate` seconds. Then each token of the answer takes `1 / decode_rate`. The cache stores whole
blocks and evicts the least recently used ones, of one prompt its end first. Unlike in an engine, blocks of a running sequence
may be evicted. This matters only if the running prompts alone fill the cache.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol

from bench.agents.rendering import TOKEN_BYTES, tokens

BLOCK = 16  # tokens


@dataclass(frozen=True, slots=True)
class Model:
    """Rates in tokens per second (decode: of a sequence). kv_tokens: capacity of the cache."""

    kv_tokens: int = 1_000_000
    prefill_rate: float = 10_000.0
    decode_rate: float = 100.0
    batch: int = 64


@dataclass(frozen=True, slots=True)
class Row:
    """A prefilled prompt. tag: of its turn. prompt, cached: tokens. wait: seconds to its first token."""

    replica: int
    tag: str
    path: str
    prompt: int
    cached: int
    wait: float


class Clock(Protocol):
    """Seconds from any beginning."""

    def time(self) -> float: ...

    async def until(self, when: float) -> None: ...


class LoopClock:
    """The event loop's clock."""

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    async def until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self.time()))


def block_keys(prompt: bytes) -> list[bytes]:
    """A key for each whole block, of it and all before it. O(bytes)."""
    size, key, keys = BLOCK * TOKEN_BYTES, b"", list[bytes]()
    for at in range(0, len(prompt) - size + 1, size):
        key = hashlib.blake2b(key + prompt[at : at + size], digest_size=12).digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Blocks by their keys; the next one to be evicted is first."""

    def __init__(self, kv_tokens: int) -> None:
        self._most = kv_tokens // BLOCK
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks."""
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"<PrefixCache: {len(self)} of {self._most} blocks>"

    def match(self, keys: Sequence[bytes]) -> int:
        """The leading blocks that are there. O(result)."""
        return next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys))

    def use(self, keys: Sequence[bytes]) -> None:
        """They are there now, and used last. Of a prompt that is larger than the cache: its beginning. O(keys)."""
        for key in reversed(keys[: self._most]):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


@dataclass(slots=True)
class Counters:
    """The engine's reported counters, in tokens."""

    running: int = 0
    waiting: int = 0
    prompt: int = 0
    cached: int = 0
    answered: int = 0


@dataclass(slots=True)
class Prefilled:
    """A prefilled prompt: its tokens, the cached ones, and the new ones in the cache, in whole blocks."""

    prompt: int
    cached: int
    created: int
    first: float  # when, in the loop's time


@dataclass(slots=True)
class Engine:
    """The engine of one replica."""

    number: int
    model: Model
    clock: Clock
    rows: list[Row] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    cache: PrefixCache = field(init=False)
    _free: float = 0.0  # when the last prefill ends
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.model.kv_tokens)
        self._places = asyncio.Semaphore(self.model.batch)

    def __repr__(self) -> str:
        return f"<Engine {self.number}: {asdict(self.counters)}, {self.cache!r}>"

    @asynccontextmanager
    async def sequence(self, prompt: bytes, tag: str, path: str) -> AsyncIterator[Prefilled]:
        """Begins when its prefill is done, and runs until it is left."""
        arrived, counters, state = self.clock.time(), self.counters, "waiting"
        counters.waiting += 1
        try:
            async with self._places:
                ready = self.clock.time()
                async with self._turn:
                    counters.waiting -= 1
                    counters.running += 1
                    state = "running"
                    prefilled = await self._prefill(prompt, ready)
                self.rows.append(Row(self.number, tag, path, prefilled.prompt, prefilled.cached, prefilled.first - arrived))
                yield prefilled
        finally:
            if state == "running":
                counters.running -= 1
            else:
                counters.waiting -= 1

    async def _prefill(self, prompt: bytes, ready: float) -> Prefilled:
        """The last token is always computed. What was queued begins when the one before should have ended: timers are late."""
        count, keys = tokens(prompt), block_keys(prompt)
        cached = min(self.cache.match(keys), (count - 1) // BLOCK) * BLOCK
        self.cache.use(keys)
        self._free = first = max(ready, self._free) + (count - cached) / self.model.prefill_rate
        await self.clock.until(first)
        self.counters.prompt += count
        self.counters.cached += cached
        return Prefilled(count, cached, count // BLOCK * BLOCK - cached, first)

    def end(self, whole: bytes, answer_tokens: int) -> None:
        """The prompt with its answer is in the cache, used last."""
        self.counters.answered += answer_tokens
        self.cache.use(block_keys(whole))
