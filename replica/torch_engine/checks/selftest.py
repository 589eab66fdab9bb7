"""The self-test: before a model serves, short answers of the engine are compared with plain `model(ids)`.

Theory of operation. The plain model, without a cache and before any part of it is replaced, reads some texts at once
(`expect`) and so scores every token of their ends. The engine gets their beginnings as prompts, and a sampler that draws the
known tokens one by one (`_DictatedSampler`): its scores have to be the plain model's. One text is computed cold, in several
chunks and across blocks; its beginning again from the prefix cache; and then beside another text. So one plain pass is enough
for each text, and a tie between tokens cannot make the answers diverge.

A row of scores is right if its error (root mean square) is small beside the spread of the plain model's scores, and its
best token is the plain model's or tied with it. In 16-bit types some rows may be wrong: rounding can make a router choose
another expert. Wrong positions, keys of another request or a missing part of the attention show in all rows.
"""

import asyncio
import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch

from replica.engine import EngineError, EngineRequest, NewTokens, SetupError
from replica.torch_engine.batching import BatchRunner, Sizes
from replica.torch_engine.patches import OutputRouter, message_of
from replica.torch_engine.sampling.sampler import Sampler

log = logging.getLogger(__name__)
ANSWER, AGAIN, BESIDE = 12, 4, 8  # tokens of an answer: cold; from the cache, alone; from the cache, beside another text
TOKENS = ANSWER + AGAIN + 2 * BESIDE
CHUNK = 32  # tokens of a step
EDGE = 256  # a sliding window of up to this many tokens is crossed
TIMEOUT_S = 600.0
ERROR = {torch.float32: 1e-3, torch.float16: 0.15, torch.bfloat16: 0.25}  # of the spread; SmolLM2 in bfloat16: 0.03 to 0.11
OFF = {torch.float32: 0.0}  # the share of rows that may be wrong
OFF_16_BITS = 0.25
TEXT = """The harbour of the old town lies open to the north, and in winter the wind throws the water over the wall. Anna
counted 17 boats that morning: three were painted green, one had lost its mast in 1962, and the others belonged to her uncle.
"Will they sail today?" she asked. Nobody knew. A clerk wrote the names of the crews into a list, added up the barrels (4 x 25 =
100) and went home before it began to rain. Later, when the lamps were lit, somebody sang of a king who had sold his crown."""


@dataclass(frozen=True, slots=True)
class ExpectedScores:
    """A text in two parts, and the plain model's scores for each token of the second."""

    prompt: list[int]
    answer: list[int]
    scores: torch.Tensor


class Mismatch(Exception):
    """The engine's answers differ from the plain model's, or it has none; the message states the reason. `cold`: the mismatch
    occurred without the prefix cache.
    """

    def __init__(self, reason: str, cold: bool) -> None:
        super().__init__(reason)
        self.cold = cold


