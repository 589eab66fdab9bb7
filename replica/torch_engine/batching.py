"""Requests on transformers' continuous batching, with paged attention and prefix sharing.

Theory of operation. transformers' `ContinuousBatchingManager` runs the model in a thread of its own: each step it takes new
requests, schedules up to `batch_tokens` of prefill and decode, runs the model and delivers tokens. Code that depends on its
internals is marked PATCHED: the delivery of outputs and the sampling of tokens (`patches.py`), the ownership of blocks
(`paged.py`), and the forward pass of some models (`attention.py`).

Admission is ours. A request is handed over only when its worst case (prompt and max_tokens) fits into the blocks that no
running request may still need; blocks that it shares with others count once. Otherwise transformers would preempt requests, and
after a preemption it accepts no new requests until one finishes, which a cancelled request never does. The queue is first come,
first served; its head is tried again whenever blocks become free, or cached.

Threads: everything here runs on the event loop's thread, but `_room_changed`.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig

from replica.cache.blocks import CacheCounts, CacheListener
from replica.engine import EngineLoad, EngineRequest, Sequence
from replica.torch_engine import attention
from replica.torch_engine.device import batching_config
from replica.torch_engine.paged import Claim, PagedBlocks
from replica.torch_engine.patches import OutputRouter, install_blocks, make_manager, memory_usage, message_of, reset
from replica.torch_engine.sampling.sampler import Sampler

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in tokens, except `max_batch` (requests). `share`: prefixes may be shared, if the model's can."""

    block_size: int
    kv_tokens: int
    batch_tokens: int
    max_batch: int
    share: bool = True

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.block_size

    def batching(self) -> ContinuousBatchingConfig:
        return batching_config(self.block_size, self.kv_tokens, self.batch_tokens, self.max_batch, self.share)


@dataclass(slots=True, eq=False)
class _Job:
    id: str
    sequence: Sequence
    blocks: int
    sampler: Sampler | None
    claim: Claim
    queued_at: float
    delivered: int = 0  # tokens


