"""The simulated engine: a replica's timing and memory without its arithmetic.

Theory of operation. Requests wait in one line. The first of the line starts when prefill is free, the batch has a
place and its blocks fit into the cache; it then occupies prefill for (prompt tokens that are not cached) / prefill
rate, and its blocks become cached when that is over. After its first token it decodes with all others: one clock
ticks for the whole batch and gives each sequence the tokens that are due since its own first token, so hundreds of
streams cost one timer. Time comes from the clock (the event loop, or a test's), and nothing is random: the same
requests at the same times give the same answers at the same times.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

from replica import sim_text
from replica.blocks import BlockLedger, CacheCounts, Lease, Sink
from replica.engine import EngineInfo, Grammar, Load, Message, PromptError, Request, Sequence, Tail, Template
from replica.prefix import Prefix

MIN_TICK_S = 0.002  # above 500 tokens/s a tick gives several tokens: timers finer than this cost more than they show


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that the engine uses."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer: ...


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Capacity in tokens; rates in tokens per second (prefill: of the replica, decode: of each sequence)."""

    kv_tokens: int = 100_000
    prefill_rate: float = 5_000.0
    decode_rate: float = 50.0
    max_batch: int = 256
    block_size: int = 16


@dataclass(slots=True, eq=False)
class _Job:
    sequence: Sequence
    prefix: Prefix
    answer: list[int]
    ends_itself: bool
    came_at: float
    lease: Lease | None = None
    first_at: float = 0.0
    emitted: int = 0


