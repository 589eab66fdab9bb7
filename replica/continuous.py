"""The real engine: transformers' continuous batching with paged attention and prefix sharing.

Theory of operation. transformers' `ContinuousBatchingManager` runs the model in a thread of its own: each step it
takes new requests, schedules up to `batch_tokens` of prefill and decode, runs the model and delivers tokens. What
touches its internals is marked SEAM: where outputs go and how tokens are sampled, in `replica/seams.py`, which block holds
what, in `replica/paged.py`, and the forward pass of some models, in `replica/attention.py`.

Admission is ours. A request is handed over only when its worst case (prompt and max_tokens) fits into the blocks that
no other running request may need. transformers would otherwise preempt requests, and after a preemption it takes no
new ones until one finishes, which a cancelled one never does. The line is first come, first served.

Threads: everything here runs on the event loop's thread.
"""

import asyncio
import inspect
import itertools
import logging
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers
from transformers import ContinuousBatchingConfig

from replica import attention
from replica.blocks import CacheCounts, Sink
from replica.checkpoint import Checkpoint
from replica.device import batching_config, default_kv_tokens, device_named, use_fastest_attention
from replica.endings import end_tokens
from replica.engine import EngineInfo, Grammar, Load, Message, PromptError, Request, Sequence, Tail, Template
from replica.failures import message_of
from replica.guided import Grammars
from replica.llama import Llama
from replica.loading import RandomWeights, load
from replica.paged import Claim, PagedBlocks
from replica.prefix import Prefix
from replica.sampling import Sampler
from replica.seams import Seams, make_manager, reset, take_blocks

log = logging.getLogger(__name__)
STOP_TIMEOUT_S = 30.0
OWN_PARAMETERS = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}


@dataclass(frozen=True, slots=True)
class ContinuousConfig:
    """How to run a model. Sizes in tokens but for `max_batch` (requests) and `threads`. 0: torch or the device decides."""

    device: str = "auto"
    dtype: str = "bfloat16"
    kv_tokens: int = 0
    block_size: int = 16
    max_batch: int = 16
    batch_tokens: int = 512
    max_model_len: int = 0
    threads: int = 0
    cache_file: Path | None = None
    chat_template: str | None = None  # in the place of the model's own


@dataclass(slots=True, eq=False)
class _Job:
    id: str
    sequence: Sequence
    blocks: int
    sampler: Sampler | None
    claim: Claim
    came_at: float
    seen: int = 0


