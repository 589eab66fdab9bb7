"""Stop strings in a text that comes in pieces, compared with the whole text."""

from __future__ import annotations

from typing import SupportsIndex

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.features.translation.adaptation.stops import StopFilter

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: character by character, until one of the stop strings is at the end."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
@example(text="abab", stops=["bab", "a"], cuts=[1])
@example(text="aab", stops=["ab"], cuts=[1, 2])
def test_any_cutting_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    filtered, out, at = StopFilter(stops), "", 0
    for end in (*sorted(cuts), len(text)):
        out += filtered.feed(text[at:end])
        at = max(at, end)
    if not filtered.stopped:
        out += filtered.finish()
    assert (out, filtered.stopped) == cut(text, stops)


@given(text=TEXTS, stops=STOPS)
def test_nothing_is_held_that_cannot_be_the_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    filtered, out = StopFilter(stops), ""
    for end, character in enumerate(text, 1):
        out += filtered.feed(character)
        if filtered.stopped:
            return
        held = text[len(out) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


class Counted(str):
    """Counts the characters that are looked at, or copied, by their places."""

    looked = 0

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        found = super().__getitem__(at)
        Counted.looked += len(found)
        return found


def test_the_work_grows_with_the_text_whatever_the_stops_look_like() -> None:
    stops = [Counted("ab" * number + "c") for number in range(100, 116)]
    filtered, out = StopFilter(stops), ""
    Counted.looked = 0
    for _ in range(1000):
        out += filtered.feed("a") + filtered.feed("b")
    assert Counted.looked <= 3 * 2000 * len(stops)
    assert out + filtered.finish() == "ab" * 1000


def test_without_stops_nothing_is_held() -> None:
    filtered = StopFilter(["", ""])
    assert [filtered.feed("a"), filtered.feed("b"), filtered.finish()] == ["a", "b", ""]


def test_after_a_stop_nothing_comes() -> None:
    filtered = StopFilter(["x"])
    assert [filtered.feed("axb"), filtered.feed("c"), filtered.finish()] == ["a", "", ""]
