"""Recorded traffic as a workload: what a file may hold, who goes on with whom, samples, open and closed replay."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.simulation.recorded import (
    FORMAT,
    HELD_S,
    MAX_COPIES,
    ClosedReplay,
    OpenReplay,
    RecordedTraffic,
    Replay,
    held,
    read,
)
from router.simulation.workloads import TraceError
from router.types import KEY_BYTES

HEADER: dict[str, Any] = {
    "format": FORMAT,
    "version": 1,
    "sample": 1.0,
    "policy": "cost",
    "fleet": [{"pool": 1, "kv_tokens": 500}],
}


def line(t: float, blocks: tuple[int, int], tokens: int, **more: Any) -> dict[str, Any]:
    """4 bytes a token, blocks of 16 tokens; 10 tokens out within a second."""
    parent, new = blocks
    row = {"t": t, "seconds": 1.0, "ttft": 0.5, "in": tokens, "out": 10, "cached": 0, "units": 4 * tokens, "block": 64}
    return {**row, "parent": parent, "new": new, "chain": 1, "pool": 1, "replica": 1, "model": 1, "status": 200, **more}


def replay_of(*rows: dict[str, Any], **header: Any) -> Replay:
    recording = read([{**HEADER, **header}, *rows])
    return Replay(recording, recording.requests, decode_rate=20.0)


# A conversation of three turns, each 100 tokens longer than the one before with its answer.
TURNS = [line(0.0, (0, 6), 100), line(5.0, (6, 7), 210, cached=96), line(9.0, (13, 7), 320, cached=208)]


def test_a_turn_goes_on_with_the_one_before_and_its_answer() -> None:
    first, second, third = replay_of(*TURNS).requests
    assert first.follows == (0, 0)
    assert second.follows == (6, 110), "100 tokens and the answer's 10 fill six blocks"
    assert third.follows == (13, 220)
    assert first.next is second
    assert second.next is third


def test_what_is_cached_of_a_turn_is_the_one_before_and_its_answer_in_the_engines_blocks() -> None:
    replay = replay_of(*TURNS)
    second = replay.request(1, 0)
    assert second.cached(0) == 0
    assert second.cached(6) == 96, "110 tokens are six whole blocks of 16, and what is left of the seventh"
    assert second.cached(3) == 48, "half a block beyond the match is no whole block of the engine"
    assert Replay(replay.recording, replay.requests, 20.0, engine_block=1).request(1, 0).cached(6) == 110
    assert len(replay.request(1, 0).kept) == 13 * KEY_BYTES, "its answer fills its last block"


def test_branches_of_a_conversation_are_told_apart() -> None:
    rows = [line(0.0, (0, 6), 100), line(1.0, (4, 5), 150), line(3.0, (6, 7), 210), line(4.0, (11, 8), 280)]
    *_, main, branch = replay_of(*rows).requests
    assert main.follows[1] == 110
    assert branch.follows[1] == 160


def test_requests_come_in_order_of_time_with_equal_prefixes() -> None:
    replay = replay_of(TURNS[0], line(2.0, (4, 3), 112, chain=2), *TURNS[1:])
    arrivals = list(OpenReplay(replay, random.Random(1)).begin())
    assert [at for at, _ in arrivals] == [0.0, 2.0, 5.0, 9.0]
    assert [at for at, _ in OpenReplay(replay, random.Random(1), speed=2.0).begin()] == [0.0, 1.0, 2.5, 4.5]
    first, other, second, _ = [request.prompt for _, request in arrivals]
    assert second.keys.startswith(first.keys)
    assert other.keys[: 4 * KEY_BYTES] == first.keys[: 4 * KEY_BYTES]
    assert other.keys[4 * KEY_BYTES :] not in first.keys
    assert {first.scale, other.scale} == {"model 1"}
    assert (first.units, first.block_units, arrivals[0][1].tokens) == (400, 64, 100)


def test_token_ids_are_tokens() -> None:
    replay = replay_of(line(0.0, (0, 6), 100, units=100, block=16, ids=True, session=3))
    [(_, request)] = OpenReplay(replay, random.Random(1)).begin()
    assert (request.prompt.scale, request.prompt.units, request.tokens) == ("", 100, 100)
    assert request.prompt.session
    assert request.prompt.session_key


def test_an_answer_of_unknown_length_decodes_as_long_as_it_took() -> None:
    replay = replay_of(line(0.0, (0, 6), 100, out=None, seconds=5.5))
    assert replay.request(0, 0).output_tokens == 100


def test_in_a_closed_loop_a_turn_comes_after_its_answer_and_the_think_time() -> None:
    replay = replay_of(*TURNS, line(2.0, (0, 3), 50, chain=2))
    source = ClosedReplay(replay, random.Random(1))
    first, other = source.begin()
    assert (first[0], other[0], len(source)) == (0.0, 2.0, 4)
    following = source.after(first[1], 11.0)
    assert following is not None
    assert following[0] == 15.0, "4 s after the answer"
    last = source.after(following[1], 20.0)
    assert last is not None
    assert last[0] == 23.0
    assert source.after(last[1], 30.0) is None
    assert source.after(other[1], 30.0) is None


def test_requests_of_a_conversation_that_overlapped_do_not_wait_for_each_other() -> None:
    source = ClosedReplay(replay_of(line(0.0, (0, 6), 100), line(0.5, (4, 5), 150), line(1.2, (6, 7), 210)), random.Random(1))
    assert [at for at, _ in source.begin()] == [0.0, 0.5]


def test_a_client_that_waited_for_its_conversation_begins_its_next_one_after_it() -> None:
    """The second client has begun one while another ran; nobody knows about the third, whose number is 0."""
    rows = [
        *(line(at, (0, 6), 100, seconds=2.0, chain=chain, client=7) for chain, at in ((1, 0.0), (2, 5.0))),
        *(line(at, (0, 6), 100, seconds=2.0, chain=chain, client=8) for chain, at in ((3, 0.5), (4, 1.5))),
        *(line(at, (0, 6), 100, seconds=2.0, chain=chain, client=0) for chain, at in ((5, 0.7), (6, 5.7))),
    ]
    source = ClosedReplay(replay_of(*rows), random.Random(1))
    begun = list(source.begin())
    assert [at for at, _ in begun] == [0.0, 0.5, 0.7, 1.5, 5.7]
    following = source.after(begun[0][1], 12.0)
    assert following is not None
    assert following[0] == 15.0, "3 s after its first one"
    assert following[1].session != begun[0][1].session
    assert source.after(begun[1][1], 12.0) is None
    faster = ClosedReplay(replay_of(*rows), random.Random(1), speed=2.0)
    assert len(list(faster.begin())) == 6, "twice as many clients: none waits"


def test_a_sample_is_replayed_as_often_as_makes_it_whole() -> None:
    rows = [line(float(n), (0, 6) if n == 0 else (4, 2), 100, chain=n + 1) for n in range(200)]
    replay = replay_of(*rows, sample=0.1)
    arrivals = list(OpenReplay(replay, random.Random(1)).begin())
    assert len(arrivals) == 2000
    assert [at for at, _ in arrivals] == sorted(at for at, _ in arrivals)
    assert min(at for at, _ in arrivals) >= 0
    heads = {request.prompt.keys[: 4 * KEY_BYTES] for _, request in arrivals}
    assert len(heads) == 1, "what conversations share, their copies share"
    assert len({request.prompt.keys for _, request in arrivals}) == 2000, "what is one's own is each copy's own"
    third = list(OpenReplay(replay_of(*rows, sample=0.3), random.Random(1)).begin())
    assert len(third) == pytest.approx(667, rel=0.1)


def test_copies_of_a_conversation_keep_its_order() -> None:
    replay = replay_of(*TURNS, sample=0.05)
    copies: dict[str, list[float]] = {}
    for at, request in OpenReplay(replay, random.Random(1)).begin():
        copies.setdefault(request.session, []).append(at)
    assert len(copies) == 20
    assert {tuple(round(at - times[0], 6) for at in times) for times in copies.values()} == {(0.0, 5.0, 9.0)}


def test_what_failed_is_not_replayed() -> None:
    recording = read([HEADER, line(0.0, (0, 6), 100, status=502), line(1.0, (0, 6), 100, status=499, ttft=None), TURNS[0]])
    assert [one.replayable for one in recording.requests] == [False, True, False]


def test_the_header_has_the_fleet_and_the_last_line_what_is_missing() -> None:
    recording = read([HEADER, TURNS[0], {"end": 60.0, "lost": 3}])
    assert recording.pools == {1: [{"kv_tokens": 500, "prefill_rate": 0.0}]}
    assert (recording.seconds, recording.lost, recording.share, recording.policy) == (60.0, 3, 1.0, "cost")
    assert read([HEADER, TURNS[0]]).seconds == 1.0, "without its last line: until the last answer"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**HEADER, "version": 2}], "line 1: version is 2: this release reads version 1"),
        ([{**HEADER, "format": "other"}], "line 1: format is 'other'"),
        ([{**HEADER, "sample": 0}], "line 1: sample"),
        ([{**HEADER, "sample": 0.1 / MAX_COPIES}], "line 1: sample"),
        ([{**HEADER, "sample": True}], "line 1: sample"),
        ([{**HEADER, "fleet": 3}], "line 1: fleet is not a list"),
        ([{**HEADER, "fleet": [3]}], "line 1: fleet is not a list"),
        ([{**HEADER, "fleet": [{"kv_tokens": -1}]}], "line 1: kv_tokens"),
        ([HEADER, {"end": 1.0}, TURNS[0]], "line 3: nothing may follow"),
        ([HEADER, {"end": -1.0}], "line 2: end"),
        ([HEADER, {}], "line 2: "),
        ([HEADER, line(-1.0, (0, 6), 100)], "line 2: t is '-1.0'"),
        ([HEADER, line(float("nan"), (0, 6), 100)], "line 2: t is 'nan'"),
        ([HEADER, line(float("inf"), (0, 6), 100)], "line 2: t is 'inf'"),
        ([HEADER, line(1e300, (0, 6), 100)], "line 2: t is"),
        ([HEADER, line(0.0, (1, 6), 100)], "line 2: parent 1"),
        ([HEADER, line(0.0, (0, 7), 100)], "line 2: 7 blocks of 64"),
        ([HEADER, line(0.0, (0, 1 << 60), 100)], "line 2: new"),
        ([HEADER, line(0.0, (0, 10**400), 100)], "line 2: new"),
        ([HEADER, line(0.0, (0, 6), 100, block=0)], "line 2: 6 blocks of 0"),
        ([HEADER, line(0.0, (0, 6), 100, cached=101)], "line 2: cached"),
        ([HEADER, line(0.0, (0, 6), 100, out=-1)], "line 2: out"),
        ([HEADER, line(0.0, (0, 6), 100, out=True)], "line 2: out"),
        ([HEADER, line(0.0, (0, 6), 100, chain="a")], "line 2: chain"),
        ([HEADER, line(0.0, (0, 6), 100, pool=[1])], "line 2: pool"),
        ([HEADER, line(0.0, (0, 6), 100, ttft="soon")], "line 2: ttft"),
        ([HEADER, {**line(0.0, (0, 6), 100), "in": 0}], "line 2: 6 blocks"),
        ([HEADER, {**line(0.0, (0, 6), 100), "in": 10**12}], "line 2: in is"),
    ],
)
def test_what_no_recorder_writes_is_refused_with_its_line(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(TraceError) as refused:
        read(rows)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted([*TURNS[0], "session", "ids", "end", "format"])), JSON)
def test_any_value_is_read_or_refused(name: str, value: Any) -> None:
    try:
        recording = read([HEADER, TURNS[0], {**TURNS[1], name: value}])
    except TraceError:
        return
    assert isinstance(recording, RecordedTraffic)
    replay = Replay(recording, recording.requests, 20.0)
    assert len(list(OpenReplay(replay, random.Random(1)).begin())) == len(recording.requests)


# -- what was there before


def test_what_was_cached_before_the_recording_is_there_at_the_beginning() -> None:
    first = line(1.0, (0, 6), 100, cached=64, chain=1, replica=4)
    again = line(2.0, (6, 7), 210, cached=96, chain=1, replica=4)
    sibling = line(3.0, (4, 3), 112, cached=64, chain=2, replica=4)
    elsewhere = line(4.0, (4, 3), 112, cached=80, chain=3, replica=7)
    cold = line(5.0, (0, 3), 50, cached=0, chain=4, replica=7)
    late = line(HELD_S + 1, (0, 6), 100, cached=96, chain=5, replica=7)
    replay = replay_of(first, again, sibling, elsewhere, cold, late)
    there = list(held(replay, {4: 0, 7: 1}, random.Random(1)))
    assert [(number, request.prompt.blocks, request.tokens) for number, request in there] == [(1, 5, 80), (0, 4, 64)]
    (_, one), (_, other) = there
    assert replay.request(0, 0).prompt.keys.startswith(other.prompt.keys)
    assert one.prompt.keys.startswith(other.prompt.keys)


def test_copies_of_a_sample_have_been_there_too() -> None:
    replay = replay_of(line(1.0, (0, 6), 100, cached=64), sample=0.1)
    there = list(held(replay, {1: 0}, random.Random(1)))
    assert sorted(number for number, _ in there) == list(range(10)), "on different replicas"
    assert len({request.prompt.keys for _, request in there}) == 10
