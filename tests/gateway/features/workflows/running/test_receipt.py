"""The receipt of a run with a killed call, whose cached tokens no engine has reported."""

from __future__ import annotations

import pytest

from gateway.features.workflows.running.messages import CallUsage
from gateway.features.workflows.running.receipt import Receipt


@pytest.mark.parametrize(
    ("cached", "computed"),
    [
        (0, 1000 + 100),  # the prefix was computed for the sibling
        (900, 100 + 1000),  # for the killed call, which came first, against the prediction
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
