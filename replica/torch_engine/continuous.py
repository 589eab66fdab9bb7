"""The real engine: transformers' continuous batching with paged attention and prefix sharing.

Theory of operation. transformers' `ContinuousBatchingManager` runs the model in a thread of its own: each step it
takes new requests, schedules up to `batch_tokens` of prefill and decode, runs the model and delivers tokens. What
depends on its internals is marked PATCHED: where outputs go and how tokens are sampled (`patches.py`), which request owns
which block (`paged.py`), and the forward pass of some models (`attention.py`).

Admission is ours. A request is handed over only when its worst case (prompt and max_tokens) fits into the blocks that
no running request may still need. Otherwise transformers would preempt requests, and after a preemption it accepts no
new ones until one finishes, which a cancelled one never does. The queue is first come, first served.

Threads: everything here runs on the event loop's thread.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig

from replica.cache.blocks import CacheCounts, CacheListener
from replica.cache.prefix import Prefix
from replica.engine import (
    Detokenizer,
    EngineInfo,
    EngineLoad,
    Grammar,
    Message,
    PromptEnd,
    Request,
    Sequence,
    TemplateOverride,
)
from replica.torch_engine import attention
from replica.torch_engine.checkpoint import Checkpoint
from replica.torch_engine.device import batching_config, default_kv_tokens, device_named, use_fastest_attention
from replica.torch_engine.grammar import Grammars
from replica.torch_engine.llama import PackedLlama
from replica.torch_engine.loading import RandomWeights, load
from replica.torch_engine.paged import Claim, PagedBlocks
from replica.torch_engine.patches import OutputRouter, install_blocks, make_manager, message_of, reset
from replica.torch_engine.sampling import Sampler
from replica.torch_engine.tokenizer import ModelTokenizer, end_tokens

log = logging.getLogger(__name__)
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ContinuousConfig:
    """How to run a model. Sizes in tokens, except `max_batch` (requests) and `threads`. 0: torch or the device decides."""

    device: str = "auto"
    dtype: str = "bfloat16"
    kv_tokens: int = 0
    block_size: int = 16
    max_batch: int = 16
    batch_tokens: int = 512
    max_model_len: int = 0
    threads: int = 0
    cache_file: Path | None = None
    chat_template: str | None = None  # None: the model's own


@dataclass(slots=True, eq=False)
class _Job:
    id: str
    sequence: Sequence
    blocks: int
    sampler: Sampler | None
    claim: Claim
    queued_at: float
    delivered: int = 0  # tokens


class ContinuousEngine:
    """A model folder, Hub id or configuration as an Engine. The constructor loads the model: seconds. `listeners` are called
    for each change of the cached blocks; `router` and `grammars` make the parts that deliver outputs and constrain answers."""

    def __init__(
        self,
        model: str | Path | RandomWeights,
        config: ContinuousConfig,
        listeners: Items[CacheListener] = (),
        *,
        router: Callable[..., OutputRouter] = OutputRouter,
        grammars: Callable[[Any, int, list[int]], Grammars | None] = Grammars.if_available,
    ) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if config.threads:
            torch.set_num_threads(config.threads)
        tokenizer, self._model = load(model, config.dtype, device_named(config.device))
        self._tokenizer = ModelTokenizer(tokenizer, config.chat_template)
        use_fastest_attention(self._model)
        config = replace(config, kv_tokens=config.kv_tokens or default_kv_tokens(self._model, _batching(config)))
        self._checkpoint = Checkpoint(config.cache_file, self._model, config.block_size) if config.cache_file else None
        self._forward = PackedLlama.if_supported(self._model)  # after the checkpoint has hashed the weights
        self._config, self._sinks = config, [*listeners, *([self._checkpoint.contents] if self._checkpoint else [])]
        num_blocks = config.kv_tokens // config.block_size
        capacity = num_blocks * config.block_size
        limits = [capacity, self._model.config.max_position_embeddings, config.max_model_len or capacity]
        self._eos = end_tokens(self._model, tokenizer)
        self._info = EngineInfo(
            kind="transformers",
            context=min(limits),
            vocab_size=self._model.config.vocab_size,
            block_size=config.block_size,
            num_blocks=num_blocks,
        )
        self._grammars = grammars(tokenizer, self._info.vocab_size, self._eos)
        self._make_router = router
        self._manager: Any = None
        self._blocks: PagedBlocks | None = None  # None for a model whose blocks cannot be shared
        self._ids = itertools.count()
        self._waiting: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}
        self._jobs: dict[Sequence, _Job] = {}
        self._reserved = 0  # blocks that running requests may need
        self._last_error: str | None = None

    def __repr__(self) -> str:
        total = self._info.num_blocks
        return (
            f"<ContinuousEngine {len(self._running)} running, {len(self._waiting)} waiting, {self._reserved}/{total} reserved>"
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self) -> None:
        self._last_error = None
        router = self._make_router(asyncio.get_running_loop(), self._received, self._running)
        batching = _batching(self._config)
        self._manager = await asyncio.to_thread(make_manager, self._model, batching, self._eos, router)
        self._blocks = install_blocks(self._manager, self._info.num_blocks, self._sinks)
        if self._forward:
            attention.install(self._manager, self._forward)
        if self._checkpoint and self._blocks:
            await asyncio.to_thread(self._checkpoint.restore, self._blocks)
        self._manager.start()

    async def close(self) -> None:
        for sequence in list(self._jobs):
            sequence.fail("the replica is shutting down")
        if self._manager is None:
            return
        sound = self.failure() is None
        await asyncio.to_thread(self._manager.stop, block=True, timeout=STOP_TIMEOUT_S, hard_stop=True)
        if self._checkpoint and self._blocks and sound and not self._manager.is_running():
            await asyncio.to_thread(self._checkpoint.save, self._blocks)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, special)

    def encode_chat(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        end: PromptEnd = "answer",
        template: TemplateOverride | None = None,
    ) -> list[int]:
        return self._tokenizer.encode_chat(messages, tools, end, template or TemplateOverride())

    def decode(self, tokens: list[int], special: bool = False) -> str:
        return self._tokenizer.decode(tokens, special)

    def detokenizer(self, special: bool = False) -> Detokenizer:
        return self._tokenizer.detokenizer(special)

    def token_strings(self, tokens: list[int]) -> list[str]:
        return self._tokenizer.token_strings(tokens)

    def grammar_error(self, grammar: Grammar) -> str | None:
        if self._grammars is None:
            return "llguidance is not installed here (pip install llguidance), or cannot read this model's vocabulary."
        return self._grammars.error(grammar)

    def load(self) -> EngineLoad:
        used = self._blocks.ledger.used if self._blocks else self._reserved
        return EngineLoad(len(self._running), len(self._waiting), used / self._info.num_blocks)

    def cache_counts(self) -> CacheCounts:
        return self._blocks.ledger.counts() if self._blocks else CacheCounts()

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
        return self._blocks is None or await asyncio.to_thread(reset, self._manager, self._blocks, STOP_TIMEOUT_S)

    def submit(self, request: Request) -> Sequence:
        """O(prompt)."""
        sequence = Sequence(request, self._cancel)
        blocks = -(-(len(request.prompt) + request.max_tokens) // self._info.block_size)
        claim = Claim(Prefix(request.prompt, self._info.block_size, request.scope), request.keep_s)
        grammar = self._grammars.start(request.grammar) if self._grammars and request.grammar else None
        sampler = Sampler.if_needed(request, grammar, self._ends(request))
        job = _Job(f"r{next(self._ids)}", sequence, blocks, sampler, claim, asyncio.get_running_loop().time())
        self._jobs[sequence] = job
        self._waiting.append(job)
        self._admit()
        return sequence

    def _admit(self) -> None:
        """Hand over requests from the head of the queue while there is room."""
        while self._waiting and len(self._running) < self._config.max_batch:
            job = self._waiting[0]
            if self._reserved + job.blocks > self._info.num_blocks:
                return
            self._waiting.popleft()
            self._reserved += job.blocks
            self._running[job.id] = job
            request = job.sequence.request
            job.sequence.queued_s = asyncio.get_running_loop().time() - job.queued_at
            if self._blocks:
                self._blocks.register(job.id, job.claim)
            accepted = self._manager.add_request(
                list(request.prompt),
                request_id=job.id,
                max_new_tokens=request.max_tokens,
                streaming=True,
                eos_token_id=self._ends(request),
            )
            if accepted is None:
                if self._blocks:
                    self._blocks.unregister(job.id)
                self._release(job)
                job.sequence.fail(self.failure() or "the engine is stopping")

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
            elif fresh and output.is_finished() and fresh[-1] in self._ends(job.sequence.request):
                job.sequence.end(fresh, scores)
            elif fresh:
                job.sequence.push(fresh, "length" if output.is_finished() else None, scores)
        self._admit()

    def _ends(self, request: Request) -> list[int]:
        """The tokens that end this request's answer."""
        return [*([] if request.ignore_eos else self._eos), *request.stop_tokens]

    def _release(self, job: _Job) -> None:
        del self._running[job.id]
        del self._jobs[job.sequence]
        self._reserved -= job.blocks

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


def _batching(config: ContinuousConfig) -> ContinuousBatchingConfig:
    return batching_config(config.block_size, config.kv_tokens, config.batch_tokens, config.max_batch)
