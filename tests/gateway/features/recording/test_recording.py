"""The ring of recent requests: every recorder gets every row once, or finds a gap; without recorders there is nothing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.features.recording.recording import QUIET_S, ROW_BYTES, Recording, RecordingPage

HALF = 1 << 63


class Counted:
    """begun, ended: how often."""

    def __init__(self, recording: Recording) -> None:
        self.begun = self.ended = 0
        recording.begin, recording.end = self._begin, self._end

    def _begin(self) -> None:
        self.begun += 1

    def _end(self) -> None:
        self.ended += 1


def recording_of(rows: int = 1000) -> Recording:
    numbers = iter(range(1, 1 << 30))
    return Recording(lambda: f"{next(numbers):x}", rows * ROW_BYTES)


def values(page: RecordingPage) -> list[Any]:
    return [row[0] for row in page.rows]


def test_it_begins_with_the_first_question_and_ends_by_itself() -> None:
    recording = recording_of()
    counted = Counted(recording)
    recording.sweep(1e9)
    assert (counted.begun, counted.ended) == (0, 0)
    page = recording.page({}, 1.0, 100.0)
    assert (counted.begun, page.rows, page.last) == (1, [], 0)
    recording.add(0, b"", (7,))
    recording.page({}, 1.0, 130.0)
    recording.sweep(130.0 + QUIET_S)
    assert counted.ended == 0
    recording.sweep(130.1 + QUIET_S)
    assert (counted.begun, counted.ended, repr(recording)) == (1, 1, "<Recording off, 0 rows, 0 bytes>")
    again = recording.page({page.ring: 1}, 1.0, 500.0)
    assert again.ring != page.ring
    assert (again.first, again.rows, counted.begun) == (1, [], 2)


def test_a_question_that_is_asked_again_gets_the_same_rows() -> None:
    recording = recording_of()
    ring = recording.page({}, 1.0, 0.0).ring
    for number in range(5):
        recording.add(0, b"", (number,))
    assert values(recording.page({ring: 2}, 1.0, 1.0)) == [2, 3, 4]
    assert values(recording.page({ring: 2}, 1.0, 2.0)) == [2, 3, 4]
    assert values(recording.page({ring: 5}, 1.0, 2.0)) == []
    assert values(recording.page({ring: 99}, 1.0, 2.0)) == [], "a cursor that nobody has given out"
    assert values(recording.page({"other": 3}, 1.0, 2.0)) == [0, 1, 2, 3, 4]


def test_what_is_pushed_out_is_a_gap_in_the_numbers() -> None:
    recording = recording_of(rows=3)
    ring = recording.page({}, 1.0, 0.0).ring
    for number in range(10):
        recording.add(0, b"", (number,))
    page = recording.page({ring: 4}, 1.0, 1.0)
    assert (page.first, page.last, values(page)) == (8, 10, [7, 8, 9])
    recording.add(0, bytes(100 * ROW_BYTES), (10,))
    assert values(recording.page({ring: 4}, 1.0, 1.0)) == [10], "a row larger than the ring is kept until the next"


def test_a_page_is_bounded_and_says_what_is_left() -> None:
    recording = recording_of()
    ring = recording.page({}, 1.0, 0.0).ring
    for number in range(10):
        recording.add(0, b"", (number,))
    page = recording.page({ring: 0}, 1.0, 1.0, 4 * ROW_BYTES)
    assert (values(page), page.last, page.left) == ([0, 1, 2, 3], 4, 6)
    page = recording.page({ring: 4}, 1.0, 1.0, 1)
    assert (values(page), page.last, page.left) == ([4], 5, 5)


def test_of_sessions_those_in_the_share_that_was_asked_for() -> None:
    recording = recording_of()
    ring = recording.page({}, 0.25, 0.0).ring
    assert [recording.wants(key) for key in (0, 1, HALF // 2 - 4096, HALF // 2, HALF, 2 * HALF - 1)] == [True] * 3 + [False] * 3
    recording.page({}, 0.75, 0.0)
    assert recording.wants(HALF)
    for key in (0, 1, HALF):
        recording.add(key, b"", (key,))
    assert values(recording.page({ring: 0}, 0.25, 1.0)) == [0, 1]
    assert values(recording.page({ring: 0}, 0.75, 1.0)) == [0, 1, HALF]
    assert recording.page({ring: 0}, 0.25, 1.0).last == 3, "what is left out is not asked for again"


def test_a_page_is_json() -> None:
    recording = recording_of()
    ring = recording.page({}, 1.0, 0.0).ring
    recording.add(0, b"\x00\xff", (1.5, None, b"\x00\xff", "m"))
    rows = json.loads(recording.page({}, 1.0, 0.0).encode())
    assert rows == {"ring": ring, "first": 1, "last": 1, "left": 0, "skipped": 0, "rows": [[1.5, None, "AP8=", "m"]]}


class Recorders(RuleBasedStateMachine):
    """Three recorders that ask when they like, against a list of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = recording_of(rows=6)
        self.added = 0
        self.ring = self.recording.page({}, 1.0, 0.0).ring
        self.cursors = [0, 0, 0]

    @rule(size=st.integers(0, 3 * ROW_BYTES))
    def add(self, size: int) -> None:
        self.added += 1
        self.recording.add(0, bytes(size), (self.added,))

    @rule(who=st.integers(0, 2), most=st.integers(1, 8))
    def ask(self, who: int, most: int) -> None:
        page = self.recording.page({self.ring: self.cursors[who]}, 1.0, 0.0, most * ROW_BYTES)
        assert page.first > self.cursors[who]
        assert values(page) == list(range(page.first, page.last + 1))
        assert page.left == self.added - page.last
        assert page.rows or page.last == self.added
        self.cursors[who] = page.last

    @invariant()
    def bounded(self) -> None:
        self.recording.check()


TestRecorders = Recorders.TestCase
