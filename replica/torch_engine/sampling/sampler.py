"""One request's next tokens from the model's scores: penalties, masks, grammar, and the draw (`drawing.py`)."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from replica.engine import EngineRequest, TokenScore
from replica.torch_engine.sampling.drawing import Shape, draw
from replica.torch_engine.sampling.grammar import GrammarState
from replica.torch_engine.sampling.masks import NEVER, TokenMask

MIN_LOGPROB = -9999.0  # replaces -inf, which JSON does not have; as in vLLM


class Sampler:
    """One request's sampling, with its own random generator. The tokens depend on the scores passed in, the seed and the tokens
    drawn before, and on no other request. `ends`: the tokens that would end the answer; `model_ends`: the model's end tokens,
    also if they do not end this answer.
    """

    def __init__(
        self, request: EngineRequest, grammar: GrammarState | None = None, ends: Items[int] = (), model_ends: Items[int] = ()
    ) -> None:
        self._request, self._grammar = request, grammar
        self._mask = TokenMask.if_needed(request.allowed_tokens, request.bad_words, model_ends)
        self._ends = torch.tensor(ends if request.min_tokens else [], dtype=torch.long)
        self._random = np.random.default_rng(None if request.seed is None else request.seed % (1 << 64))
        self._shape = Shape(request.temperature, request.top_k, request.top_p, request.min_p)
        self._drawn: Counter[int] = Counter()
        self._bias = _Columns(request.logit_bias.items())
        # The tokens that the repetition penalty counts, each once.
        self._seen = torch.tensor(sorted(set(request.prompt)) if request.repetition_penalty != 1 else [], dtype=torch.long)
        self._prompt = frozenset(self._seen.tolist())
        self.scores: list[TokenScore] = []  # one per token, if requested

    @property
    def shape(self) -> Shape | None:
        """The settings of a draw that depends only on the scores and `uniform`; None if it depends on more."""
        request = self._request
        more = request.greedy or request.logprobs is not None or self._mask or self._grammar
        return None if more or _changed(request) or request.min_tokens else self._shape

    def uniform(self) -> float:
        """The next random number, in [0, 1)."""
        return self._random.random()

    @classmethod
    def if_needed(
        cls, request: EngineRequest, grammar: GrammarState | None = None, ends: Items[int] = (), model_ends: Items[int] = ()
    ) -> "Sampler | None":
        """A sampler; None for a request that always takes the best token and wants no scores."""
        masked = len(request.allowed_tokens) or request.bad_words or grammar or request.min_tokens
        needed = _changed(request) or masked or request.logprobs is not None or not request.greedy
        return cls(request, grammar, ends, model_ends) if needed else None

    def draw(self, scores: torch.Tensor) -> int:
        """Draw one token id from the scores of the whole vocabulary, which are on the CPU. O(vocabulary)."""
        changed = self._penalised(scores.float())
        token = int(changed.argmax()) if self._request.greedy else draw(changed.numpy(), self._shape, self.uniform())
        self._count(token)
        if self._grammar is not None:
            self._grammar.advance(token)
        if self._request.logprobs is not None:
            self.scores.append(_score(scores.float(), token, self._request.logprobs))
        return token

    def _count(self, token: int) -> None:
        """Count a drawn token."""
        self._drawn[token] += 1
        if self._mask is not None:
            self._mask.advance(token)
        if self._request.repetition_penalty != 1 and self._drawn[token] == 1 and token not in self._prompt:
            self._seen = torch.cat([self._seen, torch.tensor([token])])

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        request = self._request
        if request.repetition_penalty != 1:
            old = scores[self._seen]
            new = torch.where(old > 0, old / request.repetition_penalty, old * request.repetition_penalty)
            scores = scores.scatter(0, self._seen, new)
        if request.presence_penalty or request.frequency_penalty:
            drawn = _Columns(
                (token, request.presence_penalty + request.frequency_penalty * times) for token, times in self._drawn.items()
            )
            scores = scores.scatter_add(0, drawn.tokens, -drawn.values)
        if len(self._bias.tokens):
            scores = scores.scatter_add(0, self._bias.tokens, self._bias.values)
        if request.min_tokens and self._drawn.total() < request.min_tokens:
            scores = scores.index_fill(0, self._ends, NEVER)
        if self._mask is not None:
            scores = self._mask.masked(scores)
        return scores if self._grammar is None else self._grammar.masked(scores)


def _changed(request: EngineRequest) -> bool:
    """Return whether the request changes the model's scores."""
    penalties = request.presence_penalty or request.frequency_penalty or request.repetition_penalty != 1
    return bool(penalties or request.logit_bias)


class _Columns:
    """Token ids and a number for each, as tensors."""

    def __init__(self, items: Iterable[tuple[int, float]]) -> None:
        pairs = list(items)
        self.tokens = torch.tensor([token for token, _ in pairs], dtype=torch.long)
        self.values = torch.tensor([value for _, value in pairs], dtype=torch.float32)


def _score(scores: Any, token: int, top: int) -> TokenScore:
    logprobs = torch.log_softmax(scores, dim=-1).clamp(min=MIN_LOGPROB)
    best = logprobs.topk(top)
    return TokenScore(token, float(logprobs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
