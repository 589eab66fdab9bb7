"""What the real engine survives.

A step that raises (there was no memory for it, say) fails the requests of its batch: their blocks are free again, nothing of
the step is shared, and the next step is another one's. Scores that are no numbers, and a sampler or a grammar that raises,
fail one request. What transformers does around a step, and an accelerator that reports an error (it answers nothing but
errors from then on), end the engine's thread; then `/health` says so.
"""

import logging
import math
from typing import Any

import torch

log = logging.getLogger(__name__)


def survive(processor: Any) -> None:
    """SEAM: transformers ends its thread when a step raises."""
    step = processor._generation_step

    def surviving(model: Any) -> None:
        try:
            step(model)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            log.exception("a step failed, and the requests in it")
            processor.handle_batch_error(error)
            processor.inputs_and_outputs.requests_in_batch = []  # so that the update which follows finds nobody

    processor._generation_step = surviving


def check_score(best: float) -> None:
    """The best score of a token is no number if any other's is none."""
    if not math.isfinite(best):
        raise ArithmeticError("the model's scores for the next token are not numbers")


def message_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
