"""Drawing for several requests at once: what is left is what drawing for one leaves, and so are the tokens."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from replica.torch_engine.sampling.drawing import Shape, draw, shaped
from replica.torch_engine.sampling.rows import ROWS, draw_rows, shaped_rows

pytestmark = pytest.mark.model  # not the model, but torch: seconds to import
SIZE = 40
SHAPES = st.builds(
    Shape,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, SIZE + 5),
    top_p=st.sampled_from([1e-9, 0.1, 0.37, 0.73, 0.913, 0.9991, 1.0]),
    min_p=st.sampled_from([0.0, 0.051, 0.51, 1.0]),
)
# Eighths: their chances differ by far more than sums are rounded by, and many are equal. None: a token that is not drawn.
SCORES = st.lists(st.none() | st.integers(-80, 80), min_size=SIZE, max_size=SIZE).filter(lambda row: set(row) != {None})
ROW = st.tuples(SCORES, SHAPES, st.floats(0, 1, exclude_max=True))


def table(rows: list[list[int | None]]) -> torch.Tensor:
    return torch.tensor([[-math.inf if each is None else each / 8 for each in row] for row in rows])


@given(st.lists(ROW, min_size=1, max_size=5))
def test_each_row_has_the_chances_that_it_has_alone(rows: list[tuple[list[int | None], Shape, float]]) -> None:
    scores, shapes = table([row for row, _, _ in rows]), [shape for _, shape, _ in rows]
    for ours, row, shape in zip(shaped_rows(scores, shapes).numpy(), scores.numpy(), shapes, strict=True):
        theirs = shaped(row, shape)
        assert np.flatnonzero(ours).tolist() == np.flatnonzero(theirs).tolist()
        assert ours == pytest.approx(theirs, rel=1e-5)


@given(st.lists(ROW, min_size=1, max_size=5))
def test_each_token_is_where_the_sum_passes_the_uniform_number(rows: list[tuple[list[int | None], Shape, float]]) -> None:
    scores, shapes, uniforms = table([row for row, _, _ in rows]), [each[1] for each in rows], [each[2] for each in rows]
    tokens = draw_rows(scores, shapes, uniforms)
    for row, shape, uniform, token in zip(scores.numpy(), shapes, uniforms, tokens, strict=True):
        chances = shaped(row, shape).astype(float)
        sums = np.concatenate([[0.0], chances.cumsum()]) / chances.sum()
        assert chances[token] > 0
        assert sums[token] - 1e-6 <= uniform <= sums[token + 1] + 1e-6


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 2 * ROWS + 1))
def test_a_row_does_not_depend_on_the_others(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    scores = torch.from_numpy((random.standard_normal((count, 5000)) * 4).astype(np.float32))
    some = [Shape(), Shape(0.7, top_p=0.9), Shape(1.5, top_k=20), Shape(1.2, min_p=0.1), Shape(1.0, 50, 0.8, 0.02)]
    shapes, uniforms = [some[at % len(some)] for at in range(count)], random.random(count).tolist()
    together = draw_rows(scores, shapes, uniforms)
    assert together == [draw_rows(scores[at][None], [shapes[at]], [uniforms[at]])[0] for at in range(count)]
    assert together == [draw(scores[at].numpy(), shapes[at], uniforms[at]) for at in range(count)]


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_no_token_without_a_chance_is_drawn(uniform: float) -> None:
    for only in (0, SIZE // 2, SIZE - 1):
        scores = torch.full((1, SIZE), -math.inf)
        scores[0, only] = -5.0
        for shape in (Shape(), Shape(top_k=2), Shape(top_p=0.5), Shape(min_p=0.5), Shape(1e-3)):
            assert draw_rows(scores, [shape], [uniform]) == [only]
