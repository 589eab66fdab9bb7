"""Text that may be sent: the same however the tokens arrive, and never half a character."""

from hypothesis import given
from hypothesis import strategies as st

from replica.text import Detokenizer, StopStrings


def decode_bytes(tokens: list[int]) -> str:
    """A vocabulary of single bytes: the hardest for whole characters."""
    return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str, sizes: list[int]) -> None:
    tokens, pieces, detokenizer = list(text.encode()), [], Detokenizer(decode_bytes)
    for size in [*sizes, len(tokens)]:
        pieces.append(detokenizer.push(tokens[:size]))
        tokens = tokens[size:]
    assert "".join(pieces) + detokenizer.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_comes_out_at_the_end_only() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert detokenizer.push(b"ab") == "ab"
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


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
