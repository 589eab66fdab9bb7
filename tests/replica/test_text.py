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


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_stop_strings_cut_where_the_whole_text_would_be_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    stopper, out, rest = StopStrings(tuple(stops)), "", text
    while rest and not stopper.hit:
        size = data.draw(st.integers(1, len(rest)))
        out += stopper.push(rest[:size])
        rest = rest[size:]
    found = any(stop in text for stop in stops)
    assert stopper.hit == found
    out += stopper.finish()
    if not found:
        assert out == text
    else:
        assert not any(stop in out for stop in stops)
        assert text.startswith(out)
        assert any(text[len(out) :].startswith(stop) for stop in stops)


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert StopStrings(()).push("text") == "text"
