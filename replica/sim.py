"""The simulated engine: a replica's timing and memory without its arithmetic.

Theory of operation. Work is done in steps, one after the other without a gap; `sim_cost` says how long one takes. With a
`prefill_chunk`, a step computes so many tokens of prompts, in the order of their coming, and a token of each sequence that
decodes: so each slows the other. Without one there are two lanes that know nothing of each other: in one a step is a whole
prompt, in the other a token of each sequence. A step takes in what is there when it begins, and all that it has computed
is there at its end: blocks become cached, tokens go out. So a request waits for the end of the step that it meets.

The first of the line starts when a step has tokens to spare, the batch has a place and its blocks fit into the cache.

One timer wakes the engine at the end of the next step. If it comes late, the steps that are over by then are done in their
order, each at its own time. Steps shorter than a timer is worth are taken several at once.

Time comes from the clock (the event loop, or a test's), chance from `fates`: the same requests at the same times give
the same answers at the same times.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Protocol

from replica import sim_text
from replica.blocks import BlockLedger, CacheCounts, Lease, Sink
from replica.engine import EngineInfo, Grammar, Load, Message, PromptError, Request, Sequence, Tail, Template
from replica.faults import BREAK, ERROR, Fate, no_fates
from replica.prefix import Prefix
from replica.sim_cost import SimConfig, Step

MIN_TICK_S = 0.002  # decoding steps shorter than this are taken together: finer timers cost more than they show


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that the engine uses."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer: ...


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
    emitted: int = 0

    @property
    def left(self) -> int:
        return len(self.sequence.request.prompt) - self.computed

    @property
    def context(self) -> int:
        return self.computed + self.emitted


@dataclass(slots=True, eq=False)
class _Lane:
    """Steps in a row: what the present one computes, if there is one, and when it ends. `rounds`: how many it stands for."""

    pieces: dict[_Job, int] = field(default_factory=dict)
    decoding: list[_Job] = field(default_factory=list)
    rounds: int = 1
    ends_at: float = math.inf


class SimEngine:
    """See the module. `clock` defaults to the running event loop at `start`; `sinks` hear of each cached block; `fates` tells
    what is to go wrong with each request."""

    def __init__(
        self, config: SimConfig, clock: Clock | None = None, sinks: Items[Sink] = (), fates: Iterator[Fate] | None = None
    ) -> None:
        self._config, self._costs = config, config.costs
        self._fates = fates or no_fates()
        self._cache = BlockLedger(max(1, config.kv_tokens // config.block_size), config.block_size, sinks)
        self._clock = clock
        self._late: dict[_Job, Timer] = {}
        self._waiting: deque[_Job] = deque()
        self._prefilling: dict[_Job, None] = {}
        self._decoding: dict[_Job, None] = {}
        self._prompts = _Lane()
        self._answers = self._prompts if config.prefill_chunk else _Lane()
        self._lanes = list(dict.fromkeys((self._prompts, self._answers)))
        self._timer: Timer | None = None
        self._jobs: dict[Sequence, _Job] = {}

    def __repr__(self) -> str:
        busy, waiting = len(self._prefilling), len(self._waiting) + len(self._late)
        return f"<SimEngine {waiting} waiting, {busy} in prefill, {len(self._decoding)} decoding, {self._cache!r}>"

    @property
    def info(self) -> EngineInfo:
        size, blocks = self._cache.size, self._cache.capacity
        return EngineInfo("sim", size * blocks, sim_text.VOCAB_SIZE, size, blocks, scores=False)

    async def start(self) -> None:
        self._clock = self._clock or asyncio.get_running_loop()

    async def close(self) -> None:
        for timer in (self._timer, *self._late.values()):
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
        running = len(self._decoding) + len(self._prefilling)
        return Load(running, len(self._waiting) + len(self._late), self._cache.used / self._cache.capacity)

    def cache_counts(self) -> CacheCounts:
        return self._cache.counts()

    async def reset_prefix_cache(self) -> bool:
        return not self._jobs and self._cache.clear()

    def check(self) -> None:
        """Prove the invariants. O(blocks + jobs)."""
        self._cache.check()
        known = [*self._late, *self._waiting, *self._prefilling, *self._decoding]
        assert sorted(map(id, known)) == sorted(map(id, self._jobs.values()))
        assert bool(self._jobs) or self._cache.used == 0
        for lane in self._lanes:
            assert (lane.ends_at < math.inf) == bool(lane.pieces or lane.decoding)
            assert self._prefilling.keys() >= lane.pieces.keys()
            assert self._decoding.keys() >= set(lane.decoding)

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
        now = self._now()
        self._do_steps(now)  # those that are over did not meet it
        self._waiting.append(job)
        self._go_on(now)

    def _now(self) -> float:
        assert self._clock is not None, "submit before start"
        return self._clock.time()

    def _call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        assert self._clock is not None, "submit before start"
        return self._clock.call_at(when, callback, *args)

    def _wake(self, when: float) -> None:
        now = max(when, self._now())  # a loop's timer may be a little early
        self._do_steps(now)
        self._go_on(now)

    def _do_steps(self, now: float) -> None:
        """All steps that are over by now, and those that follow on them."""
        while (lane := min(self._lanes, key=lambda lane: lane.ends_at)).ends_at <= now:
            when = lane.ends_at
            self._end_step(lane)
            self._begin_steps(when)

    def _go_on(self, now: float) -> None:
        """Begin what can begin; wake up when the next step is over."""
        self._begin_steps(now)
        if self._timer is not None:
            self._timer.cancel()
        next_end = min(lane.ends_at for lane in self._lanes)
        self._timer = self._call_at(next_end, self._wake, next_end) if next_end < math.inf else None

    def _begin_steps(self, when: float) -> None:
        """In each lane that is free."""
        for lane in self._lanes:
            if lane.ends_at == math.inf:
                self._begin_step(lane, when)

    def _begin_step(self, lane: _Lane, when: float) -> None:
        if lane is self._prompts:
            lane.pieces = self._pieces(when)
        if lane is self._answers:
            lane.decoding = list(self._decoding)
        if not lane.pieces and not lane.decoding:
            return
        pieces = ((tokens, job.computed + tokens) for job, tokens in lane.pieces.items())
        seconds = self._costs.seconds(Step.of(pieces, (job.context for job in lane.decoding))) / self._config.speed
        # The small term absorbs rounding.
        lane.rounds = 1 if lane.pieces else max(1, math.ceil(MIN_TICK_S / seconds - 1e-6))
        lane.ends_at = when + lane.rounds * seconds

    def _pieces(self, when: float) -> dict[_Job, int]:
        """What a step takes from prompts: as much as fits into a chunk, or all of one prompt. `when` may be a little past."""
        pieces = dict[_Job, int]()
        begun = iter(tuple(self._prefilling))
        room = self._config.prefill_chunk
        while (job := next(begun, None) or self._admit(when)) is not None:
            pieces[job] = min(job.left, room) if room else job.left
            room -= pieces[job]
            if room <= 0:
                break
        return pieces

    def _admit(self, when: float) -> _Job | None:
        """Start the first in line, if it can start."""
        full = len(self._decoding) + len(self._prefilling) >= self._config.max_batch
        if full or not self._waiting:
            return None
        job = self._waiting[0]
        request, size = job.sequence.request, self._cache.size
        blocks = -(-(len(request.prompt) + len(job.answer)) // size)
        job.lease = self._cache.reserve(job.prefix, blocks, when, request.keep_s / self._config.speed)
        if job.lease is None:
            return None
        self._waiting.popleft()
        job.sequence.queued_s = when - job.came_at
        job.computed = job.sequence.cached_tokens = job.lease.named * size
        self._prefilling[job] = None
        return job

    def _end_step(self, lane: _Lane) -> None:
        """What was computed is there. O(prompts and sequences in the step)."""
        pieces, decoding, rounds = lane.pieces, lane.decoding, lane.rounds
        lane.pieces, lane.decoding, lane.ends_at = {}, [], math.inf
        for job, tokens in pieces.items():
            assert job.lease is not None
            job.computed += tokens
            self._cache.commit(job.lease, job.computed // self._cache.size)
            if not job.left:
                # With the last piece comes the first token.
                del self._prefilling[job]
                self._decoding[job] = None
                self._emit(job, 1)
        for job in decoding:
            self._emit(job, rounds)

    def _emit(self, job: _Job, count: int) -> None:
        due = min(job.emitted + count, len(job.answer))
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
        if job in self._late:
            self._late.pop(job).cancel()
        elif job in self._waiting:
            self._waiting.remove(job)
        self._forget(job)
        for lane in self._lanes:
            lane.pieces.pop(job, None)
            lane.decoding = [other for other in lane.decoding if other is not job]
            if not lane.pieces and not lane.decoding:
                lane.ends_at = math.inf  # nobody wants what this step computes
        self._go_on(self._now())

    def _forget(self, job: _Job) -> None:
        """The job is over: its computed blocks stay in the cache, idle."""
        del self._jobs[job.sequence]
        self._prefilling.pop(job, None)
        if job.lease is None:
            return
        if self._decoding.pop(job, True) is None:
            job.prefix.extend(job.answer[: max(0, job.emitted - 1)])  # the last token's K and V are not computed
            self._cache.commit(job.lease, len(job.prefix.keys))
        self._cache.release(job.lease, self._now())


def _seed(request: Request) -> int:
    """A greedy answer depends on its prompt alone; so does one without a seed, for nothing here is random."""
    return 0 if request.greedy else (request.seed or 0) % (1 << 32)
