"""The simulated engine: a replica's timing and memory without its arithmetic.

Theory of operation. Work is done in steps, one after the other without a gap; `cost` gives the duration of each. With a
`prefill_chunk`, a step computes up to that many prompt tokens, in order of arrival, and one token of each decoding sequence:
so each slows the other. Without one there are two independent lanes: in one, a step is a whole prompt; in the other, one token
of each decoding sequence. A step includes the requests that are present when it begins; its results appear at its end: blocks
become cached, tokens are delivered. So a request that arrives during a step waits for the end of that step.

The head of the queue is admitted when a step has tokens to spare, the batch has room and its blocks fit into the cache. If
it does not fit, it is tried again when blocks have become cached or were released. To bound its work, a step that has admitted
requests with ADMITTED blocks leaves further requests to the next step; that is about 32 requests on a document of 8,000 tokens.

One timer wakes the engine at the end of the next step. If it fires late, the steps that have ended by then are done in
order, each at its own time. Steps shorter than a useful timer are done several at once. An engine that cannot keep up with its
own rates (any rates may be configured) falls behind: it does one turn of work at a time, TURN and the rest of the step that
reaches it, and the event loop does other work between turns. A request that arrives meanwhile takes part in no step that began
earlier by the engine's time.

An answer's tokens are drawn when they are due (`answer`): a waiting answer takes no memory for them.

Time comes from the clock (the event loop, or a test's), injected faults from `faults`: the same requests at the same times
give the same answers at the same times.
"""

import asyncio
import json
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Protocol

from replica.cache.blocks import BlockLease, BlockLedger, CacheCounts, CacheListener
from replica.engine import (
    Detokenizer,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    Grammar,
    Message,
    PromptEnd,
    PromptError,
    Sequence,
    TemplateOverride,
    counted,
)
from replica.sim import text as sim_text
from replica.sim.answer import Answer, Task
from replica.sim.cost import SimConfig, StepWork
from replica.sim.example import NoExample, example_of
from replica.sim.faults import BREAK, ERROR, Fault, no_faults
from replica.sim.script import Script, last_message

TURN = 1024  # tokens, or blocks that are taken, become cached or are released: a few milliseconds
ADMITTED = 16 * TURN  # blocks of the requests that one step admits, or one request more: ten milliseconds if they are cached
MIN_TICK_S = 0.002  # shorter decoding steps are done several at once: finer timers cost more than they are worth


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that the engine uses."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer: ...


@dataclass(slots=True, eq=False)
class _Job:
    sequence: Sequence
    task: Task
    answer: Answer
    queued_at: float
    fails_after: int | None  # tokens
    fault: str
    arrived_at: float = math.inf
    lease: BlockLease | None = None
    computed: int = 0
    decoded: bool = False

    @property
    def left(self) -> int:
        return len(self.sequence.request.prompt) - self.computed

    @property
    def context(self) -> int:
        return self.computed + len(self.answer.tokens)


@dataclass(slots=True, eq=False)
class _Lane:
    """A series of steps: the work of the current step, if there is one, and when it ends. `rounds`: decoding steps that are
    done at once.
    """

    pieces: dict[_Job, int] = field(default_factory=dict)
    decoding: list[_Job] = field(default_factory=list)
    rounds: int = 1
    ends_at: float = math.inf


