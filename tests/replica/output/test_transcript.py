"""Scores come with their text, in order, and those of a stop string never."""

import codecs
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from replica.engine import TokenScore
from replica.output.transcript import PlacedScore, Transcript


class ByteDetokenizer:
    """A vocabulary of single bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(tokens))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


@given(st.text("abé", min_size=1, max_size=20), st.lists(st.integers(1, 4), max_size=20), st.sampled_from(["ab", "éa", "zz"]))
def test_every_sent_token_has_its_score_and_no_other(text: str, sizes: list[int], stop: str) -> None:
    tokens, transcript = list(text.encode()), Transcript(ByteDetokenizer(), (stop,))
    out, placed, at = "", list[PlacedScore](), 0
    for size in [*sizes, len(tokens)]:
        step = tokens[at : at + size]
        scores = [TokenScore(token, float(at + index)) for index, token in enumerate(step)]
        at += len(step)
        fresh, due = transcript.push(step, scores)
        out, placed = out + fresh, placed + due
        assert all(one.offset < len(out) for one in placed)
        if transcript.matched:
            break
    if not transcript.matched:
        fresh, due = transcript.finish()
        out, placed = out + fresh, placed + due
    assert out == text.partition(stop)[0]
    assert [one.score.logprob for one in placed] == [float(index) for index in range(len(out.encode()))]
    assert bytes(one.score.token for one in placed).decode() == out
    assert [one.offset for one in placed] == [len(out.encode()[:index].decode(errors="ignore")) for index in range(len(placed))]


def test_an_end_token_has_a_score_and_no_text() -> None:
    transcript = Transcript(ByteDetokenizer(), ())
    text, placed = transcript.push([97], [TokenScore(97, -1.0), TokenScore(2, -2.0)])
    assert (text, [one.score.token for one in placed]) == ("a", [97])
    text, placed = transcript.finish()
    assert (text, placed) == ("", [PlacedScore(1, TokenScore(2, -2.0))])
