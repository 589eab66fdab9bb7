"""Drawing one token from the scores of a vocabulary, in time that is linear in its size.

A border decides which tokens may be drawn: the least likely token that top-k or top-p leaves. To find it the chances are
partitioned into likelier and less likely ones, and then the part with the border, until that is small enough to be sorted.

One uniform number is drawn, and the token is the one at which the sum of the chances, in the order of the vocabulary, passes
it. So a draw depends only on the scores, the settings and that number.

Of equally likely tokens, top-k leaves all at its border, as transformers does; top-p leaves the tokens with the lower ids.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Chances = NDArray[np.float32]
"""Of each token, in the order of the vocabulary; not normalised: the best one has 1. 0: it is not drawn."""

HEAD: Final = 1024  # no more tokens than that can each have a 1024th of the mass
SORTED: Final = 4096  # so many tokens are sorted; more are partitioned first
TOP: Final = 16  # the first partition is the likeliest 16th, which usually contains the border; the others are halves
BLOCK: Final = 1024  # chances that are summed at once


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings that turn scores into chances. temperature > 0; top_k 0, top_p 1, min_p 0: all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def draw(scores: NDArray[np.float32], shape: Shape, uniform: float) -> int:
    """Draw a token id. scores: one per token, -inf for a token that is not drawn; at least one is finite, none is NaN or inf.
    uniform: in [0, 1). O(vocabulary).
    """
    return _passed(shaped(scores, shape), uniform)


def shaped(scores: NDArray[np.float32], shape: Shape) -> Chances:
    """The chances of all tokens. Applied in this order: temperature, top_k, top_p of the mass that top_k leaves, min_p."""
    chances: Chances = np.exp((scores - scores.max()) * np.float32(1 / shape.temperature))
    if 0 < shape.top_k < len(chances):
        last = len(chances) - shape.top_k
        chances = chances * (chances >= np.partition(chances, last)[last])
    if shape.top_p < 1:
        chances = chances * _nucleus(chances, shape.top_p)
    if shape.min_p > 0:
        chances = chances * (chances >= np.float32(shape.min_p))
    return chances


def _nucleus(chances: Chances, top_p: float) -> NDArray[np.bool_]:
    """The smallest set of the likeliest tokens whose mass reaches top_p of all; at least one token."""
    mass = float(chances.sum(dtype=np.float64))
    target = top_p * mass
    head = chances[chances >= np.float32(mass / HEAD)]
    enough = head.sum(dtype=np.float64) >= target
    border, equal = _border(head if enough else chances, target)
    inside = chances >= border
    inside[np.flatnonzero(chances == border)[equal:]] = False
    return inside


def _border(chances: Chances, target: float) -> tuple[np.float32, int]:
    """The chance of the last token that is needed, the likeliest first, until their mass reaches the target; and how many
    tokens of exactly this chance are needed. If the mass of all tokens does not reach it, all are needed.
    """
    rest, needed, mass, share = chances, 0, 0.0, TOP  # `needed` tokens with this mass are likelier than the rest
    while len(rest) > SORTED:
        cut = len(rest) - len(rest) // share
        parted = np.partition(rest, cut)
        with_top = mass + float(parted[cut:].sum(dtype=np.float64))
        if with_top >= target:
            rest = parted[cut:]
        else:
            rest, needed, mass = parted[:cut], needed + len(rest) - cut, with_top
        share = 2
    ordered = np.sort(rest)[::-1]
    sums = mass + ordered.cumsum(dtype=np.float64)
    at = min(int(np.searchsorted(sums, target)), len(ordered) - 1)
    return ordered[at], needed + at + 1 - int(np.count_nonzero(chances > ordered[at]))


def _passed(chances: Chances, uniform: float) -> int:
    """The token at which the sum of chances passes `uniform` of the total. Its chance is not 0."""
    sums = np.add.reduceat(chances, np.arange(0, len(chances), BLOCK), dtype=np.float64).cumsum()
    goal = uniform * sums[-1]
    block = min(int(np.searchsorted(sums, goal, side="right")), len(sums) - 1)
    first = block * BLOCK
    inside = (sums[block - 1] if block else 0.0) + chances[first : first + BLOCK].cumsum(dtype=np.float64)
    at = int(np.searchsorted(inside, goal, side="right"))
    if at < len(inside):
        return first + at
    return int(np.flatnonzero(chances[: first + BLOCK])[-1])  # rounding has put the target after all chances
