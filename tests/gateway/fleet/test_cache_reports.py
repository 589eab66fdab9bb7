from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.cache_reports import ENOUGH_REQUESTS, ENOUGH_TOKENS, CacheFinding, Overlap

LONG = 2000  # predicted tokens of one answer; twenty of them are enough


def findings(overlap: Overlap, *answers: tuple[int, int | None]) -> list[CacheFinding]:
    return [finding for answer in answers if (finding := overlap.metered(*answer))]


def test_zeros_are_reported_once_and_taken_back_at_the_first_hit() -> None:
    overlap = Overlap()
    assert findings(overlap, *[(LONG, 0)] * 19) == []
    assert findings(overlap, (LONG, 0)) == [CacheFinding.ZERO]
    assert findings(overlap, *[(LONG, 0)] * 100) == []
    assert findings(overlap, (0, 64)) == [CacheFinding.HIT], "a hit that was not predicted is one too"
    assert findings(overlap, (LONG, 64)) == []
    assert findings(overlap, *[(LONG, 0)] * 20) == [CacheFinding.ZERO], "it may begin again"


def test_a_hit_in_between_and_a_restart_begin_the_row_anew() -> None:
    overlap = Overlap()
    assert findings(overlap, *[(LONG, 0)] * 19, (LONG, 1), *[(LONG, 0)] * 19) == []
    overlap.restart()
    assert findings(overlap, *[(LONG, 0)] * 19) == []


def test_few_tokens_are_no_evidence() -> None:
    overlap = Overlap()
    assert findings(overlap, *[(100, 0)] * 199) == []
    assert findings(overlap, (100, 0)) == [CacheFinding.ZERO]


def test_what_was_not_predicted_is_no_evidence() -> None:
    assert findings(Overlap(), *[(0, 0)] * 1000) == []
    assert findings(Overlap(), *[(0, None)] * 1000) == []


def test_silence_is_another_finding() -> None:
    overlap = Overlap()
    assert findings(overlap, *[(LONG, None)] * 20) == [CacheFinding.SILENT]
    assert findings(overlap, *[(LONG, None)] * 100) == []
    assert findings(overlap, *[(LONG, 0)] * 19) == [], "silent answers are no evidence about hits"
    assert findings(overlap, *[(LONG, None)] * 100) == [], "an engine that reports may leave a zero out"
    assert findings(overlap, (LONG, 0)) == [CacheFinding.ZERO]


same_answers = st.tuples(st.sampled_from([0, 100, LONG, 50_000]), st.sampled_from([None, 0, 7]), st.integers(1, 30))


@given(st.lists(same_answers))
def test_zero_and_hit_take_turns_and_zero_needs_its_evidence(runs: list[tuple[int, int | None, int]]) -> None:
    overlap = Overlap()
    found: list[CacheFinding] = []
    row: list[int] = []
    for predicted, reported in [run[:2] for run in runs for _ in range(run[2])]:
        finding = overlap.metered(predicted, reported)
        if reported:
            row.clear()
        elif reported == 0 and predicted:
            row.append(predicted)
        if finding is CacheFinding.ZERO:
            assert len(row) >= ENOUGH_REQUESTS
            assert sum(row) >= ENOUGH_TOKENS
        if finding in (CacheFinding.ZERO, CacheFinding.HIT):
            found.append(finding)
    assert found == [(CacheFinding.ZERO, CacheFinding.HIT)[place % 2] for place in range(len(found))]
    assert overlap.zero == (len(found) % 2 == 1)
