"""The simulated engine: a replica's timing and memory without its arithmetic.

Theory of operation. Requests wait in one line. The first of the line starts when prefill is free, the batch has a
place and its blocks fit into the cache; it then occupies prefill for (prompt tokens that are not cached) / prefill
rate, and its blocks become cached when that is over. After its first token it decodes with all others: one clock
ticks for the whole batch and gives each sequence the tokens that are due since its own first token, so hundreds of
streams cost one timer.

A decoding step takes 1 / decode rate, and for each further sequence the share `decode_slowdown` of it longer. With a
`prefill_chunk`, prompts are computed chunk by chunk, and a step computes a chunk and a token of each sequence: it takes as
long as both. So decoding slows prefill and prefill slows decoding; the blocks of a chunk are cached at its end. What is
due follows from `progress`, the tokens that a sequence decoding all along would have: it grows by one a step, and is
settled whenever the length of a step changes.

Time comes from the clock (the event loop, or a test's), chance from `fates`: the same requests at the same times give
the same answers at the same times.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

from replica import sim_text
from replica.blocks import BlockLedger, CacheCounts, Lease, Sink
from replica.engine import EngineInfo, Grammar, Load, Message, PromptError, Request, Sequence, Tail, Template
from replica.faults import BREAK, ERROR, Fate, no_fates
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
    """Capacity in tokens; rates in tokens per second (prefill: of the replica, decode: of a sequence that is alone).
    `prefill_chunk` 0: prefill and decoding do not disturb each other. All times are divided by `speed`."""

    kv_tokens: int = 100_000
    prefill_rate: float = 5_000.0
    decode_rate: float = 50.0
    max_batch: int = 256
    block_size: int = 16
    prefill_chunk: int = 0
    decode_slowdown: float = 0.0
    speed: float = 1.0


@dataclass(slots=True, eq=False)
class _Job:
    sequence: Sequence
    prefix: Prefix
    answer: list[int]
    ends_itself: bool
    came_at: float
    last_token: int | None  # it fails in the place of the next one
    fault: str
    lease: Lease | None = None
    computed: int = 0
    began_at: float = 0.0  # the progress at its first token
    emitted: int = 0


class SimEngine:
    """See the module. `clock` defaults to the running event loop at `start`; `sinks` hear of each cached block; `fates` tells
    what is to go wrong with each request."""

    def __init__(
        self, config: SimConfig, clock: Clock | None = None, sinks: Items[Sink] = (), fates: Iterator[Fate] | None = None
    ) -> None:
        self._config = config
        self._prefill_rate = config.prefill_rate * config.speed
        self._decode_rate = config.decode_rate * config.speed
        self._fates = fates or no_fates()
        self._cache = BlockLedger(max(1, config.kv_tokens // config.block_size), config.block_size, sinks)
        self._clock = clock
        self._late: dict[_Job, Timer] = {}
        self._waiting: deque[_Job] = deque()
        self._prefilling: _Job | None = None
        self._prefill_timer: Timer | None = None
        self._chunk = 0  # prompt tokens of the step that is computed now, if they are in chunks
        self._decoding: dict[_Job, None] = {}
        self._tick_timer: Timer | None = None
        self._settled, self._settled_at = 0.0, 0.0
        self._jobs: dict[Sequence, _Job] = {}

    def __repr__(self) -> str:
        busy, waiting = 1 if self._prefilling else 0, len(self._waiting) + len(self._late)
        return f"<SimEngine {waiting} waiting, {busy} in prefill, {len(self._decoding)} decoding, {self._cache!r}>"

    @property
    def info(self) -> EngineInfo:
        size, blocks = self._cache.size, self._cache.capacity
        return EngineInfo("sim", size * blocks, sim_text.VOCAB_SIZE, size, blocks, scores=False)

    async def start(self) -> None:
        self._clock = self._clock or asyncio.get_running_loop()

    async def close(self) -> None:
        for timer in (self._prefill_timer, self._tick_timer, *self._late.values()):
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
        return Load(running, len(self._waiting) + len(self._late), self._cache.used / self._cache.capacity)

    def cache_counts(self) -> CacheCounts:
        return self._cache.counts()

    async def reset_prefix_cache(self) -> bool:
        return not self._jobs and self._cache.clear()

    def check(self) -> None:
        """Prove the invariants. O(blocks + jobs)."""
        self._cache.check()
        known = [*self._late, *self._waiting, *self._decoding, *([self._prefilling] if self._prefilling else [])]
        assert sorted(map(id, known)) == sorted(map(id, self._jobs.values()))
        assert bool(self._jobs) or self._cache.used == 0
        assert self._prefilling or not self._chunk

    def submit(self, request: Request) -> Sequence:
        """O(prompt + answer)."""
        sequence = Sequence(request, self._cancel)
        tokens, ends_itself = sim_text.answer(
            request.prompt, request.max_tokens, endless=request.ignore_eos, least=request.min_tokens, seed=_seed(request)
        )
        cut = next((at for at in range(request.min_tokens, len(tokens)) if tokens[at] in request.stop_tokens), None)
        if cut is not None:
            del tokens[cut + 1 :]
        now, fate, prefix = self._now(), next(self._fates), Prefix(request.prompt, self._cache.size, request.scope)
        job = _Job(sequence, prefix, tokens, ends_itself, now, fate.last_token(len(tokens)), ERROR if fate.fails else BREAK)
        self._jobs[sequence] = job
        if fate.delay_s:
            self._late[job] = self._call_at(now + fate.delay_s / self._config.speed, self._arrived, job)
        else:
            self._line_up(job)
        return sequence

    def _arrived(self, job: _Job) -> None:
        del self._late[job]
        self._line_up(job)

    def _line_up(self, job: _Job) -> None:
        self._waiting.append(job)
        self._admit(self._now())

    def _now(self) -> float:
        assert self._clock is not None, "submit before start"
        return self._clock.time()

    def _call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        assert self._clock is not None, "submit before start"
        return self._clock.call_at(when, callback, *args)

    def _admit(self, now: float) -> None:
        """Start the first in line, if it can start. `now` may be a little past: work follows on work without a gap."""
        full = len(self._decoding) >= self._config.max_batch
        if self._prefilling is not None or full or not self._waiting or self._clock is None:
            return
        job = self._waiting[0]
        request, size = job.sequence.request, self._cache.size
        blocks = -(-(len(request.prompt) + len(job.answer)) // size)
        job.lease = self._cache.reserve(job.prefix, blocks, now, request.keep_s / self._config.speed)
        if job.lease is None:
            return
        self._waiting.popleft()
        job.sequence.queued_s = now - job.came_at
        job.computed = job.sequence.cached_tokens = job.lease.named * size
        self._prefilling = job
        self._compute(job, now)

    def _compute(self, job: _Job, now: float) -> None:
        """Begin with the next piece of a prompt: with all of it, or a chunk."""
        left = len(job.sequence.request.prompt) - job.computed
        tokens = min(left, self._config.prefill_chunk or left)
        seconds = tokens / self._prefill_rate
        if self._config.prefill_chunk:
            self._settle(now)
            self._chunk = tokens
            seconds = self._step_s() if self._decoding else seconds
        self._prefill_timer = self._call_at(now + seconds, self._computed, job, tokens, now + seconds)

    def _computed(self, job: _Job, tokens: int, when: float) -> None:
        """A piece is done: its blocks are cached. With the last one comes the first token."""
        assert job.lease is not None
        job.computed += tokens
        self._cache.commit(job.lease, job.computed // self._cache.size)
        if job.computed < len(job.sequence.request.prompt):
            self._compute(job, when)
            return
        self._settle(when)
        self._prefilling, self._prefill_timer, self._chunk = None, None, 0
        job.began_at = self._settled
        self._decoding[job] = None
        self._emit(job, 1)
        if self._decoding and self._tick_timer is None:
            self._schedule_tick(when)
        self._admit(when)

    def _step_s(self) -> float:
        """How long a step takes now."""
        others = max(0, len(self._decoding) - 1)
        return (1 + others * self._config.decode_slowdown) / self._decode_rate + self._chunk / self._prefill_rate

    def _progress(self, when: float) -> float:
        return self._settled + (when - self._settled_at) / self._step_s()

    def _settle(self, when: float) -> None:
        """The length of a step may change now, or has changed at `when`, a little ago."""
        self._settled, self._settled_at = self._progress(when), when

    def _schedule_tick(self, after: float) -> None:
        when = after + max(self._step_s(), MIN_TICK_S)
        self._tick_timer = self._call_at(when, self._tick, when)

    def _tick(self, when: float) -> None:
        """One step of the batch. A late tick gives all that is due by now. O(decoding)."""
        self._tick_timer = None
        now = max(when, self._now())
        progress = self._progress(now)
        for job in list(self._decoding):
            # The small term absorbs rounding: a token due exactly now is due.
            self._emit(job, 1 + int(progress - job.began_at + 1e-6))
        if self._decoding:
            self._schedule_tick(now)
        self._admit(now)

    def _emit(self, job: _Job, due: int) -> None:
        due = min(due, len(job.answer))
        if due <= job.emitted:
            return
        if job.last_token is not None and due > job.last_token:
            if job.emitted == job.last_token:
                self._forget(job)
                job.sequence.fail(job.fault)
                return
            due = job.last_token
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
            self._settle(self._now())
            self._prefilling, self._prefill_timer, self._chunk = None, None, 0
        elif job in self._late:
            self._late.pop(job).cancel()
        elif job in self._waiting:
            self._waiting.remove(job)
        self._forget(job)
        self._admit(self._now())

    def _forget(self, job: _Job) -> None:
        """The job is over: its computed blocks stay in the cache, idle."""
        del self._jobs[job.sequence]
        if job.lease is None:
            return
        self._settle(self._now())
        if self._decoding.pop(job, True) is None:
            job.prefix.extend(job.answer[: max(0, job.emitted - 1)])  # the last token's K and V are not computed
            self._cache.commit(job.lease, len(job.prefix.keys))
        self._cache.release(job.lease, self._now())


def _seed(request: Request) -> int:
    """A greedy answer depends on its prompt alone; so does one without a seed, for nothing here is random."""
    return 0 if request.greedy else (request.seed or 0) % (1 << 32)
