"""Drawing for several requests at once on the scores' device: on a GPU, which sorts a vocabulary faster than it sends it to the
host. The tokens are the same as from `drawing.py`, except for the rounding of sums.
"""

from collections.abc import Sequence
from typing import Final

import torch

from replica.torch_engine.sampling.drawing import Shape

ROWS: Final = 16  # sorted at once: 60 MB at a vocabulary of 128,000


def draw_rows(scores: torch.Tensor, shapes: Sequence[Shape], uniforms: Sequence[float]) -> list[int]:
    """A token id for each row. scores: (rows, vocabulary), -inf for a token that is not drawn; the best one of each row is
    finite. uniforms: in [0, 1). A row's token does not depend on the others.
    """
    tokens: list[int] = []
    for first in range(0, len(shapes), ROWS):
        some = slice(first, first + ROWS)
        chances = shaped_rows(scores[some], shapes[some])
        tokens += _passed(chances, _column(uniforms[some], chances, torch.float64)).tolist()
    return tokens


def shaped_rows(scores: torch.Tensor, shapes: Sequence[Shape]) -> torch.Tensor:
    """The chances of each row, as `drawing.shaped` has them: (rows, vocabulary), float32."""
    scores = scores.float()
    temperatures = _column([1 / shape.temperature for shape in shapes], scores)
    chances = torch.exp((scores - scores.amax(-1, keepdim=True)) * temperatures)
    if all(shape.top_k == 0 and shape.top_p == 1 and shape.min_p == 0 for shape in shapes):
        return chances
    # Stable: of tokens that are equally likely, top-p leaves those with the lower ids.
    ordered, tokens = chances.sort(dim=-1, descending=True, stable=True)
    size = chances.shape[-1]
    last = _column([min(shape.top_k or size, size) - 1 for shape in shapes], scores, torch.long)
    ordered = ordered * (ordered >= ordered.gather(-1, last))
    sums = ordered.cumsum(-1, dtype=torch.float64)
    top_p = _column([shape.top_p for shape in shapes], scores, torch.float64)
    inside = (sums - ordered < top_p * sums[:, -1:]) | (top_p == 1)
    inside[:, 0] = True
    inside &= ordered >= _column([shape.min_p for shape in shapes], scores)
    return torch.zeros_like(chances).scatter(-1, tokens, ordered * inside)


def _passed(chances: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The tokens at which the sums pass `uniforms` of the whole. Their chances are not 0."""
    sums = chances.cumsum(-1, dtype=torch.float64)
    at = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    # Rounding may put a target after all chances.
    last = chances.shape[-1] - 1 - (chances.flip(-1) > 0).int().argmax(-1, keepdim=True)
    return torch.minimum(at, last)[:, 0]


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
