"""What a step of an engine costs in time: the model that the simulated engine runs by, and that `fit` fits.

A step computes some tokens of prompts and one token of each sequence that decodes. Its time is a sum: something for the
step itself, for each token, for each token of context that its sequences have (they are read), and for each pair of a
computed token and one that it looks at. A kernel that knows which tokens belong together computes the pairs that are needed;
a dense mask over the batch computes those of every token with every other one, and `dense_s` is what the rest of them costs.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Self

Piece = tuple[int, int]  # of a prompt: the tokens that are computed, the tokens that there are then


@dataclass(frozen=True, slots=True)
class Step:
    """What is computed at once: tokens of prompts, sequences that decode; the context of all; the pairs that are needed."""

    prompt: int
    decoding: int
    context: int
    pairs: float

    @classmethod
    def of(cls, pieces: Iterable[Piece], contexts: Iterable[int]) -> Self:
        """`contexts`: how many tokens each sequence that decodes looks at. O(both)."""
        prompt = decoding = context = 0
        pairs = 0.0
        for tokens, length in pieces:
            prompt += tokens
            context += length
            pairs += tokens * (length - tokens / 2)  # each looks at those before it
        for length in contexts:
            decoding += 1
            context += length
            pairs += length
        return cls(prompt, decoding, context, pairs)

    @property
    def amounts(self) -> tuple[float, ...]:
        """How much there is of each thing that costs, in the order of `Costs`."""
        rest = (self.prompt + self.decoding) * self.context - self.pairs
        alone, decodes = float(not self.decoding), float(self.decoding > 0)
        return (alone, self.prompt, decodes, max(0, self.decoding - 1), self.context, self.pairs, rest)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of a step without decoding, of a token of a prompt, of a step with one sequence that decodes, of each further
    one, of a token of context, of a pair that is needed, of a pair that is not."""

    step_s: float
    prompt_s: float
    decode_s: float
    further_s: float
    context_s: float
    pair_s: float
    dense_s: float

    def seconds(self, step: Step) -> float:
        return self.times(step.amounts)

    def times(self, amounts: Iterable[float]) -> float:
        costs: tuple[float, ...] = astuple(self)
        return sum(cost * amount for cost, amount in zip(costs, amounts, strict=True))


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Capacity in tokens; rates in tokens per second (prefill: of the replica, decode: of a sequence that is alone).

    `prefill_chunk` 0: prefill and decoding do not disturb each other. `decode_slowdown`: the share of a lone sequence's step
    that each further one adds. `step_s`: what a step of prompts alone takes beside its tokens. `context_s`: for each token of
    context in a step. `attention_s`: for each pair of a computed token and one that it looks at; `attention_dense`: the share
    of it that all other pairs in the step take. All times are divided by `speed`.
    """

    kv_tokens: int = 100_000
    prefill_rate: float = 5_000.0
    decode_rate: float = 50.0
    max_batch: int = 256
    block_size: int = 16
    prefill_chunk: int = 0
    decode_slowdown: float = 0.0
    speed: float = 1.0
    step_s: float = 0.0
    context_s: float = 0.0
    attention_s: float = 0.0
    attention_dense: float = 0.0

    @property
    def costs(self) -> Costs:
        return Costs(
            step_s=self.step_s,
            prompt_s=1 / self.prefill_rate,
            decode_s=1 / self.decode_rate,
            further_s=self.decode_slowdown / self.decode_rate,
            context_s=self.context_s,
            pair_s=self.attention_s,
            dense_s=self.attention_s * self.attention_dense,
        )
