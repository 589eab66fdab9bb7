"""The real engine: a model on transformers' continuous batching.

It loads the model, finds a way of computing it with the same answers as the plain model (`checks/selftest.py`), and serves it
that way (`batching.py`).
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from replica.cache.blocks import CacheCounts, CacheListener
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
    SetupError,
    TemplateOverride,
    counted,
)
from replica.torch_engine.batching import BatchRunner, Sizes
from replica.torch_engine.checkpoint import Checkpoint
from replica.torch_engine.checks import selftest
from replica.torch_engine.checks.positions import constant_until
from replica.torch_engine.checks.selftest import Mismatch, TrialRouter
from replica.torch_engine.device import default_kv_tokens, device_named, use_fastest_attention
from replica.torch_engine.llama import PackedLlama
from replica.torch_engine.loading import RandomWeights, load
from replica.torch_engine.patches import OutputRouter, message_of
from replica.torch_engine.sampling.grammar import Grammars
from replica.torch_engine.sampling.sampler import Sampler
from replica.torch_engine.tokenizer import ModelTokenizer, end_tokens

log = logging.getLogger(__name__)
PASSED = "self-test passed in %.1f s: the scores of %d tokens, cold, cached and batched, are the plain model's, with %s"


@dataclass(frozen=True, slots=True)
class ContinuousConfig:
    """How to run a model. Sizes in tokens, except `max_batch` (requests) and `threads`. 0: torch or the device decides."""

    device: str = "auto"
    dtype: str = "auto"
    kv_tokens: int = 0
    block_size: int = 16
    max_batch: int = 16
    batch_tokens: int = 512
    max_model_len: int = 0
    threads: int = 0
    cache_file: Path | None = None
    chat_template: str | None = None  # None: the model's own

    def sizes(self) -> Sizes:
        return Sizes(self.block_size, self.kv_tokens, self.batch_tokens, self.max_batch)


@dataclass(frozen=True, slots=True)
class ComputeMethod:
    """A way of computing a model: with our own forward pass or transformers', with one of its attentions, with or without
    shared prefixes.
    """

    own: bool
    attention: str
    share: bool = True

    def __str__(self) -> str:
        passes = "our own forward pass" if self.own else f"transformers' forward pass ({self.attention})"
        return passes if self.share else f"{passes} without a prefix cache"


def ways(own: bool, attention: str) -> Iterator[ComputeMethod]:
    """The ways of computing a model, the best one first. `attention`: transformers' choice for this model."""
    if own:
        yield ComputeMethod(own, attention)
    others = dict.fromkeys((attention, "sdpa" if attention.startswith("flash") else attention, "eager"))
    for share in (True, False):
        yield from (ComputeMethod(False, each, share) for each in others)


