"""Replaced parts of transformers' continuous batching: where outputs go, how tokens are sampled, what a failing step ends,
which block ledger is used. `continuous.py` describes how they work together.

Failures. A step that raises (there was no memory for it, say) fails the requests of its batch: their blocks are free again,
nothing of the step is shared, and the next step runs. Scores that are not numbers, and a sampler or a grammar that raises, fail
one request. What transformers does around a step, and an accelerator that reports an error (it answers only with errors from
then on), end the engine's thread; `/health` reports that.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from replica.cache.blocks import CacheListener
from replica.engine import SetupError
from replica.torch_engine.paged import Claim, PagedBlocks
from replica.torch_engine.sampling import Sampler

log = logging.getLogger(__name__)


class Job(Protocol):
    """A running request as a step needs it."""

    @property
    def sampler(self) -> Sampler | None: ...

    @property
    def claim(self) -> Claim: ...


class OutputRouter:
    """Delivers outputs to the event loop and samples each request's tokens. The methods run in the engine's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, received: Callable[[list[Any]], None], running: Mapping[str, Job]
    ) -> None:
        self._loop, self._received, self._running = loop, received, running

    def install(self, manager: Any) -> None:
        """Call before the manager's thread starts."""
        manager.output_router = self  # PATCHED: outputs; deliver, deliver_batch and fail_and_deliver below
        manager.warmup()  # creates the batch processor, which keeps the router set before
        processor = manager.batch_processor
        processor.inputs_and_outputs.compute_stream = None  # PATCHED: one stream, see replica/torch_engine/device.py
        processor.model_runner._sample = partial(self.sample, processor.inputs_and_outputs)  # PATCHED: sampling
        isolate_failures(processor)

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._loop.call_soon_threadsafe(self._received, outputs)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.status, state.error = RequestStatus.FAILED, message_of(error)
        self.deliver(state.to_generation_output())

    def sample(self, batch: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Samples per request; transformers has one configuration for all. One row per request that gets a token."""
        best, chosen = scores[0].max(dim=-1)
        ids = [future.state.request_id for future in batch.requests_in_batch if future.has_new_token]
        for row, (request_id, score) in enumerate(zip(ids, best.tolist(), strict=False)):
            job = self._running.get(request_id)
            if job is None:
                continue
            try:
                _check_score(score)
                if job.sampler is not None:
                    chosen[row] = job.sampler.draw(scores[0, row].cpu())
            except Exception as error:  # noqa: BLE001 - whatever it is, the other requests continue
                job.claim.tainted = True
                # This step's output for it comes later, finds no request, and is cancelled.
                self.deliver(GenerationOutput(request_id, error=message_of(error), status=RequestStatus.FAILED))
        output_ids[0, : len(chosen)].copy_(chosen)


def make_manager(model: Any, batching: ContinuousBatchingConfig, eos: list[int], router: OutputRouter) -> Any:
    """transformers' manager, patched, not started yet. Raises SetupError."""
    generation = GenerationConfig(do_sample=False, eos_token_id=eos)
    try:
        manager = model.init_continuous_batching(generation, batching)
        router.install(manager)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise SetupError(
            f"there is no memory for --kv-tokens {(batching.num_blocks or 0) * batching.page_size}: {error}"
        ) from error
    return manager


def install_blocks(manager: Any, capacity: int, listeners: Items[CacheListener]) -> PagedBlocks | None:
    """Install our block ledger; None if the model's blocks cannot be shared."""
    cache = manager.batch_processor.cache
    if not PagedBlocks.can_serve(cache):
        log.warning("this model has layers that attend to a sliding window: it is served without a prefix cache")
        return None
    blocks = PagedBlocks(cache, capacity, listeners)
    blocks.install(cache)  # PATCHED: blocks
    return blocks


def reset(manager: Any, blocks: PagedBlocks, timeout_s: float) -> bool:
    """Drop the cache, after cancelled requests are gone and the engine's thread has paused; False if it is in use."""
    blocks.unused.wait(timeout_s)
    with manager.pause():
        return blocks.ledger.clear()


def isolate_failures(processor: Any) -> None:
    """PATCHED: transformers ends its thread when a step raises."""
    step = processor._generation_step

    def isolated(model: Any) -> None:
        try:
            step(model)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            log.exception("a step failed, and the requests in it")
            processor.handle_batch_error(error)
            processor.inputs_and_outputs.requests_in_batch = []  # so that the update that follows finds no requests

    processor._generation_step = isolated


def message_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _check_score(best: float) -> None:
    """If any score of a token is not a number, neither is the best one."""
    if not math.isfinite(best):
        raise ArithmeticError("the model's scores for the next token are not numbers")
