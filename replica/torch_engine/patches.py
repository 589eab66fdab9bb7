"""Replaced parts of transformers' continuous batching: delivery of outputs, sampling of tokens, isolation of failing steps,
the block ledger. `batching.py` describes how they work together.

Failures. A step that raises (out of memory, for example) fails the requests of its batch: their blocks are free again, no
block of the step is shared, and the next step runs. Scores that are not numbers, and a sampler or a grammar that raises on the
host, fail one request. Errors in transformers' code around a step, and an accelerator error (after which it only reports
errors), end the engine's thread; `/health` reports that.
"""

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replica.cache.blocks import CacheListener
from replica.engine import SetupError
from replica.torch_engine.paged import Claim, PagedBlocks, check_signatures
from replica.torch_engine.sampling.rows import draw_rows
from replica.torch_engine.sampling.sampler import Sampler

log = logging.getLogger(__name__)
EAGER: Mapping[str, tuple[str, ...]] = {"update": ("key_states", "value_states", "layer_idx", "kwargs")}


class PatchJob(Protocol):
    """A running request, as far as a step needs it."""

    @property
    def sampler(self) -> Sampler | None: ...

    @property
    def claim(self) -> Claim: ...


class OutputRouter:
    """Delivers outputs to the event loop and samples each request's tokens. The methods run in the engine's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, received: Callable[[list[Any]], None], running: Mapping[str, PatchJob]
    ) -> None:
        self._loop, self._received, self._running = loop, received, running

    def install(self, manager: Any) -> None:
        """Call before the manager's thread starts."""
        manager.output_router = self  # PATCHED: outputs; deliver, deliver_batch and fail_and_deliver below
        manager.warmup()  # creates the batch processor, which keeps the router set before
        processor = manager.batch_processor
        processor.inputs_and_outputs.compute_stream = None  # PATCHED: one stream, see replica/torch_engine/device.py
        processor.model_runner._sample = partial(self.sample, processor.inputs_and_outputs)  # PATCHED: sampling
        isolate_failures(processor, self.step_failed)

    def step_failed(self) -> None:
        """Called while the error is handled."""
        log.exception("a step failed, and the requests in it")

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._loop.call_soon_threadsafe(self._received, outputs)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.status, state.error = RequestStatus.FAILED, message_of(error)
        self.deliver(state.to_generation_output())

    def draws_together(self, scores: torch.Tensor) -> bool:
        """Return whether all rows are drawn together: on a GPU. A CPU is 1.4 to 25 times as fast with one row after the other,
        because `drawing.py` sorts little.
        """
        return bool(scores.is_cuda)

    def sample(self, batch: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Sample per request, while transformers has one configuration for all. One row per request that gets a token."""
        best, chosen = scores[0].max(dim=-1)
        ids = [future.state.request_id for future in batch.requests_in_batch if future.has_new_token]
        jobs = [(row, job) for row, each in enumerate(ids) if (job := self._running.get(each))]
        samplers = {row: job.sampler for row, job in jobs if job.sampler is not None}
        scores_of_best = best.tolist()
        sound = {row: each for row, each in samplers.items() if math.isfinite(scores_of_best[row])}
        drawn = _draw_together(scores[0], sound) if self.draws_together(scores) else {}
        rest = [row for row in samplers if row not in drawn]
        tables = dict(zip(rest, scores[0, rest].cpu(), strict=True)) if rest else {}  # one transfer for all
        if drawn:
            chosen[list(drawn)] = torch.tensor(list(drawn.values()), device=chosen.device)
        for row, job in jobs:
            try:
                _check_score(scores_of_best[row])
                if row in tables:
                    chosen[row] = samplers[row].draw(tables[row])
            except Exception as error:  # noqa: BLE001 - after any error the other requests continue
                job.claim.tainted = True
                # This step's output for the request arrives later, finds no request, and is cancelled.
                self.deliver(GenerationOutput(ids[row], error=message_of(error), status=RequestStatus.FAILED))
        output_ids[0, : len(chosen)].copy_(chosen)


def make_manager(model: Any, batching: ContinuousBatchingConfig, eos: list[int], router: OutputRouter) -> Any:
    """transformers' manager, patched, not started yet. Raises SetupError."""
    generation = GenerationConfig(do_sample=False, eos_token_id=eos)
    check_signatures(PagedAttentionCache, "PagedAttentionCache", EAGER)
    ALL_ATTENTION_FUNCTIONS.register("paged|eager", _paged_eager)  # PATCHED: eager attention
    try:
        manager = model.init_continuous_batching(generation, batching)
        router.install(manager)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise SetupError(
            f"there is no memory for --kv-tokens {(batching.num_blocks or 0) * batching.page_size}: {error}"
        ) from error
    return manager


def _paged_eager(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any) -> Any:
    """A model's own eager attention over paged keys. transformers' paged eager attention is the same for all models and lacks
    model-specific parts: a cap on scores (Gemma 2), for example.
    """
    cache = named.pop("cache", None)
    if cache is None:
        raise ValueError("its layers do not pass the paged cache to their attention")
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=named)
    own = sys.modules[type(module).__module__].eager_attention_forward
    return own(module, query, key, value, attention_mask, **named)


def install_blocks(
    manager: Any, capacity: int, listeners: Items[CacheListener], changed: Callable[[], None]
) -> PagedBlocks | None:
    """Install our block ledger; None if the model's blocks cannot be shared. changed: see PagedBlocks."""
    cache = manager.batch_processor.cache
    if not PagedBlocks.can_serve(cache):
        return None
    blocks = PagedBlocks(cache, capacity, listeners, changed=changed)
    blocks.install(cache)  # PATCHED: blocks
    return blocks


def memory_usage(manager: Any) -> float:
    """The share of KV memory that requests hold, 0 to 1, if transformers manages its blocks. Callable from any thread."""
    processor = None if manager is None else manager.batch_processor  # None before the start and after the end
    free: float = 1.0 if processor is None else processor.cache.compute_free_capacity()
    return 1 - free


def reset(manager: Any, blocks: PagedBlocks, timeout_s: float) -> bool:
    """Drop the cache once cancelled requests are gone and the engine's thread has paused; False if it is in use."""
    blocks.unused.wait(timeout_s)
    with manager.pause():
        return blocks.reset()


def isolate_failures(processor: Any, failed: Callable[[], None]) -> None:
    """PATCHED: keep transformers' thread running when a step raises. `failed` is called first."""
    step = processor._generation_step

    def isolated(model: Any) -> None:
        try:
            step(model)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - after any error the next step runs
            failed()
            processor.handle_batch_error(error)
            processor.inputs_and_outputs.requests_in_batch = []  # so that the update that follows finds no requests

    processor._generation_step = isolated


def message_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _draw_together(scores: torch.Tensor, samplers: Mapping[int, Sampler]) -> dict[int, int]:
    """The tokens of the rows that need only their scores, drawn on the scores' device."""
    shapes = {row: shape for row, each in samplers.items() if (shape := each.shape)}
    if not shapes:
        return {}
    uniforms = [samplers[row].uniform() for row in shapes]
    return dict(zip(shapes, draw_rows(scores[list(shapes)], list(shapes.values()), uniforms), strict=True))


def _check_score(best: float) -> None:
    """Raise if a score is not a number: then the best score is none either."""
    if not math.isfinite(best):
        raise ArithmeticError("the model's scores for the next token are not numbers")
