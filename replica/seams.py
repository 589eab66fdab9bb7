"""What is put in the place of parts of transformers' continuous batching: where outputs go, how tokens are sampled, which
block ledger there is. `replica/continuous.py` says how they work together."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from replica.blocks import Sink
from replica.engine import SetupError
from replica.failures import check_score, message_of, survive
from replica.paged import Claim, PagedBlocks
from replica.sampling import Sampler

log = logging.getLogger(__name__)


class Job(Protocol):
    """What a step has to know of a request."""

    @property
    def sampler(self) -> Sampler | None: ...

    @property
    def claim(self) -> Claim: ...


class Seams:
    """Outputs and sampling. The methods run in the engine's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, received: Callable[[list[Any]], None], running: Mapping[str, Job]
    ) -> None:
        self._loop, self._received, self._running = loop, received, running

    def install(self, manager: Any) -> None:
        """Before the manager's thread starts."""
        manager.output_router = self  # SEAM: outputs; deliver, deliver_batch and fail_and_deliver below
        manager.warmup()  # creates the batch processor, which keeps the router it finds
        processor = manager.batch_processor
        processor.inputs_and_outputs.compute_stream = None  # SEAM: one stream, see replica/device.py
        processor.model_runner._sample = partial(self._sample, processor.inputs_and_outputs)  # SEAM: sampling
        survive(processor)  # SEAM: steps

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._loop.call_soon_threadsafe(self._received, outputs)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.status, state.error = RequestStatus.FAILED, message_of(error)
        self.deliver(state.to_generation_output())

    def _sample(self, batch: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Each request's own sampling; transformers has one for all. Rows follow the requests that get a token."""
        best, chosen = scores[0].max(dim=-1)
        ids = [future.state.request_id for future in batch.requests_in_batch if future.has_new_token]
        for row, (request_id, score) in enumerate(zip(ids, best.tolist(), strict=False)):
            job = self._running.get(request_id)
            if job is None:
                continue
            try:
                check_score(score)
                if job.sampler is not None:
                    chosen[row] = job.sampler.draw(scores[0, row].cpu())
            except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
                job.claim.spoilt = True
                # When this step's output comes after it, nobody wants that any more, and it is cancelled.
                self.deliver(GenerationOutput(request_id, error=message_of(error), status=RequestStatus.FAILED))
        output_ids[0, : len(chosen)].copy_(chosen)


def make_manager(model: Any, batching: ContinuousBatchingConfig, eos: list[int], seams: Seams) -> Any:
    """transformers' own, changed, and not started yet. Raises SetupError."""
    generation = GenerationConfig(do_sample=False, eos_token_id=eos)
    try:
        manager = model.init_continuous_batching(generation, batching)
        seams.install(manager)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise SetupError(
            f"there is no memory for --kv-tokens {(batching.num_blocks or 0) * batching.page_size}: {error}"
        ) from error
    return manager


def take_blocks(manager: Any, capacity: int, sinks: Items[Sink]) -> PagedBlocks | None:
    """Put our ledger in; None where blocks cannot be shared."""
    cache = manager.batch_processor.cache
    if not PagedBlocks.can_serve(cache):
        log.warning("this model has layers that attend to a sliding window: it is served without a prefix cache")
        return None
    blocks = PagedBlocks(cache, capacity, sinks)
    blocks.install(cache)  # SEAM: blocks
    return blocks


def reset(manager: Any, blocks: PagedBlocks, timeout_s: float) -> bool:
    """Waits for cancelled requests to be gone, and for the engine's thread to pause."""
    blocks.unused.wait(timeout_s)
    with manager.pause():
        return blocks.ledger.clear()
