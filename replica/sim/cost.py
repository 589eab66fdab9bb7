"""The duration of an engine's step: the model that the simulated engine uses and `fit` fits.

A step computes some prompt tokens and one token of each decoding sequence. Its time is a sum: a constant for the step, a
cost per token, per token of context of its sequences (which is read), and per attention pair: a computed token and a token
that it attends to. A kernel that knows which tokens belong together computes only the needed pairs; a dense mask over the
batch computes the pairs of every token with every other token, and `dense_s` is the cost of these other pairs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

Piece = tuple[int, int]  # a part of a prompt: tokens computed in this step, tokens computed up to its end


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step's work: prompt tokens, decoding sequences, their tokens of context in total, needed attention pairs."""

    prompt: int
    decoding: int
    context: int
    pairs: float

    @classmethod
    def of(cls, pieces: Iterable[Piece], contexts: Iterable[int]) -> Self:
        """`contexts`: tokens of context of each decoding sequence. O(both)."""
        prompt = decoding = context = 0
        pairs = 0.0
        for tokens, length in pieces:
            prompt += tokens
            context += length
            pairs += tokens * (length - tokens / 2)  # each attends to those before it
        for length in contexts:
            decoding += 1
            context += length
            pairs += length
        return cls(prompt, decoding, context, pairs)

    @property
    def amounts(self) -> tuple[float, ...]:
        """The quantities of work in the order of `StepCosts`."""
        rest = (self.prompt + self.decoding) * self.context - self.pairs
        alone, decodes = float(not self.decoding), float(self.decoding > 0)
        return (alone, self.prompt, decodes, max(0, self.decoding - 1), self.context, self.pairs, rest)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds per step without decoding, prompt token, step with one decoding sequence, additional decoding sequence, token
    of context, needed attention pair, other attention pair."""

    step_s: float
    prompt_s: float
    decode_s: float
    further_s: float
    context_s: float
    pair_s: float
    dense_s: float

    def seconds(self, step: StepWork) -> float:
        return self.times(step.amounts)

    def times(self, amounts: Iterable[float]) -> float:
        alone, prompt, decodes, further, context, pairs, rest = amounts
        return (
            self.step_s * alone
            + self.prompt_s * prompt
            + self.decode_s * decodes
            + self.further_s * further
            + self.context_s * context
            + self.pair_s * pairs
            + self.dense_s * rest
        )


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Capacity in tokens; rates in tokens per second (prefill: of the replica; decode: of a sequence alone in the batch).

    `prefill_chunk` 0: prefill and decoding do not slow each other. `decode_slowdown`: the time that each additional sequence
    adds to a decoding step, as a share of it. `step_s`: constant time of a step without decoding. `context_s`: time per token
    of context in a step. `attention_s`: time per attention pair (a computed token and a token that it attends to);
    `attention_dense`: the time of the step's other pairs, as a share of that. All times are divided by `speed`. `slots`: the
    blocks of a request become cached at its end, so that prompts in flight share nothing.
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
    slots: bool = False

    @property
    def costs(self) -> StepCosts:
        return StepCosts(
            step_s=self.step_s,
            prompt_s=1 / self.prefill_rate,
            decode_s=1 / self.decode_rate,
            further_s=self.decode_slowdown / self.decode_rate,
            context_s=self.context_s,
            pair_s=self.attention_s,
            dense_s=self.attention_s * self.attention_dense,
        )
