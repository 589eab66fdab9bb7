"""Sampling of one request's next token from the model's scores: penalties, temperature, top-k, top-p, min-p, grammar."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import torch

from replica.engine import Request, TokenScore
from replica.torch_engine.grammar import GrammarState

NEVER = float("-inf")
MIN_LOGPROB = -9999.0  # instead of -inf, which JSON does not have; as in vLLM


class Sampler:
    """One request's sampling, with its own random generator. The tokens depend on the scores passed in, the seed and the tokens
    drawn before, and on no other request. `ends`: the tokens that would end the answer."""

    def __init__(self, request: Request, grammar: GrammarState | None = None, ends: Items[int] = ()) -> None:
        self._request, self._grammar = request, grammar
        self._ends = torch.tensor(ends if request.min_tokens else [], dtype=torch.long)
        self._generator = torch.Generator()
        if request.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(request.seed % (1 << 63))
        self._drawn: Counter[int] = Counter()
        self._bias = _Columns(request.logit_bias.items())
        self._prompt = torch.tensor(sorted(set(request.prompt)) if request.repetition_penalty != 1 else [], dtype=torch.long)
        self.scores: list[TokenScore] = []  # one per token, if requested

    @classmethod
    def if_needed(cls, request: Request, grammar: GrammarState | None = None, ends: Items[int] = ()) -> "Sampler | None":
        """None for a request that always takes the best token and wants no scores."""
        changed = request.presence_penalty or request.frequency_penalty or request.logit_bias or request.repetition_penalty != 1
        needed = changed or grammar or request.min_tokens or request.logprobs is not None or not request.greedy
        return cls(request, grammar, ends) if needed else None

    def draw(self, scores: torch.Tensor) -> int:
        """One token id from the scores of the whole vocabulary. O(vocabulary), plus a sort if top_p is below 1."""
        changed = self._penalised(scores.float())
        token = int(changed.argmax()) if self._request.greedy else self._sampled(changed)
        self._drawn[token] += 1
        if self._grammar is not None:
            self._grammar.advance(token)
        if self._request.logprobs is not None:
            self.scores.append(_score(scores.float(), token, self._request.logprobs))
        return token

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        request = self._request
        if request.repetition_penalty != 1:
            seen = torch.cat(
                [self._prompt, torch.tensor(list(self._drawn.keys() - set(self._prompt.tolist())), dtype=torch.long)]
            )
            old = scores[seen]
            scores = scores.scatter(
                0, seen, torch.where(old > 0, old / request.repetition_penalty, old * request.repetition_penalty)
            )
        if request.presence_penalty or request.frequency_penalty:
            drawn = _Columns(
                (token, request.presence_penalty + request.frequency_penalty * times) for token, times in self._drawn.items()
            )
            scores = scores.scatter_add(0, drawn.tokens, -drawn.values)
        if len(self._bias.tokens):
            scores = scores.scatter_add(0, self._bias.tokens, self._bias.values)
        if request.min_tokens and self._drawn.total() < request.min_tokens:
            scores = scores.index_fill(0, self._ends, NEVER)
        return scores if self._grammar is None else self._grammar.masked(scores)

    def _sampled(self, scores: torch.Tensor) -> int:
        request = self._request
        scores = scores / request.temperature
        if 0 < request.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(request.top_k).values[-1], NEVER)
        probabilities = torch.softmax(scores, dim=-1)
        if request.top_p < 1:
            ordered, indices = probabilities.sort(descending=True)
            before = ordered.cumsum(dim=-1) - ordered
            # The first token always stays: the sum before it is 0.
            probabilities = torch.zeros_like(probabilities).scatter(0, indices, ordered * (before < request.top_p))
        if request.min_p > 0:
            probabilities = probabilities * (probabilities >= request.min_p * probabilities.max())
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


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
