from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounting.consumed import CACHED, NOTHING_PREDICTED, OUTPUT, TOKENS, Prediction, consumed
from gateway.dialects.usage import Usage

HALF = Prediction(1000, 500)


@pytest.mark.parametrize(
    ("reported", "predicted", "passed", "whole", "expected", "estimated"),
    [
        (Usage(900, 20, 300), HALF, 19, True, Usage(900, 20, 300), ""),
        (Usage(900, 20, 0), HALF, 19, True, Usage(900, 20, 0), ""),
        (Usage(900, 20, None), HALF, 19, True, Usage(900, 20, 450), CACHED),
        (Usage(900, 20, None, 600), HALF, 19, True, Usage(900, 20, 300, 600), CACHED),  # what was written was not cached
        (Usage(900, 20, None), Prediction(1000, 500, caches=False), 19, True, Usage(900, 20, 0), ""),
        (Usage(900, 20, None), Prediction(1000, 0), 19, True, Usage(900, 20, 0), CACHED),
        (Usage(900, 20, None), Prediction(1000, 5000), 19, True, Usage(900, 20, 899), CACHED),  # never all of it
        (Usage(900, 20, 300), HALF, 30, True, Usage(900, 20, 300), ""),  # an engine may write more events than tokens
        (Usage(900, 0, 300), HALF, 30, False, Usage(900, 30, 300), OUTPUT),
        (Usage(900, 0, None), HALF, 30, False, Usage(900, 30, 450), TOKENS),
        (Usage(900, 40, 300), HALF, 30, False, Usage(900, 40, 300), ""),  # the last count had come
        (None, HALF, 30, False, Usage(1000, 30, 500), TOKENS),
        (None, HALF, 0, False, Usage(1000, 0, 500), TOKENS),
        (None, Prediction(1000, 500, caches=False), 30, True, Usage(1000, 30, 0), TOKENS),
        (None, NOTHING_PREDICTED, 0, True, Usage(0, 0, 0), TOKENS),
    ],
)
def test_what_was_not_reported_is_estimated(
    reported: Usage | None, predicted: Prediction, passed: int, whole: bool, expected: Usage, estimated: str
) -> None:
    used = consumed(reported, predicted, passed, whole=whole)
    assert (used.usage, used.cached, used.estimated) == (expected, expected.cached, estimated)


counts = st.integers(0, 10**9)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    prompt, completion = draw(counts), draw(counts)
    cached = draw(st.none() | st.integers(0, prompt))
    return Usage(prompt, completion, cached, draw(st.integers(0, prompt - (cached or 0))))


@given(usages(), st.builds(Prediction, counts, counts, caches=st.booleans()), counts, st.booleans())
def test_the_parts_of_a_prompt_never_exceed_it(reported: Usage, predicted: Prediction, passed: int, whole: bool) -> None:
    used = consumed(reported, predicted, passed, whole=whole)
    assert used.cached >= 0
    assert used.cached + used.usage.written <= used.usage.prompt == reported.prompt
    assert used.usage.completion in (reported.completion, passed)
    assert used.usage.completion >= reported.completion
    if reported.cached is not None:
        assert used.cached == reported.cached
