"""The least tokens of a run: the union of its prompts as prefixes, in the engines' own counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.features.workflows.running.receipt import PromptUnion

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