class ContinuousEngine:
    """A model folder, Hub id or configuration as an Engine. The constructor loads the model: seconds. `listeners` are called
    for each change of the cached blocks; `router`, `grammars` and `forward` make the parts that deliver outputs, constrain
    answers, and compute the models that `forward` supports.
    """

    def __init__(
        self,
        model: str | Path | RandomWeights,
        config: ContinuousConfig,
        listeners: Items[CacheListener] = (),
        *,
        router: Callable[..., OutputRouter] = OutputRouter,
        grammars: Callable[[Any, int, list[int]], Grammars | None] = Grammars.if_available,
        forward: type[PackedLlama] = PackedLlama,
    ) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if config.threads:
            torch.set_num_threads(config.threads)
        self._name, self._load = str(model), partial(load, model, config.dtype, device_named(config.device))
        tokenizer, self._model = self._load()
        self._tokenizer = ModelTokenizer(tokenizer, config.chat_template)
        use_fastest_attention(self._model)
        config = replace(config, kv_tokens=config.kv_tokens or default_kv_tokens(self._model, config.sizes().batching()))
        self._checkpoint = Checkpoint(config.cache_file, self._model, config.block_size) if config.cache_file else None
        self._config, self._sinks = config, [*listeners, *([self._checkpoint.contents] if self._checkpoint else [])]
        num_blocks, shape = config.sizes().num_blocks, self._model.config.get_text_config()
        capacity = num_blocks * config.block_size
        self._longest = _context(shape)
        if config.max_model_len > min(self._longest, capacity):
            log.warning("--max-model-len %d: there is room for %d tokens", config.max_model_len, min(self._longest, capacity))
        self._eos = end_tokens(self._model, tokenizer)
        self._info = EngineInfo(
            kind="transformers",
            context=min(capacity, config.max_model_len or capacity, self._longest),
            vocab_size=shape.vocab_size,
            block_size=config.block_size,
            num_blocks=num_blocks,
            longest_token=self._tokenizer.longest_token,
        )
        self._grammars = grammars(tokenizer, self._info.vocab_size, self._eos)
        self._make_router, self._make_forward = router, forward
        self._forward: PackedLlama | None = None
        self._emptied = False
        self._way: ComputeMethod | None = None
        self.batching = BatchRunner(self._model, None, config.sizes(), self._eos)  # `start` replaces it

    def __repr__(self) -> str:
        return f"<ContinuousEngine {self._way or 'not started'}, {self.batching!r}>"

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def prefix_caching(self) -> bool:
        return self.batching.blocks is not None

    @property
    def way(self) -> ComputeMethod | None:
        """The way of computing the model; None before the start."""
        return self._way

    async def start(self) -> None:
        """Begin to serve. Raises SetupError if no way computes the model correctly."""
        self._way = self._way or await self._right_way()
        sizes = replace(self._config.sizes(), share=self._way.share)
        self.batching = BatchRunner(self._model, self._forward, sizes, self._eos, self._sinks, self._make_router)
        await self.batching.start(self._checkpoint.restore if self._checkpoint else None)
        if self._checkpoint and not self.prefix_caching:
            log.warning("--cache-file has no effect: %s is served without a prefix cache", self._named())

    async def close(self) -> None:
        sound = await self.batching.stop()
        if self._checkpoint and self.batching.blocks and sound:
            await asyncio.to_thread(self._checkpoint.save, self.batching.blocks)

    async def _right_way(self) -> ComputeMethod:
        """The first way with the plain model's answers; the model is prepared for it. Raises SetupError."""
        text, clock = self._tokenizer.encode(selftest.TEXT, special=True), _Clock()
        try:
            with clock:
                expected = await asyncio.to_thread(selftest.expect, self._model, text, self._config.block_size, self._longest)
        except Exception as error:
            raise SetupError(f"cannot serve {self._named()}: the plain model fails: {message_of(error)}") from error
        reasons, reason = dict[ComputeMethod, Mismatch](), ""
        for way in ways(self._make_forward.supports(self._model), self._model.config._attn_implementation):
            if not way.share and reasons[replace(way, share=True)].cold:
                continue  # the mismatch did not come from the prefix cache
            try:
                await asyncio.to_thread(self._prepare, way)
                sizes = selftest.sizes(expected, self._config.block_size, way.share)
                with clock:
                    trial = BatchRunner(self._model, self._forward, sizes, self._eos, make_router=TrialRouter)
                    await selftest.check(trial, expected, self._model.dtype)
            except Mismatch as error:
                log.warning("self-test: not with %s: %s", way, error)
                reasons[way], reason = error, str(error)
            else:
                found = replace(way, share=trial.blocks is not None)
                log.info(PASSED, clock.seconds, selftest.TOKENS, found)
                return found
        raise SetupError(f"cannot serve {self._named()}: {selftest.known_reason(self._model) or reason}")

    def _prepare(self, way: ComputeMethod) -> None:
        """Prepare the model for this way. It is loaded again if our own pass has taken its weights. Raises Mismatch."""
        self._forward = None
        try:
            if way.own:
                self._emptied = True
                self._forward = self._make_forward(self._model)
            elif self._emptied:
                _, self._model = self._load()
                self._emptied = False
            if self._model.config._attn_implementation != way.attention:
                self._model.set_attn_implementation(way.attention)
        except (ValueError, RuntimeError, ImportError) as error:
            raise Mismatch(message_of(error), cold=True) from error

    def _named(self) -> str:
        return f"{self._name} ({type(self._model).__name__})"

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, special, counted(self._info.context))

    def encode_chat(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        end: PromptEnd = "answer",
        template: TemplateOverride | None = None,
    ) -> list[int]:
        return self._tokenizer.encode_chat(messages, tools, end, template or TemplateOverride(), counted(self._info.context))

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
        return self.batching.load()

    def cache_counts(self) -> CacheCounts:
        return self.batching.cache_counts()

    def failure(self) -> str | None:
        return self.batching.failure()

    async def reset_prefix_cache(self) -> bool:
        return await self.batching.reset_prefix_cache()

    def submit(self, request: EngineRequest) -> Sequence:
        """Accept a request. O(prompt). Raises PromptError beyond the context, where some models compute something else."""
        if len(request.prompt) + request.max_tokens > self._info.context:
            raise PromptError(f"prompt and max_tokens are more than the context of {self._info.context} tokens")
        grammar = self._grammars.start(request.grammar) if self._grammars and request.grammar else None
        return self.batching.submit(request, Sampler.if_needed(request, grammar, self.batching.ends(request), self._eos))


class _Clock:
    """Adds up the seconds spent inside."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.seconds -= time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()


def _context(config: Any) -> int:
    """The most tokens that this model can read."""
    most: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
    constant, kind = constant_until(config) or (most, "")
    if constant < most:
        log.warning(
            "the context is limited to %d of %d tokens: beyond, this model's rotary positions (%s) change with the length of a "
            "text, and cached keys would be wrong",
            constant,
            most,
            kind,
        )
    return min(most, constant)
