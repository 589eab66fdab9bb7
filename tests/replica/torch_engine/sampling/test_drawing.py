"""Drawing a token: against a slow reference, against transformers' own warpers, and at the edges."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from replica.torch_engine.sampling.drawing import SORTED, Chances, Shape, draw, shaped

pytestmark = pytest.mark.model  # not the model, but torch: seconds to import
LARGE = 3 * SORTED + 7


def reference(scores: list[float], shape: Shape) -> list[int]:
    """The ids that may be drawn: by sorting everything, with Python's floats."""
    best = max(scores)
    chances = {at: float(np.exp(np.float32((score - best) / shape.temperature))) for at, score in enumerate(scores)}
    if 0 < shape.top_k < len(scores):
        least = sorted(chances.values())[-shape.top_k]
        chances = {at: chance for at, chance in chances.items() if chance >= least}
    if shape.top_p < 1:
        goal, before, left = shape.top_p * math.fsum(chances.values()), 0.0, dict[int, float]()
        for at in sorted(chances, key=lambda at: (-chances[at], at)):
            if before >= goal and left:
                break
            left[at] = chances[at]
            before += chances[at]
        chances = left
    return sorted(at for at, chance in chances.items() if chance >= np.float32(shape.min_p) and chance > 0)


# Eighths: their chances differ by far more than sums are rounded by, and many are equal.
few_scores = st.lists(st.integers(-80, 80).map(lambda eighths: eighths / 8), min_size=1, max_size=60)
shapes = st.builds(
    Shape,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1e-9, 0.1, 0.37, 0.73, 0.913, 0.9991, 1.0]),
    min_p=st.sampled_from([0.0, 0.051, 0.51, 1.0]),
)


@given(scores=few_scores, shape=shapes)
def test_what_may_be_drawn_is_what_sorting_leaves(scores: list[float], shape: Shape) -> None:
    left = np.flatnonzero(shaped(np.array(scores, np.float32), shape)).tolist()
    assert left == reference(scores, shape)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    coarse=st.booleans(),
    shape=st.builds(
        Shape,
        temperature=st.sampled_from([0.7, 1.0]),
        top_k=st.sampled_from([0, 1, 50, 5000, LARGE - 1, LARGE]),
        top_p=st.sampled_from([0.1, 0.9, 0.95, 0.999, 1.0]),
    ),
)
def test_a_large_vocabulary_is_cut_at_the_same_border(seed: int, spread: float, coarse: bool, shape: Shape) -> None:
    scores = (np.random.default_rng(seed).standard_normal(LARGE) * spread).astype(np.float32)
    if coarse:  # like bfloat16: many are equal
        scores = np.round(scores, 1)
    chances = shaped(scores, shape)
    left = np.flatnonzero(chances)
    everything = shaped(scores, Shape(shape.temperature))
    if shape.top_k:
        everything = everything * (everything >= np.sort(everything)[-min(shape.top_k, LARGE)])
    mass, goal = everything.sum(dtype=np.float64), shape.top_p * everything.sum(dtype=np.float64)
    assert (chances[left] == everything[left]).all()
    dropped = np.delete(everything, left)
    if dropped.any():
        assert dropped.max() <= chances[left].min()
        last = float(chances[left].min())
        assert goal - 1e-9 * mass <= chances.sum(dtype=np.float64) < goal + last + 1e-9 * mass
    else:
        assert shape.top_p == 1 or chances.sum(dtype=np.float64) - chances[left].min() < goal + 1e-9 * mass


@given(scores=few_scores, uniform=st.floats(0, 1, exclude_max=True), shape=shapes)
def test_a_draw_is_where_the_sum_passes_the_uniform_number(scores: list[float], uniform: float, shape: Shape) -> None:
    chances = shaped(np.array(scores, np.float32), shape).astype(float)
    token = draw(np.array(scores, np.float32), shape, uniform)
    sums = np.concatenate([[0.0], chances.cumsum()]) / chances.sum()
    assert chances[token] > 0
    assert sums[token] - 1e-9 <= uniform <= sums[token + 1] + 1e-9


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_no_token_without_a_chance_is_drawn(uniform: float) -> None:
    for size in (3, 1024, 1025, LARGE):
        for only in (0, size // 2, size - 1):
            scores = np.full(size, -np.inf, np.float32)
            scores[only] = -5.0
            for shape in (Shape(), Shape(top_k=2), Shape(top_p=0.5), Shape(min_p=0.5), Shape(1e-3)):
                assert draw(scores, shape, uniform) == only


def test_uniform_numbers_reach_each_part_of_a_large_vocabulary() -> None:
    flat = np.zeros(LARGE, np.float32)
    drawn = [draw(flat, Shape(), (at + 0.5) / LARGE) for at in range(0, LARGE, 97)]
    assert drawn == list(range(0, LARGE, 97))
    assert all(one < other for one, other in pairwise(drawn))


def warped(scores: Chances, shape: Shape) -> torch.Tensor:
    """The chances as transformers has them."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(shape.temperature)])
    if shape.top_k:
        steps.append(TopKLogitsWarper(shape.top_k))
    if shape.top_p < 1:
        steps.append(TopPLogitsWarper(shape.top_p))
    if shape.min_p:
        steps.append(MinPLogitsWarper(shape.min_p))
    ids: torch.LongTensor = torch.zeros((1, 1), dtype=torch.long)  # type: ignore[assignment]
    logits: torch.FloatTensor = torch.from_numpy(scores.copy())[None]  # type: ignore[assignment]
    return torch.softmax(steps(ids, logits)[0], dim=-1)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(0.7, top_p=0.9),
        Shape(1.5, top_k=20),
        Shape(1.2, min_p=0.1),
        Shape(1.0, top_k=50, top_p=0.8, min_p=0.02),
        Shape(0.9, top_p=0.999),
    ],
    ids=str,
)
def test_draws_have_the_chances_that_transformers_gives_them(shape: Shape) -> None:
    random = np.random.default_rng(7)
    scores = (random.standard_normal(LARGE) * 3).astype(np.float32)
    expected = warped(scores, shape).numpy().astype(float)
    chances = shaped(scores, shape)
    assert chances / chances.sum(dtype=np.float64) == pytest.approx(expected, abs=1e-6)
    times = 4000
    drawn = Counter(draw(scores, shape, random.random()) for _ in range(times))
    likely = np.flatnonzero(expected * times >= 5)
    parts = [(drawn[int(at)], expected[at] * times) for at in likely]
    rest = times - sum(seen for seen, _ in parts), times - sum(due for _, due in parts)
    square = sum((seen - due) ** 2 / due for seen, due in (*parts, rest) if due >= 1)
    freedom = max(1, len(parts))
    assert abs(square - freedom) < 5 * math.sqrt(2 * freedom)  # 5 standard deviations