class BatchRunner:
    """Answers requests with a loaded model, from `start` to `stop`. `forward`: replaces the model's own pass. `eos`: the tokens
    that end an answer. `listeners` are called for each change of the cached blocks.
    """

    def __init__(
        self,
        model: Any,
        forward: attention.Forward | None,
        sizes: Sizes,
        eos: list[int],
        listeners: Items[CacheListener] = (),
        make_router: Callable[..., OutputRouter] = OutputRouter,
    ) -> None:
        self._model, self._forward, self._sizes, self._eos = model, forward, sizes, eos
        self._sinks, self._make_router = listeners, make_router
        self._manager: Any = None
        self.blocks: PagedBlocks | None = None  # None for a model whose blocks cannot be shared
        self._ids = itertools.count()
        self._waiting: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}
        self._jobs: dict[Sequence, _Job] = {}
        self._counted = _CountedStep(sizes.num_blocks)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._admission_due = False
        self._last_error: str | None = None

    def __repr__(self) -> str:
        return f"<BatchRunner {len(self._running)} running, {len(self._waiting)} waiting, {self.blocks or self._counted!r}>"

    async def start(self, restore: Callable[[PagedBlocks], None] | None = None) -> None:
        """Start the model's thread. `restore` may fill the cache before the first request. Raises SetupError, and any error of
        transformers for a model that it cannot serve.
        """
        self._loop = asyncio.get_running_loop()
        router = self._make_router(self._loop, self._received, self._running)
        self._manager = await asyncio.to_thread(make_manager, self._model, self._sizes.batching(), self._eos, router)
        if self._sizes.share:
            self.blocks = install_blocks(self._manager, self._sizes.num_blocks, self._sinks, self._room_changed)
        if self._forward:
            attention.install(self._manager, self._forward)
        if restore and self.blocks:
            await asyncio.to_thread(restore, self.blocks)
        self._manager.start()

    async def stop(self, reason: str = "the replica is shutting down") -> bool:
        """Fail the running requests and end the thread. Returns True if the thread has ended and had worked until then: the
        cached blocks are valid.
        """
        for sequence in list(self._jobs):
            sequence.fail(reason)
        self._waiting.clear()
        if self._manager is None:
            return False
        sound = self.failure() is None
        await asyncio.to_thread(self._manager.stop, block=True, timeout=STOP_TIMEOUT_S, hard_stop=True)
        return sound and not self._manager.is_running()

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._running), len(self._waiting), self._usage())

    def cache_counts(self) -> CacheCounts:
        if self.blocks:
            return self.blocks.ledger.counts()
        return CacheCounts(free=round((1 - self._usage()) * self._sizes.num_blocks))

    def _usage(self) -> float:
        """The share of blocks that running requests hold."""
        return self.blocks.ledger.used / self._sizes.num_blocks if self.blocks else memory_usage(self._manager)

    def failure(self) -> str | None:
        if self._manager is None:
            return None
        # Requests are denied before running ones fail: when a client sees the failure, the engine is unhealthy already.
        denial: str | None = self._manager.background_thread_status.can_accept_new_requests()
        fatal = self._manager.background_thread_status.fatal_error
        return denial and (message_of(fatal) if fatal else self._last_error or denial)

    async def reset_prefix_cache(self) -> bool:
        if self._jobs:
            return False
        return self.blocks is None or await asyncio.to_thread(reset, self._manager, self.blocks, STOP_TIMEOUT_S)

    def submit(self, request: EngineRequest, sampler: Sampler | None) -> Sequence:
        """Accept a request. O(prompt)."""
        sequence = Sequence(request, self._cancel)
        blocks = -(-(len(request.prompt) + request.max_tokens) // self._sizes.block_size)
        claim = Claim(request.prefix(self._sizes.block_size), request.keep_s)
        job = _Job(f"r{next(self._ids)}", sequence, blocks, sampler, claim, asyncio.get_running_loop().time())
        self._jobs[sequence] = job
        self._waiting.append(job)
        self._admit()
        return sequence

    def ends(self, request: EngineRequest) -> list[int]:
        """The tokens that end this request's answer."""
        return [*([] if request.ignore_eos else self._eos), *request.stop_tokens]

    def _room_changed(self) -> None:
        """Called in the engine's thread."""
        if self._waiting and not self._admission_due and self._loop:
            self._admission_due = True
            self._loop.call_soon_threadsafe(self._admit)

    def _admit(self) -> None:
        """Hand over requests from the head of the queue while there is room."""
        self._admission_due = False
        while self._waiting and len(self._running) < self._sizes.max_batch:
            job = self._waiting[0]
            if not self._has_room(job):
                return
            self._waiting.popleft()
            self._running[job.id] = job
            request = job.sequence.request
            job.sequence.queued_s = asyncio.get_running_loop().time() - job.queued_at
            accepted = self._manager.add_request(
                list(request.prompt),
                request_id=job.id,
                max_new_tokens=request.max_tokens,
                streaming=True,
                eos_token_id=self.ends(request),
            )
            if accepted is None:
                if self.blocks:
                    self.blocks.withdraw(job.id)
                self._release(job)
                job.sequence.fail(self.failure() or "the engine is stopping")

    def _has_room(self, job: _Job) -> bool:
        """Return whether the request may run beside the others; if so, the blocks that it may need are promised to it."""
        counts = self.blocks is None or self._forward is None  # transformers' own pass reads at most as many blocks as exist
        if counts and not self._counted.admit(job.id, job.blocks):
            return False
        if self.blocks and not self.blocks.admit(job.id, job.claim, job.blocks):
            self._counted.withdraw(job.id)
            return False
        return True

    def _received(self, outputs: list[Any]) -> None:
        """The outputs of one step; called on the loop's thread."""
        for output in outputs:
            job = self._running.get(output.request_id)
            if job is None:
                # Inside transformers a cancellation can overtake its own request; it is ignored then.
                if not output.is_finished():
                    self._manager.cancel_request(output.request_id)
                continue
            fresh = output.generated_tokens[job.delivered :]
            scores = job.sampler.scores[job.delivered : job.delivered + len(fresh)] if job.sampler else []
            job.delivered += len(fresh)
            if output.is_finished():
                self._release(job)
            job.sequence.cached_tokens = job.claim.cached_tokens
            if output.error is not None:
                self._last_error = output.error
                job.sequence.fail(output.error)
            elif fresh and output.is_finished() and fresh[-1] in self.ends(job.sequence.request):
                job.sequence.end(fresh, scores)
            elif fresh:
                job.sequence.push(fresh, "length" if output.is_finished() else None, scores)
        self._admit()

    def _release(self, job: _Job) -> None:
        del self._running[job.id]
        del self._jobs[job.sequence]
        self._counted.withdraw(job.id)

    def _cancel(self, sequence: Sequence) -> None:
        job = self._jobs[sequence]
        if job.id in self._running:
            self._release(job)
            # Cancellations take effect at the start of a step, before new requests take their blocks.
            self._manager.cancel_request(job.id)
            self._admit()
        else:
            self._waiting.remove(job)
            del self._jobs[sequence]


class _CountedStep:
    """The blocks that running requests may need, where a shared block counts for each of its requests: transformers' own pass
    reads it once for each, and can read at most as many blocks in a step as the cache has.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<{self.used} of {self._capacity} blocks counted>"

    @property
    def used(self) -> int:
        return sum(self._blocks.values())

    def admit(self, request_id: str, blocks: int) -> bool:
        if self.used + blocks > self._capacity:
            return False
        self._blocks[request_id] = blocks
        return True

    def withdraw(self, request_id: str) -> None:
        """Remove a request that has ended, or was not accepted."""
        self._blocks.pop(request_id, None)
