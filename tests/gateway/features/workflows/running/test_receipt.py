"""The receipt of a run: the least tokens are the union of its prompts as prefixes, in the engines' own counts; killed calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.workflows.running.messages import CallUsage
from gateway.features.workflows.running.receipt import PromptUnion, Receipt

# A message of n equal letters has n tokens; messages of different letters share nothing.
MESSAGES = st.builds(lambda letter, size: letter * size, st.sampled_from([b"a", b"b", b"c"]), st.just(7))


@given(st.lists(st.lists(MESSAGES, min_size=1, max_size=5), min_size=1, max_size=8))
def test_the_least_is_the_size_of_the_union(prompts: list[list[bytes]]) -> None:
    union = PromptUnion()
    known: set[tuple[bytes, ...]] = set()
    least = 0
    for prompt in prompts:
        prefixes = {tuple(prompt[: at + 1]) for at in range(len(prompt))}
        least += sum(len(prefix[-1]) for prefix in prefixes - known) or 1  # a last token is computed again
        known |= prefixes
        union.add("m", prompt, sum(map(len, prompt)))
    assert union.least == least


def test_an_answer_is_a_part_of_what_continues_it() -> None:
    union = PromptUnion()
    union.add("m", [b"question"], 100, [b"question", b"answer"], 21)
    assert union.add("m", [b"question", b"answer", b"critique"], 150) == 150 - 120
    assert union.add("other", [b"question"], 90) == 90


def test_a_call_that_no_engine_has_counted_shares_the_counts_of_others() -> None:
    union = PromptUnion()
    union.add("m", [b"h" * 100, b"check"], 210)
    assert union.add("m", [b"h" * 100], 300, estimated=True) == 1
    assert union.add("m", [b"h" * 100, b"x" * 50], 300, estimated=True) == 100, "a third of its bytes is new"
    assert PromptUnion().add("m", [b"h" * 100], 300, estimated=True) == 300


@pytest.mark.parametrize(
    ("cached", "computed"),
    [
        (0, 1000 + 100),  # the prefix was computed for the sibling
        (900, 100 + 1000),  # for the killed call, which came first, against the prediction
        (100, 900 + 100),  # rounding
    ],
)
def test_a_prefix_that_was_computed_for_a_killed_call_counts(cached: int, computed: int) -> None:
    receipt = Receipt()
    receipt.count(CallUsage(1000, 900, 5, reported=False, predicted_cached=900))
    receipt.count(CallUsage(1000, cached, 5, predicted_cached=0))
    assert receipt.as_json()["computed_tokens"] == computed
    assert receipt.as_json()["cached_tokens"] == 2000 - computed


def test_a_warm_prefix_is_cached_for_all() -> None:
    receipt = Receipt()
    receipt.count(CallUsage(1000, 900, 5, reported=False, predicted_cached=900))
    receipt.count(CallUsage(1000, 900, 5, predicted_cached=900))
    assert receipt.as_json()["computed_tokens"] == 200
