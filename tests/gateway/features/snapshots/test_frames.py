"""A snapshot as frames, of which any carrier may lose, change or repeat some."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.features.snapshots.frames import END, Frames, frames_of
from gateway.features.snapshots.snapshot import Header, KnowledgeError, Origin, Snapshot

SNAPSHOT = Snapshot(Header("1/256", {"r1": Origin("http://r1", "pod-1", 17.5)}), [b"first", b"second"], 1.0, "worker 7")
FRAMES = list(frames_of(SNAPSHOT))


def received(frames: list[bytes], max_bytes: int = 1 << 20) -> Snapshot | None:
    made, found = Frames(max_bytes=max_bytes), None
    for frame in frames:
        assert found is None, "nothing comes behind its end"
        found = made.add(frame)
    return found


def test_it_arrives_as_it_was() -> None:
    found = received(FRAMES)
    assert found == SNAPSHOT
    assert found.source == "worker 7"
    assert received(FRAMES[:-1]) is None


@pytest.mark.parametrize("order", [(0, 2, 3), (0, 0, 1, 2, 3), (0, 2, 1, 3)])
def test_a_frame_that_is_missing_or_repeated_is_noticed(order: tuple[int, ...]) -> None:
    with pytest.raises(KnowledgeError, match="checksum"):
        received([FRAMES[number] for number in order])


def test_one_that_is_too_large_is_refused_before_its_end() -> None:
    with pytest.raises(KnowledgeError, match="too large"):
        received(FRAMES[:-1], max_bytes=len(FRAMES[0]) + len(FRAMES[1]))


@given(st.lists(st.sampled_from(FRAMES) | st.binary(max_size=30) | st.binary(max_size=30).map(END.__add__), max_size=8))
@example(FRAMES)
@example([*FRAMES[:-1], b"", FRAMES[-1]])
def test_of_any_frames_only_its_own_are_the_snapshot(frames: list[bytes]) -> None:
    found = None
    with contextlib.suppress(KnowledgeError):
        found = received(frames[: len(FRAMES) + 1])
    assert found is None or (found.header, b"".join(found.chunks)) == (SNAPSHOT.header, b"".join(SNAPSHOT.chunks))
