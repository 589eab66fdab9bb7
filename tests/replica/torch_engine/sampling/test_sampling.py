"""Drawing tokens: the right chances, repeatable, and safe at the edges."""

from collections import Counter
from typing import Any

import pytest

from replica.engine import EngineRequest

pytest.importorskip("torch")

import torch

from replica.torch_engine.sampling.sampler import Sampler

pytestmark = pytest.mark.model  # not the model, but torch: seconds to import


def sampler(**sampling: Any) -> Sampler:
    made = Sampler.if_needed(EngineRequest([1], 1, **({"seed": 1} | sampling)))
    assert made is not None
    return made


def counts(made: Sampler, scores: list[float], draws: int = 2000) -> Counter[int]:
    return Counter(made.draw(torch.tensor(scores)) for _ in range(draws))


def test_low_temperatures_are_greedy() -> None:
    assert Sampler.if_needed(EngineRequest([1], 1)) is None
    assert Sampler.if_needed(EngineRequest([1], 1, temperature=1e-40)) is None


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


def test_top_k_and_min_p_leave_the_likeliest() -> None:
    scores = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert set(counts(sampler(temperature=1.0, top_k=2), scores)) == {0, 1}
    assert set(counts(sampler(temperature=1.0, top_k=9), scores)) == {0, 1, 2, 3}
    assert set(counts(sampler(temperature=1.0, min_p=0.45), scores)) == {0, 1, 2}


def drawn(scores: list[float], times: int, **sampling: Any) -> list[int]:
    made = sampler(**sampling)
    return [made.draw(torch.tensor(scores)) for _ in range(times)]


def test_penalties_count_what_was_drawn() -> None:
    scores = [3.0, 2.5, 2.0]
    assert drawn(scores, 4, presence_penalty=0.6) == [0, 1, 0, 0]  # 2.4 1.9 2.0: once for all
    assert drawn(scores, 6, frequency_penalty=0.6) == [0, 1, 0, 2, 1, 0]  # each time again
    assert drawn([-0.1, -0.5, 3.0], 3, presence_penalty=-2.0) == [2, 2, 2]


def test_the_repetition_penalty_counts_the_prompt_too() -> None:
    made = Sampler.if_needed(EngineRequest([0], 1, repetition_penalty=2.0))
    assert made is not None
    # The prompt's token 0 has 3 / 2; the others' 2 and 1.9 are halved once they are drawn.
    assert [made.draw(torch.tensor([3.0, 2.0, 1.9])) for _ in range(3)] == [1, 2, 0]
    made = Sampler.if_needed(EngineRequest([0], 1, repetition_penalty=2.0))
    assert made is not None
    assert made.draw(torch.tensor([-1.0, -1.5])) == 1  # -1 * 2


def test_a_bias_changes_the_choice_and_a_large_one_forbids() -> None:
    assert drawn([3.0, 2.0], 1, logit_bias={1: 2.0}) == [1]
    assert set(drawn([3.0, 2.0], 200, logit_bias={0: -100.0}, temperature=1.0)) == {1}


def test_scores_are_those_of_the_model_before_any_change() -> None:
    made = sampler(temperature=0.5, logit_bias={0: -100.0}, logprobs=2)
    token = made.draw(torch.tensor([0.5, 0.25, 0.25]).log())
    (score,) = made.scores
    assert score.token == token
    assert score.logprob == pytest.approx(torch.tensor(0.25).log().item())
    assert score.top[0] == (0, pytest.approx(torch.tensor(0.5).log().item()))
    assert len(score.top) == 2
    assert drawn([1.0, 2.0], 1, logprobs=0) == [1]