class SimEngine:
    """See the module. `clock` defaults to the event loop that runs at `start`; `listeners` are called for each change of the
    cached blocks; `faults` has the injected fault of each request; `script` says its answers."""

    def __init__(
        self,
        config: SimConfig,
        clock: Clock | None = None,
        listeners: Items[CacheListener] = (),
        faults: Iterator[Fault] | None = None,
        script: Script | None = None,
    ) -> None:
        self._config, self._costs = config, config.costs
        self._faults = faults or no_faults()
        self._script = script
        self._cache = BlockLedger(max(1, config.kv_tokens // config.block_size), config.block_size, listeners)
        self._clock = clock
        self._late: dict[_Job, Timer] = {}
        self._waiting: deque[_Job] = deque()
        self._prefilling: dict[_Job, None] = {}
        self._decoding: dict[_Job, None] = {}
        self._prompts = _Lane()
        self._answers = self._prompts if config.prefill_chunk else _Lane()
        self._lanes = list(dict.fromkeys((self._prompts, self._answers)))
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self._leaving: deque[_Job] = deque()  # cancelled; their blocks are released in turns
        self._release: Timer | None = None  # set while a further turn releases blocks
        self._behind = False  # steps have ended and are still to be done
        self._work = 0  # the work done in the present turn
        self._refused: _Job | None = None  # the head of the queue, if it does not fit into the cache as it is now
        self._jobs: dict[Sequence, _Job] = {}
        self._tasks: weakref.WeakValueDictionary[int, Task] = weakref.WeakValueDictionary()  # by their prompt's id

    def __repr__(self) -> str:
        busy, waiting = len(self._prefilling), len(self._waiting) + len(self._late)
        return f"<SimEngine {waiting} waiting, {busy} in prefill, {len(self._decoding)} decoding, {self._cache!r}>"

    @property
    def info(self) -> EngineInfo:
        size, blocks = self._cache.size, self._cache.capacity
        return EngineInfo("sim", size * blocks, sim_text.VOCAB_SIZE, size, blocks, sim_text.LONGEST_TOKEN, scores=False)

    @property
    def prefix_caching(self) -> bool:
        return True

    async def start(self) -> None:
        self._clock = self._clock or asyncio.get_running_loop()

    async def close(self) -> None:
        for timer in (self._timer, self._release, *self._late.values()):
            if timer is not None:
                timer.cancel()
        for sequence in list(self._jobs):
            sequence.fail("the replica is shutting down")
        self._jobs.clear()

    def encode(self, text: str, special: bool = True) -> list[int]:
        tokens = sim_text.encode(text, counted(self.info.context))
        if self._script is not None:
            self._script.note(tokens, text.rpartition("\n")[2])
        return tokens

    def encode_chat(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        end: PromptEnd = "answer",
        template: TemplateOverride | None = None,
    ) -> list[int]:
        if template and (template.text is not None or template.variables):
            raise PromptError("the simulated engine has no template to change")
        encoded = sim_text.encode_chat(messages, tools, end, counted(self.info.context))
        if self._script is not None:
            self._script.note(encoded, last_message(messages))
        return encoded

    def decode(self, tokens: list[int], special: bool = False) -> str:
        return sim_text.decode(tokens) if self._script is None else sim_text.decode(tokens, self._script.texts)

    def detokenizer(self, special: bool = False) -> Detokenizer:
        return sim_text.WordDetokenizer() if self._script is None else sim_text.WordDetokenizer(self._script.texts)

    def token_strings(self, tokens: list[int]) -> list[str]:
        return [self.decode([token]) for token in tokens]

    def grammar_error(self, grammar: Grammar) -> str | None:
        if grammar.kind == "choice":
            grammar.compiled = json.loads(grammar.text)[0]
            return None
        if grammar.kind == "json":
            try:
                grammar.compiled = example_of(grammar.text)
            except NoExample as error:
                return f"{error}."
            return None
        followed = grammar.kind == "calls" or self._script is not None
        return None if followed else "the simulated engine has no token scores to constrain."

    def failure(self) -> str | None:
        return None

    def load(self) -> EngineLoad:
        running = len(self._decoding) + len(self._prefilling)
        return EngineLoad(running, len(self._waiting) + len(self._late), self._cache.used / self._cache.capacity)

    def cache_counts(self) -> CacheCounts:
        return self._cache.counts()

    async def reset_prefix_cache(self) -> bool:
        return not self._jobs and self._cache.clear()

    def check(self) -> None:
        """Assert the invariants. O(blocks + jobs)."""
        self._cache.check()
        known = [*self._late, *self._waiting, *self._prefilling, *self._decoding, *self._leaving]
        assert sorted(map(id, known)) == sorted(map(id, self._jobs.values()))
        assert bool(self._jobs) or self._cache.used == 0
        for lane in self._lanes:
            assert (lane.ends_at < math.inf) == bool(lane.pieces or lane.decoding)
            assert self._prefilling.keys() >= lane.pieces.keys()
            assert self._decoding.keys() >= set(lane.decoding)

    def submit(self, request: EngineRequest) -> Sequence:
        """Accept a request. O(prompt), or a turn's work."""
        sequence, task = Sequence(request, self.cancel), self._task(request)
        answer, now, fault = Answer(task, request), self._now(), next(self._faults)
        job = _Job(sequence, task, answer, now, fault.fails_after(answer.least), ERROR if fault.fails else BREAK)
        self._jobs[sequence] = job
        if late_s := fault.delay_s + request.transfer_s:
            self._late[job] = self._call_at(now + late_s / self._config.speed, self._arrived, job)
        else:
            self._enqueue(job)
        return sequence

    def _task(self, request: EngineRequest) -> Task:
        """The task of a request, shared with the unfinished answers to the same prompt."""
        key = id(request.prompt)
        task = self._tasks.get(key)
        if task is None or not task.covers(request):
            scripted = () if self._script is None else self._script.answer(request.prompt)
            task = self._tasks[key] = Task.of(request, self._cache.size, scripted)
        return task

    def _arrived(self, job: _Job) -> None:
        del self._late[job]
        self._enqueue(job)

    def _enqueue(self, job: _Job) -> None:
        job.arrived_at = now = self._now()
        if not self._behind:
            self._do_steps(now)  # steps that have ended began before it
        self._waiting.append(job)
        self._continue(now)

    def _now(self) -> float:
        assert self._clock is not None, "submit before start"
        return self._clock.time()

    def _call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        assert self._clock is not None, "submit before start"
        return self._clock.call_at(when, callback, *args)

    def _wake(self, when: float) -> None:
        self._timer = None
        now = max(when, self._now())  # a loop's timer may be a little early
        self._do_steps(now)
        self._continue(now)

    def _do_steps(self, now: float) -> None:
        """Do the steps that have ended by now, and the steps that follow, up to one turn's work."""
        self._work = 0
        while (lane := min(self._lanes, key=lambda lane: lane.ends_at)).ends_at <= now and self._work < TURN:
            when = lane.ends_at
            self._end_step(lane, when)
            self._begin_steps(when)
        self._behind = min(lane.ends_at for lane in self._lanes) <= now

    def _continue(self, now: float) -> None:
        """Begin the steps that can begin; set the timer to the next end of a step."""
        self._begin_steps(now)
        next_end = min(lane.ends_at for lane in self._lanes)
        if self._timer is not None:
            if self._timer_at == next_end:
                return  # set anew for each request, a timer that is due would never fire
            self._timer.cancel()
        self._timer, self._timer_at = None, next_end
        if next_end < math.inf:
            self._timer = self._call_at(next_end, self._wake, next_end)

    def _begin_steps(self, when: float) -> None:
        """Begin a step in each idle lane."""
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
        seconds = self._costs.seconds(StepWork.of(pieces, (job.context for job in lane.decoding))) / self._config.speed
        # The small term absorbs rounding.
        lane.rounds = 1 if lane.pieces else max(1, min(math.ceil(MIN_TICK_S / seconds - 1e-6), TURN // len(lane.decoding)))
        lane.ends_at = when + lane.rounds * seconds

    def _pieces(self, when: float) -> dict[_Job, int]:
        """A step's prompt tokens: as many as fit into a chunk, or all of one prompt. `when` may be slightly in the past."""
        pieces = dict[_Job, int]()
        begun = iter(tuple(self._prefilling))
        room, most = self._config.prefill_chunk, self._work + ADMITTED
        while (job := next(begun, None) or self._admit(when, most)) is not None:
            pieces[job] = min(job.left, room) if room else job.left
            room -= pieces[job]
            if room <= 0:
                break
        return pieces

    def _admit(self, when: float, most: int) -> _Job | None:
        """Admit the head of the queue, if there is room. most: the turn's work from which on admission waits for the
        next step.
        """
        full = len(self._decoding) + len(self._prefilling) >= self._config.max_batch or self._work >= most
        if full or not self._waiting or self._waiting[0].arrived_at > when or self._waiting[0] is self._refused:
            return None
        job = self._waiting[0]
        request, size = job.sequence.request, self._cache.size
        blocks = -(-(len(request.prompt) + job.answer.most) // size)
        job.lease = self._cache.reserve(job.task.prefix, blocks, when, request.keep_s / self._config.speed)
        self._work += blocks
        if job.lease is None:
            self._refused = job
            return None
        self._waiting.popleft()
        job.sequence.queued_s = when - job.queued_at
        job.computed = job.sequence.cached_tokens = job.lease.shared * size
        if request.taken_over:  # the last token of a prompt is always computed; taken ones count as cached, as in vLLM
            job.computed = max(job.computed, min(request.taken_over, len(request.prompt) - 1))
            job.sequence.cached_tokens = job.computed if request.taken_cached is None else request.taken_cached
        self._prefilling[job] = None
        return job

    def _end_step(self, lane: _Lane, when: float) -> None:
        """Deliver the results of a step."""
        pieces, decoding, rounds = lane.pieces, lane.decoding, lane.rounds
        lane.pieces, lane.decoding, lane.ends_at = {}, [], math.inf
        self._work += len(pieces)
        for job, tokens in pieces.items():
            job.computed += tokens
            if not self._config.slots:
                self._commit(job, job.computed // self._cache.size)
            if not job.left:
                # The last piece of a prompt gives the first token.
                del self._prefilling[job]
                self._decoding[job] = None
                self._emit(job, 1, when)
        for job in decoding:
            self._emit(job, rounds, when)

    def _emit(self, job: _Job, count: int, when: float) -> None:
        """Deliver the next tokens of an answer."""
        sequence, answer = job.sequence, job.answer
        if job.fails_after is not None:
            count = min(count, job.fails_after - len(answer.tokens))
            if not count:
                self._forget(job, when)
                sequence.fail(job.fault)
                return
        fresh = answer.take(count)
        self._work += len(fresh)
        if answer.finish is not None:
            self._forget(job, when)
        if answer.stopped:
            sequence.end(fresh)
        else:
            sequence.push(fresh, answer.finish)

    def cancel(self, sequence: Sequence) -> None:
        """Called when a sequence is closed before its end. Its place in the batch is free at once; its blocks are free a little
        later if many have just been released. O(waiting + running), and a turn's work.
        """
        job = self._jobs[sequence]
        if job in self._late:
            self._late.pop(job).cancel()
        elif job in self._waiting:
            self._waiting.remove(job)
            self._refused = None if job is self._refused else self._refused
        self._leave(job)
        for lane in self._lanes:
            lane.pieces.pop(job, None)
            lane.decoding = [other for other in lane.decoding if other is not job]
            if not lane.pieces and not lane.decoding:
                lane.ends_at = math.inf  # this step's results are not needed
        self._leaving.append(job)
        if self._release is None:
            self._give_back()

    def _give_back(self) -> None:
        """Release the blocks of cancelled requests, up to one turn's work."""
        self._work, self._release = 0, None
        now = self._now()
        while self._leaving and self._work < TURN:
            self._end(self._leaving.popleft(), now)
        if self._work >= TURN:
            self._release = self._call_at(now, self._give_back)
        self._continue(now)

    def _leave(self, job: _Job) -> None:
        """Remove the job from all steps."""
        self._prefilling.pop(job, None)
        job.decoded = self._decoding.pop(job, True) is None

    def _forget(self, job: _Job, when: float) -> None:
        """Remove a job that has ended."""
        self._leave(job)
        self._end(job, when)

    def _end(self, job: _Job, when: float) -> None:
        """Release the job's blocks. Computed blocks stay in the cache, idle."""
        del self._jobs[job.sequence]
        if job.lease is None:
            return
        self._refused = None
        if job.decoded:
            # The last token's K and V are not computed.
            job.lease.prefix = job.task.prefix_of(job.answer.tokens[:-1])
            self._commit(job, len(job.lease.prefix.keys))
        self._work += len(job.lease.blocks)
        self._cache.release(job.lease, when)

    def _commit(self, job: _Job, blocks: int) -> None:
        """Make the job's first `blocks` blocks cached: they are computed."""
        assert job.lease is not None
        fresh = blocks - job.lease.shared
        if fresh > 0:
            self._work += fresh
            self._refused = None
        self._cache.commit(job.lease, blocks)
