"""Text is cut at stop strings, however it arrives, and a part of one is never sent."""

from hypothesis import given
from hypothesis import strategies as st

from replica.output.stop_strings import StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def cut_of(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The oracle: the text read character by character until it ends in a stop string, the longest if in several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.text("abc", max_size=30), STOPS, st.data())
def test_stop_strings_cut_where_the_whole_text_would_be_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    stopper, out, rest = StopStrings(tuple(stops)), "", text
    cut, matched = cut_of(text, stops)
    while rest and stopper.matched is None:
        size = data.draw(st.integers(1, len(rest)))
        out += stopper.push(rest[:size])
        assert cut.startswith(out)  # never a part of a stop string
        rest = rest[size:]
    out += stopper.finish()
    assert (out, stopper.matched) == (cut, matched)


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert StopStrings(()).push("text") == "text"
