"""Drawing tokens: the right chances, repeatable, and safe at the edges."""

from collections import Counter
from typing import Any

import pytest

from replica.engine import Request

pytest.importorskip("torch")

import torch

from replica.sampling import Sampler

pytestmark = pytest.mark.model  # not the model, but torch: seconds to import


def sampler(**sampling: Any) -> Sampler:
    made = Sampler.of(Request([1], 1, **({"seed": 1} | sampling)))
    assert made is not None
    return made


def counts(made: Sampler, scores: list[float], draws: int = 2000) -> Counter[int]:
    return Counter(made.draw(torch.tensor(scores)) for _ in range(draws))


def test_low_temperatures_are_greedy() -> None:
    assert Sampler.of(Request([1], 1)) is None
    assert Sampler.of(Request([1], 1, temperature=1e-40)) is None


def test_chances_follow_the_scores_and_the_temperature() -> None:
    scores = [2.0, 1.0, 0.0]
    plain, hot = counts(sampler(temperature=1.0), scores), counts(sampler(temperature=2.0), scores)
    for drawn, temperature in ((plain, 1.0), (hot, 2.0)):
        expected = torch.softmax(torch.tensor(scores) / temperature, dim=-1)
        for token in range(3):
            assert drawn[token] / 2000 == pytest.approx(float(expected[token]), abs=0.05)


@pytest.mark.parametrize(("top_p", "left"), [(0.01, {0}), (0.5, {0}), (0.7, {0, 2}), (1.0, {0, 1, 2})])
def test_top_p_keeps_the_smallest_head_that_reaches_it(top_p: float, left: set[int]) -> None:
    scores = torch.tensor([0.6, 0.1, 0.3]).log().tolist()
    assert set(counts(sampler(temperature=1.0, top_p=top_p), scores)) == left


@pytest.mark.parametrize("seed", [0, -5, 1 << 62, (1 << 64) + 3])
def test_a_seed_repeats_its_draws(seed: int) -> None:
    scores = [1.0] * 50
    first, second = (sampler(temperature=1.0, seed=seed) for _ in range(2))
    assert [first.draw(torch.tensor(scores)) for _ in range(20)] == [second.draw(torch.tensor(scores)) for _ in range(20)]


def test_scores_as_large_as_they_get_are_drawn() -> None:
    assert sampler(temperature=0.001).draw(torch.tensor([1e4, -1e4, 9e3])) == 0