def expect(model: Any, ids: Items[int], block_size: int, context: int) -> list[ExpectedScores]:
    """The plain model's scores for a long and a short text. `ids`: the tokens of a text. Raises the model's errors."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    length = max(2 * block_size if block_size <= CHUNK else block_size, CHUNK) + 5
    length = max(length, window + 5 if window <= EDGE else 0)
    shortened = [max(1, min(most, context - ANSWER)) for most in (length, 7)]
    return [_expected(model, [*ids[at:], *ids[:at]], most) for at, most in zip((0, len(ids) // 2), shortened, strict=True)]


def _expected(model: Any, ids: Items[int], length: int) -> ExpectedScores:
    text = [ids[at % len(ids)] for at in range(length + ANSWER)]
    with torch.no_grad():
        scores = model(torch.tensor([text], device=model.device), use_cache=False).logits[0, length - 1 : -1]
    if scores.isnan().any():
        raise ArithmeticError("the plain model's scores for the next token are not numbers")
    return ExpectedScores(text[:length], text[length:], scores.float().cpu())


def sizes(expected: Items[ExpectedScores], block_size: int, share: bool) -> Sizes:
    """The sizes of an engine that has room for these texts at the same time."""
    blocks = sum(-(-(len(each.prompt) + ANSWER) // block_size) + 1 for each in expected)
    return Sizes(block_size, 2 * blocks * block_size, CHUNK, 2, share)


async def check(batching: BatchRunner, expected: Items[ExpectedScores], dtype: torch.dtype) -> None:
    """Start the engine, compare its answers, stop it. Raises Mismatch, or SetupError."""
    long, short = expected
    cold = True
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _start(batching)
            _compare(await _answered(batching, long, ANSWER), long, dtype, "computed alone")
            cold = False
            _compare(await _answered(batching, long, AGAIN), long, dtype, "computed again")
            both = await asyncio.gather(*(_answered(batching, each, BESIDE) for each in (long, short)))
            for scores, each in zip(both, expected, strict=True):
                _compare(scores, each, dtype, "computed beside another")
    except (EngineError, ArithmeticError) as error:
        raise Mismatch(message_of(error), cold) from error
    except TimeoutError as error:
        raise Mismatch(f"no answer within {TIMEOUT_S:.0f} s", cold) from error
    finally:
        await batching.stop()


def known_reason(model: Any) -> str | None:
    """The reason why transformers' continuous batching cannot compute a model that failed the test, if it is a known one."""
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        return f"it has layers of the type {min(others)}, for which transformers has no paged cache"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention is code of its own in transformers, which does not read the paged cache of continuous batching"
    if getattr(config, "kv_lora_rank", None):
        return "its keys and values differ in size (latent attention), and transformers' paged cache has one size for both"
    return None


async def _start(batching: BatchRunner) -> None:
    try:
        await batching.start()
    except SetupError:
        raise
    except Exception as error:  # transformers has a different error for each model that it cannot serve
        raise Mismatch(message_of(error), cold=True) from error


async def _answered(batching: BatchRunner, expected: ExpectedScores, count: int) -> torch.Tensor:
    """The engine's scores for the first `count` tokens of the answer."""
    request = EngineRequest(expected.prompt, count, ignore_eos=True)
    dictated = _DictatedSampler(request, expected.answer)
    sequence, step = batching.submit(request, dictated), NewTokens([], None)
    while step.finish is None:
        step = await sequence.next()
    return torch.stack(dictated.seen)


class TrialRouter(OutputRouter):
    """A router without backtraces: a failure becomes the reason of a Mismatch, and its backtrace would not help a user."""

    def step_failed(self) -> None:
        log.debug("a step of the self-test failed", exc_info=True)


class _DictatedSampler(Sampler):
    """Draws known tokens, and keeps the scores."""

    def __init__(self, request: EngineRequest, tokens: Items[int]) -> None:
        super().__init__(request)
        self._tokens = tokens
        self.seen: list[torch.Tensor] = []

    def draw(self, scores: torch.Tensor) -> int:
        self.seen.append(scores.float().clone())
        return self._tokens[len(self.seen) - 1]


def _compare(found: torch.Tensor, expected: ExpectedScores, dtype: torch.dtype, how: str) -> None:
    """Compare rows of scores. Raises ArithmeticError if too many are wrong."""
    plain = expected.scores[: len(found)]
    limit = ERROR[dtype]
    usable = plain.isfinite() & found.isfinite()
    difference = torch.where(usable, found - plain, 0.0)
    spread = torch.where(usable, plain, 0.0).std(-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = difference.pow(2).mean(-1).sqrt() / spread
    behind = (plain.max(-1).values - plain.gather(-1, found.argmax(-1, keepdim=True))[:, 0]) / spread
    wrong = ~((error <= limit) & (behind <= 2 * limit) & (plain.isfinite() == found.isfinite()).all(-1))
    if wrong.sum() > OFF.get(dtype, OFF_16_BITS) * len(wrong):
        first, worst = int(wrong.nonzero()[0]), float(error.max())
        raise ArithmeticError(
            f"{int(wrong.sum())} of {len(wrong)} tokens that are {how} have other scores than in the plain model, from token "
            f"{first + 1} of the answer on (error {worst:.2g} of their spread, {limit:g} allowed)"
        )