class ContinuousEngine:
    """A model folder, Hub id or shape as an Engine. The constructor loads the model: seconds. `sinks` hear of cached blocks."""

    def __init__(self, model: str | Path | RandomWeights, config: ContinuousConfig, sinks: Items[Sink] = ()) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if config.threads:
            torch.set_num_threads(config.threads)
        self._tokenizer, self._model = load(model, config.dtype, device_named(config.device))
        use_fastest_attention(self._model)
        config = replace(config, kv_tokens=config.kv_tokens or default_kv_tokens(self._model, _batching(config)))
        if config.chat_template is not None:
            self._tokenizer.chat_template = config.chat_template
        self._checkpoint = Checkpoint(config.cache_file, self._model, config.block_size) if config.cache_file else None
        self._forward = Llama.of(self._model)  # after the checkpoint has seen the weights
        self._config, self._sinks = config, [*sinks, *([self._checkpoint.contents] if self._checkpoint else [])]
        num_blocks = config.kv_tokens // config.block_size
        capacity = num_blocks * config.block_size
        limits = [capacity, self._model.config.max_position_embeddings, config.max_model_len or capacity]
        self._eos = end_tokens(self._model, self._tokenizer)
        self._info = EngineInfo(
            kind="transformers",
            context=min(limits),
            vocab_size=self._model.config.vocab_size,
            block_size=config.block_size,
            num_blocks=num_blocks,
        )
        self._grammars = Grammars.of(self._tokenizer, self._info.vocab_size, self._eos)
        self._manager: Any = None
        self._blocks: PagedBlocks | None = None  # none for a model whose blocks cannot be shared
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
        seams = Seams(asyncio.get_running_loop(), self._received, self._running)
        batching = _batching(self._config)
        self._manager = await asyncio.to_thread(make_manager, self._model, batching, self._eos, seams)
        self._blocks = take_blocks(self._manager, self._info.num_blocks, self._sinks)
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
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def encode_chat(
        self, messages: list[Message], tools: list[Any] | None, tail: Tail = "answer", template: Template | None = None
    ) -> list[int]:
        template = template or Template()
        if taken := OWN_PARAMETERS & template.variables.keys():
            raise PromptError(f"chat_template_kwargs are the template's, and may not set {', '.join(sorted(taken))}")
        options = {**template.variables, "chat_template": template.text, "tokenize": True, "return_dict": False}
        options |= {"add_generation_prompt": tail == "answer", "continue_final_message": tail == "open"}
        try:
            ids = self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise PromptError(str(error)) from error
        return list(ids)

    def decode(self, tokens: list[int], special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def token_strings(self, tokens: list[int]) -> list[str]:
        # A vocabulary can be larger than the tokenizer's: what is beyond has no text.
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(tokens)]

    def grammar_error(self, grammar: Grammar) -> str | None:
        if self._grammars is None:
            return "llguidance is not installed here (pip install llguidance), or cannot read this model's vocabulary."
        return self._grammars.error(grammar)

    def load(self) -> Load:
        used = self._blocks.ledger.used if self._blocks else self._reserved
        return Load(len(self._running), len(self._waiting), used / self._info.num_blocks)

    def cache_counts(self) -> CacheCounts:
        return self._blocks.ledger.counts() if self._blocks else CacheCounts()

    def failure(self) -> str | None:
        if self._manager is None:
            return None
        # Denials begin before requests are failed, so nobody is told of a failure by an engine that calls itself healthy.
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
        guide = self._grammars.guide(request.grammar) if self._grammars and request.grammar else None
        sampler = Sampler.of(request, guide, self._ends(request))
        job = _Job(f"r{next(self._ids)}", sequence, blocks, sampler, claim, asyncio.get_running_loop().time())
        self._jobs[sequence] = job
        self._waiting.append(job)
        self._admit()
        return sequence

    def _admit(self) -> None:
        """Hand over the first of the line, as long as there is room."""
        while self._waiting and len(self._running) < self._config.max_batch:
            job = self._waiting[0]
            if self._reserved + job.blocks > self._info.num_blocks:
                return
            self._waiting.popleft()
            self._reserved += job.blocks
            self._running[job.id] = job
            request = job.sequence.request
            job.sequence.queued_s = asyncio.get_running_loop().time() - job.came_at
            if self._blocks:
                self._blocks.expect(job.id, job.claim)
            accepted = self._manager.add_request(
                list(request.prompt),
                request_id=job.id,
                max_new_tokens=request.max_tokens,
                streaming=True,
                eos_token_id=self._ends(request),
            )
            if accepted is None:
                if self._blocks:
                    self._blocks.forget(job.id)
                self._release(job)
                job.sequence.fail(self.failure() or "the engine is stopping")

    def _received(self, outputs: list[Any]) -> None:
        """Outputs of one step, in the loop's thread."""
        for output in outputs:
            job = self._running.get(output.request_id)
            if job is None:
                # A cancellation can overtake its own request inside transformers, which then ignores it.
                if not output.is_finished():
                    self._manager.cancel_request(output.request_id)
                continue
            fresh = output.generated_tokens[job.seen :]
            scores = job.sampler.scores[job.seen : job.seen + len(fresh)] if job.sampler else []
            job.seen += len(fresh)
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
        """The tokens that end its answer."""
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