class SimEngine:
    """See the module. `clock` defaults to the running event loop at `start`; `sinks` hear of each cached block."""

    def __init__(self, config: SimConfig, clock: Clock | None = None, sinks: Items[Sink] = ()) -> None:
        self._config = config
        self._cache = BlockLedger(max(1, config.kv_tokens // config.block_size), config.block_size, sinks)
        self._clock = clock
        self._waiting: deque[_Job] = deque()
        self._prefilling: _Job | None = None
        self._prefill_timer: Timer | None = None
        self._decoding: dict[_Job, None] = {}
        self._tick_timer: Timer | None = None
        self._jobs: dict[Sequence, _Job] = {}

    def __repr__(self) -> str:
        busy = 1 if self._prefilling else 0
        return f"<SimEngine {len(self._waiting)} waiting, {busy} in prefill, {len(self._decoding)} decoding, {self._cache!r}>"

    @property
    def info(self) -> EngineInfo:
        size, blocks = self._cache.size, self._cache.capacity
        return EngineInfo("sim", size * blocks, sim_text.VOCAB_SIZE, size, blocks, scores=False)

    async def start(self) -> None:
        self._clock = self._clock or asyncio.get_running_loop()

    async def close(self) -> None:
        for timer in (self._prefill_timer, self._tick_timer):
            if timer is not None:
                timer.cancel()
        for sequence in list(self._jobs):
            sequence.fail("the replica is shutting down")
        self._jobs.clear()

    def encode(self, text: str, special: bool = True) -> list[int]:
        return sim_text.encode(text)

    def encode_chat(
        self, messages: list[Message], tools: list[Any] | None, tail: Tail = "answer", template: Template | None = None
    ) -> list[int]:
        if template and (template.text is not None or template.variables):
            raise PromptError("the simulated engine has no template to change")
        return sim_text.encode_chat(messages, tools, tail)

    def decode(self, tokens: list[int], special: bool = False) -> str:
        return sim_text.decode(tokens)

    def token_strings(self, tokens: list[int]) -> list[str]:
        return [sim_text.decode([token]) for token in tokens]

    def grammar_error(self, grammar: Grammar) -> str | None:
        return "the simulated engine has no scores to keep to a grammar with."

    def failure(self) -> str | None:
        return None

    def load(self) -> Load:
        running = len(self._decoding) + (self._prefilling is not None)
        return Load(running, len(self._waiting), self._cache.used / self._cache.capacity)

    def cache_counts(self) -> CacheCounts:
        return self._cache.counts()

    async def reset_prefix_cache(self) -> bool:
        return not self._jobs and self._cache.clear()

    def check(self) -> None:
        """Prove the invariants. O(blocks + jobs)."""
        self._cache.check()
        known = [*self._waiting, *self._decoding, *([self._prefilling] if self._prefilling else [])]
        assert sorted(map(id, known)) == sorted(map(id, self._jobs.values()))
        assert bool(self._jobs) or self._cache.used == 0

    def submit(self, request: Request) -> Sequence:
        """O(prompt + answer)."""
        sequence = Sequence(request, self._cancel)
        tokens, ends_itself = sim_text.answer(
            request.prompt, request.max_tokens, endless=request.ignore_eos, seed=_seed(request)
        )
        cut = next((at for at, token in enumerate(tokens) if token in request.stop_tokens), None)
        if cut is not None:
            del tokens[cut + 1 :]
        job = _Job(sequence, Prefix(request.prompt, self._cache.size, request.scope), tokens, ends_itself, self._now())
        self._jobs[sequence] = job
        self._waiting.append(job)
        self._admit(self._now())
        return sequence

    def _now(self) -> float:
        assert self._clock is not None, "submit before start"
        return self._clock.time()

    def _admit(self, now: float) -> None:
        """Start the first in line, if it can start. `now` may be a little past: work follows on work without a gap."""
        full = len(self._decoding) >= self._config.max_batch
        if self._prefilling is not None or full or not self._waiting or self._clock is None:
            return
        job = self._waiting[0]
        request, size = job.sequence.request, self._cache.size
        blocks = -(-(len(request.prompt) + len(job.answer)) // size)
        job.lease = self._cache.reserve(job.prefix, blocks, now, request.keep_s)
        if job.lease is None:
            return
        self._waiting.popleft()
        job.sequence.queued_s = now - job.came_at
        job.sequence.cached_tokens = job.lease.named * size
        uncached = len(request.prompt) - job.sequence.cached_tokens
        job.first_at = now + uncached / self._config.prefill_rate
        self._prefilling = job
        self._prefill_timer = self._clock.call_at(job.first_at, self._prefilled, job)

    def _prefilled(self, job: _Job) -> None:
        self._prefilling = self._prefill_timer = None
        assert job.lease is not None
        self._cache.commit(job.lease, len(job.prefix.keys))
        self._decoding[job] = None
        self._emit(job, 1)
        if self._decoding and self._tick_timer is None:
            self._schedule_tick(job.first_at)
        self._admit(job.first_at)

    def _schedule_tick(self, after: float) -> None:
        assert self._clock is not None
        period = max(1 / self._config.decode_rate, MIN_TICK_S)
        self._tick_timer = self._clock.call_at(after + period, self._tick, after + period)

    def _tick(self, when: float) -> None:
        """One step of the batch. A late tick gives all that is due by now. O(decoding)."""
        self._tick_timer = None
        now = max(when, self._now())
        for job in list(self._decoding):
            # The small term absorbs rounding: a token due exactly now is due.
            self._emit(job, 1 + int((now - job.first_at) * self._config.decode_rate + 1e-6))
        if self._decoding:
            self._schedule_tick(now)
        self._admit(now)

    def _emit(self, job: _Job, due: int) -> None:
        due = min(due, len(job.answer))
        if due <= job.emitted:
            return
        fresh, job.emitted = job.answer[job.emitted : due], due
        if due < len(job.answer):
            job.sequence.push(fresh)
            return
        self._forget(job)
        if fresh[-1] in job.sequence.request.stop_tokens:
            job.sequence.end(fresh)
        else:
            job.sequence.push(fresh, "stop" if job.ends_itself else "length")

    def _cancel(self, sequence: Sequence) -> None:
        job = self._jobs[sequence]
        if job is self._prefilling and self._prefill_timer is not None:
            self._prefill_timer.cancel()
            self._prefilling = self._prefill_timer = None
        elif job in self._waiting:
            self._waiting.remove(job)
        self._forget(job)
        self._admit(self._now())

    def _forget(self, job: _Job) -> None:
        """The job is over: its computed blocks stay in the cache, idle."""
        del self._jobs[job.sequence]
        if job.lease is None:
            return
        if self._decoding.pop(job, True) is None:
            job.prefix.extend(job.answer[: job.emitted - 1])  # the last token's K and V are not computed
            self._cache.commit(job.lease, len(job.prefix.keys))
        self._cache.release(job.lease, self._now())


def _seed(request: Request) -> int:
    """A greedy answer depends on its prompt alone; so does one without a seed, for nothing here is random."""
    return 0 if request.greedy else (request.seed or 0) % (1 << 32)
