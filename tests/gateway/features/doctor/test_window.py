"""The window of recent prompts against a simple search, with its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.prompt.outline import Outliner
from gateway.features.doctor.observed import ObservedRequest, common_blocks
from gateway.features.doctor.window import Window
from router import seed, text_keys

PROMPTS = st.lists(
    st.tuples(st.sampled_from(["", "s", "t"]), st.lists(st.sampled_from(["aa", "bb", "c" * 250]), min_size=1, max_size=6)),
    max_size=30,
)
BLOCK = 64


def prompt(number: int, session: str, turns: list[str], outliner: Outliner) -> ObservedRequest:
    text = "".join(f"\x1euser\x1f{turn}" for turn in turns).encode()
    made = ObservedRequest("m", text_keys(text, BLOCK, seed(("m",))), len(text), BLOCK, outline=outliner.outline(text))
    made.number, made.session = number, session
    return made


@given(PROMPTS)
def test_the_longest_match_is_that_of_a_search_over_all(given_: list[tuple[str, list[str]]]) -> None:
    window, before, outliner = Window(), list[ObservedRequest](), Outliner()
    for number, (session, turns) in enumerate(given_, 1):
        one = prompt(number, session, turns, outliner)
        longest = max([common_blocks(one, other) for other in before], default=0)
        assert window.longest(one)[0] == longest
        related = window.related(one)
        assert [each.number for each in related] == sorted((each.number for each in related), reverse=True)
        same = [each for each in before if each.session == session and session]
        assert {each.number for each in same[-8:]} <= {each.number for each in related}
        window.add(one)
        window.check()
        before.append(one)


@given(PROMPTS, st.integers(1, 5), st.integers(2000, 20_000))
def test_bounds_hold_after_each_prompt(given_: list[tuple[str, list[str]]], most: int, most_bytes: int) -> None:
    window, outliner = Window(most, most_bytes), Outliner(3, 5)
    for number, (session, turns) in enumerate(given_, 1):
        window.add(prompt(number, session, turns, outliner))
        window.check()
        outliner.check()
        assert len(window) <= most


def test_the_last_prompts_of_a_long_session_stay_known_when_its_first_ones_leave() -> None:
    """The session has had more prompts than are remembered of one."""
    window, outliner = Window(max_prompts=12), Outliner()
    for number in range(1, 17):
        window.add(prompt(number, "long" if number <= 12 else "other", [f"{number}"], outliner))
        window.check()
    assert len(window) == 12
    assert set(range(5, 13)) <= {each.number for each in window.related(prompt(17, "long", ["17"], outliner))}
